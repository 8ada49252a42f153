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
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

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

# ---- what parses ----------------------------------------------------------------------------------------

tree = partial(load_tree, where="w")
document = partial(parse_document, where="w")
blob = partial(unpack, where="w")
metadata = partial(load_metadata, where="w")
torch_file = partial(load_value, where="w")


def header(data: bytes) -> object:
    return parse_header(data, data_nbytes=data.count(b'"U8"'), where="w")


def opened(store: MemoryStore) -> object:
    return read_folder(store, "model.safetensors.index.json")


def chunks_of_metadata(data: bytes) -> object:
    stored = DcpMetadata(load_metadata(data, where="w"), location="w")
    return stored.chunks(stored.arrays)


def tensors_file(data: bytes) -> object:
    return load_tensor_pickle(data, [], where="w")


def read_index(made: tuple[Any, ...]) -> object:
    store, message, last, whole_bytes = made
    index = open_index(store, message, whole_bytes=whole_bytes)
    return index.of_boxes([last]), index.arrays


# ---- inputs of a size -----------------------------------------------------------------------------------


def repeated_key(n: int) -> str:
    """The last key stands twice, so that it is found last."""
    return json.dumps({f"key{i}": i for i in range(n)})[:-1] + f', "key{n - 1}": 0}}'


def encoded(value: Any) -> EncodedValue:
    return EncodedValue(value, ())


def int_keys(keys: Iterable[int]) -> EncodedValue:
    return encoded({"$dict": [[{"$int": hex(key)}, 0] for key in keys]})


def tuple_keys(keys: Iterable[tuple[int, int]]) -> EncodedValue:
    return encoded({"$dict": [[{"$tuple": list(key)}, 0] for key in keys]})


def stored_metadata(n: int) -> bytes:
    chunks = [ChunkStorageMetadata(torch.Size([i]), torch.Size([1])) for i in range(n)]
    properties = TensorProperties(dtype=torch.float32)
    array = TensorStorageMetadata(properties, torch.Size([n]), chunks)
    stored = {MetadataIndex("w", chunk.offsets, i): i for i, chunk in enumerate(chunks)}
    return pickle.dumps(Metadata({"w": array}, {f"w{i}": ("a", i) for i in range(n)}, stored), protocol=4)


def shared_chunks(n: int) -> bytes:
    """Return n keys with one list of n chunks, all empty: others would have to be stored for each key."""
    chunks = [ChunkStorageMetadata(torch.Size([0]), torch.Size([0])) for _ in range(n)]
    return _arrays(n, torch.Size([n]), chunks)


def shared_shape(n: int) -> bytes:
    return _arrays(n, torch.Size([1] * n), [])


def _arrays(n: int, shape: torch.Size, chunks: list[ChunkStorageMetadata]) -> bytes:
    properties = TensorProperties(dtype=torch.float32)
    arrays = {f"w{i}": TensorStorageMetadata(properties, shape, chunks) for i in range(n)}
    return pickle.dumps(Metadata(arrays, {}, {}), protocol=4)


