"""Nothing of an index is believed that was not checked: bytes that changed, and documents that lie."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy

from megackpt.errors import CheckpointError, FormatError, IntegrityError, StorageError
from megackpt.formats import index_reader
from megackpt.formats.index_columns import StoredColumn, require
from megackpt.formats.index_file import write_index
from megackpt.formats.index_layout import ROW_COLUMNS, aligned_head, bytes_of, header_of
from megackpt.formats.strategy import Json
from megackpt.metadata import ChunkTable, StoredChunks
from megackpt.storage import MemoryStore, digest_of
from tests.support.states import ask, box, damaged, small

ROWS = (*ROW_COLUMNS, "array", "digest")


def offset_of(store: MemoryStore, name: str) -> int:
    """Say where a column begins."""
    data = store.read("index", max_bytes=2**30)
    length = int.from_bytes(data[:8], "little")
    offset: int = json.loads(data[8 : 8 + length])[name]["data_offsets"][0]
    return 8 + length + offset


@pytest.mark.parametrize("name", ROW_COLUMNS)
def test_damage_to_a_needed_block_of_rows_is_found(name: str) -> None:
    store, message, stored = small()
    width = 12 if name in ("start", "shape") else 4
    damaged(store, offset_of(store, name) + (64 + 16) * width)  # the first of the rows asked for
    with pytest.raises(IntegrityError, match=r"index: the bytes \d+:\d+ are not those that were saved"):
        ask(store, message, stored)


def test_damage_to_needed_digests_is_found() -> None:
    store, message, stored = small()
    damaged(store, offset_of(store, "digest") + (64 + 16 + 15) * 2 * 8)
    with pytest.raises(IntegrityError, match=r"index: the bytes \d+:\d+ are not those that were saved"):
        ask(store, message, stored)


@pytest.mark.parametrize("name", ["header", "key.utf8", "array.rows", "block.xxh3", "digest.xxh3", "padding"])
def test_damage_to_the_head_is_found(name: str) -> None:
    store, message, stored = small()
    damaged(store, 20 if name == "header" else offset_of(store, name))
    with pytest.raises(IntegrityError, match="index: the bytes 0:"):
        ask(store, message, stored)


def test_damage_elsewhere_neither_stops_a_load_nor_is_believed() -> None:
    store, message, stored = small()
    expected = ask(store, message, stored)
    # A row between those asked for, read with them: with this flip it would seem to be one of them.
    wanted = [box(stored, 0, (0, 0, 0), (2, 8, 300_000)), box(stored, 0, (6, 0, 0), (2, 8, 300_000))]
    damaged(store, offset_of(store, "start") + 16 * 12, bit=2)
    index = index_reader.open_index(store, message, whole_bytes=0)
    assert len(index.of_boxes(wanted)) == 32
    assert ask(store, message, stored).table.start.tolist() == expected.table.start.tolist()


@pytest.mark.parametrize(("change", "error"), [(-1, IntegrityError), (1, FormatError)])
def test_an_index_of_another_length_raises_an_error(change: int, error: type[CheckpointError]) -> None:
    store, message, stored = small()
    data = store.read("index", max_bytes=2**30)
    store.write("index", data[:change] if change < 0 else data + b"\0")
    with pytest.raises(error, match=f"index: the file has {len(data) + change} bytes instead of {len(data)}"):
        ask(store, message, stored)


def forged(edit: Callable[[dict[str, Any]], object]) -> tuple[MemoryStore, Json, StoredChunks]:
    """Write an index with other columns, and digests of the head that fit them."""
    store, message, stored = small()
    columns: dict[str, Any] = safetensors.numpy.load(store.read("index", max_bytes=2**30))
    del columns["padding"]
    edit(columns)
    rows = {name: columns.pop(name) for name in ROWS if name in columns}
    head = aligned_head(columns)
    header = header_of(head, {name: (c.dtype, c.shape) for name, c in rows.items()})
    in_front = b"".join([header, *map(bytes_of, head.values())])
    data = b"".join([in_front, *map(bytes_of, rows.values())])
    store.write("index", data)
    message["index"] |= {"nbytes": len(data), "xxh3_128": digest_of(data)}
    message["index"]["head"] |= {"nbytes": len(in_front), "xxh3_128": digest_of(in_front)}
    return store, message, stored


def put(name: str, at: int | tuple[int, ...], value: int) -> Callable[[dict[str, Any]], object]:
    """Set one value of a column."""

    def edit(columns: dict[str, Any]) -> None:
        columns[name] = columns[name].astype(np.int64)
        columns[name][at] = value

    return edit


def cut(name: str) -> Callable[[dict[str, Any]], object]:
    """Leave out the last row of a column."""
    return lambda columns: columns.update({name: columns[name][:-1]})


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (put("array.rows", 0, -64), "its arrays do not have its 192 chunks"),
        (put("array.rows", 0, 2**62), "its arrays do not have its 192 chunks"),
        (put("array.rows", 0, 63), "its arrays do not have its 192 chunks"),
        (put("array.reach", 0, -1), "outside of their arrays"),
        (put("block.start", 3, -1), "outside of their arrays"),
        (put("block.start", 3, 9), "outside of their arrays"),
        (put("block.start", 2, 1), "not in their order"),
        (put("block.digest_start", 0, 1), "digests of their own"),
        (put("block.digest_start", 5, 2**62), "digests of their own"),
        (put("block.digest_start", -1, 2**40), "digests of their own"),
        (
            lambda columns: columns.update(
                {"block.digest_start": np.array([0, 2**63 - 1, -(2**63), -1, *[384] * 9])}
            ),
            "digests of their own",
        ),
        (put("file_name.ends", 0, 2**40), "do not fit its text"),
        (put("global_shape", (0, 0), -8), "shape that no array can have"),
        *[(cut(name), "does not fit that of rows") for name in ("array.rows", "array.reach", "block.start")],
        *[
            (cut(name), "does not fit that of rows")
            for name in ("block.digest_start", "block.xxh3", "digest.xxh3")
        ],
        *[(cut(name), f"column '{name}' is U32") for name in ("start", "nbytes", "offset_bytes")],
        (cut("digest"), "digests of their own"),
        (lambda columns: columns.pop("block.start"), "column 'block.start' is missing"),
        (lambda columns: columns.pop("file"), "column 'file' is missing"),
        (lambda columns: columns.update(nbytes=columns["nbytes"].astype(np.uint8)), "column 'nbytes' is U8"),
    ],
)
def test_a_head_that_lies_raises_an_error(edit: Callable[[dict[str, Any]], object], match: str) -> None:
    with pytest.raises(FormatError, match=f"index: .*{match}"):
        ask(*forged(edit))


def with_digests(**columns: Any) -> Callable[[dict[str, Any]], object]:
    """Add digests of the three arrays, and then change columns."""
    message: dict[str, Any] = {"crc64nvme": np.array([5, 0, 2**64 - 1], np.uint64)}
    message["has_crc64nvme"] = np.array([1, 0, 1], np.uint8)
    there = {f"array.{name}": column for name, column in (message | columns).items() if column is not None}
    return lambda into: into.update(there)


@pytest.mark.parametrize("whole_bytes", [0, 2**30], ids=["parts", "whole"])
def test_digests_of_arrays_are_read_with_the_head_or_the_whole_index(whole_bytes: int) -> None:
    store, message, _ = forged(with_digests())
    index = index_reader.open_index(store, message, whole_bytes=whole_bytes)
    assert index.array_digests == {"layers.000": 5, "layers.002": 2**64 - 1}
    store, message, _ = small()
    assert index_reader.open_index(store, message, whole_bytes=whole_bytes).array_digests == {}


@pytest.mark.parametrize("whole_bytes", [0, 2**30], ids=["parts", "whole"])
@pytest.mark.parametrize(
    "columns",
    [
        {"crc64nvme": np.zeros(2, np.uint64)},
        {"crc64nvme": np.zeros(4, np.uint64)},
        {"crc64nvme": np.zeros((3, 1), np.uint64)},
        {"crc64nvme": np.zeros(3, np.int64)},
        {"crc64nvme": None},
        {"crc64nvme": np.ones(3, np.uint64)},
        {"has_crc64nvme": np.zeros(2, np.uint8)},
        {"has_crc64nvme": np.ones(3, np.int64)},
        {"has_crc64nvme": np.array([1, 0, 2], np.uint8)},
        {"has_crc64nvme": None},
    ],
    ids=str,
)
def test_digests_of_arrays_that_do_not_fit_them_raise_an_error(columns: Any, whole_bytes: int) -> None:
    store, message, _ = forged(with_digests(**columns))
    with pytest.raises(FormatError, match=r"index: .*(array\.(has_)?crc64nvme'|digests of arrays).* damaged"):
        index_reader.open_index(store, message, whole_bytes=whole_bytes)


def test_damage_to_digests_of_arrays_is_found() -> None:
    store, message, stored = forged(with_digests())
    damaged(store, offset_of(store, "array.crc64nvme"))
    with pytest.raises(IntegrityError, match="index: the bytes 0:"):
        ask(store, message, stored)


@pytest.mark.parametrize(
    ("entry", "match"),
    [
        ({"xxh3_128": None}, "no digest of the head"),
        ({"nbytes": 7}, "are the head"),
        ({"nbytes": 2**50}, "are the head"),
        ({"nbytes": -1}, "does not say how large"),
        ({"nbytes": "9"}, "does not say how large"),
        ({"block_rows": 0}, "does not say how large"),
        ({"block_rows": 2**40}, "are the head"),
        ({"block_rows": 15}, "does not fit that of rows"),
        ({"block_digests": 7}, "does not fit that of rows"),
        ({"block_digests": 2**63}, "are the head"),
    ],
)
def test_an_entry_that_lies_raises_an_error(entry: Json, match: str) -> None:
    store, message, stored = small()
    message["index"]["head"] |= entry
    with pytest.raises(FormatError, match=f"index: .*({match})"):
        ask(store, message, stored)


def with_header(edit: Callable[[Json], object]) -> tuple[MemoryStore, Json, StoredChunks]:
    """Write an index with another header, of the same length."""
    store, message, stored = small()
    data = store.read("index", max_bytes=2**30)
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    edit(header)
    text = json.dumps(header, separators=(",", ":")).encode()
    data = len(text).to_bytes(8, "little") + text + data[8 + length :]
    store.write("index", data)
    nbytes = message["index"]["head"]["nbytes"] + len(text) - length
    message["index"] |= {"nbytes": len(data), "xxh3_128": digest_of(data)}
    message["index"]["head"] |= {"nbytes": nbytes, "xxh3_128": digest_of(data[:nbytes])}
    return store, message, stored


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (lambda h: h["start"].update(data_offsets=[0, 2304]), "columns overlap or leave gaps"),
        (lambda h: h["file"]["data_offsets"].reverse(), "columns overlap or leave gaps"),
        (lambda h: h["nbytes"].update(data_offsets=[2**60, 2**60 + 768]), "columns overlap or leave gaps"),
        (lambda h: h["nbytes"].update(shape=[2**58]), "column 'nbytes' is U32"),
        (lambda h: h["nbytes"].update(shape=[-192]), "column 'nbytes' is U32"),
        (lambda h: h["array"].update(shape=[2**58]), "column 'array' is U32"),
        (lambda h: h["block.start"].update(shape=[2**40]), "column 'block.start' is U32"),
        (lambda h: h["nbytes"].update(shape=["192"]), "its header is malformed"),
        (lambda h: h["nbytes"].pop("dtype"), "its header is malformed"),
        (lambda h: h.update(nbytes=[1]), "its header is malformed"),
    ],
)
def test_a_header_that_lies_raises_an_error(edit: Callable[[Json], object], match: str) -> None:
    with pytest.raises(FormatError, match=f"index: {match}"):
        ask(*with_header(edit))


def test_a_column_without_elements_may_not_claim_any_extent() -> None:
    columns = {"global_shape": StoredColumn("I64", (0, 2**62), 0, 0)}  # more than numpy can count, times 0
    with pytest.raises(FormatError, match="column 'global_shape' is I64"):
        require(columns, "global_shape", ("I64",), (-1, -1), "index")


def test_a_head_without_a_header_raises_an_error() -> None:
    store, message, stored = small()
    for text in (b"[" * 10_000, b"null", b"\xff" * 50, b'{"a":1}'):
        head = len(text).to_bytes(8, "little") + text
        store.write("index", head)
        entry = {"nbytes": len(head), "xxh3_128": digest_of(head)}
        message["index"] |= {**entry, "head": message["index"]["head"] | entry}
        with pytest.raises(FormatError, match="index: its header is malformed"):
            ask(store, message, stored)
    store.write("index", (2**62).to_bytes(8, "little") + bytes(8))
    entry = {"nbytes": 16, "xxh3_128": digest_of((2**62).to_bytes(8, "little") + bytes(8))}
    message["index"] |= {**entry, "head": message["index"]["head"] | entry}
    with pytest.raises(FormatError, match=f"index: its header has {2**62} bytes"):
        ask(store, message, stored)


@pytest.mark.parametrize(
    ("name", "value", "error", "match"),
    [
        ("file", 8, FormatError, "lies in no file"),
        ("file", -1, FormatError, "lies in no file"),
        ("offset_bytes", -1, FormatError, "lies in no file"),
        ("nbytes", 299_999, FormatError, "does not lie in its array"),
        ("flat_stop", 300_001, FormatError, "does not lie in its array"),
        ("files", 0, StorageError, "is absolute"),
    ],
)
def test_rows_that_lie_raise_an_error(
    name: str, value: int, error: type[CheckpointError], match: str
) -> None:
    store, _, stored = small()
    row = 64 + 16
    if name == "files":
        lying = replace(stored, files=tuple(f"/data/{i}" for i in range(8)))
    else:
        of = stored.table if hasattr(stored.table, name) else stored
        column = getattr(of, name).copy()
        column[row] = value
        changed = replace(of, **{name: column})  # type: ignore[type-var]
        lying = replace(stored, table=changed) if isinstance(changed, ChunkTable) else changed
    message = {"index": write_index(store, "index", lying, block_rows=16, block_digests=8)}
    with pytest.raises(error, match=match):
        ask(store, message, stored)


def test_a_block_with_more_digests_than_its_rows_raises_an_error() -> None:
    with pytest.raises(FormatError, match="index: of the chunks 64:96 some have more or fewer digests"):
        ask(*forged(put("block.digest_start", 6, 193)))


def test_a_row_with_more_digests_than_its_block_raises_an_error() -> None:
    store, _, stored = small()
    arrays = tuple(replace(a, dtype="object") for a in stored.table.arrays)  # of any length
    ones = np.ones(len(stored), np.int64)
    table = replace(stored.table, arrays=arrays, shape=np.ones_like(stored.table.shape), flat_stop=ones)
    honest = replace(stored, table=table)
    message = {"index": write_index(store, "index", honest, block_rows=16, block_digests=8)}
    assert len(ask(store, message, honest)) == 16
    nbytes = stored.table.nbytes.copy()
    nbytes[64 + 16 : 64 + 18] = 2**61, 1_000_000 - 2**61  # together they have as many digests as before
    lying = replace(honest, table=replace(table, nbytes=nbytes))
    message = {"index": write_index(store, "index", lying, block_rows=16, block_digests=8)}
    index = index_reader.open_index(store, message, whole_bytes=0)
    with pytest.raises(FormatError, match="index: of the chunks 64:96 some have more or fewer digests"):
        index.of_boxes([box(honest, 1, (2, 0, 0), (1, 1, 1))])
