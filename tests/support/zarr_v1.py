"""Checkpoints in format zarr version 1, which megackpt only reads."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import torch

from megackpt import (
    SaveOptions,
    load,
    load_common_state_dict,
    load_content_metadata,
    load_plain_tensors,
    load_sharded_metadata,
    save,
)
from megackpt.engine.data.tensor_bytes import as_bits, byte_view
from megackpt.entities import ShardedObject, ShardedStateDict
from megackpt.formats.zarr.array_documents import array_v2
from megackpt.formats.zarr.rounds import Grid
from megackpt.plans.metadata import ArraySpec
from megackpt.storage import LocalStore, MemoryStore, Store
from tests.support.states import torch_saved

ATTEMPT = "0123456789abcdef"
MARKER = f".megackpt-{ATTEMPT}.json"


def save_zarr_v1(
    state: ShardedStateDict, target: Path | Store, *, content_metadata: Any = None, is_ours: bool = True
) -> None:
    """Write a state of one rank."""
    source = MemoryStore()
    options = SaveOptions(plain_tensors="common")
    save(state, source, content_metadata=content_metadata, options=options)
    copy_as_zarr_v1(source, target, is_ours=is_ours)


def copy_as_zarr_v1(source: Path | Store, target: Path | Store, *, is_ours: bool = True) -> None:
    """Write what is in another checkpoint, each dim of an array cut into two chunks."""
    files: dict[str, bytes] = {}
    common, content_metadata = load_common_state_dict(source), load_content_metadata(source)
    for key, tensor in load_plain_tensors(source).items():
        if key not in common:  # else it is a tensor of common state that the other format stores as an array
            files |= _files_of_array(key, tensor)
    objects = {k: v for k, v in load_sharded_metadata(source).items() if isinstance(v, ShardedObject)}
    files |= {
        f"{name}.pt": torch_saved(value) for name, value in load(objects, source).items() if name in objects
    }
    if content_metadata is not None:
        common["content_metadata"] = content_metadata
    files["common.pt"] = torch_saved(common)
    if is_ours:
        files[MARKER] = json.dumps({"files": sorted(files), "checkpoint": sorted(files)}).encode()
    manifest = {"sharded_backend": "zarr", "common_backend": "torch"}
    manifest |= {f"{backend}_version": 1 for backend in list(manifest)}
    files["metadata.json"] = json.dumps(manifest, indent=1, sort_keys=True).encode()
    store = target if isinstance(target, Store) else LocalStore(target)
    store.create()
    for name, data in files.items():
        store.write(name, data)
    store.sync()


def _files_of_array(key: str, tensor: torch.Tensor) -> dict[str, bytes]:
    chunk = tuple(max(-(-n // 2), 1) for n in tensor.shape)
    spec = ArraySpec(key, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
    array, bits = array_v2(spec, Grid(chunk, chunk)), as_bits(tensor)
    files = array.documents()
    for cell in product(*map(range, array.file_extents)):
        part = bits[array.region(cell)]
        whole = torch.zeros(chunk, dtype=bits.dtype)  # the last chunk along a dim may reach beyond the array
        whole[tuple(map(slice, part.shape))] = part
        files[array.path + array.leaf(cell)] = bytes(byte_view(whole))
    return files
