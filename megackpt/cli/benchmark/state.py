"""The state that is saved: parameters of a transformer, their fp32 masters and two moments.

Every value is computed from its key and its index in the global array. So it is known without a checkpoint
what a load at another layout must return.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from zlib import crc32

import torch
import xxhash

LAYERS = 8
STATES = ("master", "exp_avg", "exp_avg_sq")
"""What an optimizer keeps for each parameter, in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GridLayout:
    """A parallel layout; TP ranks are neighbours, then DP, then PP.

    Attributes:
        tp, pp, dp: extents; their product is the number of ranks.
        is_flat: optimizer state is cut over DP into flat ranges, as a distributed optimizer does it;
            otherwise it is split as parameters are.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    is_flat: bool = False

    def coordinates_of(self, rank: int) -> tuple[int, int, int]:
        """Return the TP, PP and DP rank of a rank."""
        return rank % self.tp, rank // (self.tp * self.dp), rank // self.tp % self.dp

    def __str__(self) -> str:
        named = [("TP", self.tp), ("PP", self.pp), ("DP", self.dp)]
        return "x".join(f"{name}{extent}" for name, extent in named if extent > 1) or "DP1"


@dataclass(frozen=True, slots=True)
class ModelArray:
    """A parameter of the whole model.

    Attributes:
        key: its name.
        shape: its global shape.
        tp_axis: the axis that TP splits; None if every TP rank has all of it.
        layer: the layer, which decides on the pipeline stage; None for what the first stage holds.
    """

    key: str
    shape: tuple[int, ...]
    tp_axis: int | None
    layer: int | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """What one rank holds of one array.

    Attributes:
        key: name of the array in the checkpoint.
        data: the block, or with `flat` its range of the row-major flattening of the block.
        box_shape: shape of the box.
        tp_axis: as of its ModelArray.
        replica: 0 for the rank whose copy counts; then the others that hold the same.
        flat: the range of the block; None for all of it.
    """

    key: str
    data: torch.Tensor
    box_shape: tuple[int, ...]
    tp_axis: int | None
    replica: tuple[int, int]
    flat: slice | None = None


@dataclass(frozen=True, slots=True)
class RankState:
    """What one rank holds at a layout.

    Attributes:
        layout: the layout.
        rank: the rank.
        shards: its shards, in the order of their keys.
    """

    layout: GridLayout
    rank: int
    shards: list[Shard] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of all shards."""
        return sum(shard.data.numel() * shard.data.element_size() for shard in self.shards)


