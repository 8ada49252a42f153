"""What a rank and its writer process say to each other.

Owns the messages; nothing here acts. They go through a pipe between a process and its own child, which is the
only place where objects are pickled: never into, or out of, a checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import TypeAlias

from megackpt.comm.store_group import StoreAddress
from megackpt.engine.checkpoint.step_roots import step_directories
from megackpt.engine.saving.plan_agreement import PlanCompletion
from megackpt.engine.saving.write import CommonFiles
from megackpt.engine.tiers.save import NodeLocation
from megackpt.formats.damage import Damage
from megackpt.geometry import Ints
from megackpt.options import VerifyOptions
from megackpt.planning import SavePlan
from megackpt.storage import ObjectOptions, Store


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointLocation:
    """A checkpoint below a root: its name there, and options if the root is in an object store.

    store is the root itself, pickled, where a user gave one instead of a path or an URL.
    """

    root: str
    name: str
    objects: ObjectOptions | None = None
    store: bytes | None = None

    def open(self) -> Store:
        """Return its store."""
        root = self.root if self.store is None else ForkingPickler.loads(self.store)  # of our own parent
        return step_directories(root, objects=self.objects).open(self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinMessage:
    """To the writer: which rank of how many it writes for, and where they meet; None for a rank alone."""

    rank: int
    size: int
    address: StoreAddress | None
    timeout_s: float


@dataclass(frozen=True, slots=True)
class MemoryMessage:
    """To the writer: how large the staging memory is now; it is empty."""

    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class PlanMessage:
    """To the writer: a plan that jobs name by its number, and how it is completed."""

    number: int
    plan: SavePlan
    complete: PlanCompletion | None


@dataclass(frozen=True, slots=True)
class ForgetPlanMessage:
    """To the writer: no job will name this plan again."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Job:
    """To the writer: a save to be written and committed.

    Attributes:
        number: its number; jobs are done one after the other.
        label: what to call it in messages.
        attempt: the attempt; also the prefix of its meetings.
        place: where to: below a root, or on the nodes.
        strategy: the format's strategy, pickled: where it cannot be unpickled only this job fails.
        plan: number of the plan.
        sizes: sizes of the objects in that.
        report: what rank 0 is told.
        parity: at most how many files are protected together; None for no parity.
        common: common state; on rank 0.
        start: position of the stream at which its first row begins.
        in_order: whether the strategy takes the rows in order, so that memory may be used again at once.
        keeps: whether it may not, as the next job reads the same rows from there.
        verify: how what is committed is read again; None if it is not.
    """

    number: int
    label: str
    attempt: str
    place: CheckpointLocation | NodeLocation
    strategy: bytes
    plan: int
    sizes: Ints
    report: bytes
    parity: int | None
    common: CommonFiles | None
    start: int
    in_order: bool
    keeps: bool
    verify: VerifyOptions | None


@dataclass(frozen=True, slots=True)
class StagedMessage:
    """To the writer: the stream is there up to this position."""

    position: int


@dataclass(frozen=True, slots=True)
class CancelledMessage:
    """To the writer: what a job writes could not be staged; error is encoded."""

    job: int
    error: bytes


@dataclass(frozen=True, slots=True)
class LeaveMessage:
    """To the writer: there is nothing more to do."""


@dataclass(frozen=True, slots=True)
class FollowUpDoneMessage:
    """To the writer: what the trainer does after a commit is done; error is encoded, if there is one."""

    job: int
    error: bytes | None


@dataclass(frozen=True, slots=True)
class ReadyMessage:
    """From the writer: it has started."""


@dataclass(frozen=True, slots=True)
class AliveMessage:
    """From the writer: it works, or waits for somebody else; see `signs_of_life`."""


@dataclass(frozen=True, slots=True)
class ConsumedMessage:
    """From the writer: the memory before this position may be used again."""

    position: int


@dataclass(frozen=True, slots=True)
class CommittedMessage:
    """From the writer of rank 0: a job is committed; it waits for `FollowUpDoneMessage`.

    damages are what writers have found that have verified it; None if they have not.
    """

    job: int
    damages: tuple[Damage, ...] | None


@dataclass(frozen=True, slots=True)
class EndedMessage:
    """From the writer: a job is over; error is encoded, None if it succeeded on all ranks."""

    job: int
    error: bytes | None


def meetings_of(attempt: str) -> str:
    """Return the prefix under which writers meet for an attempt."""
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
