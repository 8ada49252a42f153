"""The plan of an import: the chunks of the new checkpoint, and the part of an array that each has. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from megackpt.geometry import Ints
from megackpt.maintenance.windows import ByteArray
from megackpt.mapping import ShardedTensor
from megackpt.maps import RegionMap, bound_to
from megackpt.metadata import ArraySpec, ChunkTable, pad_shapes
from megackpt.planning import SavePlan
from megackpt.planning.copy_plan import plan_copy

_LAYER = re.compile(r"(?P<stack>(?:.*\.)?layers)\.(?P<number>\d+)\.(?P<name>.+)")


class RowWindow(NamedTuple):
    """Rows of a plan that are read together, and where each begins in a buffer, in bytes."""

    rows: tuple[int, ...]
    at: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class ImportPlan:
    """The chunks of a new checkpoint.

    Attributes:
        plan: which rank writes which chunk.
    """

    plan: SavePlan

    @classmethod
    def of(cls, arrays: Sequence[ArraySpec], *, ranks: int) -> ImportPlan:
        """Cut arrays, sorted by key, into chunks, which ranks divide by bytes."""
        dims = max((len(spec.global_shape) for spec in arrays), default=1) or 1
        shape = pad_shapes([spec.global_shape for spec in arrays], dims, fill=1)
        number = np.arange(len(arrays))
        whole = ChunkTable(
            tuple(arrays),
            array=number,
            start=np.zeros((len(arrays), dims), np.int64),
            shape=shape,
            flat_start=np.zeros(len(arrays), np.int64),
            flat_stop=shape.prod(axis=1),
            nbytes=np.array([spec.nbytes for spec in arrays], np.int64),
        )
        return cls(plan_copy(whole, number, ranks=ranks).plan)

    def nbytes_of(self, rows: Ints) -> int:
        """Return the size of some rows, in bytes."""
        return int(self.plan.table.nbytes[rows].sum())

    def windows(self, rows: Sequence[int], buffer_bytes: int) -> Iterator[RowWindow]:
        """Yield rows in order, as many at a time as buffer_bytes hold, and at least one."""
        chosen: list[int] = []
        at: list[int] = []
        filled = 0
        for row, nbytes in zip(rows, self.plan.table.nbytes[list(rows)].tolist(), strict=True):
            if chosen and filled + nbytes > buffer_bytes:
                yield RowWindow(tuple(chosen), tuple(at), filled)
                chosen, at, filled = [], [], 0
            chosen.append(row)
            at.append(filled)
            filled += nbytes
        if chosen:
            yield RowWindow(tuple(chosen), tuple(at), filled)

    def requests(self, window: RowWindow, data: ByteArray) -> list[ShardedTensor]:
        """Return the rows of a window as parts of arrays, with their bytes of the buffer as memory."""
        return [self._request(row, data[at:]) for row, at in zip(window.rows, window.at, strict=True)]

    def parts(self, window: RowWindow, data: ByteArray) -> Iterator[tuple[int, memoryview]]:
        """Yield the bytes of each row of a window, as views of its buffer."""
        for row, at in zip(window.rows, window.at, strict=True):
            yield row, data[at : at + int(self.plan.table.nbytes[row])].data

    def _request(self, row: int, data: ByteArray) -> ShardedTensor:
        table = self.plan.table
        spec = table.arrays[int(table.array[row])]
        dims = len(spec.global_shape)
        dtype = getattr(torch, spec.dtype)
        shape = tuple(table.shape[row, :dims].tolist())
        memory = torch.from_numpy(data[: int(table.nbytes[row])]).view(dtype)
        first, stop = int(table.flat_start[row]), int(table.flat_stop[row])
        return ShardedTensor(
            spec.key,
            memory,
            dtype,
            shape,
            spec.global_shape,
            tuple(table.start[row, :dims].tolist()),
            flattened_range=slice(first, stop),
        )


def with_stacked_layers_where_equal(made: RegionMap) -> RegionMap:
    """Return a map that stacks the layers of a stack, if all have the same arrays in the same shapes.

    An encoder and a decoder are a stack each. Layers for further tokens keep keys of their own, as in the
    models that have them.
    """
    stacks: dict[str, dict[str, dict[int, tuple[int, ...]]]] = {}
    for key, array in made.left.items():
        match = _LAYER.fullmatch(key)
        if match is not None and not match["stack"].endswith("mtp.layers"):
            shapes = stacks.setdefault(match["stack"], {}).setdefault(match["name"], {})
            shapes[int(match["number"])] = array.stored
    stacked = {f"{stack}.{name}" for stack, arrays in stacks.items() if _are_equal(arrays) for name in arrays}
    return bound_to(made, stacked)


def _are_equal(arrays: Mapping[str, Mapping[int, tuple[int, ...]]]) -> bool:
    """Whether all layers of a stack have the same arrays: shapes by number of the layer, by name."""
    has_all = len({frozenset(shapes) for shapes in arrays.values()}) == 1
    return has_all and all(len(set(shapes.values())) == 1 for shapes in arrays.values())


def new_arrays(made: RegionMap, dtypes: Mapping[str, str]) -> list[ArraySpec]:
    """Return the left arrays of a map, sorted by key, with the dtypes that are given by key."""
    return [ArraySpec(key, dtypes[key], made.left[key].stored) for key in sorted(made.left)]
