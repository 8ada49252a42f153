"""Attacks by zarr arrays: documents that lie, chunks that expand, indexes of shards that lie."""

from __future__ import annotations

import bz2
import json
import os
import shutil
import struct
import zlib
from collections.abc import Callable
from typing import Any

from tests.system.attacks.crafting import ZARR_1, ZARR_3, ZARR_ZLIB, Location, attack, attacks_with, edit_json

EXPANDED = 2 << 30
_PART = 16 << 20


def _deflated_zeros(wbits: int) -> bytes:
    """Two gigabytes of zeros, deflated: one part many times, as each begins anew."""
    compressor = zlib.compressobj(9, zlib.DEFLATED, wbits)
    head = compressor.compress(b"\0" * _PART) + compressor.flush(zlib.Z_FULL_FLUSH)
    part = compressor.compress(b"\0" * _PART) + compressor.flush(zlib.Z_FULL_FLUSH)
    return head + part * (EXPANDED // _PART - 1) + compressor.flush()


def _zstd_zeros() -> bytes:
    """Two gigabytes of zeros as blocks of one repeated byte. Source: RFC 8878, section 3.1.1."""
    block = ((1 << 1) | ((128 << 10) << 3)).to_bytes(3, "little") + b"\0"
    last = (1 | (1 << 1) | (1 << 3)).to_bytes(3, "little") + b"\0"
    return b"\x28\xb5\x2f\xfd\x00\x58" + block * (EXPANDED // (128 << 10)) + last


def _zstd_of_many_frames() -> bytes:
    block = (1 | (1 << 1) | ((128 << 10) << 3)).to_bytes(3, "little") + b"\0"
    return (b"\x28\xb5\x2f\xfd\x00\x58" + block) * (EXPANDED // (128 << 10))


def _blosc(nbytes: int) -> bytes:
    """A header of blosc that claims so many bytes. Source: README_CHUNK_FORMAT of c-blosc."""
    return struct.pack("<BBBBIII", 2, 1, 0x33, 1, nbytes, 1 << 20, 200) + b"\0" * 184


def chunk_expands(position: Location, how: tuple[dict[str, Any], Callable[[], bytes]]) -> None:
    """The chunk of the array `half`, 6 bytes, is compressed anew."""
    compressor, data = how
    edit_json(position.directory / "half" / ".zarray", compressor=compressor)
    (position.directory / "half" / "0").write_bytes(data())


BLOSC = {"id": "blosc", "cname": "zstd", "clevel": 5, "shuffle": 1}
BOMBS = {
    "zlib": ({"id": "zlib", "level": 1}, lambda: _deflated_zeros(15)),
    "gzip": ({"id": "gzip", "level": 1}, lambda: _deflated_zeros(31)),
    "bz2": ({"id": "bz2", "level": 9}, lambda: bz2.compress(b"\0" * _PART) * (EXPANDED // _PART)),
    "zstd": ({"id": "zstd", "level": 1}, _zstd_zeros),
    "zstd_of_many_frames": ({"id": "zstd", "level": 1}, _zstd_of_many_frames),
    "blosc": (BLOSC, lambda: _blosc(2**31 - 1)),
    "blosc_wrapping": (BLOSC, lambda: _blosc(2**32 - 1)),
    "nothing": ({"id": "zlib", "level": 1}, lambda: b""),
    "not_compressed": ({"id": "zlib", "level": 1}, lambda: b"\0" * 6),
}
attacks_with(ZARR_1, "a chunk of 6 bytes expands to two gigabytes by {}", BOMBS, chunk_expands)


@attack(ZARR_ZLIB, "the chunks are larger than the array, by far")
def chunk_of_a_gigabyte(position: Location) -> None:
    edit_json(position.directory / "half" / ".zarray", chunks=[1 << 30])
    (position.directory / "half" / "0").write_bytes(_deflated_zeros(15))


@attack(ZARR_1, "the chunks are larger than the array, by far, and stored in another order")
def chunk_of_a_gigabyte_in_fortran(position: Location) -> None:
    edit_json(position.directory / "block" / ".zarray", chunks=[1 << 14, 1 << 14], order="F")
    for file in (position.directory / "block").glob("[0-9]*"):
        file.unlink()
    with (position.directory / "block" / "0.0").open("wb") as file:
        file.truncate(4 << 28)


def document_is(position: Location, fields: dict[str, Any]) -> None:
    edit_json(position.directory / "half" / ".zarray", **fields)


DOCUMENTS: dict[str, dict[str, Any]] = {
    "a_vast_shape": {"shape": [2**40], "chunks": [1]},
    "a_vast_empty_shape": {"shape": [0, 2**40], "chunks": [1, 1]},
    "a_vast_chunk": {"chunks": [2**61]},
    "a_vast_shape_of_one_chunk": {"shape": [2**40], "chunks": [2**40]},
    "a_negative_shape": {"shape": [-3]},
    "a_fraction_as_shape": {"shape": [3.0]},
    "a_wrapping_shape": {"shape": [2**32, 2**32], "chunks": [2**32, 2**32]},
    "fifty_dims": {"shape": [1] * 50, "chunks": [1] * 50},
    "no_dims": {"shape": [], "chunks": []},
    "empty_chunks": {"chunks": [0]},
    "a_wider_dtype": {"dtype": "<f8"},
    "a_dtype_of_objects": {"dtype": "|O"},
    "a_dtype_of_code": {"dtype": "os.system"},
    "another_byte_order": {"dtype": ">f4"},
    "an_unknown_compressor": {"compressor": {"id": "os.system", "level": 1}},
    "a_compressor_of_nothing": {"compressor": {"id": None}},
    "a_compressor_as_text": {"compressor": "zlib"},
    "a_pickling_filter": {"filters": [{"id": "pickle"}]},
    "a_filter_as_text": {"filters": "pickle"},
    "an_unknown_order": {"order": "Z"},
    "a_separator_that_goes_up": {"dimension_separator": "/../"},
    "a_fill_value_of_another_type": {"fill_value": {"a": 1}},
    "a_fill_value_of_a_text": {"fill_value": "A" * 1_000_000},
    "another_format": {"zarr_format": 99},
    "format_3": {"zarr_format": 3},
}
# No digest stands with a document: another shape, for which all chunks are there, is another array.
attacks_with(ZARR_1, "a .zarray has {}", DOCUMENTS, document_is, another=("a_vast_empty_shape",))
ZIPPED = {f"zlib_{name}": fields for name, fields in DOCUMENTS.items() if "compressor" not in name}
attacks_with(
    ZARR_ZLIB,
    "a .zarray of compressed chunks has {}",
    ZIPPED,
    document_is,
    another=("zlib_a_vast_empty_shape",),
)


def zarray_text(position: Location, change: Callable[[str], str]) -> None:
    file = position.directory / "half" / ".zarray"
    file.write_text(change(file.read_text().strip()))


TEXTS: dict[str, Callable[[str], str]] = {
    "is_nested_100_000_deep": lambda _: "[" * 100_000,
    "has_the_field_shape_twice": lambda text: '{"shape": [7],' + text[1:],
}
attacks_with(ZARR_1, "a .zarray {}", TEXTS, zarray_text)


@attack(ZARR_1, "an array is in another array", is_another=True)
def array_in_an_array(position: Location) -> None:
    shutil.copytree(position.directory / "half", position.directory / "block" / "half2")
    edit_json(position.directory / "block" / "half2" / ".zarray", shape=[2**40], chunks=[1])


def object_name(position: Location, name: str) -> None:
    for file in position.directory.glob("object/*.pt"):
        file.rename(file.with_name(name.format(rank=file.name.split("_")[1])))


attacks_with(
    ZARR_1,
    "an object lies at an offset {}",
    {"that_no_integer_holds": f"shard_{{rank}}{'0' * 30}_{'9' * 40}.pt"},
    object_name,
)


def first_object_name(position: Location, name: str) -> None:
    file = position.only_file("object/*.pt")
    file.rename(file.with_name(name))


attacks_with(
    ZARR_1,
    "an object is of {}",
    {
        "an_array_of_10_to_the_15": "shard_0_1000000000000000.pt",
        "a_thousand_dims": f"shard_{'0.' * 50}0_{'1.' * 50}1.pt",
    },
    first_object_name,
)


def _document_3(position: Location) -> Any:
    return position.only_file("zarr-*/half/zarr.json")


def document_3_is(position: Location, fields: dict[str, Any]) -> None:
    edit_json(_document_3(position), **fields)


def _grid(*chunk: Any) -> dict[str, Any]:
    return {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk)}}}


def _sharding(inner: Any, codecs: Any, index: Any = None, location: str = "end") -> dict[str, Any]:
    configuration = {
        "chunk_shape": inner,
        "codecs": codecs,
        "index_codecs": index or BYTES,
        "index_location": location,
    }
    return {"codecs": [{"name": "sharding_indexed", "configuration": configuration}]}


BYTES = [{"name": "bytes", "configuration": {"endian": "little"}}]
GZIP = {"name": "gzip", "configuration": {"level": 1}}
ZSTD = {"name": "zstd", "configuration": {"level": 1, "checksum": False}}
OURS = {"megackpt": {"key": "half", "dtype": "bfloat16"}}
DOCUMENTS_3: dict[str, dict[str, Any]] = {
    "a_vast_shape": {"shape": [2**40], **_grid(1), "codecs": BYTES},
    "a_vast_shard": {"shape": [2**40], **_grid(2**40)},
    "a_vast_chunk": {**_grid(2**61), "codecs": BYTES},
    "a_vast_empty_shape": {"shape": [0, 2**40], **_grid(1, 1), "codecs": BYTES},
    "a_wrapping_shape": {"shape": [2**32, 2**32]},
    "an_irregular_grid": {"chunk_grid": {"name": "os.system"}},
    "a_grid_of_text": {"chunk_grid": "regular"},
    "an_unknown_codec": {"codecs": [*BYTES, {"name": "os.system", "configuration": {"command": "id"}}]},
    "codecs_of_text": {"codecs": "bytes"},
    "no_codecs": {"codecs": []},
    "a_codec_that_is_none": {"codecs": [None]},
    "gzip_that_is_not": {"codecs": [*BYTES, GZIP]},
    "a_thousand_codecs": {"codecs": [*BYTES, *[GZIP] * 1000]},
    "a_transpose_out_of_range": {"codecs": [{"name": "transpose", "configuration": {"order": [9]}}, *BYTES]},
    "shards_in_shards": _sharding([1], _sharding([1], BYTES)["codecs"]),
    "shards_with_compressed_indexes": _sharding([1], BYTES, [*BYTES, GZIP]),
    "shards_with_the_index_in_front": _sharding([1], BYTES, None, "start"),
    "shards_with_the_index_elsewhere": _sharding([1], BYTES, None, "middle"),
    "shards_with_empty_chunks": _sharding([0], BYTES),
    "shards_with_codecs_of_text": _sharding([1], "bytes"),
    "a_fill_value_of_an_object": {"fill_value": {"a": [1]}},
    "a_fill_value_of_code": {"fill_value": "0x__import__('os')"},
    "a_wider_data_type": {"data_type": "float64"},
    "a_structured_data_type": {"data_type": {"name": "struct"}},
    "a_key_that_goes_up": {"attributes": {"megackpt": {"key": "../../outside/secret", "dtype": "bfloat16"}}},
    "a_key_of_another_array": {"attributes": {"megackpt": {"key": "block", "dtype": "bfloat16"}}},
    "a_key_that_is_a_list": {"attributes": {"megackpt": {"key": ["half"], "dtype": "bfloat16"}}},
    "a_key_with_surrogates": {"attributes": {"megackpt": {"key": "\ud800", "dtype": "bfloat16"}}},
    "a_dtype_that_is_a_list": {"attributes": {"megackpt": {"key": "half", "dtype": ["bfloat16"]}}},
    "a_key_of_many_bytes": {"attributes": {"megackpt": {"key": "k" * 1_000_000, "dtype": "bfloat16"}}},
    "attributes_of_text": {"attributes": "megackpt"},
    "storage_transformers": {"storage_transformers": [{"name": "os.system"}]},
    "another_node": {"node_type": "os.system"},
}
OTHER_ARRAYS = ("a_vast_empty_shape", "a_key_that_goes_up", "a_key_of_many_bytes", "attributes_of_text")
attacks_with(ZARR_3, "a zarr.json has {}", DOCUMENTS_3, document_3_is, another=OTHER_ARRAYS)


def _crc32c(data: bytes) -> bytes:
    """Return the checksum as zarr stores it. Source: RFC 3720, appendix B.4; the reflected polynomial."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return struct.pack("<I", crc ^ 0xFFFFFFFF)


def set_shard_entry(position: Location, entry: tuple[int, int]) -> None:
    """The index of a shard of one chunk says that it lies elsewhere."""
    file = position.only_file("zarr-*/half/c/0")
    index = struct.pack("<QQ", *entry)
    file.write_bytes(file.read_bytes()[:-20] + index + _crc32c(index))


SHARDS = {
    "beyond": (1 << 40, 10),
    "highest": (2**63 - 1, 10),
    "wrapping": (2**64 - 8, 16),
    "missing": (2**64 - 1, 2**64 - 1),
    "vast": (0, 1 << 40),
    "longest": (0, 2**64 - 1),
    "nothing": (0, 0),
    "in_the_index": (4, 26),
}
attacks_with(ZARR_3, "a shard says of its chunk: {}", SHARDS, set_shard_entry)


def shard_expands(position: Location, how: tuple[list[Any], Callable[[], bytes]]) -> None:
    """The one chunk of a shard, 6 bytes, is compressed anew."""
    codecs, data = how
    edit_json(_document_3(position), **_sharding([3], codecs))
    chunk = data()
    position.only_file("zarr-*/half/c/0").write_bytes(chunk + struct.pack("<QQ", 0, len(chunk)))


def chunk_3_expands(position: Location, how: tuple[list[Any], Callable[[], bytes]]) -> None:
    """The chunk of an array without shards, 6 bytes, is compressed anew."""
    codecs, data = how
    edit_json(_document_3(position), codecs=codecs)
    position.only_file("zarr-*/half/c/0").write_bytes(data())


def _twice() -> bytes:
    """Zeros, deflated twice."""
    return zlib.compress(_deflated_zeros(31), 9, 31)


BOMBS_3 = {
    "gzip": ([*BYTES, GZIP], lambda: _deflated_zeros(31)),
    "zstd": ([*BYTES, ZSTD], _zstd_zeros),
    "gzip_twice": ([*BYTES, GZIP, GZIP], _twice),
    "blosc": (
        [
            *BYTES,
            {
                "name": "blosc",
                "configuration": {
                    "cname": "lz4",
                    "clevel": 5,
                    "shuffle": "noshuffle",
                    "typesize": 1,
                    "blocksize": 0,
                },
            },
        ],
        lambda: _blosc(2**31 - 1),
    ),
}
attacks_with(ZARR_3, "a chunk of 6 bytes expands to two gigabytes by {}", BOMBS_3, chunk_3_expands)
attacks_with(ZARR_3, "a chunk of 6 bytes in a shard expands to two gigabytes by {}", BOMBS_3, shard_expands)


@attack(ZARR_3, "a shard of many files claims chunks without end in all but the first")
def shards_of_chunks_without_end(position: Location) -> None:
    document = _document_3(position)
    inner, files = 1 << 16, 1 << 8
    edit_json(document, shape=[inner * files], **_grid(inner), **_sharding([1], BYTES))
    directory = document.parent / "c"
    (directory / "0").write_bytes(b"\0" * (inner * 16))
    for number in range(1, files):
        (directory / str(number)).write_bytes(b"")


@attack(ZARR_3, "a group's document is a pipe", is_harmless=True)
def group_is_odd(position: Location) -> None:
    file = position.only_file("zarr-*/zarr.json")
    file.unlink()
    os.mkfifo(file)


@attack(ZARR_3, "a zarr.json has a field of a hundred thousand lists")
def zarr_json_is_wide(position: Location) -> None:
    document = _document_3(position)
    message = json.loads(document.read_text())
    text = json.dumps(message)[:-1] + ',"x":[' + "[]," * 100_000 + "[]]}"
    document.write_text(text)
