"""Messages between a rank and its writer process, and the location that a job names.

They are pickles in a pipe between a process and its own child. The native format has no pickles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import TypeAlias

from megackpt.comm.store_host import StoreAddress
from megackpt.engine.checkpoint.step_roots import step_directories
from megackpt.engine.saving.planned_save import SaveHook
from megackpt.engine.saving.write import CommonFiles
from megackpt.engine.tiers.save import NodeLocation
from megackpt.formats.damage import Damage
from megackpt.formats.strategy import Json
from megackpt.options import VerifyOptions
from megackpt.plans.geometry import Ints
from megackpt.plans.planning import SavePlan
from megackpt.storage import ObjectOptions, Store


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointLocation:
    """A checkpoint below a root.

    Attributes:
        root: path or URL of the root.
        name: name of the checkpoint there.
        objects: options, if the root is in an object store.
        store: the root as a pickled store, if the user gave a store instead of a path or URL.
    """

    root: str
    name: str
    objects: ObjectOptions | None = None
    store: bytes | None = None

    def open(self) -> Store:
        """Return the store of the checkpoint."""
        root = self.root if self.store is None else ForkingPickler.loads(self.store)  # of our own parent
        return step_directories(root, objects=self.objects).open(self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """To the writer: a save to be written and committed.

    Attributes:
        number: its number; jobs are done one after the other.
        label: its name in messages.
        attempt: id of the attempt; also in the prefix of the keys that writers exchange.
        location: a checkpoint below a root, or the directories of a tier on the nodes.
        strategy: the strategy, pickled: if it cannot be unpickled, only this job fails.
        hooks: optional features of the save.
        plan: number of the plan.
        commit_fields: further fields of metadata.json; see `PlannedSave`.
        exchanged: whether ranks have exchanged declarations; see `PlannedSave`.
        object_sizes: sizes of the objects that this rank writes, in bytes.
        common: common state; on rank 0.
        start: position of the stream at which its first row starts.
        in_order: whether the strategy takes the rows in order, so that memory is free as soon as it is read.
        keeps: whether the memory stays in use, because the next job reads the same rows from it.
        verify: how the committed checkpoint is read again; None if it is not.
        unpadded: shapes without padding; see `PlannedSave`.
    """

    number: int
    label: str
    attempt: str
    location: CheckpointLocation | NodeLocation
    strategy: bytes
    hooks: tuple[SaveHook, ...]
    plan: int
    commit_fields: Json
    exchanged: bool
    object_sizes: Ints | None
    common: CommonFiles | None
    start: int
    in_order: bool
    keeps: bool
    verify: VerifyOptions | None
    unpadded: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinMessage:
    """To the writer: the rank that it writes for, and where writers synchronise; None for a rank alone."""

    rank: int
    size: int
    address: StoreAddress | None
    timeout_s: float


@dataclass(frozen=True, slots=True)
class MemoryMessage:
    """To the writer: the size of the staging memory from now on; the memory is empty."""

    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class PlanMessage:
    """To the writer: a plan, which jobs name by its number."""

    number: int
    plan: SavePlan


@dataclass(frozen=True, slots=True)
class ForgetPlanMessage:
    """To the writer: no further job names this plan."""

    number: int


@dataclass(frozen=True, slots=True)
class StagedMessage:
    """To the writer: the stream is written up to this position."""

    position: int


@dataclass(frozen=True, slots=True)
class CancelledMessage:
    """To the writer: the bytes of a job could not be staged; error is encoded."""

    job: int
    error: bytes


@dataclass(frozen=True, slots=True)
class FollowUpDoneMessage:
    """To the writer: the training process has done the work after a commit; error is encoded, or None."""

    job: int
    error: bytes | None


@dataclass(frozen=True, slots=True)
class LeaveMessage:
    """To the writer: there is nothing more to do."""


@dataclass(frozen=True, slots=True)
class ReadyMessage:
    """From the writer: it has started."""


BEAT_S = 1.0
"""How often a process sends `AliveMessage`, and how often its rank checks that it makes progress."""


@dataclass(frozen=True, slots=True)
class AliveMessage:
    """From the writer: it works, or waits for somebody else."""


@dataclass(frozen=True, slots=True)
class ConsumedMessage:
    """From the writer: the memory before this position is free."""

    position: int


@dataclass(frozen=True, slots=True)
class CommittedMessage:
    """From the writer of rank 0: a job is committed; it waits for `FollowUpDoneMessage`.

    damages are what writers have found when they verified the checkpoint; None if they have not.
    """

    job: int
    damages: tuple[Damage, ...] | None


@dataclass(frozen=True, slots=True)
class EndedMessage:
    """From the writer: a job is over; error is encoded, None if the job succeeded on all ranks."""

    job: int
    error: bytes | None


def store_prefix(attempt: str) -> str:
    """Return the prefix of the keys under which writers exchange messages for an attempt."""
    return f"megackpt/{attempt}"


ToWriter: TypeAlias = (
    JoinMessage
    | MemoryMessage
    | PlanMessage
    | ForgetPlanMessage
    | Job
    | StagedMessage
    | CancelledMessage
    | FollowUpDoneMessage
    | LeaveMessage
)
FromWriter: TypeAlias = ReadyMessage | AliveMessage | ConsumedMessage | CommittedMessage | EndedMessage
