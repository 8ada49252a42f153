"""The last part of a save: write chunks, common state and index, then commit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from megackpt.comm import Group, errors_on_all_ranks, gather_step, join_fields, split_fields
from megackpt.engine.checkpoint import manifest
from megackpt.engine.saving.planned_save import PlannedSave, WrittenChunks, pack_report
from megackpt.formats.documents import UNPADDED
from megackpt.formats.strategy import Json, SaveStrategy
from megackpt.plans.geometry import Ints
from megackpt.storage import Store


@dataclass(frozen=True, slots=True)
class CommonFiles:
    """Common state as a format would write it, ready to be put into a store.

    Attributes:
        files: the files by name, in the order of writing.
        manifest_fields: what `SaveStrategy.write_common` returned.
    """

    files: tuple[tuple[str, bytes], ...]
    manifest_fields: Json

    @classmethod
    def of(cls, common: Any, strategy: SaveStrategy, *, attempt: str) -> CommonFiles:
        """Let a format write common state into memory."""
        from megackpt.storage import MemoryStore

        store = MemoryStore()
        manifest_fields = strategy.write_common(store, attempt=attempt, common=common)
        files = tuple((name, store.read(name, max_bytes=store.size(name))) for name in store.names())
        return cls(files, manifest_fields)

    def put(self, store: Store) -> Json:
        """Write the files. Their content is durable when this returns, their names after `store.sync()`."""
        for name, data in self.files:
            store.write(name, data)
        return self.manifest_fields


def write_and_commit(planned: PlannedSave, store: Store, group: Group) -> None:
    """Write this rank's chunks; when all ranks have written theirs, commit. Collective over the group.

    Raises:
        CheckpointError: the same on every rank. The checkpoint at this location is the previous one, if any,
            or this one if only the last synchronisation, after the commit, failed.
    """
    try:
        if planned.leftovers is None:
            planned = _with_leftovers(planned, store, group)
        written = write_chunks(planned, store, group)
        receipts = [hook.after_writing(written, store, group) for hook in planned.hooks]
        with errors_on_all_ranks(group, "writing the index"):
            if group.rank == 0:
                commit_attempt(planned, written, store, world_size=group.size, hook_receipts=receipts)
    except Exception:
        # Rank 0 removes the files of all ranks, which are in one store. What a lost rank still writes is left
        # over, and the next save removes it.
        if group.rank == 0:
            manifest.discard(store, attempt=planned.attempt, strategy=planned.strategy)
        raise


def _with_leftovers(planned: PlannedSave, store: Store, group: Group) -> PlannedSave:
    """Create the store's directory and look for leftover files, on rank 0, before any rank writes."""
    leftovers = manifest.LeftoverFiles()
    with errors_on_all_ranks(group, "looking for an earlier checkpoint"):
        if group.rank == 0:
            store.create()
            leftovers = manifest.find_leftover_files(store, planned.strategy)
    return replace(planned, leftovers=leftovers)


def write_chunks(planned: PlannedSave, store: Store, group: Group) -> WrittenChunks:
    """Write this rank's chunks, round by round; return what all ranks report, on rank 0. Collective.

    Raises:
        CheckpointError: the same on every rank. What was written is not removed.
    """
    strategy, plan, rank = planned.strategy, planned.plan, group.rank
    messages_of_rounds: list[list[bytes]] = []
    rounds: Sequence[Ints] = ()
    # The strategy returns the number of rounds in the first step. It is equal on all ranks, so all of them
    # make as many steps.
    while not messages_of_rounds or len(messages_of_rounds) < len(rounds):
        with gather_step(group, "writing its chunks") as step:
            if not rounds:  # computed in the step, as it may raise an error on one rank only
                plan = planned.sized_plan(rank)
                rounds = strategy.rounds(plan, rank)
            receipt = strategy.write_chunks(
                store,
                attempt=planned.attempt,
                rank=rank,
                plan=plan,
                rows=rounds[len(messages_of_rounds)],
                parts=planned.parts,
            )
            # The report is the same in all rounds, so it travels with the first receipt only.
            report = pack_report(planned, plan) if not messages_of_rounds else b""
            step.data = join_fields([report, receipt])
        messages_of_rounds.append(step.results)
    unpacked = [[split_fields(message) for message in messages] for messages in messages_of_rounds]
    return WrittenChunks(
        planned,
        reports=[report for report, _ in unpacked[0]],
        receipts=[[receipt for _, receipt in of_rank] for of_rank in zip(*unpacked, strict=True)],
    )


def commit_attempt(
    planned: PlannedSave,
    written: WrittenChunks,
    store: Store,
    *,
    world_size: int,
    hook_receipts: Sequence[list[bytes]] = (),
) -> None:
    """Write common state and index, and commit. Rank 0 only, after every rank has written its chunks.

    Args:
        planned: the save.
        written: what all ranks have reported.
        store: where the chunks were written.
        world_size: number of ranks.
        hook_receipts: what `SaveHook.after_writing` returned, one list for each hook of the save.

    Raises:
        CheckpointError: see `write_and_commit`; nothing is removed here.
    """
    attempt, strategy, common = planned.attempt, planned.strategy, planned.common
    unpadded = written.unpadded_shapes()
    if isinstance(common, CommonFiles):  # encoded earlier
        common_entries = common.put(store)
    else:
        common_entries = strategy.write_common(store, attempt=attempt, common=common)
    manifest_fields = {
        "sharded_backend": strategy.backend,
        "sharded_backend_version": strategy.version,
        "common_backend": strategy.backend,
        "common_backend_version": strategy.version,
        "attempt": attempt,
        "world_size": world_size,
        **planned.commit_fields,
        **common_entries,
        **strategy.write_index(store, attempt=attempt, plan=written.plan(), receipts=written.receipts),
        **({UNPADDED: unpadded} if unpadded else {}),
    }
    for hook, receipts in zip(planned.hooks, hook_receipts, strict=True):
        manifest_fields |= hook.index_fields(receipts, planned, store)
    # Every file has to be durable before the manifest names it.
    store.sync()
    leftovers = planned.leftovers or manifest.LeftoverFiles()
    manifest.commit(store, manifest_fields, attempt=attempt, earlier=leftovers, strategy=strategy)