def make_model(nbytes: int, *, ranks: int, dtype: torch.dtype) -> list[ModelArray]:
    """Choose a transformer whose state takes about nbytes bytes and splits evenly over ranks. Pure."""
    layers = -(-LAYERS // ranks) * ranks
    numel = nbytes // (dtype.itemsize + 4 * len(STATES))
    step = math.lcm(8, ranks)
    hidden = max(step, int(math.sqrt(numel / (12 * layers + 8))) // step * step)
    rest = numel - layers * (12 * hidden**2 + hidden)
    words = max(step, rest // hidden // step * step)
    arrays = [ModelArray("embedding.weight", (words, hidden), 0)]
    for layer in range(layers):
        shapes: Sequence[tuple[str, tuple[int, ...], int | None]] = (
            ("norm.weight", (hidden,), None),
            ("qkv.weight", (3 * hidden, hidden), 0),
            ("proj.weight", (hidden, hidden), 1),
            ("fc1.weight", (4 * hidden, hidden), 0),
            ("fc2.weight", (hidden, 4 * hidden), 1),
        )
        arrays += [ModelArray(f"layers.{layer}.{name}", shape, axis, layer) for name, shape, axis in shapes]
    return arrays


def state_nbytes(model: Sequence[ModelArray], dtype: torch.dtype) -> int:
    """Bytes of the whole state, each element once."""
    return sum(array.numel for array in model) * (dtype.itemsize + 4 * len(STATES))


def make_state(
    model: Sequence[ModelArray], layout: GridLayout, rank: int, dtype: torch.dtype, *, filled: bool = True
) -> RankState:
    """Return what a rank holds; unless filled, with memory of arbitrary content. Local."""
    state = RankState(layout, rank)
    tp_rank, pp_rank, dp_rank = layout.coordinates_of(rank)
    layers = 1 + max(array.layer or 0 for array in model)
    own_arrays = [a for a in model if (a.layer or 0) * layout.pp // layers == pp_rank]
    cuts = _flat_cuts(own_arrays, layout, dp_rank) if layout.is_flat else [None] * len(own_arrays)
    for array, cut in zip(own_arrays, cuts, strict=True):
        axis = array.tp_axis
        block = tuple(n // layout.tp if i == axis else n for i, n in enumerate(array.shape))
        replica = (0 if axis is not None else tp_rank, dp_rank)
        for key, kind in _keys(array.key, dtype):
            flat = None if key == array.key else cut
            if flat is not None and flat.start == flat.stop:
                continue
            if not filled:
                data = torch.empty(block if flat is None else flat.stop - flat.start, dtype=kind)
            else:
                data = _values(array, key, block, tp_rank, kind, flat=flat)
            replica_of = replica if flat is None else (replica[0], 0)
            state.shards.append(
                Shard(key=key, data=data, box_shape=block, tp_axis=axis, replica=replica_of, flat=flat)
            )
    return state


def spoil(state: RankState) -> None:
    """Overwrite everything that a rank holds, so that what is right afterwards was loaded."""
    for shard in state.shards:
        as_bytes(shard.data).fill_(0x55)


def fingerprints(state: RankState) -> tuple[str, ...]:
    """Return a 128-bit digest of each shard; loads are compared with it, so no second state is needed."""
    return tuple(xxhash.xxh3_128_hexdigest(as_bytes(shard.data).numpy().data) for shard in state.shards)


def first_difference(state: RankState, expected: Sequence[str]) -> str | None:
    """Return the key of a shard whose fingerprint is not the expected one; None if there is none."""
    for shard, actual, correct in zip(state.shards, fingerprints(state), expected, strict=True):
        if actual != correct:
            return shard.key
    return None


def as_bytes(data: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor as bytes, `[n]`."""
    return data.detach().view(-1).view(torch.uint8)


def _keys(key: str, dtype: torch.dtype) -> Iterator[tuple[str, torch.dtype]]:
    yield key, dtype
    for name in STATES:
        yield f"optimizer.{name}.{key}", torch.float32


def _flat_cuts(arrays: Sequence[ModelArray], layout: GridLayout, dp_rank: int) -> list[slice | None]:
    """Cut the concatenation of a stage's blocks into equal ranges; return this rank's range of each block."""
    sizes = [a.numel // (layout.tp if a.tp_axis is not None else 1) for a in arrays]
    total = sum(sizes)
    low, high = total * dp_rank // layout.dp, total * (dp_rank + 1) // layout.dp
    cuts: list[slice | None] = []
    start = 0
    for size in sizes:
        cuts.append(slice(min(max(low - start, 0), size), min(max(high - start, 0), size)))
        start += size
    return cuts


def _values(
    array: ModelArray,
    key: str,
    block: tuple[int, ...],
    tp_rank: int,
    dtype: torch.dtype,
    *,
    flat: slice | None,
) -> torch.Tensor:
    """Return the values of a block, `block`, or a flat range of them.

    Their bits follow from the key and the position in the global array.
    """
    coordinates_of = torch.zeros(block, dtype=torch.int64)
    stride = 1
    for axis in reversed(range(len(block))):
        first = tp_rank * block[axis] if axis == array.tp_axis else 0
        along = torch.arange(first, first + block[axis]).mul_(stride)
        coordinates_of += along.view([-1 if i == axis else 1 for i in range(len(block))])
        stride *= array.shape[axis]
    # A multiplicative hash: neighbours differ in all bytes, and nothing compresses. Source: Knuth, TAOCP 6.4.
    bits = coordinates_of.add_(crc32(key.encode())).mul_(2654435761)
    bits = bits.bitwise_xor_(bits >> 15)
    kept = bits.to(torch.int16 if dtype.itemsize == 2 else torch.int32)
    values = kept.view(dtype)
    return values if flat is None else values.flatten()[flat].clone()
