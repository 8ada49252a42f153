"""One rank's side of a save: its state taken apart, objects encoded, chunks declared.

Owns what is computed of a rank's state before ranks meet: declarations, digests to be compared, and the bytes
of each row of a plan.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch

from megackpt.codec import leaf_digests
from megackpt.codec.paths import format_path
from megackpt.engine.checkpoint.common_arrays import find_arrays, map_common, with_references
from megackpt.engine.data.device_copies import follow, host_parts, parts_in_buffers, rows_to_host
from megackpt.engine.data.tensor_bytes import check_source
from megackpt.engine.saving.duplicates import digests_of_copies, with_one_main_each
from megackpt.engine.saving.plan_cache import CachedPlan, PlanCache
from megackpt.engine.state.flatten import FlattenedState, flatten_state
from megackpt.errors import DeclarationError, UnsupportedError
from megackpt.formats.strategy import ChunkParts, SaveStrategy
from megackpt.geometry import Ints, strides_of
from megackpt.mapping import ShardedStateDict, ShardedTensor, is_main_replica
from megackpt.mapping.describe import describe
from megackpt.mapping.tree import ABSENT, Steps, dotted, without_empty
from megackpt.metadata import DIGEST_BLOCK_BYTES, DeclaredChunks, PackedDeclarations, pack_declarations
from megackpt.options import PlainTensors, Policy, Spread
from megackpt.planning import SavePlan
from megackpt.storage import digest_of, digest_of_parts


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """What is saved, besides where and how.

    Attributes:
        state: this rank's sharded state dict.
        choose: makes the strategy; called where its refusal becomes that of all ranks.
        not_imported: returns backend and version of the format that choose has yet to import, None if it
            has: ranks compare what they were given before they spend seconds on an import.
        content_metadata: a value stored beside the common state; that of rank 0 counts.
        validate: prove coverage and equality of common state before anything is written.
        common_to_compare: makes of the common state what must be equal on all ranks; None for all of it.
        plans: where plans of earlier saves are; None to plan anew.
        assume_constant_structure: take the last plan, if there is one, without comparing declarations.
        spread: who may write a chunk that several ranks hold; see `SaveOptions`.
        spread_label: returns a number that is equal on the ranks of this one's `spread_group`; 0 where there
            is none. It may refuse, as choose may.
        plain_tensors: how tensors of common state are stored; see `SaveOptions`.
        rank0_values: globs of paths of common state that may differ between ranks; see `SaveOptions`.
        sample_replicas: what to do about replicas whose samples differ; see `SaveOptions`.
        alike: what else all ranks must have been given alike, by the names that a user knows; for JSON.
    """

    state: ShardedStateDict
    choose: Callable[[], SaveStrategy]
    not_imported: Callable[[], tuple[str, int] | None] = lambda: None
    content_metadata: Any = None
    validate: bool = True
    common_to_compare: Any = None
    plans: PlanCache | None = None
    assume_constant_structure: bool = False
    spread: Spread = "world"
    spread_label: Callable[[], int] = int
    plain_tensors: PlainTensors = "auto"
    rank0_values: tuple[str, ...] = ()
    sample_replicas: Policy = Policy.IGNORE
    alike: Mapping[str, Any] = field(default_factory=dict)

    def settings(self, backend: str, version: int) -> dict[str, Any]:
        """Return what all ranks must be given alike, by the names that a user knows."""
        return {
            "format": [backend, version],
            "validate_access_integrity": self.validate,
            "SaveOptions.spread": self.spread,
            "plans given": self.plans is not None,
            **self.alike,
        }


@dataclass(frozen=True, slots=True)
class LocalState:
    """One rank's state, ready to be declared and written.

    Attributes:
        request: what is saved.
        strategy: the format that writes it.
        expanded: the state taken apart.
        blobs: its objects, encoded; empty where another rank writes them.
        declared: its declarations; entities count tensors, then objects.
        said: what these were made of, see `CachedPlan`.
        earlier: a plan for which it has declared the same.
        spread_label: see `SaveRequest`.
        rank: number of this rank.
        ranks: how many there are.
        common: the common state that is stored, with references to its arrays.
        arrays: tensors of common state that are stored as arrays, by their places; as far as this rank
            declares them they are among the expanded ones.
    """

    request: SaveRequest
    strategy: SaveStrategy
    flattened: FlattenedState
    blobs: tuple[bytes, ...]
    declared: DeclaredChunks
    said: tuple[Any, ...]
    earlier: CachedPlan | None
    spread_label: int
    rank: int
    ranks: int
    common: Any
    arrays: Mapping[Steps, ShardedTensor]

    def common_leaves(self) -> bytes:
        """Digests of the leaves of this rank's common state that are compared, as sorted JSON."""
        prune, common, arrays = self.request.common_to_compare, self.common, self.arrays
        if prune is not None:
            common, arrays = self.flattened.common, {}
        if self.request.rank0_values:
            common = map_common(lambda steps, leaf: ABSENT if self._is_rank0s(steps) else leaf, common)
            arrays = {steps: array for steps, array in arrays.items() if not self._is_rank0s(steps)}
        if prune is not None:
            common = prune({} if common is ABSENT else common)
        # A container that is empty on one rank may hold sharded entities of another.
        compared = without_empty(common)
        found = leaf_digests({} if compared is ABSENT else compared)
        for steps, array in arrays.items():
            assert array.data is not None  # a tensor of the state dict
            pieces = host_parts(array.data, part_bytes=DIGEST_BLOCK_BYTES)
            found[format_path("", steps)] = f"{array.dtype}{array.global_shape}{digest_of_parts(pieces)}"
        return json.dumps(found, sort_keys=True).encode()

    def _is_rank0s(self, steps: Steps) -> bool:
        return is_rank0s(steps, self.request.rank0_values)

    def values(self) -> dict[str, dict[str, str]]:
        """Digests of what ranks may hold copies of: replicated values by key, chunks of DTensors by name."""
        held = {o.key: o.data for o in self.flattened.objects if o.key in self.flattened.replicated}
        replicated = {key: digest_of(leaves(value)) for key, value in held.items()}
        return {"replicated": replicated, "copies": digests_of_copies(self.flattened)}

    def lists(self) -> PackedDeclarations:
        """Return what this rank declares as it is sent to the one that plans."""
        return self._lists(self.declared)

    def structure(self) -> str:
        """Digest of everything that this rank adds to a plan but the sizes of its objects.

        And of which of how many ranks it is, and whether it keeps its own rows of the plan, or all.
        """
        if self.earlier is not None:
            return self.earlier.declared
        table = self.declared.table
        nbytes = table.nbytes.copy()
        nbytes[len(self.flattened.tensors) :] = nbytes[len(self.flattened.tensors) :] > 0
        lists = self._lists(replace(self.declared, table=replace(table, nbytes=nbytes)))
        keeps_all = not self.strategy.capabilities.needs_own_rows_only
        who = [self.rank, self.ranks, self.request.spread, self.spread_label]
        besides = json.dumps([*who, len(lists.main_rows), keeps_all]).encode()
        return digest_of(b"".join((besides, lists.entities.tobytes(), lists.main_rows, lists.replica_rows)))

    def kept(self, plan: SavePlan, whole: SavePlan | None) -> CachedPlan:
        """Return what is kept of a plan for the next save that declares the same."""
        return CachedPlan(plan, self.structure(), self.said, self.declared, whole)

    def alone(self) -> DeclaredChunks:
        """Return its declarations for a save in which it knows of no other rank: it stores what it holds."""
        return with_one_main_each(self.declared, set(self.flattened.replicated))

    def object_sizes(self, plan: SavePlan, *, rank: int) -> Ints:
        """Return the lengths of the objects of a plan that this rank writes, in the order of its rows."""
        first = len(self.flattened.tensors)
        entities = plan.entity[plan.writer == rank]
        return np.array([len(self.blobs[s - first]) for s in entities.tolist() if s >= first], np.int64)

    def pieces(self, plan: SavePlan, row: int, *, part_bytes: int) -> Iterator[memoryview]:
        """Return the bytes of a row of a plan that this rank writes."""
        entity, tensors = int(plan.entity[row]), self.flattened.tensors
        if entity >= len(tensors):
            return iter([memoryview(self.blobs[entity - len(tensors)])])
        return host_parts(self.elements(plan, row), part_bytes=part_bytes)

    def elements(self, plan: SavePlan, row: int) -> torch.Tensor:
        """Return the part of a tensor that a row stands for: a box of it, or a range of a flat one."""
        entity, part, whole = int(plan.entity[row]), plan.table, self.declared.table
        data = self.flattened.tensors[entity].data
        assert data is not None
        if part.nbytes[row] == whole.nbytes[entity]:
            return data
        # Rows are padded to the widest array of those who declare them, which need not be the same here.
        axes = len(whole.arrays[int(whole.array[entity])].global_shape)
        start = part.start[row, :axes] - whole.start[entity, :axes]
        shape = part.shape[row, :axes]
        if self.flattened.tensors[entity].flattened_range is not None:
            # A flat tensor that is all of its box was declared, and so cut, as a box.
            before = int((start * strides_of(whole.shape[[entity], :axes])[0]).sum())
            low = before + int(part.flat_start[row] - whole.flat_start[entity])
            return data[low : low + int(part.flat_stop[row] - part.flat_start[row])]
        own = zip(start.tolist()[axes - data.ndim :], shape.tolist()[axes - data.ndim :], strict=True)
        return data[tuple(slice(a, a + n) for a, n in own)]

    def _lists(self, declared: DeclaredChunks) -> PackedDeclarations:
        flattened = self.flattened
        return pack_declarations(
            declared, replicated=flattened.replicated, part_of_ranks=flattened.part_of_ranks
        )


