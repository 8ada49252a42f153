"""What attacks are made of: a copy of a real checkpoint, and ways to write lies into its documents.

Holds the list of attacks, which the decorator fills, and the checkpoints that they damage. What a reader
does with them is in `trial`.
"""

from __future__ import annotations

import json
import shutil
import struct
import zlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from safetensors.numpy import load, save
from safetensors.torch import save_file

import megackpt
from megackpt import SaveOptions, ShardedObject, ShardedTensor
from megackpt.comm import Group
from megackpt.entities import ShardedStateDict
from megackpt.storage import MemoryStore, Store, digest_of
from megackpt.testing.world import SimulatedWorld
from tests.support.dcp_alone import ALONE
from tests.support.zarr_v1 import copy_as_zarr_v1

STEP = "iter_0000007"
CANARY = b"CANARY-of-a-file-outside"
NATIVE, TORCH_DIST, DCP = "megackpt:1", "torch_dist:1", "dcp"
ZARR_1, ZARR_3, ZARR_ZLIB = "zarr:1", "zarr:3", "zarr-zlib"
HUGGINGFACE = "huggingface"
COMMON = {"step": 7, "args": {"lr": 3e-4, "betas": [0.9, 0.95]}, "rng": torch.arange(4)}
OBJECTS = ({"rank": 0, "seen": [1, 2.0]}, {"rank": 1, "seen": [1, 2.0]})
BLOCK = torch.arange(48.0).reshape(6, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """Where an attack is built.

    Attributes:
        directory: the checkpoint, a copy of its base.
        outside: a directory that no reader may look into; its `secret` holds the canary.
        ran: a path at which code that runs makes a directory.
        other: another whole checkpoint of the same format, which is not to be changed.
    """

    directory: Path
    outside: Path
    ran: Path
    other: Path

    def only_file(self, pattern: str) -> Path:
        return min(path for path in self.directory.glob(pattern) if not path.is_dir())


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """One crafted directory.

    Attributes:
        name: of the builder.
        claim: what the directory says that is not so.
        base: which checkpoint it is made of.
        build: spoils a copy of it.
        is_harmless: whether every reader gives what was saved.
        is_another: whether it is a whole checkpoint of other content, which may be loaded: a forger who can
            write digests can write anything, and all that counts is that nothing else happens.
    """

    name: str
    claim: str
    base: str
    build: Callable[[Location], None]
    is_harmless: bool = False
    is_another: bool = False


ATTACKS: dict[str, Attack] = {}


def attack(
    base: str, claim: str, *, is_harmless: bool = False, is_another: bool = False
) -> Callable[[Callable[[Location], None]], Any]:

    def register(build: Callable[[Location], None]) -> Callable[[Location], None]:
        name = build.__name__
        assert name not in ATTACKS, name
        ATTACKS[name] = Attack(
            name=name, claim=claim, base=base, build=build, is_harmless=is_harmless, is_another=is_another
        )
        return build

    return register


def attacks_with(
    base: str,
    claim: str,
    values: dict[str, Any],
    build: Callable[[Location, Any], None],
    *,
    name: str = "",
    harmless: Collection[str] = (),
    another: Collection[str] = (),
) -> None:
    """Register one attack for each of some values; claim has a `{}` for the name of the value.

    name begins their names; that of build does if none is given. harmless and another are names of values for
    which the attack is so.
    """
    for which, value in values.items():
        whole = f"{name or build.__name__}_{which}"

        def spoil(location: Location, value: Any = value) -> None:
            build(location, value)

        assert whole not in ATTACKS, whole
        ATTACKS[whole] = Attack(
            name=whole,
            claim=claim.format(which),
            base=base,
            build=spoil,
            is_harmless=which in harmless,
            is_another=which in another,
        )


def request(*, empty: bool, ranks: tuple[int, ...] = (0, 1)) -> ShardedStateDict:
    """What some ranks save, or, empty, what a load asks for."""
    numbers = torch.zeros_like(BLOCK) if empty else BLOCK
    state: dict[str, Any] = {}
    for rank in ranks:
        state[f"block{rank}"] = ShardedTensor.from_rank_offsets(
            "block", numbers[:, 4 * rank : 4 * rank + 4].clone(), (1, rank, 2)
        )
        owned = None if empty else OBJECTS[rank]
        state[f"object{rank}"] = ShardedObject("object", owned, (2,), (rank,))
    half = torch.zeros(3) if empty else torch.ones(3)
    state["half"] = ShardedTensor.from_rank_offsets("half", half.bfloat16(), replica_id=ranks[0])
    return state if empty else {**state, **COMMON}


def arrays_request() -> ShardedStateDict:
    """What a load asks of a Hugging Face folder: the arrays of `request`."""
    return {key: value for key, value in request(empty=True).items() if isinstance(value, ShardedTensor)}


def dcp_request() -> ShardedStateDict:
    return {
        "block": ShardedTensor.from_rank_offsets("block", torch.zeros_like(BLOCK)),
        "object": ShardedObject("object", None, (1,), (0,)),
    }


def build_base(kind: str, directory: Path) -> None:
    if kind == DCP:
        dcp.save({"block": BLOCK, "object": "some text"}, checkpoint_id=directory, **ALONE)
        message = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        (directory / "metadata.json").write_text(json.dumps({**message, "common_backend": "torch"}))
        return
    if kind == HUGGINGFACE:
        _build_folder(directory)
        return
    is_zarr_1 = kind in (ZARR_1, ZARR_ZLIB)
    backend, _, version = (NATIVE if is_zarr_1 else kind).partition(":")
    target: Path | Store = MemoryStore() if is_zarr_1 else directory

    def save_rank(group: Group) -> None:
        megackpt.save(
            request(empty=False, ranks=(group.rank,)),
            target,
            (backend, int(version)),
            content_metadata={"sharding": "flat"},
            options=SaveOptions(plain_tensors="common"),  # there are attacks on the file of these
            group=group,
        )

    SimulatedWorld(2).run(save_rank)
    if is_zarr_1:
        copy_as_zarr_v1(target, directory, is_ours=kind == ZARR_1)
    if kind == ZARR_ZLIB:
        _compress(directory)


def _build_folder(directory: Path) -> None:
    """Write a Hugging Face folder with two arrays in files of their own.

    It has a metadata.json, without which a `Checkpointer` takes no directory for a step.
    """
    directory.mkdir(parents=True)
    arrays = {"block": BLOCK, "half": torch.ones(3).bfloat16()}
    files = {key: f"model-0000{i}-of-00002.safetensors" for i, key in enumerate(arrays, 1)}
    for key, array in arrays.items():
        save_file({key: array}, directory / files[key], metadata={"format": "pt"})
    index = {"metadata": {"total_size": 390}, "weight_map": files}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text('{"model_type": "gpt2"}')
    manifest = {"sharded_backend": "huggingface", "sharded_backend_version": 1}
    (directory / "metadata.json").write_text(json.dumps(manifest))


def _compress(directory: Path) -> None:
    """Compress the arrays of a zarr v2 checkpoint, as other writers do."""
    for document in directory.glob("*/.zarray"):
        edit_json(document, compressor={"id": "zlib", "level": 1})
        for chunk in document.parent.glob("[0-9]*"):
            chunk.write_bytes(zlib.compress(chunk.read_bytes()))


def safetensors(header: Any, data: bytes = b"") -> bytes:
    """Return a file of safetensors with a header, as JSON or its bytes, that need not fit its data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def edit_json(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_bytes()), **fields}))


def edit_manifest(location: Location, **fields: Any) -> None:
    edit_json(location.directory / "metadata.json", **fields)


def edit_entry(location: Location, entry: str, **fields: Any) -> None:
    message = json.loads((location.directory / "metadata.json").read_bytes())
    edit_manifest(location, **{entry: {**message[entry], **fields}})


def field_is(*fields: str) -> Callable[[Location, Any], None]:
    """Return what sets a field of metadata.json, or, of two, a field of an entry that names a file."""
    *entry, field = fields

    def build(location: Location, value: Any) -> None:
        if entry:
            edit_entry(location, entry[0], **{field: value})
        else:
            edit_manifest(location, **{field: value})

    return build


def put_named(location: Location, entry: str, data: bytes) -> None:
    """Replace a file that metadata.json names, and the size and digest that it says."""
    message = json.loads((location.directory / "metadata.json").read_bytes())[entry]
    message.pop("head", None)
    (location.directory / message["file"]).write_bytes(data)
    edit_manifest(location, **{entry: {**message, "nbytes": len(data), "xxh3_128": digest_of(data)}})


def edit_index(location: Location, change: Callable[[dict[str, Any]], None]) -> None:
    """Change columns of the index; sizes and digests then fit, so that only the columns lie."""
    columns = dict(load((location.only_file("index-*")).read_bytes()))
    change(columns)
    kept = {name: np.ascontiguousarray(c) for name, c in columns.items()}
    put_named(location, "index", save(kept))


def set_rows(location: Location, column: str, value: int, *, row: int = 0) -> None:
    """Set one number of a column of the index, which becomes 64 bits wide."""

    def change(columns: dict[str, Any]) -> None:
        wide = columns[column].astype(np.int64)
        wide[row, ...] = value
        columns[column] = wide

    edit_index(location, change)


def copy_of(base: Path, target: Path) -> Path:
    shutil.copytree(base, target)
    return target
