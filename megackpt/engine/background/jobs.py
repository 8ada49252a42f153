"""What a writer process does for one save: into a root, or into a tier.

Owns the order: prepare, write and commit as a synchronous save does, look again, let the training do what
follows. Where bytes and other ranks come from is up to `main`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Protocol

from megackpt.comm import Group, Numbers, encode_error, run_and_compare
from megackpt.comm.messages import common_error
from megackpt.comm.writer_group import WriterGroup
from megackpt.engine.background.messages import Job
from megackpt.engine.saving.plan_agreement import PlanCompletion
from megackpt.engine.saving.write import PlannedSave, write_out
from megackpt.engine.tiers.save import NodeLocation, clean_node, save_on_nodes
from megackpt.engine.verification.collective import verify_on_all_ranks, work_after_commit
from megackpt.engine.verification.verify import verify_share
from megackpt.errors import CheckpointError
from megackpt.formats.damage import Damage
from megackpt.formats.strategy import ChunkParts, SaveStrategy
from megackpt.options import VerifyOptions
from megackpt.planning import SavePlan
from megackpt.storage import Store

Hook = Callable[[Store], Store]
"""What tests put around the store of each save; it is named by module and attribute, `a.b:c`."""


class JobServices(Protocol):
    """The process that a job is done in."""

    @property
    def timeout_s(self) -> float:
        """How long ranks wait for each other, in seconds."""

    def open(self, job: Job) -> Store:
        """Return the store that a job is written to."""

    def follow(self, job: Job, damages: Sequence[Damage] | None) -> None:
        """Let the training do what follows a commit, and wait until that is done."""

    def beat(self) -> None:
        """Show that this process works."""


def planned_by(job: Job, plan: SavePlan, complete: PlanCompletion | None, pieces: ChunkParts) -> PlannedSave:
    """Return the save that a job tells to carry out."""
    return PlannedSave(
        attempt=job.attempt,
        plan=plan,
        pieces=pieces,
        common=job.common,
        earlier=None,
        report=job.report,
        parity=job.parity,
        complete=complete,
    )


def carry_out(job: Job, planned: PlannedSave, group: Group, here: JobServices) -> None:
    """Write this rank's part of a save; when all have, commit, and do what follows. Collective.

    Raises:
        CheckpointError: the same on every rank, as of a synchronous save.
    """
    opened: list[tuple[Store, SaveStrategy]] = []

    def prepare() -> Numbers:
        opened.append((here.open(job), _unpickled(job.strategy)))
        return Numbers(())

    run_and_compare(group, prepare, equal=0, doing="preparing to write")
    store, strategy = opened[0]
    damages: list[Damage] | None = None
    try:
        if isinstance(job.place, NodeLocation):
            _save_on_nodes(job, job.place, planned, store, strategy, group)
        else:
            write_out(planned, store, strategy, group)
            if job.verify is not None:
                damages = _verify(store, job.verify, group, here)
    finally:
        store.close()

    def follow() -> Numbers:
        if isinstance(job.place, NodeLocation):
            clean_node(job.place, rank=group.rank)
        if group.rank == 0:
            here.follow(job, damages)
        return Numbers(())

    run_and_compare(group, follow, equal=0, doing=work_after_commit(damages))


def _save_on_nodes(
    job: Job, place: NodeLocation, planned: PlannedSave, store: Store, strategy: SaveStrategy, group: Group
) -> None:
    try:
        save_on_nodes(planned, store, strategy, group, place)
    except Exception as error:
        if isinstance(group, WriterGroup):  # another may wait for what this one was to send it
            ours = isinstance(error, CheckpointError)
            group.abort(error if ours else failure_of(job, error, rank=group.rank))
        raise


def failure_of(job: Job, error: Exception, *, rank: int) -> CheckpointError:
    """Return the error of all ranks for one that is none of ours."""
    return common_error({rank: encode_error(error)}, f"saving {job.label}")


def _verify(store: Store, options: VerifyOptions, group: Group, here: JobServices) -> list[Damage]:
    # Classes that the training has registered, or allows in pickles, are not known in this process.
    known_here = replace(options, allow_unsafe_pickle=False, skip_unknown_classes=True)
    look = partial(verify_share, store, known_here)
    return verify_on_all_ranks(group, look, timeout_s=here.timeout_s, while_reading=here.beat)


def _unpickled(strategy: bytes) -> SaveStrategy:
    found: SaveStrategy = ForkingPickler.loads(strategy)  # of our own parent, through a pipe
    return found
