"""A planned save, what its ranks have written, and the hooks of its optional features."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megackpt.comm import Group, join_fields, split_fields
from megackpt.engine.checkpoint.manifest import LeftoverFiles
from megackpt.engine.saving.plan_cache import CachedPlan
from megackpt.entities.flatten import FlattenedState
from megackpt.errors import MismatchError
from megackpt.formats.strategy import ChunkParts, Json, SaveStrategy
from megackpt.plans.geometry import Ints
from megackpt.plans.metadata import ChunkTable, DeclaredChunks, pack_columns, unpack_columns
from megackpt.plans.planning import (
    SavePlan,
    as_declarations,
    plan_main_replicas,
    with_object_sizes,
)
from megackpt.storage import Store


@dataclass(frozen=True, slots=True)
class PlannedSave:
    """A save that all ranks have agreed on; nothing is written yet.

    Attributes:
        attempt: the id of this attempt.
        plan: the rows that this rank writes, or those of all ranks: on rank 0, and on each rank if the format
            needs them. Saves that use one cached plan have the same object here.
        parts: the bytes of the rows that this rank writes, and the sizes of its objects.
        common: common state, or its encoded files. Only rank 0's is written.
        strategy: writes the format.
        leftovers: the leftover files of earlier saves; known to rank 0. None: the store was not searched yet.
        hooks: optional features of this save.
        commit_fields: further fields of metadata.json. Only rank 0's are written.
        exchanged: whether ranks have exchanged declarations. If they have not, rank 0 has its own rows only,
            and each rank sends its rows when it has written them.
        unpadded: `ShardedTensor.unpadded_shape` of the tensors of this rank that declare one, by key.
    """

    attempt: str
    plan: SavePlan
    parts: ChunkParts
    common: Any  # whatever the user saves
    strategy: SaveStrategy
    leftovers: LeftoverFiles | None = field(default_factory=LeftoverFiles)
    hooks: tuple[SaveHook, ...] = ()
    commit_fields: Json = field(default_factory=dict)
    exchanged: bool = True
    unpadded: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def sized_plan(self, rank: int) -> SavePlan:
        """Return the plan with the sizes of the objects that this rank writes."""
        sizes = self.parts.object_sizes
        return self.plan if sizes is None else with_object_sizes(self.plan, {rank: sizes})


@dataclass(frozen=True, slots=True)
class WrittenChunks:
    """What the ranks have written. Ranks other than 0 have no messages of others.

    Attributes:
        planned: the save.
        reports: what `pack_report` returned, by rank; none if rank 0 knows all of it.
        receipts: what `SaveStrategy.write_chunks` returned, by rank and round.
    """

    planned: PlannedSave
    reports: Sequence[bytes]
    receipts: list[list[bytes]]

    def plan(self) -> SavePlan:
        """Return the plan of all ranks, with the sizes of their objects. On rank 0 only.

        Raises:
            MismatchError: ranks that have exchanged no declarations contradict each other.
        """
        rows = [split_fields(report)[0] for report in self.reports]
        if self.planned.exchanged:
            sizes = {rank: np.frombuffer(of_rank, np.int64) for rank, of_rank in enumerate(rows)}
            return with_object_sizes(self.planned.plan, sizes)
        from megackpt.plans.metadata.merge import decode_declarations, merge_declarations

        columns = [unpack_columns(of_rank, where=f"rows of rank {rank}") for rank, of_rank in enumerate(rows)]
        return plan_main_replicas(merge_declarations(decode_declarations(columns)))

    def unpadded_shapes(self) -> dict[str, list[int]]:
        """Return the shapes without padding that ranks declare, by key. On rank 0 only.

        Raises:
            MismatchError: ranks declare different ones for a key.
        """
        shapes: dict[str, list[int]] = {}
        for rank, report in enumerate(self.reports):
            for key, shape in json.loads(split_fields(report)[1]).items():
                if shapes.setdefault(key, shape) != shape:
                    raise MismatchError(
                        f"{key!r}: rank {rank} declares unpadded_shape {tuple(shape)}, and another rank "
                        f"{tuple(shapes[key])}. Build the model with one vocabulary size on all ranks.",
                        key=key,
                        rank=rank,
                    )
        return shapes


def pack_report(planned: PlannedSave, sized: SavePlan) -> bytes:
    """Return what rank 0 does not know of this rank, for `WrittenChunks`.

    These are the sizes of its objects, or all of its rows, which sized has (see `PlannedSave.sized_plan`),
    and its shapes without padding.
    """
    sizes = planned.parts.object_sizes
    if planned.exchanged:
        rows = b"" if sizes is None else sizes.tobytes()
    else:
        rows = pack_columns(as_declarations(sized).to_columns())
    return join_fields([rows, json.dumps(planned.unpadded).encode()])


class SaveHook:
    """An optional feature of a save. Each method is called at one stage; here, each does nothing.

    All ranks have equal hooks in the same order. A hook can be pickled: in an asynchronous save the writer
    process calls `after_writing` and `index_fields`.
    """

    def strategy_for(self, strategy: SaveStrategy) -> SaveStrategy:
        """Return the strategy that writes the checkpoint, given the one that the user chose. Local.

        Raises:
            UnsupportedError: the format does not have this feature.
        """
        return strategy

    def attachment(
        self, flattened: FlattenedState, declared: DeclaredChunks, *, ranks: int, number: int
    ) -> bytes:
        """Return what this rank sends with its declarations to the rank that plans. Local.

        Ranks send declarations only if there is no cached plan for them. number is one of the save, and equal
        on all ranks.
        """
        return b""

    def terms(self, flattened: FlattenedState, cached: CachedPlan, *, number: int) -> tuple[int, int]:
        """Return this rank's terms of two sums over all ranks: for copies of tensors, and of objects. Local.

        If copies are equal on all ranks, each sum is a multiple of `2**SUMMAND_BITS`. Ranks add terms only if
        they have a cached plan. number is one of the save, and equal on all ranks that use this plan.
        """
        return 0, 0

    def compare_copies(
        self,
        flattened: FlattenedState,
        cached: CachedPlan,
        group: Group,
        *,
        number: int,
        tensors: bool,
        objects: bool,
    ) -> None:
        """Find out which copies differ, after the sum of tensors, of objects or both has shown that some do.

        Collective, before the rank plans or writes anything.

        Raises:
            CheckpointError: the same on every rank.
        """

    def check_attachments(
        self, attachments: Sequence[bytes], attachment_of_rank: Ints, table: ChunkTable
    ) -> None:
        """Check the attachments of all ranks, before rank 0 plans. Rank 0 only.

        Args:
            attachments: every distinct attachment once.
            attachment_of_rank: position of each rank's attachment in it, `[ranks]`.
            table: the chunks that all ranks declare.

        Raises:
            CheckpointError: raised on all ranks.
        """

    def after_planning(self, flattened: FlattenedState, declared: DeclaredChunks, group: Group) -> None:
        """Look at this rank's state when all ranks have a plan and nothing is written. Collective.

        Raises:
            CheckpointError: the same on every rank.
        """

    def after_writing(self, written: WrittenChunks, store: Store, group: Group) -> list[bytes]:
        """Write more files when all ranks have written their chunks. Collective.

        Returns:
            One receipt of each rank for `index_fields`, on rank 0.

        Raises:
            CheckpointError: the same on every rank.
        """
        return []

    def index_fields(self, receipts: list[bytes], planned: PlannedSave, store: Store) -> Json:
        """Return what the manifest says of the files of `after_writing`. Rank 0 only, with the index."""
        return {}
