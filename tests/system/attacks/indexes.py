"""Attacks on the index: columns that lie, behind sizes and digests that fit."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from megackpt.storage import digest_of
from tests.system.attacks.crafting import (
    NATIVE,
    TORCH_DIST,
    Location,
    attack,
    attacks_with,
    edit_entry,
    edit_index,
    put_named,
    safetensors,
    set_rows,
)

Columns = dict[str, Any]
NUMBERS = {"negative": -1, "lowest": -(2**63), "highest": 2**63 - 1, "wrapping": 2**62 + 1, "terabyte": 2**40}

for column in (
    "offset_bytes",
    "nbytes",
    "start",
    "shape",
    "flat_start",
    "flat_stop",
    "file",
    "array",
    "global_shape",
):

    def spoil(location: Location, value: int, column: str = column) -> None:
        set_rows(location, column, value)

    attacks_with(NATIVE, f"{column} of a chunk is {{}}", NUMBERS, spoil, name=f"row_{column}")


def columns_are(location: Location, change: Callable[[Columns], None]) -> None:
    edit_index(location, change)


def _set(name: str, of: Callable[[Any], Any]) -> Callable[[Columns], None]:
    def change(columns: Columns) -> None:
        columns[name] = of(columns[name])

    return change


def _object_of_a_terabyte(columns: Columns) -> None:
    wide = columns["nbytes"].astype(np.int64)
    wide[-1] = 2**40
    columns["nbytes"] = wide
    columns["digest"] = np.zeros(len(wide) - 1 + 2**22, np.uint64)


def _overlap(columns: Columns) -> None:
    """Two chunks of one length at the same place, each with the digest of what lies there."""
    nbytes, offset, digest = (columns[n] for n in ("nbytes", "offset_bytes", "digest"))
    for column in (columns["file"], offset, digest):
        column[1] = column[0]
    assert nbytes[0] == nbytes[1]


def _overlap_in_the_array(columns: Columns) -> None:
    """The second chunk claims the place of the first: as many elements as the array has, and a gap."""
    start = columns["start"].astype(np.int64)
    start[1] = start[0]
    columns["start"] = start


def _text(columns: Columns, name: str, values: list[bytes]) -> None:
    columns[f"{name}.utf8"] = np.frombuffer(b"".join(values), np.uint8)
    columns[f"{name}.ends"] = np.cumsum([len(v) for v in values]).astype(np.int64)


def _files(*names: bytes) -> Callable[[Columns], None]:
    return lambda columns: _text(columns, "file_name", list(names))


def _keys(*names: bytes) -> Callable[[Columns], None]:
    return lambda columns: _text(columns, "key", list(names))


def _vast_array(columns: Columns) -> None:
    """An array that has no chunk and 2**40 elements."""
    _text(columns, "key", [b"block", b"half", b"object", b"vast"])
    _text(columns, "dtype", [b"float32", b"bfloat16", b"object", b"float32"])
    columns["ndim"] = np.append(columns["ndim"], 1).astype(np.uint8)
    columns["global_shape"] = np.concatenate([columns["global_shape"].astype(np.int64), [[2**40, 1]]])


def _vast_chunk(columns: Columns) -> None:
    """One chunk of 2**40 elements, which no file holds."""
    columns["global_shape"] = columns["global_shape"].astype(np.int64)
    columns["global_shape"][1, 0] = 2**40
    for name, value in {"shape": 2**40, "flat_stop": 2**40, "nbytes": 2**41}.items():
        wide = columns[name].astype(np.int64)
        wide[2, ...] = np.array([value, 1]) if wide.ndim == 2 else value
        columns[name] = wide
    columns["digest"] = np.zeros(2**23 + 10, np.uint64)


def _digests(*values: int, known: Any = (1, 1, 0)) -> Callable[[Columns], None]:
    """Digests of the arrays `block` and `half`, and of the objects `object`."""

    def change(columns: Columns) -> None:
        columns["array.crc64nvme"] = np.array(values, np.uint64)
        columns["array.has_crc64nvme"] = np.array(known, np.uint8)

    return change


CHANGES: dict[str, Callable[[Columns], None]] = {
    "few_array_digests": _digests(1, 2),
    "few_marks_of_digests": _digests(1, 2, 0, known=(1, 1)),
    "array_digest_of_objects": _digests(1, 2, 3, known=(1, 1, 1)),
    "array_digests_without_marks": lambda columns: columns.update(
        {"array.crc64nvme": np.zeros(3, np.uint64)}
    ),
    "signed_array_digests": lambda columns: columns.update(
        {"array.crc64nvme": np.zeros(3, np.int64), "array.has_crc64nvme": np.ones(3, np.uint8)}
    ),
    "wrong_array_digests": _digests(1, 2, 0),
    "object_of_a_terabyte": _object_of_a_terabyte,
    "overlap": _overlap,
    "overlap_in_the_array": _overlap_in_the_array,
    "vast_array": _vast_array,
    "vast_chunk": _vast_chunk,
    "float_rows": _set("start", lambda c: c.astype(np.float64)),
    "nan_rows": _set("offset_bytes", lambda c: np.full(c.shape, np.nan)),
    "bool_array": _set("array", lambda c: c.astype(np.bool_)),
    "unsigned_array": _set("array", lambda c: c.astype(np.uint64)),
    "float_array": _set("array", lambda c: c.astype(np.float32)),
    "scalar_rows": _set("nbytes", lambda c: c[0]),
    "scalar_array": _set("array", lambda c: c[0]),
    "square_ends": _set("key.ends", lambda c: c[:, None]),
    "float_ends": _set("key.ends", lambda c: c.astype(np.float32) / 3),
    "square_nbytes": _set("nbytes", lambda c: c[:, None]),
    "flat_start_column": _set("start", lambda c: c[:, 0]),
    "no_dims": _set("start", lambda c: c[:, :0]),
    "few_rows": _set("file", lambda c: c[:-1]),
    "many_rows": _set("file", lambda c: np.append(c, c)),
    "no_digests": _set("digest", lambda c: c[:0]),
    "signed_digests": _set("digest", lambda c: c.astype(np.int64)),
    "float_digests": _set("digest", lambda c: c.astype(np.float64)),
    "other_digests": _set("digest", lambda c: c[::-1].copy()),
    "many_dims": _set("ndim", lambda c: c + 200),
    "float_dims": _set("ndim", lambda c: c.astype(np.float32) / 3),
    "missing": lambda columns: columns.pop("nbytes"),
    "not_utf8": _set("key.utf8", lambda c: c | 0x80),
    "text_of_integers": _set("key.utf8", lambda c: c.astype(np.int64)),
    "keys_unsorted": _keys(b"half", b"block", b"object"),
    "keys_twice": _keys(b"block", b"block", b"object"),
    "key_with_nul": _keys(b"block\0x", b"half", b"object"),
    "key_with_newline": _keys(b"block\nx", b"half", b"object"),
    "key_that_goes_up": _keys(b"../../outside/secret", b"half", b"object"),
    "key_with_escapes": _keys(b"[red]\x1b[2J", b"half", b"object"),
    "ends_backwards": _set("key.ends", lambda c: c[::-1].copy()),
    "ends_beyond": _set("key.ends", lambda c: c + 10_000),
    "dtype_unknown": lambda columns: _text(columns, "dtype", [b"float31", b"bfloat16", b"object"]),
    "dtype_of_code": lambda columns: _text(columns, "dtype", [b"os.system", b"bfloat16", b"object"]),
    "dtype_wider": lambda columns: _text(columns, "dtype", [b"float64", b"bfloat16", b"object"]),
    "dtype_equal": lambda columns: _text(columns, "dtype", [b"int32", b"bfloat16", b"object"]),
    "tensor_as_object": lambda columns: _text(columns, "dtype", [b"object", b"bfloat16", b"object"]),
    "object_as_tensor": lambda columns: _text(columns, "dtype", [b"float32", b"bfloat16", b"uint8"]),
    "wrapped_shape": _set("global_shape", lambda c: np.full(c.shape, 2**32, np.int64)),
    "transposed_shape": _set("global_shape", lambda c: c[:, ::-1].copy()),
    "file_outside": _files(b"../../outside/secret", b"../../outside/secret"),
    "file_absolute": _files(b"/etc/passwd", b"/etc/passwd"),
    "file_device": _files(b"/dev/zero", b"/dev/zero"),
    "file_nul": _files(b"data/a\0b", b"data/b"),
    "file_backslash": _files(b"..\\secret", b"data/b"),
    "file_newline": _files(b"data/a\nb", b"data/b\n"),
    "file_long": _files(b"a" * 100_000, b"b"),
    "file_empty": _files(b"", b""),
    "file_directory": _files(b"data", b"data"),
    "file_manifest": _files(b"metadata.json", b"metadata.json"),
    "files_missing": _files(b"data/x"),
}
ANOTHER = (
    "wrong_array_digests",
    "key_with_nul",
    "key_with_newline",
    "key_that_goes_up",
    "key_with_escapes",
    "dtype_equal",
    "tensor_as_object",
    "vast_array",
)
attacks_with(NATIVE, "the columns of the index: {}", CHANGES, columns_are, another=ANOTHER)


def header_is(location: Location, data: bytes) -> None:
    put_named(location, "index", data)


HEADERS = {
    "endless": struct.pack("<Q", 2**63 - 1) + b"{}",
    "wrapped": struct.pack("<Q", 2**64 - 8) + b"{}",
    "short": b"\1",
    "nothing": b"",
    "deep": safetensors(b"[" * 100_000 + b"]" * 100_000),
    "a_list": safetensors([1]),
    "vast": safetensors({"key.utf8": {"dtype": "U8", "shape": [2**60], "data_offsets": [0, 2**60]}}),
    "wrapping": safetensors({"array": {"dtype": "I64", "shape": [2**32, 2**32], "data_offsets": [0, 0]}}),
    "without_elements": safetensors({"array": {"dtype": "I64", "shape": [2**62, 0], "data_offsets": [0, 0]}}),
    "overlapping": safetensors(
        {n: {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]} for n in ("array", "start")}, b"\0" * 8
    ),
    "bf16": safetensors({"array": {"dtype": "BF16", "shape": [4], "data_offsets": [0, 8]}}, b"\0" * 8),
    "f8": safetensors({"array": {"dtype": "F8_E4M3", "shape": [8], "data_offsets": [0, 8]}}, b"\0" * 8),
    "f4": safetensors({"array": {"dtype": "F4", "shape": [16], "data_offsets": [0, 8]}}, b"\0" * 8),
}
attacks_with(NATIVE, "the header of the index is {}", HEADERS, header_is)


def head_is(location: Location, fields: Any) -> None:
    message = json.loads((location.directory / "metadata.json").read_bytes())["index"]["head"]
    edit_entry(location, "index", head={**message, **fields} if isinstance(fields, dict) else fields)


HEADS = {
    "endless": {"nbytes": 2**63 - 1},
    "negative": {"nbytes": -1},
    "of_rows_without_end": {"block_rows": 2**62},
    "of_no_rows": {"block_rows": 0},
    "a_list": [1],
}
attacks_with(NATIVE, "the head of the index is {}", HEADS, head_is)


@attack(NATIVE, "a data file is shorter than its chunks")
def data_file_is_short(location: Location) -> None:
    os.truncate(location.only_file("data/*"), 4100)


def torch_dist_rows(location: Location, offset: int) -> None:
    """All chunks begin near one offset of their files."""
    note = location.only_file("megackpt-*.json")
    message = json.loads(note.read_bytes())
    file = location.directory / message["index"]["file"]
    columns = dict(load(file.read_bytes()))
    columns["offset_bytes"] = columns["offset_bytes"].astype(np.int64) % 64 + offset
    file.write_bytes(save(columns))
    entry = {"file": file.name, "nbytes": file.stat().st_size, "xxh3_128": digest_of(file.read_bytes())}
    note.write_text(json.dumps({**message, "index": entry}))


attacks_with(
    TORCH_DIST, "chunks lie {} their files", {"at_the_beginning_of": 0, "beyond": 2**40}, torch_dist_rows
)