class StateRowParts(ChunkParts):
    """The bytes of the rows of a plan that a rank writes, one by one or in order.

    Made by the thread that has computed the tensors; any thread may ask for pieces.
    """

    def __init__(self, local: LocalState, plan: SavePlan, *, part_bytes: int) -> None:
        self._local, self._plan, self._part_bytes = local, plan, part_bytes
        on_cuda = {
            i: t.data for i, t in enumerate(local.flattened.tensors) if t.data is not None and t.data.is_cuda
        }
        follow(on_cuda.values())
        self._copied = frozenset(on_cuda)

    def __call__(self, row: int) -> Iterator[memoryview]:
        """Return the bytes of one row."""
        return self._local.pieces(self._plan, int(row), part_bytes=self._part_bytes)

    def in_order(self, rows: Sequence[int]) -> Iterator[Iterator[memoryview]]:
        """Yield the bytes of each row; copies from devices run ahead, from row to row."""
        if not self._copied:
            return map(self, rows)
        return rows_to_host(
            rows,
            is_copied=self._is_copied,
            parts=lambda row: parts_in_buffers(self._local.elements(self._plan, row), self._part_bytes),
            as_they_lie=self,
        )

    def _is_copied(self, row: int) -> bool:
        return int(self._plan.entity[row]) in self._copied and self._plan.table.nbytes[row] > 0


