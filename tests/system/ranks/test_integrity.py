"""Parity, fallback, the comparison of replicas, and equality by digests, on real processes."""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megackpt import (
    Checkpointer,
    LoadOptions,
    MismatchError,
    SaveOptions,
    ShardedObject,
    ShardedTensor,
    diff,
    load,
    load_with_report,
    save,
)
from megackpt.comm import TorchGroup
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
    rank = dist.get_rank()
    save(state(rank, 1.0), directory, options=SaveOptions(parity=2, compare_replicas=Policy.ERROR))
    dist.barrier()
    if rank == 0:
        (Path(directory) / "data" / min(f.name for f in (Path(directory) / "data").iterdir())).unlink()
    dist.barrier()
    loaded, report = load_with_report(
        state(rank, 0.0), directory, options=LoadOptions(on_corrupt="fallback", exchange="all_to_all")
    )
    assert torch.equal(loaded["rows"], state(rank, 1.0)["rows"].data)
    return sorted({m.source for m in report.recovered})


def test_ranks_rebuild_a_lost_file(rank_pool: RankPool, tmp_path: Path) -> None:
    sources = rank_pool.run(save_and_lose, RANKS, str(tmp_path))
    assert {source for of_rank in sources for source in of_rank} == {"parity"}


def save_with_stream(checkpointer: Checkpointer, step: int, *, seed: int = 7, drift: float = 0.0) -> None:
    """Save an object and a tensor, of which all ranks have a copy."""
    rank = dist.get_rank()
    stream = ShardedObject("stream", {"seed": seed}, (1,), (0,), replica_id=rank)
    saved = state(rank, 1.0)
    assert saved["copy"].data is not None
    saved["copy"].data += drift
    checkpointer.save(step, {**saved, "stream": stream})


def save_until_found(root: str, asynchronous: bool) -> tuple[str, tuple[int, ...]]:
    is_last = dist.get_rank() == RANKS - 1
    with Checkpointer(root, async_save=asynchronous) as checkpointer:
        for step in (1, 2, 3):
            save_with_stream(checkpointer, step)
        with pytest.raises(MismatchError) as of_object:
            save_with_stream(checkpointer, 4, seed=7 + is_last)
        with pytest.raises(MismatchError) as of_tensor:
            save_with_stream(checkpointer, 5, drift=float(is_last))
        save_with_stream(checkpointer, 6)
        checkpointer.wait()
        return f"{of_object.value}\n{of_tensor.value}", checkpointer.steps()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_ranks_find_copies_that_differ_in_any_save(
    rank_pool: RankPool, tmp_path: Path, asynchronous: bool
) -> None:
    ((message, steps),) = set(rank_pool.run(save_until_found, RANKS, str(tmp_path), asynchronous))
    assert "'stream' [0:1]: rank 3 differs from the majority, ranks 0, 1, 2" in message
    assert "'copy' [0:3]: rank 3 differs from the majority, ranks 0, 1, 2" in message
    assert steps == (1, 2, 3, 6)


def collectives_of_saves(root: str, asynchronous: bool, policy: Policy) -> list[int]:
    group = TorchGroup(timeout_s=60)
    counts = []
    options = SaveOptions(sample_replicas=policy)
    with Checkpointer(root, group=group, async_save=asynchronous, save_options=options) as checkpointer:
        for step in (1, 2, 3):
            save_with_stream(checkpointer, step)
            counts.append(group._collectives)
    return [later - earlier for earlier, later in pairwise(counts)]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_comparison_of_copies_takes_no_collective(
    rank_pool: RankPool, tmp_path: Path, asynchronous: bool
) -> None:
    counts = [
        rank_pool.run(collectives_of_saves, RANKS, str(tmp_path / policy.value), asynchronous, policy)
        for policy in (Policy.ERROR, Policy.IGNORE)
    ]
    assert counts[0] == counts[1]


def go_back(root: str) -> tuple[int, float, int]:
    rank = dist.get_rank()
    with Checkpointer(
        root,
        async_save=True,
        save_options=SaveOptions(parity=2, compare_replicas=Policy.WARN),
        load_options=LoadOptions(on_corrupt="fallback"),
    ) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state(rank, float(step)))
        checkpointer.wait()
        dist.barrier()
        if rank == 0:
            shutil.rmtree(f"{root}/iter_0000002/data")
        dist.barrier()
        loaded = checkpointer.load(state(rank, 0.0))
        assert checkpointer.last_load is not None
        protected = len(list(Path(root).glob("iter_*/parity/*")))
        return checkpointer.last_load.step, float(loaded["rows"][1]) - rank, protected


def test_ranks_go_back_to_one_step_of_those_they_saved_asynchronously(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    assert rank_pool.run(go_back, RANKS, str(tmp_path)) == [(1, 1.0, 4)] * RANKS


WITH_DIGESTS = SaveOptions(array_digests=True)
WEIGHT = torch.arange(96 * 84).reshape(96, 84).bfloat16()
MASTER = torch.arange(96 * 84, dtype=torch.float32).reshape(96, 84) / 7


def digest_state(*, filled: bool) -> dict[str, ShardedTensor]:
    """Columns of a weight, a flat range of its master copy, and a copy of a bias, of this rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    columns = WEIGHT.chunk(ranks, dim=1)[rank].clone()
    begin, end = (MASTER.numel() * i // ranks + (i % ranks) for i in (rank, rank + 1))
    flat = MASTER.flatten()[begin:end].clone()
    bias = torch.linspace(0, 1, 50)
    for data in () if filled else (columns, flat, bias):
        data.zero_()
    return {
        "weight": ShardedTensor.from_rank_offsets("weight", columns, (1, rank, ranks)),
        "master": ShardedTensor.from_rank_offsets_flat(
            "master", flat, tuple(MASTER.shape), flattened_range=slice(begin, end)
        ),
        "bias": ShardedTensor.from_rank_offsets("bias", bias, replica_id=rank),
    }


def save_step(root: Path) -> None:
    with Checkpointer(
        root, async_save=True, verify_after_save=True, save_options=WITH_DIGESTS
    ) as checkpointer:
        checkpointer.save(1, digest_state(filled=True))


def move(root: Path) -> None:
    empty = digest_state(filled=False)
    load(empty, root / "iter_0000001")
    with Checkpointer(root, save_options=WITH_DIGESTS) as checkpointer:
        checkpointer.save(2, empty)


def test_a_checkpoint_that_moved_to_another_layout_is_proved_equal_without_being_read(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    pytest.importorskip("awscrt.checksums", reason="the extra digests is not installed")
    rank_pool.run(save_step, 4, tmp_path)
    rank_pool.run(move, 3, tmp_path)
    steps = [tmp_path / f"iter_000000{step}" for step in (1, 2)]
    for step in steps:
        shutil.rmtree(step / "data")
    difference = diff(*steps)
    assert difference.is_equal
    assert (difference.compared, difference.by_digest, difference.nbytes) == (3, 3, 0)
    assert difference.by_digest_nbytes == WEIGHT.nbytes + MASTER.nbytes + 200
