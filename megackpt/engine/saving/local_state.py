"""One rank's state in a save: flattened, its objects encoded, its chunks declared. Nothing is collective.

It gives the declarations that are sent to rank 0, the digests that ranks compare, and the bytes of each row
of the plan.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch

from megackpt.codec import leaf_digests
from megackpt.codec.kinds import format_path
from megackpt.engine.checkpoint.common_arrays import find_arrays, map_common, with_references
from megackpt.engine.data.device_copies import (
    ByteSource,
    bytes_on_device,
    follow,
    host_parts,
    parts_in_buffers,
    rows_to_host,
)
from megackpt.engine.data.tensor_bytes import check_source
from megackpt.engine.saving.copies import replica_factors, value_digest
from megackpt.engine.saving.plan_cache import CachedPlan
from megackpt.engine.saving.save_request import SaveRequest
from megackpt.entities import ShardedTensor, is_main_replica
from megackpt.entities.describe import describe
from megackpt.entities.flatten import FlattenedState, flatten_state
from megackpt.entities.plain_tensors import module_statistics
from megackpt.entities.tree import ABSENT, Steps, dotted, without_empty
from megackpt.errors import DeclarationError, UnsupportedError
from megackpt.formats.strategy import ChunkParts, SaveStrategy
from megackpt.plans.geometry import Ints, strides_of
from megackpt.plans.metadata import DIGEST_BLOCK_BYTES, DeclaredChunks, PackedDeclarations, pack_declarations
from megackpt.plans.planning import SavePlan
from megackpt.storage import digest_of, digest_of_parts


@dataclass(frozen=True, slots=True)
class LocalState:
    """The state of one rank, ready to be planned and written.

    Attributes:
        request: what is saved.
        strategy: writes the format.
        flattened: the state dict, flattened.
        blobs: its objects, encoded; empty where another rank writes the object.
        declared: its declarations; entities are numbered tensors first, then objects.
        source: what the declarations were made from, see `CachedPlan`.
        matching_plan: a cached plan for which this rank has declared the same; None if there is none.
        spread_label: what `SaveRequest.spread_label` has returned.
        rank: number of this rank.
        ranks: number of ranks.
        common: the common state that is stored, with references to its arrays.
        arrays: tensors of common state that are stored as arrays, by their steps in the state dict. Those
            that this rank declares are also among the flattened tensors.
        absent_parts: the parts of common state that some ranks lack, with the lowest rank that has each.
    """

    request: SaveRequest
    strategy: SaveStrategy
    flattened: FlattenedState
    blobs: tuple[bytes, ...]
    declared: DeclaredChunks
    source: tuple[Any, ...]
    matching_plan: CachedPlan | None
    spread_label: int
    rank: int
    ranks: int
    common: Any
    arrays: Mapping[Steps, ShardedTensor]
    absent_parts: Mapping[str, int] = field(default_factory=dict)

    def settings(self) -> dict[str, Any]:
        """Return the arguments that must be equal on all ranks; see `SaveRequest.settings`."""
        return self.request.settings(self.strategy.backend, self.strategy.version)

    def common_digests(self) -> dict[str, str]:
        """Return digests of the leaves of common state that are compared between ranks, by path."""
        prune, common, arrays = self.request.common_to_compare, self.common, self.arrays
        globs = self.request.options.rank0_values
        if prune is not None:
            # The function of the user takes the tensors of its state, not references to arrays.
            common, arrays = self.flattened.common, {}
        if globs:
            common = map_common(lambda steps, leaf: ABSENT if is_rank0_value(steps, globs) else leaf, common)
            arrays = {steps: array for steps, array in arrays.items() if not is_rank0_value(steps, globs)}
        if prune is not None:
            common = prune({} if common is ABSENT else common)
        # A container that is empty on one rank may hold sharded entities on another.
        compared = without_empty(common)
        # Leaves inside of namespaces, too, which are leaves of the tree above.
        digests: dict[str, str] = {}
        if compared is not ABSENT:
            digests = leaf_digests(compared, left_out=lambda steps: is_rank0_value(steps, globs))
        for steps, array in arrays.items():
            assert array.data is not None  # a tensor of the state dict
            parts = host_parts(array.data, part_bytes=DIGEST_BLOCK_BYTES)
            digests[format_path("", steps)] = f"{array.dtype}{array.global_shape}{digest_of_parts(parts)}"
        return digests

    def statistics_paths(self) -> frozenset[str]:
        """Return the paths of the running statistics of norms, as `common_digests` has them."""
        return frozenset(format_path("", steps) for steps in module_statistics(self.request.state))

    def value_digests(self) -> dict[str, dict[str, str]]:
        """Return digests of what must be equal on ranks that hold copies.

        These are replicated values, by key, and chunks of DTensors, by `key[box]`.
        """
        flattened = self.flattened
        if not flattened.replicated and not flattened.on_some_ranks:
            return {"replicated": {}, "copies": {}}
        from megackpt.engine.saving.copies import digests_of_unmarked_replicas

        values = {o.key: o.data for o in flattened.objects if o.key in flattened.replicated}
        replicated = {key: value_digest(value) for key, value in values.items()}
        return {"replicated": replicated, "copies": digests_of_unmarked_replicas(flattened)}

    def packed(self, declared: DeclaredChunks) -> PackedDeclarations:
        """Return declarations of this state as they are sent to rank 0."""
        flattened = self.flattened
        return pack_declarations(
            declared, replicated=flattened.replicated, on_some_ranks=flattened.on_some_ranks
        )

    def structure_digest(self) -> str:
        """Return a digest of what a plan depends on: the declarations of this rank, without sizes of objects.

        The rank, the number of ranks, and whether a rank has the plan of all ranks or its own rows are part
        of the digest.
        """
        if self.matching_plan is not None:
            return self.matching_plan.structure_digest
        table = self.declared.table
        nbytes = table.nbytes.copy()
        # Of an object only whether this rank encodes it: sizes change from save to save.
        nbytes[len(self.flattened.tensors) :] = nbytes[len(self.flattened.tensors) :] > 0
        packed = self.packed(replace(self.declared, table=replace(table, nbytes=nbytes)))
        has_all_rows = not self.strategy.capabilities.needs_own_rows_only
        identity = [self.rank, self.ranks, self.request.options.spread, self.spread_label]
        # The length of main_rows shows where they end: the digest joins them with replica_rows.
        header = json.dumps([*identity, len(packed.main_rows), has_all_rows]).encode()
        return digest_of(b"".join((header, packed.entities.tobytes(), packed.main_rows, packed.replica_rows)))

    def cached_plan(self, plan: SavePlan, replica_weights: Ints) -> CachedPlan:
        """Return a plan as it is cached for the next save that declares the same.

        replica_weights is what rank 0 has sent with the plan.
        """
        factors = replica_factors(self.declared.table, replica_weights)
        return CachedPlan(plan, self.structure_digest(), self.source, self.declared, factors)


class StateRowParts(ChunkParts):
    """The bytes of the rows of a plan that a rank writes, one by one or in order.

    The thread that has computed the tensors makes this object, since copies from devices are ordered after
    the work of that thread. Any thread may use it.

    Attributes:
        device: a CUDA device that has some of the tensors; None if none has.
    """

    def __init__(self, local: LocalState, plan: SavePlan, *, part_bytes: int) -> None:
        self._tensors, self._blobs = local.flattened.tensors, local.blobs
        self._declared, self._plan, self._part_bytes = local.declared.table, plan, part_bytes
        on_cuda = {i: t.data for i, t in enumerate(self._tensors) if t.data is not None and t.data.is_cuda}
        follow(on_cuda.values())
        self._copied = frozenset(on_cuda)
        # Entities are numbered tensors first, then objects.
        objects = plan.entity[plan.writer == local.rank] - len(self._tensors)
        self.object_sizes = np.array([len(self._blobs[i]) for i in objects.tolist() if i >= 0], np.int64)
        self.device = next((data.device for data in on_cuda.values()), None)

    def __call__(self, row: int) -> Iterator[memoryview]:
        """Return the bytes of one row."""
        number = int(self._plan.entity[row]) - len(self._tensors)
        if number >= 0:
            return iter([memoryview(self._blobs[number])])
        return host_parts(self._elements(int(row)), part_bytes=self._part_bytes)

    def in_order(self, rows: Sequence[int]) -> Iterator[Iterator[memoryview]]:
        """Yield the bytes of each row; copies from devices begin before their row is taken."""
        if not self._copied:
            return map(self, rows)
        arriving = rows_to_host(
            parts_in_buffers(self._elements(row), self._part_bytes) for row in rows if self._is_copied(row)
        )
        # `arriving` has one item for each copied row, in the order of rows.
        return (next(arriving) if self._is_copied(row) else self(row) for row in rows)

    def sources(self, rows: Sequence[int]) -> Iterator[Iterator[ByteSource]]:
        """Yield the bytes of each row where they are, for `Downloads`."""
        for row in rows:
            if self._is_copied(row):
                yield bytes_on_device(self._elements(row), self._part_bytes)
            else:
                yield (np.frombuffer(part, np.uint8) for part in self(row))

    def _is_copied(self, row: int) -> bool:
        return int(self._plan.entity[row]) in self._copied and self._plan.table.nbytes[row] > 0

    def _elements(self, row: int) -> torch.Tensor:
        """Return the elements of a tensor that a row stands for: a box of it, or a range of a flat tensor."""
        entity, part, whole = int(self._plan.entity[row]), self._plan.table, self._declared
        tensor = self._tensors[entity]
        data = tensor.data
        assert data is not None
        # The planner has not cut the entity.
        if part.nbytes[row] == whole.nbytes[entity]:
            return data
        # Tables are as wide as their array of most dims, which may differ between the plan and this rank.
        axes = len(whole.arrays[int(whole.array[entity])].global_shape)
        start = part.start[row, :axes] - whole.start[entity, :axes]
        shape = part.shape[row, :axes]
        if tensor.flattened_range is not None:
            # A flat tensor that covers its box was declared as that box, and so is cut as a box: the start
            # of the cut box in row-major order is where its elements begin.
            before = int((start * strides_of(whole.shape[[entity], :axes])[0]).sum())
            low = before + int(part.flat_start[row] - whole.flat_start[entity])
            return data[low : low + int(part.flat_stop[row] - part.flat_start[row])]
        # The local tensor has no dims for prepended axes, along which a chunk has one index only.
        own = zip(start.tolist()[axes - data.ndim :], shape.tolist()[axes - data.ndim :], strict=True)
        return data[tuple(slice(a, a + n) for a, n in own)]


def make_local_state(
    request: SaveRequest,
    strategy: SaveStrategy,
    *,
    spread_label: int,
    rank: int,
    ranks: int,
) -> LocalState:
    """Flatten a rank's state dict, encode its objects and declare its chunks. Local.

    Args:
        request: what is saved.
        strategy: writes the format.
        spread_label: what `SaveRequest.spread_label` has returned.
        rank: number of this rank.
        ranks: number of ranks.

    Raises:
        CheckpointError: the state cannot be saved in this format.
    """
    flattened = flatten_state(request.state, rank=rank, ranks=ranks)
    _check_has_data(flattened)
    arrays = _plain_arrays(request, strategy, flattened)
    common = with_references(flattened.common, {steps: array.key for steps, array in arrays.items()})
    declared_arrays = _declared_arrays(request, arrays, rank=rank)
    flattened = replace(flattened, tensors=(*flattened.tensors, *declared_arrays))
    for tensor in flattened.tensors:
        check_source(tensor)
    if rank == 0:  # common state is encoded after the chunks are written, when it is too late for an error
        strategy.check_common({"state_dict": common, "content_metadata": request.content_metadata})
    blobs = _encoded_objects(flattened, strategy)
    sizes = [len(blob) for blob in blobs]
    identity = (rank, ranks, request.options.spread, spread_label, strategy.capabilities.needs_own_rows_only)
    source = (identity, *_declaration_source(flattened, sizes))
    matching_plan = request.plans.made_from(source) if request.plans is not None else None
    if matching_plan is None:
        declared = describe(flattened.entities, rank=rank, object_nbytes=sizes)
    else:
        declared = _with_object_sizes(matching_plan.declared, sizes)
    return LocalState(
        request=request,
        strategy=strategy,
        flattened=flattened,
        blobs=blobs,
        declared=declared,
        source=source,
        matching_plan=matching_plan,
        spread_label=spread_label,
        rank=rank,
        ranks=ranks,
        common=common,
        arrays=arrays,
    )


def _encoded_objects(flattened: FlattenedState, strategy: SaveStrategy) -> tuple[bytes, ...]:
    """Return the bytes of the objects that this rank may write; none of those that another rank writes."""
    return tuple(
        # Rank 0 chooses later who writes a replicated value, so every rank encodes it.
        strategy.encode_object(o.data, path=o.key)
        if is_main_replica(o.replica_id) or o.key in flattened.replicated
        else b""
        for o in flattened.objects
    )


def _check_has_data(flattened: FlattenedState) -> None:
    empty = [tensor.key for tensor in flattened.tensors if tensor.data is None]
    if empty:
        raise DeclarationError(
            f"{empty[0]!r} has no data to save ({len(empty)} such tensors). Declare it with its tensor.",
            key=empty[0],
        )


def _plain_arrays(
    request: SaveRequest, strategy: SaveStrategy, flattened: FlattenedState
) -> Mapping[Steps, ShardedTensor]:
    """Return the tensors of common state that are stored as arrays."""
    if not strategy.capabilities.refers_to_arrays:
        if request.options.plain_tensors == "arrays":
            raise UnsupportedError(
                f"Format {strategy.backend} version {strategy.version} holds tensors of common state in "
                f"common state only. Save in the native format, or with "
                f"SaveOptions(plain_tensors='common')."
            )
        return {}
    if request.options.plain_tensors == "common":
        return {}
    return find_arrays(flattened.common, {entity.key for entity in flattened.entities})


def _declared_arrays(
    request: SaveRequest, arrays: Mapping[Steps, ShardedTensor], *, rank: int
) -> list[ShardedTensor]:
    """Return the arrays of common state that this rank declares.

    Rank 0 declares all. Another rank declares those that are proved to be equal to rank 0's, so that it may
    write them; the running statistics of norms are not.
    """
    if rank == 0:
        return list(arrays.values())
    if not arrays or not request.validate or request.common_to_compare is not None:
        return []
    statistics, globs = module_statistics(request.state), request.options.rank0_values
    return [
        replace(array, replica_id=rank)
        for steps, array in arrays.items()
        if not (steps in statistics or is_rank0_value(steps, globs))
    ]


def is_rank0_value(steps: Sequence[object], globs: Sequence[str]) -> bool:
    """Return whether a leaf of common state may differ between ranks, so that rank 0's value is stored.

    A glob matches the path joined with dots, or is the path as errors show it.
    """
    if not globs:
        return False
    name, path = dotted(tuple(steps)), format_path("", steps)
    return any(path == glob or fnmatchcase(name, glob) for glob in globs)


def _declaration_source(flattened: FlattenedState, sizes: Sequence[int]) -> tuple[Any, ...]:
    """Return all that a rank's rows are made from, except the sizes of its objects, which are in bytes."""
    objects = [
        (o.key, o.global_shape, o.global_offset, is_main_replica(o.replica_id), nbytes > 0)
        for o, nbytes in zip(flattened.objects, sizes, strict=True)
    ]
    tensors = [tensor.declared() for tensor in flattened.tensors]
    return flattened.replicated, flattened.on_some_ranks, objects, tensors


def _with_object_sizes(declared: DeclaredChunks, sizes: Sequence[int]) -> DeclaredChunks:
    """Return the declarations with other sizes of the objects, in bytes; objects are the last rows."""
    if not sizes:
        return declared
    # A copy, as these declarations belong to a cached plan, which later saves use, too.
    nbytes = declared.table.nbytes.copy()
    nbytes[-len(sizes) :] = sizes
    return replace(declared, table=replace(declared.table, nbytes=nbytes))