def torch_saved(value: object) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def index(n: int, *, whole: bool) -> tuple[Any, ...]:
    stored = stack(n // 64, 8, 8)
    store = MemoryStore()
    message = {"index": write_index(store, "index", stored)}
    return store, message, box(stored, n // 64 - 1, (2, 0, 0), (2, 8, 300_000)), 2**30 if whole else 0


def listing(n: int) -> LocalStore:
    """A directory of so many files, in the working directory."""
    location = Path(str(n)).absolute()
    for i in range(0, n, 50):
        (location / f"d{i}").mkdir(parents=True)
        for j in range(i, min(i + 50, n)):
            (location / f"d{i}" / f"f{j}").touch()
    return LocalStore(location)


def head_of_blob(n: int) -> bytes:
    """A safetensors header of so many tensors, the last of which is not described."""
    entry = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    metadata = {"format": "megackpt.codec", "version": "1", "tree": "[]"}
    text = json.dumps({"__metadata__": metadata, **{str(i): entry for i in range(n)}}).encode()
    return struct.pack("<Q", len(text)) + text


def entries(n: int, *, nbytes: int = 1) -> bytes:
    """The header of so many tensors of so many bytes each."""
    fields = {"dtype": "U8", "shape": [nbytes]}
    entries = {f"w{i}": {**fields, "data_offsets": [i * nbytes, (i + 1) * nbytes]} for i in range(n)}
    return json.dumps(entries).encode()


def extents(n: int, *, extent: int) -> bytes:
    shape = ",".join([str(extent)] * n)
    return f'{{"w":{{"dtype":"U8","shape":[{shape}],"data_offsets":[0,1]}}}}'.encode()


def folder(n: int, *, files: int) -> MemoryStore:
    """A Hugging Face folder of so many tensors of a byte in so many files."""
    store, weight_map = MemoryStore(), {}
    for number in range(files):
        names = [f"{number}.{i}" for i in range(n // files)]
        store.write(f"{number}.safetensors", save({name: torch.ones(1, dtype=torch.uint8) for name in names}))
        weight_map |= dict.fromkeys(names, f"{number}.safetensors")
    return _with_index(store, weight_map)


def index_alone(n: int) -> MemoryStore:
    return _with_index(MemoryStore(), {f"w{i}": f"../x{i}" for i in range(n)})


def _with_index(store: MemoryStore, weight_map: dict[str, str]) -> MemoryStore:
    store.write("model.safetensors.index.json", json.dumps({"weight_map": weight_map}).encode())
    return store


def one_hash(n: int) -> bytes:
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


def same_key(n: int) -> bytes:
    """A pickle that hashes a tuple of 2**18 numbers again and again."""
    large = b"K\x01" + b"2\x86" * 18 + b"q\x00"
    return pickled(large + b"}h\x00K\x00s0" * n)


def _copied(function: bytes, arguments: bytes, n: int, *, then: bytes = b"") -> bytes:
    """A pickle of a list that a function makes, which is called n times with the same arguments."""
    return pickled(b"](" + function + b"q\x00(" + arguments + b"tq\x01" + then, b"h\x00h\x01R" * n, b"e")


def copied_list(n: int) -> bytes:
    """The list gets its items when it is among the arguments already."""
    items = b"h\x02(" + b"".join(text(f"a{i}") + b"K\x02\x86" for i in range(n)) + b"e"
    return _copied(named("collections", "OrderedDict"), b"]q\x02", n // 8, then=items)


def copied_text(n: int) -> bytes:
    return _copied(named("_codecs", "encode"), text("x" * n) + text("latin1"), n // 8)


def copied_storage(n: int) -> bytes:
    """The storage is that of n bytes which pickle.dumps writes for a tensor."""
    opcodes = pickletools.genops(pickle.dumps(torch.ones(n // 4)))
    storage = binary(max((value for _, value, _ in opcodes if isinstance(value, bytes)), key=len))
    return _copied(named("torch.storage", "_load_from_bytes"), storage, n // 50)


def with_attributes(n: int) -> bytes:
    """A pickle of n // 8 objects with the same n attributes."""
    cls = named("argparse", "Namespace") + b"q\x00"
    attributes = b"}q\x01(" + b"".join(text(f"a{i}") + b"K\x01" for i in range(n)) + b"u"
    return pickled(b"](" + cls + attributes, b"h\x00)\x81h\x01b" * (n // 8), b"e")


def old_file(data: bytes) -> bytes:
    """A file as torch.save wrote it before version 1.6."""
    numbers = (torch.serialization.MAGIC_NUMBER, torch.serialization.PROTOCOL_VERSION, {})
    head = b"".join(pickle.dumps(number, protocol=2) for number in numbers)
    return head + data + pickle.dumps([], protocol=2)


# name -> (size, what makes an input of that size, what parses it)
PARSERS: dict[str, tuple[int, Callable[[int], Any], Callable[[Any], object]]] = {
    "json of common state": (40_000, lambda n: json.dumps([{"a": i, "b": [1.5]} for i in range(n)]), tree),
    "repeated key of common state": (100_000, repeated_key, tree),
    "one key, repeated": (300_000, lambda n: "{" + ",".join(['"a":1'] * n) + "}", tree),
    "digits of an integer": (2_000_000, lambda n: "[" + "9" * n + "]", tree),
    "digits of a number": (1_000_000, lambda n: "[0." + "9" * n + "]", tree),
    "long string": (8_000_000, lambda n: '["' + "\\u00e9" * (n // 6) + '"]', tree),
    "repeated key of metadata.json": (100_000, lambda n: repeated_key(n).encode(), document),
    "metadata.json": (100_000, lambda n: json.dumps({f"k{i}": [i] for i in range(n)}).encode(), document),
    "values": (20_000, lambda n: encoded([{"$tuple": [i, "x"]} for i in range(n)]), decode),
    "integer keys": (30_000, lambda n: int_keys(i * 2**64 + 1 for i in range(n)), decode),
    "integer keys of one hash": (20_000, lambda n: int_keys(i * _P + 1 for i in range(n)), decode),
    "negative integer keys of one hash": (20_000, lambda n: int_keys(-i * _P for i in range(n)), decode),
    "integers that crowd a table": (20_000, lambda n: int_keys(_crowding(n)), decode),
    "tuples as keys": (20_000, lambda n: tuple_keys((i, i + 1) for i in range(n)), decode),
    "tuples of one hash as keys": (20_000, lambda n: tuple_keys(_tuples_of(n)), decode),
    "elements of one hash": (
        20_000,
        lambda n: encoded({"$set": [{"$int": hex(i * _P)} for i in range(n)]}),
        decode,
    ),
    "header of a safetensors file": (10_000, entries, header),
    "tensors of one range": (10_000, partial(entries, nbytes=0), header),
    "extents of a tensor": (1_000_000, partial(extents, extent=1), header),
    "extents that multiply": (1_000_000, partial(extents, extent=3), header),
    "lists in a header": (300_000, lambda n: b'{"w":[' + b"[]," * n + b"[]]}", header),
    "escapes in a header": (300_000, lambda n: b'{"' + b"\\u00e9" * n + b'": 5}', header),
    "tensors of a folder": (4_000, partial(folder, files=8), opened),
    "files of a folder": (200, lambda n: folder(n, files=n), opened),
    "names outside of a folder": (50_000, index_alone, opened),
    "blob": (1_000, lambda n: pack([torch.ones(2) for _ in range(n)]), blob),
    "header of a blob": (20_000, head_of_blob, blob),
    "opcodes": (100_000, lambda n: pickle.dumps([[i, (i, str(i))] for i in range(n)], 2), check_opcodes),
    "integers of one hash in a pickle": (
        50_000,
        lambda n: pickle.dumps([0] * n + [i * _P for i in range(n)], 2),
        check_opcodes,
    ),
    "integers in a pickle that crowd a table": (
        20_000,
        lambda n: pickle.dumps([i + 8 * _P for i in _crowding(n)], 2),
        check_opcodes,
    ),
    ".metadata": (4_000, stored_metadata, metadata),
    "chunks that many keys of .metadata have": (2_000, shared_chunks, chunks_of_metadata),
    "a shape that many keys of .metadata have": (4_000, shared_shape, chunks_of_metadata),
    "keys of one hash in .metadata": (20_000, one_hash, metadata),
    "torch.save": (10_000, lambda n: torch_saved({str(i): [i, (i,)] for i in range(n)}), torch_file),
    "keys of one hash in torch.save": (20_000, lambda n: zipped(one_hash(n)), torch_file),
    "a set of tuples of one hash": (
        20_000,
        lambda n: zipped(set_of(map(pair_of, _tuples_of(n)))),
        torch_file,
    ),
    "an ordered dict of tuples of one hash": (
        20_000,
        lambda n: zipped(ordered_of(map(pair_of, _tuples_of(n)))),
        torch_file,
    ),
    "a list that calls copy": (20_000, lambda n: zipped(copied_list(n)), torch_file),
    "a text that calls copy": (200_000, lambda n: zipped(copied_text(n)), torch_file),
    "attributes that many objects get": (20_000, lambda n: zipped(with_attributes(n)), torch_file),
    "one large tuple as many keys": (2_000, lambda n: zipped(same_key(n)), torch_file),
    "a storage that many tensors have": (200_000, copied_storage, tensors_file),
    "whole index": (64 * 400, partial(index, whole=True), read_index),
    "part of an index": (64 * 800, partial(index, whole=False), read_index),
    "directory": (1_000, listing, LocalStore.names),
}


# Opcodes of keys that collide, and what reads a pickle of a dict that has them.
KEYS: dict[str, Callable[[int], Iterable[bytes]]] = {
    "tuples of one hash": lambda n: map(pair_of, _tuples_of(n)),
    "frozensets of one hash": lambda n: (_frozen(pair_of(pair)) for pair in _tuples_of(n)),
    "sizes of one hash": lambda n: map(_size, _tuples_of(n)),
    "indices of one hash": lambda n: map(_stored_index, _tuples_of(n)),
    "integers that crowd a table": lambda n: map(number_of, _crowding(n)),
}
FILES: dict[str, tuple[Callable[[bytes], bytes], Callable[[Any], object]]] = {
    ".metadata": (bytes, metadata),
    "torch.save": (zipped, torch_file),
    "an old file": (old_file, torch_file),
}
for (keys, opcodes), (file, (written, parse)) in product(KEYS.items(), FILES.items()):

    def make_file(n: int, opcodes: Any = opcodes, written: Any = written) -> bytes:
        return bytes(written(dict_of(opcodes(n))))

    PARSERS[f"{keys} in {file}"] = (20_000, make_file, parse)


def _seconds(parse: Callable[[Any], object], made: Any) -> float:
    """Return the time of the processor that a parser takes: others load this machine."""
    gc.collect()
    gc.disable()  # it looks through all objects of this process from time to time
    try:
        begin = time.thread_time()
        with suppress(FormatError, pickle.UnpicklingError):
            parse(made)
        return time.thread_time() - begin
    finally:
        gc.enable()


@sampled(20)
@pytest.mark.parametrize("name", PARSERS)
def test_twice_as_much_takes_about_twice_as_long(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # Doubled twice: a table that grows does so in steps.
    size, make, parse = PARSERS[name]
    inputs = make(size // 4), make(size)
    best = [float("inf"), float("inf")]
    for attempt in range(_TRIES):
        # The shortest time of several is the one that others have disturbed least.
        best = [min(before, _seconds(parse, made)) for before, made in zip(best, inputs, strict=True)]
        if attempt > 0 and best[1] <= _MOST**2 * max(best[0], 5e-4):
            return
    pytest.fail(f"{name}: {best[0]:.5f} s for {size // 4:,}, {best[1]:.5f} s for four times as much")
