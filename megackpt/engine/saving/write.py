"""Carrying out a save that was planned: write, collect receipts, write parity and the index, commit.

Owns the order of these steps. Each that can fail on one rank ends in a meeting of all, where a failure
becomes the same error everywhere; then what was written is removed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from megackpt.comm import Group, Numbers, run_and_compare, run_and_gather, run_on_all_ranks
from megackpt.engine.checkpoint import manifest
from megackpt.engine.saving.parity import write_parity
from megackpt.formats.strategy import ChunkParts, Json, SaveStrategy
from megackpt.geometry import Ints
from megackpt.planning import SavePlan
from megackpt.storage import MemoryStore, Store


@dataclass(frozen=True, slots=True)
class PlannedSave:
    """A save that all ranks have agreed on; nothing is written yet.

    Attributes:
        attempt: the id of this attempt.
        plan: the plan; at least this rank's own rows of it.
        pieces: the bytes of one of this rank's rows.
        common: what is stored as common state, or its files, made already; that of rank 0 counts.
        earlier: what was at the place before; known to rank 0. None: nobody has looked.
        report: what this rank tells rank 0 when it has written.
        complete: makes the plan of all ranks from the reports, on rank 0; None where `plan` is that already.
        parity: at most how many files are protected together; None for no parity.
        kept: `plan` before it had the sizes of this save's objects: the same object in every save that takes
            the same plan.
        sizes: those sizes, in bytes.
    """

    attempt: str
    plan: SavePlan
    pieces: ChunkParts
    common: Any  # whatever the user saves
    earlier: manifest.LeftoverFiles | None = field(default_factory=manifest.LeftoverFiles)
    report: bytes = b""
    complete: Callable[[Sequence[bytes]], SavePlan] | None = None
    parity: int | None = None
    kept: SavePlan | None = None
    sizes: Ints = field(default_factory=lambda: np.zeros(0, np.int64))


@dataclass(frozen=True, slots=True)
class CommonFiles:
    """Common state as a format would write it, ready to be put into a store.

    Attributes:
        files: the files by name, in the order of writing.
        said: what `SaveStrategy.write_common` returned.
    """

    files: tuple[tuple[str, bytes], ...]
    said: Json

    @classmethod
    def of(cls, common: Any, strategy: SaveStrategy, *, attempt: str) -> CommonFiles:
        """Let a format write it, into memory."""
        store = MemoryStore()
        said = strategy.write_common(store, attempt=attempt, common=common)
        files = tuple((name, store.read(name, max_bytes=store.size(name))) for name in store.names())
        return cls(files, said)

    def put(self, store: Store) -> Json:
        """Write them; their content is durable when this returns, their names after `store.sync()`."""
        for name, data in self.files:
            store.write(name, data)
        return self.said


def write_out(planned: PlannedSave, store: Store, strategy: SaveStrategy, group: Group) -> None:
    """Write this rank's part; when all have, commit. Collective over the group.

    Raises:
        CheckpointError: the same on every rank. The checkpoint at this place is the previous one, if any, or
            this one if only the last meeting, after the commit, failed.
    """
    try:
        if planned.earlier is None:
            planned = _looked(planned, store, strategy, group)
        receipts, reports = write_rounds(planned, store, strategy, group)
        parity: list[bytes] = []
        if planned.parity is not None:
            parity = write_parity(
                store,
                strategy,
                group,
                attempt=planned.attempt,
                most=planned.parity,
                written=lambda: (_whole_plan(planned, reports), receipts),
            )

        def finish() -> Numbers:
            if group.rank == 0:
                plan = _whole_plan(planned, reports)
                finish_attempt(planned, plan, receipts, store, strategy, world_size=group.size, parity=parity)
            return Numbers(())

        run_and_compare(group, finish, equal=0, doing="writing the index")
    except Exception:
        if group.rank == 0:
            manifest.discard(store, attempt=planned.attempt, strategy=strategy)
        raise


def _looked(planned: PlannedSave, store: Store, strategy: SaveStrategy, group: Group) -> PlannedSave:
    """Make the place on rank 0, and see what is there; nobody writes before."""
    found: list[manifest.LeftoverFiles] = []

    def look() -> Numbers:
        if group.rank == 0:
            store.create()
            found.append(manifest.find_leftover_files(store, strategy))
        return Numbers(())

    run_and_compare(group, look, equal=0, doing="looking at the place")
    return replace(planned, earlier=found[0] if found else manifest.LeftoverFiles())


def write_rounds(
    planned: PlannedSave, store: Store, strategy: SaveStrategy, group: Group
) -> tuple[list[list[bytes]], list[bytes]]:
    """Write this rank's chunks, round by round; return receipts by rank and round, and reports, on rank 0.

    Collective over the group.

    Raises:
        CheckpointError: the same on every rank; what was written is still there.
    """
    rounds: list[Ints] = []

    def begin() -> bytes:
        if group.rank == 0:
            strategy.begin(store, attempt=planned.attempt)
        rounds.extend(strategy.rounds(planned.plan, group.rank))
        return b""

    def write(number: int) -> bytes:
        if not rounds:  # not known yet; if the strategy refuses, all ranks are to hear of it
            rounds.extend(strategy.rounds(planned.plan, group.rank))
        report = b"" if number else planned.report
        receipt = strategy.write_chunks(
            store,
            attempt=planned.attempt,
            rank=group.rank,
            plan=planned.plan,
            rows=rounds[number],
            parts=planned.pieces,
        )
        return len(report).to_bytes(8, "little") + report + receipt

    if strategy.capabilities.writes_in_place:
        run_on_all_ranks(group, begin, doing="clearing the place")
    told: list[list[tuple[bytes, bytes]]] = []
    while not told or len(told) < len(rounds):
        step = partial(write, len(told))
        told.append([_split(t) for t in run_and_gather(group, step, doing="writing its chunks")])
    receipts = [[receipt for _, receipt in of_rank] for of_rank in zip(*told, strict=True)]
    return receipts, [report for report, _ in told[0]]


def _whole_plan(planned: PlannedSave, reports: Sequence[bytes]) -> SavePlan:
    return planned.complete(reports) if planned.complete is not None else planned.plan


def _split(told: bytes) -> tuple[bytes, bytes]:
    """Take a report and the receipt behind it apart."""
    end = 8 + int.from_bytes(told[:8], "little")
    return told[8:end], told[end:]


def finish_attempt(
    planned: PlannedSave,
    plan: SavePlan,
    receipts: list[list[bytes]],
    store: Store,
    strategy: SaveStrategy,
    *,
    world_size: int,
    parity: Sequence[bytes] = (),
) -> None:
    """Write what is not chunks, and commit. Rank 0 only, after every rank has written its chunks.

    plan is that of all ranks; receipts are by rank and round. parity are the receipts of parity files, by
    rank, where there are some.

    Raises:
        CheckpointError: see `write_out`; nothing is removed here.
    """
    attempt = planned.attempt
    said = {
        "sharded_backend": strategy.backend,
        "sharded_backend_version": strategy.version,
        "common_backend": strategy.backend,
        "common_backend_version": strategy.version,
        "attempt": attempt,
        "world_size": world_size,
        **_write_common(planned, store, strategy),
        **strategy.write_index(store, attempt=attempt, plan=plan, receipts=receipts),
    }
    if parity:
        said |= strategy.list_parity(store, attempt=attempt, receipts=list(parity))
    store.sync()
    earlier = planned.earlier or manifest.LeftoverFiles()
    manifest.commit(store, said, attempt=attempt, earlier=earlier, strategy=strategy)


def _write_common(planned: PlannedSave, store: Store, strategy: SaveStrategy) -> Json:
    if isinstance(planned.common, CommonFiles):
        return planned.common.put(store)
    return strategy.write_common(store, attempt=planned.attempt, common=planned.common)
