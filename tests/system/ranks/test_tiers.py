"""Eight real ranks as four nodes: a node is killed during a save, and the job continues on the others."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megackpt import (
    Checkpointer,
    MemoryTier,
    RankFailedError,
    SaveOptions,
    ShardedObject,
    ShardedTensor,
    Tiers,
)
from megackpt.checkpointer import LastLoad
from megackpt.engine.tiers import save as tier_save
from megackpt.testing.ranks import RankPool
from tests.support.effort import with_all

RANKS, NODES, KILLED = 8, 4, 1


def state(step: int, tp: int) -> dict[str, Any]:
    """A weight in rows, replicated over the rest; a share of each rank that no node sends in one part."""
    rank = dist.get_rank()
    weight = (torch.arange(64 * 1024.0).reshape(64, 1024) * step).chunk(tp)[rank % tp].clone()
    share = torch.arange(9 << 16, dtype=torch.int32).add_(step).chunk(RANKS)[rank].clone()
    return {
        "weight": ShardedTensor.from_rank_offsets("w", weight, (0, rank % tp, tp), replica_id=rank // tp),
        "share": ShardedTensor.from_rank_offsets("s", share, (0, rank, RANKS)),
        "rng": ShardedObject("rng", [rank, step], (RANKS,), (rank,)),
        "step": step,
    }


def checkpointer(base: Path, timeout_s: float = 60) -> Checkpointer:
    tier = MemoryTier(f"{base}/node-{{node}}")
    options = SaveOptions(timeout_s=timeout_s)
    return Checkpointer(
        base / "root",
        tiers=Tiers([tier], root_every=100, node=dist.get_rank() // 2),
        save_options=options,
    )


def train_until_a_node_is_killed(base: Path) -> str:
    """Save step 1 to the root, 2 and 3 to memory; the processes of a node die while they send step 4."""
    first = checkpointer(base)
    first.save(1, state(1, tp=2), to_root=True)
    for step in (2, 3):
        first.save(step, state(step, tp=2))
    copy = tier_save.copy_files

    def copy_or_die(*args: Any, **kwargs: Any) -> None:
        if dist.get_rank() // 2 == KILLED:
            os.kill(os.getpid(), signal.SIGKILL)
        copy(*args, **kwargs)

    tier_save.copy_files = copy_or_die
    try:
        checkpointer(base, timeout_s=8).save(4, state(4, tp=2))
    except RankFailedError as error:
        return str(error)
    finally:
        tier_save.copy_files = copy
    return ""


def resume(base: Path, tp: int) -> LastLoad:
    """Load the newest step at a layout, compare every bit, and save the next one."""
    again = checkpointer(base)
    asked = state(0, tp)
    loaded = again.load(asked)
    assert again.last_load is not None
    step = again.last_load.step
    expected = state(step, tp)
    for key in ("weight", "share"):
        assert torch.equal(loaded[key], expected[key].data), key
    assert (loaded["rng"], loaded["step"]) == ([dist.get_rank(), step], step)
    again.save(step + 1, state(step + 1, tp))
    return again.last_load


@with_all("test_tiers_async.py loses nodes, too")
def test_the_newest_step_in_memory_survives_the_loss_of_any_node_and_without_it_the_root_is_loaded(
    rank_pool: RankPool, memory_path: Path
) -> None:
    outcomes = rank_pool.outcomes(train_until_a_node_is_killed, RANKS, memory_path / "run")
    assert [isinstance(o.error, EOFError) for o in outcomes] == [r // 2 == KILLED for r in range(RANKS)]
    assert all(o.value for o in outcomes if o.error is None)
    incomplete = memory_path / "run" / f"node-{KILLED}" / "iter_0000004"
    assert list((incomplete / "data").iterdir())

    for lost in range(NODES):
        shutil.copytree(memory_path / "run", memory_path / "restarted")
        shutil.rmtree(memory_path / "restarted" / "root")
        shutil.rmtree(memory_path / "restarted" / f"node-{lost}")
        results = rank_pool.run(resume, RANKS, memory_path / "restarted", 2 if lost else 4)
        assert {(used.step, used.skipped, used.damaged) for used in results} == {(3, (), ())}
        for node in range(NODES):
            steps = sorted(path.name for path in (memory_path / "restarted" / f"node-{node}").iterdir())
            assert steps == ["iter_0000003", "iter_0000004"], (
                "incomplete steps are removed, lost copies are not made again"
            )
        shutil.rmtree(memory_path / "restarted")

    for lost in (0, 1):
        shutil.rmtree(memory_path / "run" / f"node-{lost}")
    results = rank_pool.run(resume, RANKS, memory_path / "run", 1)
    assert {(used.step, used.where) for used in results} == {(1, str(memory_path / "run" / "root"))}
    assert [passed.step for passed in results[0].skipped] == [3, 2]
