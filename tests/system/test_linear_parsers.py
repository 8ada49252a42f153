"""Each parser takes time in proportion to its input: at most 3 times as long for twice as much."""

from __future__ import annotations

import gc
import io
import json
import pickle
import pickletools
import struct
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save
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
from megackpt.formats.huggingface.folder import read_folder
from megackpt.formats.index_file import write_index
from megackpt.formats.index_reader import open_index
from megackpt.formats.pickle_limits import check_opcodes
from megackpt.formats.safe_pickle import load_value
from megackpt.formats.safetensors_header import parse_header
from megackpt.formats.tensor_pickle import load_tensor_pickle
from megackpt.formats.torch_dist.metadata_reader import DcpMetadata
from megackpt.formats.torch_dist.metadata_unpickler import load_metadata
from megackpt.storage import LocalStore, MemoryStore
from tests.support.codec import P as _P
from tests.support.codec import integers_that_crowd_a_table as _crowding
from tests.support.codec import tuples_of_one_hash as _tuples_of
from tests.support.effort import sampled
from tests.support.states import box, stack
from tests.system.attacks.opcodes import (
    binary,
    dict_of,
    named,
    number_of,
    ordered_of,
    pair_of,
    pickled,
    set_of,
    text,
    zipped,
)

_TRIES = 20
_MOST = 3.0  # a quadratic parser takes 4 times as long for twice as much

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


def _shared_chunks(n: int) -> bytes:
    """Return n keys with one list of n chunks, all empty: others would have to be stored for each key."""
    chunks = [ChunkStorageMetadata(torch.Size([0]), torch.Size([0])) for _ in range(n)]
    return _arrays(n, torch.Size([n]), chunks)


def _shared_shape(n: int) -> bytes:
    return _arrays(n, torch.Size([1] * n), [])


def _arrays(n: int, shape: torch.Size, chunks: list[ChunkStorageMetadata]) -> bytes:
    properties = TensorProperties(dtype=torch.float32)
    arrays = {f"w{i}": TensorStorageMetadata(properties, shape, chunks) for i in range(n)}
    return pickle.dumps(Metadata(arrays, {}, {}), protocol=4)


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


def _entries(n: int, *, nbytes: int = 1) -> bytes:
    """The header of so many tensors of so many bytes each."""
    fields = {"dtype": "U8", "shape": [nbytes]}
    entries = {f"w{i}": {**fields, "data_offsets": [i * nbytes, (i + 1) * nbytes]} for i in range(n)}
    return json.dumps(entries).encode()


def _extents(n: int, extent: int) -> bytes:
    shape = ",".join([str(extent)] * n)
    return f'{{"w":{{"dtype":"U8","shape":[{shape}],"data_offsets":[0,1]}}}}'.encode()


def _safetensors(header: bytes) -> Work:
    return _raising(lambda: parse_header(header, data_nbytes=header.count(b'"U8"'), where="w"))


