"""Parity, fallback and the comparison of replicas on real processes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from megackpt import (
    Checkpointer,
    LoadOptions,
    MismatchError,
    SaveOptions,
    ShardedTensor,
    load_with_report,
    save,
)
from megackpt.options import Policy
from megackpt.testing.ranks import RankPool
from tests.support.states import replica

RANKS = 4
LONG = 150_000


def state(rank: int, value: float) -> dict[str, ShardedTensor]:
    rows = torch.arange(float(LONG)) * value + rank
    return {
        "rows": ShardedTensor.from_rank_offsets("rows", rows, (0, rank, RANKS)),
        "copy": replica(value, 3, key="copy", rank=rank),
    }


def save_and_lose(directory: str) -> list[str]:
    rank = torch.distributed.get_rank()
    save(state(rank, 1.0), directory, options=SaveOptions(parity=2, compare_replicas=Policy.ERROR))
    torch.distributed.barrier()
    if rank == 0:
        (Path(directory) / "data" / min(f.name for f in (Path(directory) / "data").iterdir())).unlink()
    torch.distributed.barrier()
    loaded, report = load_with_report(
        state(rank, 0.0), directory, options=LoadOptions(on_corrupt="fallback", exchange="all_to_all")
    )
    assert torch.equal(loaded["rows"], state(rank, 1.0)["rows"].data)
    return sorted({m.source for m in report.recovered})


def test_ranks_rebuild_a_lost_file(rank_pool: RankPool, tmp_path: Path) -> None:
    sources = rank_pool.run(save_and_lose, RANKS, str(tmp_path))
    assert {source for of_rank in sources for source in of_rank} == {"parity"}


def save_drifted(directory: str) -> str:
    rank = torch.distributed.get_rank()
    drifted = state(rank, 1.0)
    assert drifted["copy"].data is not None
    drifted["copy"].data[0] += rank == 3
    with pytest.raises(MismatchError) as caught:
        save(drifted, directory, options=SaveOptions(compare_replicas=Policy.ERROR))
    return str(caught.value)


def test_ranks_agree_which_of_them_has_drifted(rank_pool: RankPool, tmp_path: Path) -> None:
    (message,) = set(rank_pool.run(save_drifted, RANKS, str(tmp_path)))
    assert "'copy' [0:3]: rank 3 differs from the majority, ranks 0, 1, 2" in message


def go_back(root: str) -> tuple[int, float, int]:
    rank = torch.distributed.get_rank()
    with Checkpointer(
        root,
        async_save=True,
        save_options=SaveOptions(parity=2, compare_replicas=Policy.WARN),
        load_options=LoadOptions(on_corrupt="fallback"),
    ) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state(rank, float(step)))
        checkpointer.wait()
        torch.distributed.barrier()
        if rank == 0:
            shutil.rmtree(f"{root}/iter_0000002/data")
        torch.distributed.barrier()
        loaded = checkpointer.load(state(rank, 0.0))
        assert checkpointer.last_load is not None
        protected = len(list(Path(root).glob("iter_*/parity/*")))
        return checkpointer.last_load.step, float(loaded["rows"][1]) - rank, protected


def test_ranks_go_back_to_one_step_of_those_they_saved_asynchronously(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    assert rank_pool.run(go_back, RANKS, str(tmp_path)) == [(1, 1.0, 4)] * RANKS
