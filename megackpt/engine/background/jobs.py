"""The steps of a writer process for one save, into a root or into a tier.

They are those of a synchronous save: open the store, write, commit, verify. Then the training process does
the work that follows a commit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.reduction import ForkingPickler

from megackpt.comm import Group, encode_error, errors_on_all_ranks
from megackpt.comm.group import common_error
from megackpt.comm.writer_group import WriterGroup
from megackpt.engine.background.messages import Job
from megackpt.engine.background.trainer_connection import TrainerConnection
from megackpt.engine.saving.planned_save import PlannedSave
from megackpt.engine.saving.write import write_and_commit
from megackpt.engine.tiers.save import NodeLocation, clean_node, save_on_nodes
from megackpt.engine.verification.collective import verify_on_all_ranks, work_after_commit
from megackpt.engine.verification.verify import verify_share
from megackpt.errors import CheckpointError
from megackpt.formats.damage import Damage
from megackpt.formats.strategy import ChunkParts, SaveStrategy
from megackpt.plans.planning import SavePlan
from megackpt.storage import Store

StoreHook = Callable[[Store], Store]
"""Wraps the store of each save, for tests. A hook is named by module and attribute, `a.b:c`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StagedJob:
    """A job, with its plan and the bytes that its rank stages.

    Attributes:
        job: the job.
        plan: the plan of the job.
        parts: the bytes of the rows that the rank writes, and the sizes of its objects.
    """

    job: Job
    plan: SavePlan
    parts: ChunkParts


def carry_out(
    staged: StagedJob, group: Group, trainer: TrainerConnection, *, hook: StoreHook | None, timeout_s: float
) -> None:
    """Write this rank's part of a save; when all ranks have done so, commit, and follow up. Collective.

    Args:
        staged: the staged rows to write.
        group: the writer processes of all ranks.
        trainer: the training process of this rank.
        hook: wraps the store; None in production.
        timeout_s: how long ranks wait for each other, in seconds.

    Raises:
        CheckpointError: the same on every rank, as of a synchronous save.
    """
    job = staged.job
    with errors_on_all_ranks(group, "preparing to write"):
        # In the step, as a store or a strategy of the user may raise an error on one rank only.
        store = job.location.open()
        store = hook(store) if hook is not None else store
        planned = _planned_save(staged)
    damages: list[Damage] | None = None
    try:
        if isinstance(job.location, NodeLocation):
            _save_on_nodes(job, job.location, planned, store, group)
        else:
            write_and_commit(planned, store, group)
            if job.verify is not None:
                # Classes that the training has registered, or allows in pickles, are not known here.
                options = replace(job.verify, allow_unsafe_pickle=False, skip_unknown_classes=True)
                damages = verify_on_all_ranks(
                    group,
                    partial(verify_share, store, options),
                    timeout_s=timeout_s,
                    while_reading=trainer.heartbeat.beat,
                )
    finally:
        store.close()
    # Writers of all ranks wait here for the training process of rank 0, which removes older steps. So the
    # save is over on no rank before that.
    with errors_on_all_ranks(group, work_after_commit(damages)):
        if isinstance(job.location, NodeLocation):
            clean_node(job.location, rank=group.rank)
        if group.rank == 0:
            trainer.follow_up(job.number, damages)


def failure_of(job: Job, error: Exception, *, rank: int) -> CheckpointError:
    """Return the error of all ranks for an error that is not a CheckpointError."""
    return common_error({rank: encode_error(error)}, f"saving {job.label}")


def _planned_save(staged: StagedJob) -> PlannedSave:
    job = staged.job
    strategy: SaveStrategy = ForkingPickler.loads(job.strategy)  # of our own parent, through a pipe
    return PlannedSave(
        attempt=job.attempt,
        plan=staged.plan,
        parts=staged.parts,
        common=job.common,
        strategy=strategy,
        leftovers=None,
        hooks=job.hooks,
        commit_fields=job.commit_fields,
        exchanged=job.exchanged,
        unpadded=job.unpadded,
    )


def _save_on_nodes(
    job: Job, location: NodeLocation, planned: PlannedSave, store: Store, group: Group
) -> None:
    try:
        save_on_nodes(planned, store, group, location)
    except Exception as error:
        if isinstance(group, WriterGroup):  # another rank may wait for bytes from this one
            is_ours = isinstance(error, CheckpointError)
            group.abort(error if is_ours else failure_of(job, error, rank=group.rank))
        raise
