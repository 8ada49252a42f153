"""Declaring and planning a save of flattened optimizer state moves nothing that grows with the state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import megackpt
from megackpt.bench.collectives import COLLECTIVE_METHODS, MESSAGE_METHODS, observed
from megackpt.formats.native import NativeSaveStrategy
from megackpt.optim import DistributedOptimizer
from megackpt.parallel import ParallelGroups, ParallelLayout
from megackpt.testing.ranks import RankPool
from models import GPT, GPTConfig


class Traffic:
    """Counts every call of a process group and the bytes of the tensors that it is given."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.nbytes = 0
        self._observed = observed(COLLECTIVE_METHODS + MESSAGE_METHODS, self._note)

    def __enter__(self) -> Traffic:
        self._observed.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._observed.__exit__(*error)

    def _note(self, name: str, args: tuple[Any, ...]) -> None:
        self.calls.append(name)
        self.nbytes += _tensor_bytes(args)


def _tensor_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, (list, tuple)):
        return sum(_tensor_bytes(v) for v in value)
    return 0


class StopAfterPlanning(NativeSaveStrategy):
    """Notes the traffic at the moment the first byte would be written."""

    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic
        self.at_end_of_planning: tuple[list[str], int] | None = None

    def write_chunks(self, *args: Any, **kwargs: Any) -> bytes:
        self.at_end_of_planning = (list(self.traffic.calls), self.traffic.nbytes)
        return super().write_chunks(*args, **kwargs)


def traffic_of_a_save(hidden_size: int, directory: Path) -> tuple[int, list[str], list[str], int]:
    """Return bytes of state, collectives while declaring, collectives and bytes until the end of planning."""
    groups = ParallelGroups.create(ParallelLayout(tp=2, dp=2))
    config = GPTConfig(
        vocab_size=64,
        hidden_size=hidden_size,
        num_layers=2,
        num_heads=4,
        seq_length=8,
        params_dtype=torch.bfloat16,
    )
    torch.manual_seed(0)  # replicas are equal
    model = GPT(config, groups)
    optimizer = DistributedOptimizer(model.parameters(), lambda g: torch.optim.AdamW(g), groups)
    megackpt.save({}, directory)  # makes the process group, once
    with Traffic() as traffic:
        sharded = model.sharded_state_dict()
        state = {"model": sharded, "optimizer": optimizer.sharded_state_dict(sharded)}
        declaring = list(traffic.calls)
        strategy = StopAfterPlanning(traffic)
        megackpt.save(state, directory, strategy)
    assert strategy.at_end_of_planning is not None
    state_bytes = sum(p.numel() for p in model.parameters()) * (2 + 12 // groups.dp.size)
    return (state_bytes, declaring, *strategy.at_end_of_planning)


PLANNING = [
    "alltoall_base",  # settings, digests, plans that are kept
    *("alltoall_base", "allgather"),  # digests of lists
    *("alltoall_base", "gather"),  # declarations
    *("alltoall_base", "scatter"),  # each rank's rows
]
"""Each begins with what it is and how long, in a message from each rank to each; what is short is in it."""


def calls_of_four_saves(directory: Path) -> list[tuple[list[str], list[str]]]:
    """Return collectives until the end of planning and after it, for saves of two structures in turn."""
    plans, counts = megackpt.PlanCache(), []
    megackpt.save({}, directory)  # makes the process group, once
    for number in range(4):
        rows = 2 + number % 2
        value = torch.full((rows,), float(number))
        shard = megackpt.ShardedTensor.from_rank_offsets(
            "w", value, (0, dist.get_rank(), dist.get_world_size())
        )
        noted = megackpt.ShardedObject("o", "x" * number, (1,), (0,), replica_id=dist.get_rank())
        with Traffic() as traffic:
            strategy = StopAfterPlanning(traffic)
            megackpt.save({"w": shard, "o": noted, "step": number}, directory, strategy, plans=plans)
        assert strategy.at_end_of_planning is not None
        planning = strategy.at_end_of_planning[0]
        counts.append((planning, traffic.calls[len(planning) :]))
    return counts


def test_planning_with_a_plan_that_is_kept_is_one_collective(rank_pool: RankPool, tmp_path: Path) -> None:
    short = [name for name in PLANNING if name != "gather"]
    once = ["alltoall_base"]
    writing = [*once, *once]  # all have written, and said what; rank 0 has committed
    for calls in rank_pool.run(calls_of_four_saves, 4, tmp_path / "c"):
        assert calls == [(short, writing), (short, writing), (once, writing), (once, writing)]


def test_declaring_and_planning_flat_state_moves_nothing_proportional_to_it(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    small = rank_pool.run(traffic_of_a_save, 4, 32, tmp_path / "c")
    large = rank_pool.run(traffic_of_a_save, 4, 512, tmp_path / "c")
    for (bytes_small, declaring, calls, moved_small), (bytes_large, _, calls_large, moved_large) in zip(
        small, large, strict=True
    ):
        print(f"state {bytes_small} B: {calls} {moved_small} B; state {bytes_large} B: {moved_large} B")
        assert declaring == []
        assert calls == calls_large == PLANNING
        assert bytes_large > 100 * bytes_small
        # Equal numbers of chunks give equally long tables, but for how parameters fall into shards.
        assert moved_large <= 1.2 * moved_small
        assert moved_large < bytes_large / 20
