"""Adapters of a checkpoint, merged into weights while these are read.

An adapter of a weight W has matrices A `[rank, in]` and B `[out, rank]`. The merged weight is
`W + scale * B A`, and with DoRA the rows of this sum get the lengths that the adapter has learned. A box of
W needs some rows of B and some columns of A, and nothing of other layers and experts, which have matrices of
their own.

Source: `megackpt.training.parallel.lora`, which merges in a model.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megackpt.engine.checkpoint.opening import open_checkpoint, read_common_and_references
from megackpt.entities import ShardedTensor
from megackpt.formats.contents import Contents
from megackpt.storage import Store
from megackpt.training.parallel.lora import LoRAConfig
from megackpt.whole.adapter_arrays import (
    Change,
    LowRank,
    Matrix,
    WeightLayers,
    changes_of,
    layer_of,
    stored_config,
)
from megackpt.whole.windows import check_can_be_read, read_parts

_BLOCK_BYTES = 4 * 1024 * 1024  # of whole rows, for their lengths


class _Part(NamedTuple):
    """Rows and columns of a matrix of weights, and their float32 memory `[rows, columns]`."""

    matrix: Matrix
    rows: slice
    columns: slice
    memory: Tensor


@dataclass(frozen=True, slots=True)
class StoredAdapters:
    """Adapters of an opened checkpoint, and the weights that they change. Safe for many threads.

    Attributes:
        configs: their choices by name, in the order in which they are merged.
        contents: the checkpoint that has them.
        weights: that with the weights.
        changes: the adapters of the weight of each layer, in that order, by the weight's key without MASTER.
        changed_keys: of the arrays of weights with such layers.
        where: location of `contents`, for errors.
        where_weights: location of `weights`.
    """

    configs: Mapping[str, LoRAConfig]
    contents: Contents
    weights: Contents
    changes: Mapping[str, Sequence[LowRank]]
    changed_keys: frozenset[str]
    where: str
    where_weights: str
    _factors: dict[Matrix, list[Tensor | None]] = field(default_factory=dict, repr=False)

    @classmethod
    def open(
        cls,
        names: Sequence[str],
        store: Store,
        weights: Contents,
        keys: Collection[str],
        *,
        where_weights: str,
        allow_unsafe_pickle: bool,
    ) -> StoredAdapters:
        """Open adapters of a checkpoint, and check that they fit the weights. Local.

        Args:
            names: of the adapters, in the order in which they are merged.
            store: of the checkpoint that has them.
            weights: the checkpoint with the weights.
            keys: of the weights that are read: parameters, or their masters. If there are masters, an adapter
                is read from its own, where it has any.
            where_weights: location of `weights`, for errors.
            allow_unsafe_pickle: as in `megackpt.verify`.

        Raises:
            DeclarationError: there is no such adapter.
            MapError: it has no arrays, or does not fit the weights.
            FormatError: its arrays are incomplete.
        """
        where = store.location
        contents = open_checkpoint(store, allow_unsafe_pickle=allow_unsafe_pickle)
        _, content = read_common_and_references(contents, where=where)
        configs = {name: stored_config(content, name, where) for name in names}
        layers = WeightLayers.of(keys, weights.arrays)
        changes = changes_of(configs, contents.arrays, layers, where=where, where_weights=where_weights)
        used = {key for own in changes.values() for low_rank in own for key in low_rank.arrays()}
        check_can_be_read(contents, sorted(used), store)
        changed = frozenset(layers.arrays[layer] for layer in changes)
        return cls(configs, contents, weights, changes, changed, where, where_weights)

    def description(self) -> list[Any]:
        """Return what tells these adapters from others, in plain JSON. Pure."""
        identity = [self.contents.identity, "" if self.contents.names_save else self.where]
        return [identity, [[name, config.to_json()] for name, config in self.configs.items()]]

    def merge_into(self, boxes: Iterable[ShardedTensor]) -> None:
        """Merge the adapters into boxes of weights, which are in float32. Local.

        The matrices of all layers and experts in the boxes are in memory meanwhile.

        Raises:
            IntegrityError, FormatError, StorageError: the bytes are damaged, or cannot be read.
        """
        parts = [part for box in boxes for part in _parts_of(box)]
        self._merge(parts, {part.matrix: self._row_factors(part.matrix) for part in parts})

    def _merge(self, parts: Sequence[_Part], factors: Mapping[Matrix, Sequence[Tensor | None]]) -> None:
        """Merge into each part as many adapters as there are factors for it, in their order."""
        changes = {part.matrix: self._changes_of(part.matrix)[: len(factors[part.matrix])] for part in parts}
        read = self._read({m for own in changes.values() for change in own for m in (change.a, change.b)})
        for matrix, rows, columns, memory in parts:
            for change, factor in zip(changes[matrix], factors[matrix], strict=True):
                # In place: a product of its own would take as much memory as the part.
                memory.addmm_(read[change.b][rows], read[change.a][:, columns], alpha=change.scale)
                if factor is not None:
                    memory *= factor[rows, None]

    def _changes_of(self, matrix: Matrix) -> list[Change]:
        layer, expert = layer_of(matrix)
        return [low_rank.of_expert(expert) for low_rank in self.changes.get(layer, ())]

    def _row_factors(self, matrix: Matrix) -> list[Tensor | None]:
        """Return what DoRA multiplies the rows of a weight by, `[out]`, for each of its adapters.

        Lengths of rows need all columns: the weight is read once more for them, in blocks of rows.
        """
        magnitudes = [change.magnitude for change in self._changes_of(matrix)]
        if not any(magnitudes):
            return [None] * len(magnitudes)
        if matrix not in self._factors:  # two threads may compute the same
            factors: list[Tensor | None] = []
            for magnitude in magnitudes:
                if magnitude is None:
                    factors.append(None)
                else:
                    factors.append(self._read({magnitude})[magnitude] / self._row_lengths(matrix, factors))
            self._factors[matrix] = factors
        return self._factors[matrix]

    def _row_lengths(self, matrix: Matrix, factors: Sequence[Tensor | None]) -> Tensor:
        """Return the lengths of rows with one adapter more than there are factors, `[out]`."""
        shape = self.weights.arrays[matrix.key].global_shape
        step = max(_BLOCK_BYTES // (4 * shape[-1]), 1)
        lengths = []
        for start in range(0, shape[-2], step):
            box = _box_of(matrix, shape, rows=(start, min(start + step, shape[-2])))
            read_parts(self.weights, [box], where=self.where_weights)
            (part,) = _parts_of(box)
            self._merge([part], {matrix: [*factors, None]})
            lengths.append(torch.linalg.vector_norm(part.memory, dim=-1))
        return torch.cat(lengths)

    def _read(self, matrices: Collection[Matrix]) -> dict[Matrix, Tensor]:
        """Return matrices of the adapters, in float32."""
        boxes = {matrix: _box_of(matrix, self._shape_of(matrix)) for matrix in matrices}
        read_parts(self.contents, list(boxes.values()), where=self.where)
        return {matrix: _data_of(box)[(0,) * len(matrix.at)] for matrix, box in boxes.items()}

    def _shape_of(self, matrix: Matrix) -> tuple[int, ...]:
        return self.contents.arrays[matrix.key].global_shape


def _parts_of(box: ShardedTensor) -> Iterator[_Part]:
    """Yield the part of each matrix in a box."""
    data, start = _data_of(box), box.global_offset
    rows, columns = (slice(o, o + n) for o, n in zip(start[-2:], data.shape[-2:], strict=True))
    for index in itertools.product(*(range(n) for n in data.shape[:-2])):
        at = tuple(o + i for o, i in zip(start, index, strict=False))
        yield _Part(Matrix(box.key, at), rows, columns, data[index])


def _box_of(matrix: Matrix, shape: tuple[int, ...], *, rows: tuple[int, int] | None = None) -> ShardedTensor:
    """Return a request for a matrix or vector of an array of this shape, or for some rows, in float32."""
    extents = list(shape[len(matrix.at) :])
    start, stop = rows or (0, extents[0])
    local = (*(1 for _ in matrix.at), stop - start, *extents[1:])
    offset = (*matrix.at, start, *(0 for _ in extents[1:]))
    return ShardedTensor(matrix.key, torch.empty(local), torch.float32, local, shape, offset)


def _data_of(box: ShardedTensor) -> Tensor:
    assert box.data is not None
    return box.data
