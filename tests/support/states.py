"""Small states, indexes and mapped arrays, and comparisons that many tests need."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megackpt import ShardedTensor, save
from megackpt.formats.index_file import write_index
from megackpt.formats.index_reader import open_index
from megackpt.formats.partial_index import PartialIndex
from megackpt.formats.strategy import Json
from megackpt.maps import RegionMap
from megackpt.maps.requests import in_order_of
from megackpt.plans.metadata import ArraySpec, ChunkTable, StoredChunks, block_counts
from megackpt.storage import MemoryStore, Store
from megackpt.testing.world import SimulatedWorld

sharded = ShardedTensor.from_rank_offsets
"""Declares a part of an array that is cut evenly: `sharded(key, data, (dim, rank, ranks))`."""


def filled(
    value: float,
    *shape: int,
    key: str = "w",
    rank: int = 0,
    ranks: int = 1,
    dtype: torch.dtype = torch.float32,
) -> ShardedTensor:
    """Return an equal share, along dim 0, of an array that is filled with one value."""
    return ShardedTensor.from_rank_offsets(key, torch.full(shape, value, dtype=dtype), (0, rank, ranks))


def flat_range(key: str, array: torch.Tensor, start: int, stop: int) -> ShardedTensor:
    """Declare some elements of an array, in row-major order."""
    data, shape = array.flatten()[start:stop].clone(), tuple(array.shape)
    return ShardedTensor.from_rank_offsets_flat(key, data, shape, flattened_range=slice(start, stop))


def save_on_ranks(
    ranks: int, state_of: Callable[[int], Any], target: Path | Store, *strategy: Any, **options: Any
) -> None:
    """Save what each of some simulated ranks declares."""
    SimulatedWorld(ranks).run(
        lambda group: save(state_of(group.rank), target, *strategy, group=group, **options)
    )


def replica(value: float, *shape: int, key: str = "r", rank: int = 0) -> ShardedTensor:
    """Return a tensor of which every rank has an equal copy."""
    return ShardedTensor.from_rank_offsets(key, torch.full(shape, value), replica_id=rank)


class OnDevice(torch.Tensor):
    """A tensor in host memory that says that it is on a device."""

    is_cuda = property(lambda self: True)


def freed(tensor: torch.Tensor, *, nbytes: int = 0) -> torch.Tensor:
    """Return a tensor after its storage was cut to some bytes, as FSDP does between two uses."""
    tensor.untyped_storage().resize_(nbytes)
    return tensor


def random_bits(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor of random bits; for bool, of random flags."""
    generator = torch.Generator().manual_seed(7)
    wanted: torch.dtype = getattr(torch, dtype)
    high = 2 if wanted is torch.bool else 256
    nbytes = math.prod(shape) * wanted.itemsize
    raw = torch.randint(0, high, (nbytes,), dtype=torch.uint8, generator=generator)
    return raw.view(wanted).reshape(shape)


def bits(tensor: torch.Tensor) -> bytes:
    """Return the elements of a tensor as bytes, in row-major order."""
    plain = tensor.detach().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def stack(keys: int, layers: int, per_layer: int) -> StoredChunks:
    """Arrays of layers that are cut into as many chunks of one row, 300,000 bytes each: two digests."""
    n = keys * layers * per_layer
    array, layer, row = np.unravel_index(np.arange(n), (keys, layers, per_layer))
    shape = (layers, per_layer, 300_000)
    specs = tuple(ArraySpec(f"layers.{k:03d}", "int8", shape) for k in range(keys))
    start = np.stack((layer, row, np.zeros_like(row)), axis=1)
    extent = np.broadcast_to(np.array([1, 1, 300_000]), start.shape).copy()
    nbytes = np.full(n, 300_000)
    table = ChunkTable(specs, array, start, extent, np.zeros(n, np.int64), nbytes, nbytes)
    counts = block_counts(nbytes)
    digests = np.random.default_rng(0).integers(0, 2**63, int(counts.sum())).astype(np.uint64)
    files = tuple(f"data/{i}" for i in range(8))
    return StoredChunks(
        table, np.arange(n) % 8, np.arange(n) // 8 * 300_000, np.cumsum(counts) - counts, digests, files
    )


def box(stored: StoredChunks, key: int, start: tuple[int, ...], shape: tuple[int, ...]) -> ChunkTable:
    """A request for one box of one array."""
    numel = np.array([int(np.prod(shape))])
    spec = stored.table.arrays[key]
    return ChunkTable(
        (spec,), np.zeros(1, np.int64), np.array([start]), np.array([shape]), numel * 0, numel, numel
    )


def small() -> tuple[MemoryStore, Json, StoredChunks]:
    """An index of 12 blocks of 16 rows, the first 4 of them of the first array."""
    stored = stack(3, 8, 8)
    store = MemoryStore()
    return store, {"index": write_index(store, "index", stored, block_rows=16, block_digests=8)}, stored


def ask(store: MemoryStore, message: Json, stored: StoredChunks) -> StoredChunks:
    """Open an index by its head, and ask for two layers of the second array."""
    index = open_index(store, message, whole_bytes=0)
    assert isinstance(index, PartialIndex)
    return index.of_boxes([box(stored, 1, (2, 0, 0), (2, 8, 300_000))])


def damaged(store: MemoryStore, at: int, *, bit: int = 1) -> MemoryStore:
    """Flip a bit of an index."""
    data = bytearray(store.read("index", max_bytes=2**30))
    data[at] ^= bit
    store.write("index", bytes(data))
    return store


def assembled(made: RegionMap, theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the left arrays, as they are stored, copied pair by pair from the right ones."""
    dtype = next(iter(theirs.values())).dtype
    ours = {key: torch.full(array.viewed, float("nan"), dtype=dtype) for key, array in made.left.items()}
    views = {key: theirs[key].view(array.viewed) for key, array in made.right.items()}
    for pair in made.pairs:
        into = in_order_of(ours[pair.left.key][pair.left.box.slices()], pair.axes)
        into.copy_(views[pair.right.key][pair.right.box.slices()] + pair.added)
    return {key: array.view(made.left[key].stored) for key, array in ours.items()}


def random_arrays(made: RegionMap, seed: int) -> dict[str, Tensor]:
    """Return right arrays with random values, multiples of 2^-20: sums with what a map adds are exact."""
    generator = torch.Generator().manual_seed(seed)
    return {
        key: (torch.randn(array.stored, generator=generator) * 2**20).round() / 2**20
        for key, array in made.right.items()
    }


def torch_saved(value: object) -> bytes:
    """Return the file that torch.save writes of a value."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


class PickledCall:
    """An object whose pickle calls a function with arguments, and may give the result a state."""

    def __init__(self, function: Callable[..., object], *arguments: object, state: object = None) -> None:
        self.call = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self) -> Any:
        return self.call
