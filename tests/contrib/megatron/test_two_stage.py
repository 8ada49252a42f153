"""The steps by which one data-parallel replica reads and broadcasts, by Megatron-Core's names."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megackpt
from megackpt.compat.megatron import dist_checkpointing
from megackpt.compat.megatron.dist_checkpointing import mapping
from megackpt.compat.megatron.dist_checkpointing.dict_utils import nested_values
from megackpt.compat.megatron.dist_checkpointing.strategies import two_stage
from megackpt.testing.ranks import RankPool

S = mapping.ShardedTensor


def state(fill: float) -> dict[str, Any]:
    """Ranks 0 and 2, and 1 and 3, hold the same half of `w`, and share the flat ranges of `flat`."""
    tp, dp = dist.get_rank() % 2, dist.get_rank() // 2
    flat = slice(0, 5) if dp == 0 else slice(5, 12)
    return {
        "layers": [{"w": S.from_rank_offsets("w", torch.full((3, 4), fill + tp), (0, tp, 2), replica_id=dp)}],
        "half": S.from_rank_offsets("half", torch.full((2,), fill).bfloat16(), replica_id=dist.get_rank()),
        "scalar": S.from_rank_offsets("scalar", torch.tensor(fill), replica_id=dist.get_rank()),
        "flat": S.from_rank_offsets_flat(
            "flat", (fill * torch.arange(12.0) + tp)[flat], (3, 4), (0, tp, 2), flattened_range=flat
        ),
        "rng": mapping.ShardedObject("rng", {"tp": tp}, (2,), (tp,), replica_id=dp),
    }


class Counted(two_stage.TwoStageDataParallelLoadShardedStrategy):
    """Replaces one step, so that all of them are taken."""

    read: list[str]

    def load_tensor_from_storage(self, checkpoint_dir: Any, ten_meta: Any) -> Any:
        self.read.append(ten_meta.sharded_tensor_no_data.key)
        if self.read[-1] == getattr(self, "failing", None):
            raise OSError("the disk is gone")
        return super().load_tensor_from_storage(checkpoint_dir, ten_meta)


def take_the_steps(path: str) -> list[str]:
    rank = dist.get_rank()
    groups = [dist.new_group([tp, tp + 2]) for tp in range(2)]
    group, dp = groups[rank % 2], rank // 2
    expected = state(3.0)
    dist_checkpointing.save(state(3.0), path)

    strategy = two_stage.TwoStageDataParallelLoadShardedStrategy(group)
    assert (strategy.dp_group_ranks, strategy.dp_group_rank) == ((rank % 2, rank % 2 + 2), dp)
    wanted = {key: value for key, value in state(0.0).items() if key != "rng"}
    filled = wanted["layers"][0]["w"].data
    plan = strategy._build_load_plan(wanted)
    assert [meta.sharded_tensor_no_data.key for meta in plan] == ["flat", "half", "scalar", "w"]
    assert [(meta.global_rank, meta.dist_group_rank) for meta in plan] == [(rank % 2, 0)] * 4
    assert [meta.data_size for meta in plan] == [48, 4, 4, 48]
    assert all(meta.dist_group_ranks == strategy.dp_group_ranks for meta in plan)
    whole = strategy.load_tensor_from_storage(path, plan[0])
    assert torch.equal(whole, (3 * torch.arange(12.0) + rank % 2).reshape(3, 4)), "of a flat range all"
    strategy._exchange_loaded_tensors(plan, wanted, path)
    check(wanted, expected)
    assert wanted["layers"][0]["w"] is filled, "filled in place"

    counted: Any = Counted(group)
    counted.read = []
    loaded = dist_checkpointing.load(state(0.0), path, counted)
    check(loaded, expected)
    assert loaded["rng"] == {"tp": rank % 2}
    assert counted.read == (["flat", "half", "scalar", "w"] if dp == 0 else []), "one of two ranks reads"
    counted.failing = "half"
    with pytest.raises(megackpt.CheckpointError, match="the disk is gone"):
        dist_checkpointing.load(state(0.0), path, counted)

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    two_stage.logger.addHandler(handler)
    two_stage.logger.setLevel(logging.INFO)
    if rank == 0:
        two_stage.timers["only on rank 0"].append(2.0)
    counted.summarize_load_times()
    two_stage.logger.removeHandler(handler)
    assert two_stage.timers["load"][0] > 0.0
    two_stage.timers.clear()
    return lines


def check(loaded: Any, expected: Any) -> None:
    for key in ("half", "scalar", "flat"):
        assert torch.equal(loaded[key], expected[key].data), key
    assert torch.equal(loaded["layers"][0]["w"], expected["layers"][0]["w"].data)
    assert not [leaf for leaf in nested_values(loaded) if isinstance(leaf, S)]


def test_the_steps_of_a_load_can_be_taken_by_themselves(rank_pool: RankPool, tmp_path: Path) -> None:
    lines = rank_pool.run(take_the_steps, 4, str(tmp_path / "c"))
    names = [line.split(":")[0] for line in lines[0][1:]]
    assert set(names) >= {"load", "_build_load_plan", "_exchange_loaded_tensors", "deduplicate_chunks"}
    assert "only on rank 0: max 2.0000 s, avg 0.5000 s" in lines[0]
    assert [len(other) for other in lines[1:]] == [1, 1, 1]


def test_a_timer_counts_calls_that_return(caplog: pytest.LogCaptureFixture) -> None:
    @two_stage.timed(verbose=True)
    def measured(fails: bool) -> int:
        """Do it."""
        if fails:
            raise ValueError("no")
        return 7

    two_stage.timers.clear()
    with caplog.at_level(logging.DEBUG):
        assert measured(False) == 7
    with pytest.raises(ValueError, match="no"):
        measured(True)
    assert list(two_stage.timers) == ["measured"]
    assert len(two_stage.timers.pop("measured")) == 1
    assert caplog.text.count("measured took") == 1
    assert measured.__doc__ == "Do it."
