"""The hooks of a save: where an optional feature takes part in the recipe of `save`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from megackpt.comm import Group
from megackpt.entities.flatten import FlattenedState
from megackpt.formats.strategy import Json, SaveStrategy
from megackpt.plans.geometry import Ints
from megackpt.plans.metadata import ChunkTable, DeclaredChunks
from megackpt.plans.planning import SavePlan
from megackpt.storage import Store

PlanCompletion: TypeAlias = Callable[[Sequence[bytes]], SavePlan]
"""Makes the plan of all ranks from one report of each rank. It can be sent to another process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenChunks:
    """What the ranks have reported after they have written their chunks. Ranks other than 0 have no reports.

    Attributes:
        attempt: id of the attempt.
        receipts: what `SaveStrategy.write_chunks` returned, by rank and round; on rank 0.
        reports: what each rank reports in addition (`PlannedSave.report`); on rank 0.
        own_plan: the plan that this rank has written by.
        complete: makes the plan of all ranks from the reports; None if `own_plan` is that already.
    """

    attempt: str
    receipts: list[list[bytes]]
    reports: list[bytes]
    own_plan: SavePlan
    complete: PlanCompletion | None

    def plan(self) -> SavePlan:
        """Return the plan of all ranks. On rank 0 only.

        Raises:
            CheckpointError: the reports contradict each other (ranks that save without validation).
        """
        return self.own_plan if self.complete is None else self.complete(self.reports)


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

    def attachment(self, flattened: FlattenedState, declared: DeclaredChunks, *, ranks: int) -> bytes:
        """Return what this rank sends with its declarations to the rank that plans. Local.

        Ranks send declarations only if there is no cached plan for them.
        """
        return b""

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

    def after_writing(
        self, written: WrittenChunks, store: Store, strategy: SaveStrategy, group: Group
    ) -> list[bytes]:
        """Write more files when all ranks have written their chunks. Collective.

        Returns:
            One receipt of each rank for `index_fields`, on rank 0.

        Raises:
            CheckpointError: the same on every rank.
        """
        return []

    def index_fields(
        self, receipts: list[bytes], store: Store, strategy: SaveStrategy, *, attempt: str
    ) -> Json:
        """Return what the manifest says of the files of `after_writing`. Rank 0 only, with the index."""
        return {}
