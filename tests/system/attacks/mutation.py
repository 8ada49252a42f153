"""Changes to the files of a small real checkpoint, and what a reader may make of them.

The targets of the fuzzers in tests/properties and in `fuzz_reader`: files in memory, changed where they
have a structure, so that digests and lengths fit again and what is behind them is reached.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load as load_columns
from safetensors.numpy import save as save_columns

import megackpt
from megackpt import CheckpointError, ShardedObject, ShardedTensor, verify
from megackpt.codec import unpack
from megackpt.formats.documents import read_document
from megackpt.formats.index_reader import open_index
from megackpt.storage import MemoryStore, digest_of
from megackpt.testing.identical import difference
from tests.support.checkpoints import contents
from tests.support.zarr_v1 import save_zarr_v1

Files = dict[str, bytes]
HOSTILE: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30, 0.5, 1e308,
    "", "..", "../x", "/etc/passwd", "a\0b", "\\", "\ud800", "x" * 300, [], [[]], {}, {"a": 1},
    [2**62, 2**62],
    {"$tensor": 0}, {"$dict": []}, {"$ndarray": 1}, [-1], [0], "0", "metadata.json",
)  # fmt: skip


def request(*, empty: bool) -> dict[str, Any]:
    """What is saved, or, empty, asked for."""
    data = torch.arange(24.0).reshape(4, 6)
    return {
        "w": ShardedTensor.from_rank_offsets("w", torch.zeros_like(data) if empty else data),
        "b": ShardedTensor.from_rank_offsets("b", torch.zeros(3) if empty else torch.ones(3)),
        "o": ShardedObject("o", None if empty else {"a": [1, 2.5]}, (1,), (0,)),
    }


def checkpoint(backend: tuple[str, int]) -> Files:
    store = MemoryStore()
    state = {**request(empty=False), "step": 7, "rng": torch.arange(4)}
    if backend == ("zarr", 1):
        save_zarr_v1(state, store)
    else:
        megackpt.save(state, store, backend)
    return contents(store)


def positions_in(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    subdirectory = (
        tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    )
    return [
        path,
        *(location for key, value in subdirectory for location in positions_in(value, (*path, key))),
    ]


def replaced(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    copy: Any = dict(tree) if isinstance(tree, dict) else list(tree)
    copy[path[0]] = replaced(tree[path[0]], path[1:], value)
    return copy


def with_document(files: Files, name: str, choose: Callable[[int], int]) -> Files:
    """Replace one value of a JSON document."""
    tree = json.loads(files[name])
    locations = positions_in(tree)
    tree = replaced(tree, locations[choose(len(locations))], HOSTILE[choose(len(HOSTILE))])
    return refitted({**files, name: json.dumps(tree).encode()}, name)


def with_column(files: Files, name: str, choose: Callable[[int], int]) -> Files:
    """Replace a number of a column of an index, its dtype, or its shape."""
    columns: dict[str, Any] = dict(load_columns(files[name]))
    column = sorted(columns)[choose(len(columns))]
    values = columns[column]
    way = choose(6)
    numbers = [n for n in HOSTILE if type(n) is int and -(2**63) <= n < 2**63]
    if way <= 2 and values.size:
        wide = values.astype(np.int64 if values.dtype != np.uint64 else np.uint64).reshape(-1)
        wide[choose(len(wide))] = np.int64(numbers[choose(len(numbers))]).astype(wide.dtype)
        columns[column] = wide.reshape(values.shape)
    elif way == 3:
        kinds = (np.uint8, np.int64, np.uint64, np.float32, np.bool_, np.int16)
        columns[column] = values.astype(kinds[choose(len(kinds))])
    elif way == 4:
        columns[column] = (values[:-1], values[:, None], np.concatenate([values, values]))[choose(3)]
    else:
        del columns[column]
    kept = {n: np.ascontiguousarray(c) for n, c in columns.items()}
    return refitted({**files, name: save_columns(kept)}, name)


def with_header(files: Files, name: str, choose: Callable[[int], int]) -> Files:
    """Replace one value of the header of a safetensors file."""
    data = files[name]
    (length,) = struct.unpack("<Q", data[:8])
    tree = json.loads(data[8 : 8 + length])
    locations = positions_in(tree)
    text = json.dumps(
        replaced(tree, locations[choose(len(locations))], HOSTILE[choose(len(HOSTILE))])
    ).encode()
    return refitted({**files, name: struct.pack("<Q", len(text)) + text + data[8 + length :]}, name)


def with_bytes(files: Files, name: str, choose: Callable[[int], int]) -> Files:
    """Change, cut or insert bytes."""
    data = bytearray(files[name])
    at = choose(max(len(data), 1))
    way = choose(4)
    if way == 0 and data:
        data[at] = choose(256)
    elif way == 1:
        del data[at:]
    elif way == 2:
        data[at:at] = bytes(choose(256) for _ in range(1 + choose(8)))
    else:
        del data[at : at + 1 + choose(16)]
    return refitted({**files, name: bytes(data)}, name)


def refitted(files: Files, name: str) -> Files:
    """Let documents that name a file say its length and digest, so that they do not end the matter."""
    copy_of_files = dict(files)
    for document, text in files.items():
        if document == name or not (document == "metadata.json" or document.startswith("megackpt-")):
            continue
        try:
            message = json.loads(text)
        except ValueError:
            continue
        for entry in message.values() if isinstance(message, dict) else ():
            if isinstance(entry, dict) and entry.get("file") == name:
                entry.update(nbytes=len(files[name]), xxh3_128=digest_of(files[name]))
                head = entry.get("head")
                if isinstance(head, dict) and head["nbytes"] <= len(files[name]):
                    head["xxh3_128"] = digest_of(files[name][: head["nbytes"]])
        copy_of_files[document] = json.dumps(message).encode()
    return copy_of_files


WAYS = (with_document, with_column, with_header, with_bytes)


def mutated(files: Files, choose: Callable[[int], int]) -> Files:
    """Return files with one change; choose returns a number below the one that it is given."""
    names = sorted(files)
    name = names[choose(len(names))]
    ways: tuple[Callable[[Files, str, Callable[[int], int]], Files], ...] = (with_bytes,)
    if name.endswith(".json") or name.endswith((".zarray", "zarr.json")):
        ways = (with_document, with_document, with_document, with_bytes)
    elif "index" in name or name.startswith("megackpt-"):
        ways = (with_column, with_column, with_header, with_bytes)
    elif name.endswith(".safetensors"):
        ways = (with_header, with_bytes)
    return ways[choose(len(ways))](files, name, choose)


def outcome(files: Files, expected: Mapping[str, Any]) -> str:
    """Read them in all ways; return what happened: "equal", or the classes of errors of ours.

    Anything else than an error of ours is raised.
    """
    messages: list[str] = []
    for name, read in READERS.items():
        try:
            values = read(MemoryStore(files=dict(files)))
        except CheckpointError as error:
            messages.append(type(error).__name__)
            continue
        if name in expected and difference(values, expected[name]) is not None:
            messages.append("other")
    return ",".join(sorted(set(messages))) or "equal"


def _by_parts(store: MemoryStore) -> None:
    """Read an index as if it were a large one."""
    manifest = read_document(store, "metadata.json")
    if isinstance(manifest.get("index"), dict) and isinstance(manifest["index"].get("head"), dict):
        index = open_index(store, manifest, whole_bytes=0)
        index.of_keys([spec.key for spec in index.arrays])


def _verify(store: MemoryStore) -> bool:
    return verify(store, deep=True, threads=1).is_undamaged


READERS: Mapping[str, Callable[[MemoryStore], Any]] = {
    "load": lambda store: megackpt.load(request(empty=True), store),
    "load_plain_tensors": megackpt.load_plain_tensors,
    "load_common_state_dict": megackpt.load_common_state_dict,
    "load_sharded_metadata": lambda store: sorted(megackpt.load_sharded_metadata(store)),
    "verify": _verify,
    "by_parts": _by_parts,
}


def expected_of(files: Files) -> dict[str, Any]:
    """What readers make of files that are whole."""
    return {name: read(MemoryStore(files=dict(files))) for name, read in READERS.items()}


def decoded(blob: bytes) -> str:
    try:
        unpack(blob, where="blob")
    except CheckpointError as error:
        return type(error).__name__
    return "equal"
