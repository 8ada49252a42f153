"""Each parser takes time in proportion to its input: at most 2.5 times as long for twice as much."""

from __future__ import annotations

import gc
import io
import json
import pickle
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megackpt.codec import EncodedValue, decode, load_tree, pack, unpack
from megackpt.errors import FormatError
from megackpt.formats.documents import parse_document
from megackpt.formats.index_file import write_index
from megackpt.formats.index_reader import open_index
from megackpt.formats.pickle_limits import check_opcodes
from megackpt.formats.safe_pickle import load_value
from megackpt.formats.torch_dist.metadata_unpickler import load_metadata
from megackpt.storage import LocalStore, MemoryStore
from tests.attacks.opcodes import zipped
from tests.small_index import box, stack

_P = 2**61 - 1  # integers that differ by multiples of it have one hash
_TRIES = 6
_MOST = 2.5

Work = Callable[[], object]


def _repeated(n: int) -> str:
    """The last key stands twice, so that it is found last."""
    return json.dumps({f"key{i}": i for i in range(n)})[:-1] + f', "key{n - 1}": 0}}'


def _metadata(n: int) -> bytes:
    chunks = [ChunkStorageMetadata(torch.Size([i]), torch.Size([1])) for i in range(n)]
    properties = TensorProperties(dtype=torch.float32)
    array = TensorStorageMetadata(properties, torch.Size([n]), chunks)
    stored = {MetadataIndex("w", chunk.offsets, i): i for i, chunk in enumerate(chunks)}
    return pickle.dumps(Metadata({"w": array}, {f"w{i}": ("a", i) for i in range(n)}, stored), protocol=4)