def prepare(
    request: SaveRequest, strategy: SaveStrategy, *, spread_label: int, rank: int, ranks: int
) -> LocalState:
    """Take a rank's state apart, encode its objects and declare its chunks. Local.

    spread_label is what `SaveRequest.spread_label` returns.

    Raises:
        CheckpointError: it cannot be saved in this format.
    """
    flattened = flatten_state(request.state, rank=rank, ranks=ranks)
    empty = [t.key for t in flattened.tensors if t.data is None]
    if empty:
        raise DeclarationError(
            f"{empty[0]!r} has no data to save ({len(empty)} such tensors). Declare it with its tensor.",
            key=empty[0],
        )
    taken = {entity.key for entity in flattened.entities}
    if request.plain_tensors == "arrays" and not strategy.capabilities.refers_to_arrays:
        raise UnsupportedError(
            f"Format {strategy.backend} version {strategy.version} holds tensors of common state in common "
            f"state only. Save in the native format, or without SaveOptions(plain_tensors='arrays')."
        )
    as_arrays = request.plain_tensors != "common" and strategy.capabilities.refers_to_arrays
    arrays = find_arrays(flattened.common, taken) if as_arrays else {}
    common = with_references(flattened.common, arrays)
    flattened = replace(flattened, tensors=(*flattened.tensors, *_declared(request, arrays, rank=rank)))
    for tensor in flattened.tensors:
        check_source(tensor)
    if rank == 0:  # it is encoded again after the chunks are written: what is refused is refused before
        strategy.check_common({"state_dict": common, "content_metadata": request.content_metadata})
    blobs = [
        strategy.encode_object(o.data, path=o.key)
        if is_main_replica(o.replica_id) or o.key in flattened.replicated
        else b""
        for o in flattened.objects
    ]
    sizes = [len(b) for b in blobs]
    who = (rank, ranks, request.spread, spread_label, strategy.capabilities.needs_own_rows_only)
    said = (who, *_said(flattened, sizes))
    earlier = request.plans.recall(said) if request.plans is not None else None
    if earlier is None:
        declared = describe(flattened.entities, rank=rank, object_nbytes=sizes)
    else:
        declared = _with_object_sizes(earlier.chunks, sizes)
    return LocalState(
        request=request,
        strategy=strategy,
        flattened=flattened,
        blobs=tuple(blobs),
        declared=declared,
        said=said,
        earlier=earlier,
        spread_label=spread_label,
        rank=rank,
        ranks=ranks,
        common=common,
        arrays=arrays,
    )


