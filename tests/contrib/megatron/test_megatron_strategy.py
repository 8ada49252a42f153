"""Our save strategy, given to the `dist_checkpointing.save` of Megatron-Core 0.16.1 itself."""

from __future__ import annotations

import argparse
import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt.errors import UnsupportedError
from megackpt.testing.ranks import RankPool
from tests.support.effort import with_all

RANKS = 2
WEIGHT = torch.arange(24.0).reshape(8, 3)


def request_of(rank: int, *, fill: bool) -> dict[str, Any]:
    """Rows of a weight, a layer of two, a replica, an object of each rank and common state."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

    of_array, mask = ShardedTensor.from_rank_offsets, 1.0 if fill else 0.0
    return {
        "w": of_array("w", WEIGHT.chunk(RANKS)[rank] * mask, (0, rank, RANKS)),
        "layer": of_array(
            "layers", torch.full((2, 5), rank + 1.0) * mask, (0, rank, RANKS), prepend_axis_num=1
        ),
        "same": of_array("same", torch.ones(3) * mask, replica_id=rank),
        "rng": ShardedObject("rng", {"seed": rank} if fill else None, (RANKS,), (rank,)),
        "args": argparse.Namespace(hidden_size=8),
        "iteration": 7,
    }


def save_and_load(path: str, wraps: bool, passes_common: bool) -> list[Any]:
    """Save by our strategy and load by Megatron-Core, both through its own functions."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

    from megackpt.integrations.megatron_strategy import MegackptSaveStrategy

    assert dist_checkpointing.__file__.endswith("megatron/core/dist_checkpointing/__init__.py")
    rank = torch.distributed.get_rank()
    os.makedirs(path, exist_ok=True)
    torch.distributed.barrier()
    strategy = MegackptSaveStrategy()
    # Megatron-Core's own `save` would call it, so what is saved below is saved by megackpt.
    with pytest.raises(UnsupportedError, match=r"saves synchronously\. For asynchronous saves, call"):
        strategy.async_save({}, path)
    if passes_common:  # as newer versions do
        state = {key: value for key, value in request_of(rank, fill=True).items() if hasattr(value, "key")}
        common = {"iteration": 7, "args": argparse.Namespace(hidden_size=8)}
        state["common_state"] = ShardedObject("common_state", common, (1,), (0,), replica_id=rank)
        strategy.save(state, path)
    else:
        save_strategy = FullyParallelSaveStrategyWrapper(strategy) if wraps else strategy
        dist_checkpointing.save(request_of(rank, fill=True), path, save_strategy)
    loaded = dist_checkpointing.load(request_of(rank, fill=False), path)
    expected = request_of(rank, fill=True)
    for key in ("w", "layer", "same"):
        assert torch.equal(loaded[key], expected[key].data), key
    return [loaded["rng"], loaded["args"].hidden_size, loaded["iteration"]]


@with_all("Megatron-Core is imported on each rank")
@pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="Megatron-Core is not installed: .[megatron]"
)
@pytest.mark.parametrize(("wraps", "passes_common"), [(False, False), (True, False), (False, True)])
def test_megatron_core_saves_by_our_strategy_and_loads_by_its_own(
    rank_pool: RankPool, tmp_path: Path, wraps: bool, passes_common: bool
) -> None:
    results = rank_pool.run(save_and_load, RANKS, str(tmp_path / "step"), wraps, passes_common)
    assert results == [[{"seed": rank}, 8, 7] for rank in range(RANKS)]
    stored = megackpt.load_plain_tensors(tmp_path / "step")
    assert torch.equal(stored["w"], WEIGHT)
    assert stored["layers"].shape == (2, 2, 5)