def _torch_saved(value: object) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def _index(n: int, *, whole: bool) -> Work:
    stored = stack(n // 64, 8, 8)
    store = MemoryStore()
    message = {"index": write_index(store, "index", stored)}
    last = box(stored, n // 64 - 1, (2, 0, 0), (2, 8, 300_000))

    def read() -> object:
        index = open_index(store, message, whole_bytes=2**30 if whole else 0)
        return index.of_boxes([last]), index.arrays

    return read


def _listing(n: int, directory: Path) -> Work:
    location = directory / str(n)
    for i in range(0, n, 50):
        (location / f"d{i}").mkdir(parents=True)
        for j in range(i, min(i + 50, n)):
            (location / f"d{i}" / f"f{j}").touch()
    store = LocalStore(location)
    return store.names


def _header(n: int) -> bytes:
    """A safetensors header of so many tensors, the last of which is not described."""
    entry = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    metadata = {"format": "megackpt.codec", "version": "1", "tree": "[]"}
    text = json.dumps({"__metadata__": metadata, **{str(i): entry for i in range(n)}}).encode()
    return struct.pack("<Q", len(text)) + text


def _tree_of_int_keys(n: int, key: Callable[[int], int]) -> EncodedValue:
    return EncodedValue({"$dict": [[{"$int": hex(key(i))}, 0] for i in range(n)]}, ())


def _tuples(n: int) -> EncodedValue:
    return EncodedValue({"$dict": [[{"$tuple": [i, i + 1]}, 0] for i in range(n)]}, ())


# name -> (size, what parses an input of that size)
PARSERS: dict[str, tuple[int, Callable[[int, Path], Work]]] = {
    "json of common state": (
        40_000,
        lambda n, _: _text(json.dumps([{"a": i, "b": [1.5]} for i in range(n)])),
    ),
    "repeated key of common state": (100_000, lambda n, _: _text(_repeated(n))),
    "one key, repeated": (300_000, lambda n, _: _text("{" + ",".join(['"a":1'] * n) + "}")),
    "digits of an integer": (2_000_000, lambda n, _: _text("[" + "9" * n + "]")),
    "digits of a number": (1_000_000, lambda n, _: _text("[0." + "9" * n + "]")),
    "repeated key of metadata.json": (100_000, lambda n, _: _document(_repeated(n).encode())),
    "metadata.json": (100_000, lambda n, _: _document(json.dumps({f"k{i}": [i] for i in range(n)}).encode())),
    "long string": (8_000_000, lambda n, _: _text('["' + "\\u00e9" * (n // 6) + '"]')),
    "values": (20_000, lambda n, _: _decoded(EncodedValue([{"$tuple": [i, "x"]} for i in range(n)], ()))),
    "integer keys": (30_000, lambda n, _: _decoded(_tree_of_int_keys(n, lambda i: i * 2**64 + 1))),
    "integer keys of one hash": (20_000, lambda n, _: _decoded(_tree_of_int_keys(n, lambda i: i * _P + 1))),
    "negative integer keys of one hash": (
        20_000,
        lambda n, _: _decoded(_tree_of_int_keys(n, lambda i: -i * _P)),
    ),
    "tuples as keys": (20_000, lambda n, _: _decoded(_tuples(n))),
    "elements of one hash": (
        20_000,
        lambda n, _: _decoded(EncodedValue({"$set": [{"$int": hex(i * _P)} for i in range(n)]}, ())),
    ),
    "blob": (1_000, lambda n, _: _unpacked(pack([torch.ones(2) for _ in range(n)]))),
    "header of a blob": (20_000, lambda n, _: _unpacked(_header(n))),
    "opcodes": (100_000, lambda n, _: _opcodes(pickle.dumps([[i, (i, str(i))] for i in range(n)], 2))),
    "integers of one hash in a pickle": (
        50_000,
        lambda n, _: _opcodes(pickle.dumps([0] * n + [i * _P for i in range(n)], 2)),
    ),
    ".metadata": (4_000, lambda n, _: _dcp(_metadata(n))),
    "keys of one hash in .metadata": (
        20_000,
        lambda n, _: _dcp(_one_hash(n)),
    ),
    "torch.save": (10_000, lambda n, _: _torch(_torch_saved({str(i): [i, (i,)] for i in range(n)}))),
    "keys of one hash in torch.save": (20_000, lambda n, _: _torch(zipped(_one_hash(n)))),
    "whole index": (64 * 400, lambda n, _: _index(n, whole=True)),
    "part of an index": (64 * 800, lambda n, _: _index(n, whole=False)),
    "directory": (1_000, _listing),
}


def _one_hash(n: int) -> bytes:
    """A pickle of a dict with such keys, written by hand: to make the dict takes as long as the attack."""
    pairs = b"".join(b"\x8a\x0a" + (i * _P).to_bytes(10, "little", signed=True) + b"K\x00" for i in range(n))
    return b"\x80\x02}(" + pairs + b"u."


def _raising(parse: Callable[[], Any]) -> Work:
    def run() -> object:
        with suppress(FormatError, pickle.UnpicklingError):
            return parse()
        return None

    return run


def _text(text: str) -> Work:
    return _raising(lambda: load_tree(text, where="w"))


def _document(data: bytes) -> Work:
    return _raising(lambda: parse_document(data, where="w"))


def _decoded(encoded: EncodedValue) -> Work:
    return _raising(lambda: decode(encoded))


def _unpacked(blob: bytes) -> Work:
    return _raising(lambda: unpack(blob, where="w"))


def _opcodes(data: bytes) -> Work:
    return _raising(lambda: check_opcodes(data))


def _dcp(data: bytes) -> Work:
    return _raising(lambda: load_metadata(data, where="w"))


def _torch(data: bytes) -> Work:
    return _raising(lambda: load_value(data, where="w"))


def _seconds(work: Work) -> float:
    """Return the time of the processor that the work takes: others load this machine."""
    gc.collect()
    gc.disable()  # it looks through all objects of this process from time to time
    try:
        begin = time.thread_time()
        work()
        return time.thread_time() - begin
    finally:
        gc.enable()


@pytest.mark.parametrize("name", PARSERS)
def test_twice_as_much_takes_about_twice_as_long(name: str, tmp_path: Path) -> None:
    # Doubled twice: a table that grows does so in steps.
    size, make = PARSERS[name]
    works = make(size // 4, tmp_path), make(size, tmp_path)
    best = [float("inf"), float("inf")]
    for attempt in range(_TRIES):
        # The shortest time of several is the one that others have disturbed least.
        best = [min(before, _seconds(work)) for before, work in zip(best, works, strict=True)]
        if attempt > 0 and best[1] <= _MOST**2 * max(best[0], 5e-4):
            return
    pytest.fail(f"{name}: {best[0]:.5f} s for {size // 4:,}, {best[1]:.5f} s for four times as much")


def test_a_repeated_key_is_named() -> None:
    with pytest.raises(FormatError, match=r"the key 'key9' is repeated in one object"):
        load_tree(_repeated(10), where="w")
    with pytest.raises(FormatError, match=r"the key 'key9' is repeated in one object"):
        parse_document(_repeated(10).encode(), where="w")


def test_keys_of_one_hash_raise_an_error_and_others_do_not() -> None:
    with pytest.raises(FormatError, match="more than 200 keys have the same hash"):
        decode(_tree_of_int_keys(201, lambda i: i * _P + 5))
    assert len(decode(_tree_of_int_keys(200, lambda i: i * _P + 5))) == 200
    many = {i * 2**70: i for i in range(1000)}
    assert unpack(pack(many), where="w") == many
    with pytest.raises(pickle.UnpicklingError, match="integers have the same hash"):
        check_opcodes(pickle.dumps([i * _P for i in range(300)]))
    check_opcodes(pickle.dumps([7 * _P] * 300 + list(many)))