def _declared(
    request: SaveRequest, arrays: Mapping[Steps, ShardedTensor], *, rank: int
) -> list[ShardedTensor]:
    """Return those of the arrays of common state that a rank declares: rank 0 all of them.

    Others declare, and may write, what is proved to be equal.
    """
    if rank and (not request.validate or request.common_to_compare is not None):
        return []
    return [
        replace(array, replica_id=rank)
        for steps, array in arrays.items()
        if rank == 0 or not is_rank0s(steps, request.rank0_values)
    ]


def is_rank0s(steps: Steps, globs: Sequence[str]) -> bool:
    """Say whether a place of common state is one at which rank 0's value counts, whatever others have."""
    return any(fnmatchcase(dotted(steps), glob) for glob in globs)


def _said(flattened: FlattenedState, sizes: Sequence[int]) -> tuple[Any, ...]:
    """Return all that a rank's rows are made of but the sizes of its objects, given in bytes."""
    objects = [
        (o.key, o.global_shape, o.global_offset, is_main_replica(o.replica_id), nbytes > 0)
        for o, nbytes in zip(flattened.objects, sizes, strict=True)
    ]
    tensors = [tensor.declared() for tensor in flattened.tensors]
    return flattened.replicated, flattened.part_of_ranks, objects, tensors


def _with_object_sizes(declared: DeclaredChunks, sizes: Sequence[int]) -> DeclaredChunks:
    """Return declarations of as many objects, which stand behind the tensors, with their sizes in bytes."""
    if not sizes:
        return declared
    nbytes = declared.table.nbytes.copy()
    nbytes[-len(sizes) :] = sizes
    return replace(declared, table=replace(declared.table, nbytes=nbytes))


def leaves(value: Any) -> bytes:
    """Digests of the leaves of a value, as sorted JSON: equal for equal values."""
    return json.dumps(leaf_digests(value), sort_keys=True).encode()
