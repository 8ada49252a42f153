"""Hypothesis strategies for global arrays and the ways to lay them out over ranks.

They state the law of the library: whatever declarations one world saves, any other world can load. Needs the
extra `test`.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from megackpt.entities import ShardedTensor
from megackpt.plans.geometry import Box

Chunk = tuple[Box, int, int]
"""A box and the flat range `[start, stop)` of it."""


@dataclass(frozen=True, slots=True)
class OwnedChunk:
    """One chunk on one rank.

    Attributes:
        rank: the rank that has it.
        chunk: the box and flat range.
        replica: 0 for the main replica.
        prepended: how many leading axes of extent 1 the local tensor leaves out.
        strided: whether the local tensor is a view that is not contiguous.
    """

    rank: int
    chunk: Chunk
    replica: int
    prepended: int
    strided: bool

    def declare(self, key: str, array: torch.Tensor) -> ShardedTensor:
        """Declare this chunk of `array`, the global array, with its true data."""
        box, start, stop = self.chunk
        block = array[box.slices()]
        flat = None if (start, stop) == (0, box.numel) else slice(start, stop)
        local_shape = box.shape[self.prepended :]
        data = (
            block.reshape(-1)[start:stop].clone() if flat is not None else block.reshape(local_shape).clone()
        )
        return ShardedTensor(
            key=key,
            data=_strided(data) if self.strided else data,
            dtype=array.dtype,
            local_shape=local_shape,
            global_shape=tuple(array.shape),
            global_offset=box.start,
            replica_id=(0, self.replica, 0),
            prepend_axis_num=self.prepended,
            flattened_range=flat,
        )


DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2fnuz,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
]


@st.composite
def arrays(draw: st.DrawFn, *, max_dims: int = 4, max_extent: int = 7) -> torch.Tensor:
    """Global arrays of 0 to max_dims dims, empty ones too, filled with random bits."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, max_extent), max_size=max_dims))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    nbytes = math.prod(shape) * dtype.itemsize
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


@st.composite
def owned_chunks(draw: st.DrawFn, shape: tuple[int, ...], *, ranks: int) -> list[OwnedChunk]:
    """A layout: the array cut into boxes, some of those into flat ranges, each on a rank, some on several."""
    chunks: list[Chunk] = []
    for box in draw(boxes(shape)):
        cuts = draw(st.lists(st.integers(0, box.numel), max_size=3)) if draw(st.booleans()) else []
        ends = [0, *sorted(cuts), box.numel]
        chunks += [(box, a, b) for a, b in itertools.pairwise(ends)]
    owned = []
    for box, start, stop in chunks:
        homes = draw(st.lists(st.integers(0, ranks - 1), min_size=1, max_size=2, unique=True))
        leading = next((d for d, n in enumerate(box.shape) if n != 1), len(box.shape))
        prepended = draw(st.integers(0, leading))
        strided = draw(st.booleans())
        owned += [
            OwnedChunk(rank, (box, start, stop), replica, prepended, strided)
            for replica, rank in enumerate(homes)
        ]
    return owned


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Boxes that tile an array: a few cuts, each through one of the boxes there are, even or not."""
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 5)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(0, box.shape[dim]))
        for low, high in ((0, cut), (cut, box.shape[dim])):
            start = tuple(a + low if d == dim else a for d, a in enumerate(box.start))
            extent = tuple(high - low if d == dim else n for d, n in enumerate(box.shape))
            boxes.append(Box(start, extent))
    return boxes


def _strided(data: torch.Tensor) -> torch.Tensor:
    """Return equal data that is every second element of something larger, along the last dim."""
    if data.ndim == 0:
        return data
    room = torch.zeros((*data.shape[:-1], data.shape[-1] * 2), dtype=data.dtype)
    view = room[..., ::2]
    view.copy_(data)
    return view