def _folder(n: int, *, files: int) -> Work:
    """A Hugging Face folder of so many tensors of a byte in so many files."""
    store, weight_map = MemoryStore(), {}
    for number in range(files):
        names = [f"{number}.{i}" for i in range(n // files)]
        store.write(f"{number}.safetensors", save({name: torch.ones(1, dtype=torch.uint8) for name in names}))
        weight_map |= dict.fromkeys(names, f"{number}.safetensors")
    store.write("model.safetensors.index.json", json.dumps({"weight_map": weight_map}).encode())
    return _opened(store)


def _index_only(n: int, file: str) -> MemoryStore:
    store = MemoryStore()
    index = {"weight_map": {f"w{i}": f"{file}{i}" for i in range(n)}}
    store.write("model.safetensors.index.json", json.dumps(index).encode())
    return store


def _opened(store: MemoryStore) -> Work:
    return _raising(lambda: read_folder(store, "model.safetensors.index.json"))


def _tree_of_int_keys(n: int, key: Callable[[int], int]) -> EncodedValue:
    return EncodedValue({"$dict": [[{"$int": hex(key(i))}, 0] for i in range(n)]}, ())


def _tuples(n: int) -> EncodedValue:
    return EncodedValue({"$dict": [[{"$tuple": [i, i + 1]}, 0] for i in range(n)]}, ())


# name -> (size, what parses an input of that size)
PARSERS: dict[str, tuple[int, Callable[[int, Path], Work]]] = {
    "json of common state": (
        40_000,
        lambda n, _: _tree(json.dumps([{"a": i, "b": [1.5]} for i in range(n)])),
    ),
    "repeated key of common state": (100_000, lambda n, _: _tree(_repeated(n))),
    "one key, repeated": (300_000, lambda n, _: _tree("{" + ",".join(['"a":1'] * n) + "}")),
    "digits of an integer": (2_000_000, lambda n, _: _tree("[" + "9" * n + "]")),
    "digits of a number": (1_000_000, lambda n, _: _tree("[0." + "9" * n + "]")),
    "repeated key of metadata.json": (100_000, lambda n, _: _document(_repeated(n).encode())),
    "metadata.json": (100_000, lambda n, _: _document(json.dumps({f"k{i}": [i] for i in range(n)}).encode())),
    "long string": (8_000_000, lambda n, _: _tree('["' + "\\u00e9" * (n // 6) + '"]')),
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
    "header of a safetensors file": (10_000, lambda n, _: _safetensors(_entries(n))),
    "tensors of one range": (10_000, lambda n, _: _safetensors(_entries(n, nbytes=0))),
    "extents of a tensor": (1_000_000, lambda n, _: _safetensors(_extents(n, 1))),
    "extents that multiply": (1_000_000, lambda n, _: _safetensors(_extents(n, 3))),
    "lists in a header": (300_000, lambda n, _: _safetensors(b'{"w":[' + b"[]," * n + b"[]]}")),
    "escapes in a header": (300_000, lambda n, _: _safetensors(b'{"' + b"\\u00e9" * n + b'": 5}')),
    "tensors of a folder": (4_000, lambda n, _: _folder(n, files=8)),
    "files of a folder": (200, lambda n, _: _folder(n, files=n)),
    "names outside of a folder": (50_000, lambda n, _: _opened(_index_only(n, "../x"))),
    "blob": (1_000, lambda n, _: _unpacked(pack([torch.ones(2) for _ in range(n)]))),
    "header of a blob": (20_000, lambda n, _: _unpacked(_header(n))),
    "opcodes": (100_000, lambda n, _: _opcodes(pickle.dumps([[i, (i, str(i))] for i in range(n)], 2))),
    "integers of one hash in a pickle": (
        50_000,
        lambda n, _: _opcodes(pickle.dumps([0] * n + [i * _P for i in range(n)], 2)),
    ),
    "integers in a pickle that crowd a table": (
        20_000,
        lambda n, _: _opcodes(pickle.dumps([i + 8 * _P for i in _crowding(n)], 2)),
    ),
    ".metadata": (4_000, lambda n, _: _dcp(_metadata(n))),
    "chunks that many keys of .metadata have": (2_000, lambda n, _: _dcp_chunks(_shared_chunks(n))),
    "a shape that many keys of .metadata have": (4_000, lambda n, _: _dcp_chunks(_shared_shape(n))),
    "keys of one hash in .metadata": (20_000, lambda n, _: _dcp(_one_hash(n))),
    "torch.save": (10_000, lambda n, _: _torch(_torch_saved({str(i): [i, (i,)] for i in range(n)}))),
    "keys of one hash in torch.save": (20_000, lambda n, _: _torch(zipped(_one_hash(n)))),
    "tuples of one hash as keys": (
        20_000,
        lambda n, _: _decoded(EncodedValue({"$dict": [[{"$tuple": list(t)}, 0] for t in _tuples_of(n)]}, ())),
    ),
    "integers that crowd a table": (
        20_000,
        lambda n, _: _decoded(EncodedValue({"$dict": [[{"$int": hex(i)}, 0] for i in _crowding(n)]}, ())),
    ),
    "a set of tuples of one hash": (
        20_000,
        lambda n, _: _torch(zipped(set_of(map(pair_of, _tuples_of(n))))),
    ),
    "an ordered dict of tuples of one hash": (
        20_000,
        lambda n, _: _torch(zipped(ordered_of(map(pair_of, _tuples_of(n))))),
    ),
    "a list that calls copy": (20_000, lambda n, _: _torch(zipped(_copied_list(n)))),
    "a text that calls copy": (
        200_000,
        lambda n, _: _torch(
            zipped(_copied(named("_codecs", "encode"), text("x" * n) + text("latin1"), n // 8))
        ),
    ),
    "attributes that many objects get": (20_000, lambda n, _: _torch(zipped(_with_attributes(n)))),
    "a storage that many tensors have": (
        200_000,
        lambda n, _: _of_tensors(_copied(named("torch.storage", "_load_from_bytes"), _storage(n), n // 50)),
    ),
    "one large tuple as many keys": (2_000, lambda n, _: _torch(zipped(_same_key(n)))),
    "whole index": (64 * 400, lambda n, _: _index(n, whole=True)),
    "part of an index": (64 * 800, lambda n, _: _index(n, whole=False)),
    "directory": (1_000, _listing),
}


# Opcodes of keys that collide, and what reads a pickle of a dict that has them.
KEYS: dict[str, Callable[[int], Iterable[bytes]]] = {
    "tuples of one hash": lambda n: map(pair_of, _tuples_of(n)),
    "frozensets of one hash": lambda n: (_frozen(pair_of(pair)) for pair in _tuples_of(n)),
    "sizes of one hash": lambda n: map(_size, _tuples_of(n)),
    "indices of one hash": lambda n: map(_stored_index, _tuples_of(n)),
    "integers that crowd a table": lambda n: map(number_of, _crowding(n)),
}
FILES: dict[str, Callable[[bytes], Work]] = {
    ".metadata": lambda data: _dcp(data),
    "torch.save": lambda data: _torch(zipped(data)),
    "an old file": lambda data: _torch(_old(data)),
}
for (keys, opcodes), (file, read) in product(KEYS.items(), FILES.items()):

    def make_work(n: int, _: Path, opcodes: Any = opcodes, read: Any = read) -> Work:
        return cast(Work, read(dict_of(opcodes(n))))

    PARSERS[f"{keys} in {file}"] = (20_000, make_work)


def _one_hash(n: int) -> bytes:
    """A pickle of a dict with such keys, written by hand: to make the dict takes as long as the attack."""
    pairs = b"".join(b"\x8a\x0a" + (i * _P).to_bytes(10, "little", signed=True) + b"K\x00" for i in range(n))
    return b"\x80\x02}(" + pairs + b"u."


def _size(pair: tuple[int, int]) -> bytes:
    return named("torch", "Size") + pair_of(pair) + b"\x85R"


def _frozen(opcodes: bytes) -> bytes:
    return named("builtins", "frozenset") + b"](" + opcodes + b"e\x85R"


def _stored_index(pair: tuple[int, int]) -> bytes:
    """Opcodes of an index of .metadata whose name is no string, so that nothing of it is salted."""
    module = "torch.distributed.checkpoint.metadata"
    fields = (b"U\x03fqnK\x01", b"U\x06offset" + _size(pair), b"U\x05indexN")
    return named(module, "MetadataIndex") + b")\x81}(" + b"".join(fields) + b"ub"


def _same_key(n: int) -> bytes:
    """A pickle that hashes a tuple of 2**18 numbers again and again."""
    large = b"K\x01" + b"2\x86" * 18 + b"q\x00"
    return pickled(large + b"}h\x00K\x00s0" * n)


def _copied(function: bytes, arguments: bytes, n: int, *, then: bytes = b"") -> bytes:
    """A pickle of a list that a function makes, which is called n times with the same arguments."""
    return pickled(b"](" + function + b"q\x00(" + arguments + b"tq\x01" + then, b"h\x00h\x01R" * n, b"e")


def _copied_list(n: int) -> bytes:
    """The list gets its items when it is among the arguments already."""
    items = b"h\x02(" + b"".join(text(f"a{i}") + b"K\x02\x86" for i in range(n)) + b"e"
    return _copied(named("collections", "OrderedDict"), b"]q\x02", n // 8, then=items)


def _storage(n: int) -> bytes:
    """Opcodes of the storage of n bytes that pickle.dumps writes for a tensor."""
    opcodes = pickletools.genops(pickle.dumps(torch.ones(n // 4)))
    return binary(max((value for _, value, _ in opcodes if isinstance(value, bytes)), key=len))


def _with_attributes(n: int) -> bytes:
    """A pickle of n // 8 objects with the same n attributes."""
    cls = named("argparse", "Namespace") + b"q\x00"
    attributes = b"}q\x01(" + b"".join(text(f"a{i}") + b"K\x01" for i in range(n)) + b"u"
    return pickled(b"](" + cls + attributes, b"h\x00)\x81h\x01b" * (n // 8), b"e")


def _old(data: bytes) -> bytes:
    """A file as torch.save wrote it before version 1.6."""
    numbers = (torch.serialization.MAGIC_NUMBER, torch.serialization.PROTOCOL_VERSION, {})
    head = b"".join(pickle.dumps(number, protocol=2) for number in numbers)
    return head + data + pickle.dumps([], protocol=2)


def _raising(parse: Callable[[], Any]) -> Work:
    def run() -> object:
        with suppress(FormatError, pickle.UnpicklingError):
            return parse()
        return None

    return run


def _tree(data: str) -> Work:
    return _raising(lambda: load_tree(data, where="w"))


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


def _dcp_chunks(data: bytes) -> Work:
    def read() -> object:
        metadata = DcpMetadata(load_metadata(data, where="w"), location="w")
        return metadata.chunks(metadata.arrays)

    return _raising(read)


def _torch(data: bytes) -> Work:
    return _raising(lambda: load_value(data, where="w"))


def _of_tensors(data: bytes) -> Work:
    return _raising(lambda: load_tensor_pickle(data, [], where="w"))


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


@sampled(20)
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
