"""Megatron-Core 0.16.1 itself with megackpt: our save strategy in its save, its loads, its rerun state.

The state of its rerun state machine holds named tuples.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megackpt
from megackpt import ShardedTensor, save
from megackpt.comm import SingleProcess
from megackpt.errors import UnsupportedError
from megackpt.formats.torch_dist import TorchDistSaveStrategy
from megackpt.storage import open_store
from megackpt.testing.identical import difference
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

    from megackpt.contrib.megatron_strategy import MegackptSaveStrategy

    assert dist_checkpointing.__file__.endswith("megatron/core/dist_checkpointing/__init__.py")
    rank = dist.get_rank()
    os.makedirs(path, exist_ok=True)
    dist.barrier()
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
@pytest.mark.parametrize(("wraps", "passes_common"), [(False, False), (True, False), (False, True)])
def test_megatron_core_saves_by_our_strategy_and_loads_by_its_own(
    core_ranks: RankPool, tmp_path: Path, wraps: bool, passes_common: bool
) -> None:
    results = core_ranks.run(save_and_load, RANKS, str(tmp_path / "step"), wraps, passes_common)
    assert results == [[{"seed": rank}, 8, 7] for rank in range(RANKS)]
    stored = megackpt.load_plain_tensors(tmp_path / "step")
    assert torch.equal(stored["w"], WEIGHT)
    assert stored["layers"].shape == (2, 2, 5)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_megatron_loads_it_strictly_where_no_values_are_listed(tmp_path: Path) -> None:
    theirs = pytest.importorskip("megatron.core.dist_checkpointing")

    def wanted() -> dict[str, Any]:
        return {"w": theirs.ShardedTensor.from_rank_offsets("w", torch.zeros(3))}

    state = {"step": 7, "w": ShardedTensor.from_rank_offsets("w", torch.arange(3.0))}
    save(state, tmp_path / "both", "torch_dist")
    save(state, tmp_path / "megatron", TorchDistSaveStrategy(values_for_dcp=False))
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        for name, strict in [("both", "assume_ok_unexpected"), ("megatron", "raise_all")]:
            loaded = theirs.load(wanted(), str(tmp_path / name), strict=strict)
            assert loaded["step"] == 7
            assert torch.equal(loaded["w"], torch.arange(3.0))
        with pytest.raises(ValueError, match="unpack"):  # as the documents say
            theirs.load(wanted(), str(tmp_path / "both"), strict="raise_all")
    finally:
        dist.destroy_process_group()


_KEPT = (
    "mode", "state", "current_iteration", "rerun_requested", "checkpoint_requested", "failed_validation_call",
    "initial_result", "suspicious_node", "suspicious_device", "data_iterator_checkpoints",
    "large_value_counts", "max_values",
)  # fmt: skip


def failed_machine(rerun: Any) -> tuple[Any, Any]:
    """A machine and its data; one rank has found a result to check on another device."""
    rank = dist.get_rank()
    machine = rerun.RerunStateMachine(mode=rerun.RerunMode.VALIDATE_RESULTS)
    machine.state = rerun.RerunState.WILL_RERUN_FROM_CHECKPOINT
    machine.current_iteration = 11
    if rank == 1:
        machine.checkpoint_requested = True
        machine.failed_validation_call = rerun.Call(rerun.Caller("loss is nan", rank), 2)
        machine.initial_result = torch.tensor(float("nan"))
        machine.suspicious_node, machine.suspicious_device = "node7", 3
    machine.large_value_counts, machine.max_values = {"loss": rank}, {"loss": 3.5 + rank}
    iterator = rerun.RerunDataIterator(iter(()))
    iterator.saved_microbatches = [{"tokens": torch.arange(4) + rank}]
    machine.data_iterator_checkpoints = [iterator.state_dict()]
    return machine, iterator


def save_and_resume(root: Path) -> None:
    import megatron.core.rerun_state_machine as rerun

    machine, iterator = failed_machine(rerun)
    call = rerun.Call(rerun.Caller("earlier", 0), 1)
    for strategy in ("megackpt", "torch_dist"):
        state = {
            "iteration": 11,
            "failures": {call.caller: [call]},
            "rerun_state_machine": machine.state_dict(iterator, "torch_dist"),
        }
        megackpt.save(state, str(root / strategy), strategy)
    if dist.get_rank() == 0:
        for source, target in (("megackpt", "torch_dist"), ("torch_dist", "megackpt")):
            stores = open_store(str(root / source)), open_store(str(root / f"to_{target}"))
            megackpt.convert(*stores, target, group=SingleProcess())
            assert megackpt.diff(*stores).is_equal
    dist.barrier()
    for name in ("megackpt", "torch_dist", "to_megackpt", "to_torch_dist"):
        again = rerun.RerunStateMachine(mode=rerun.RerunMode.VALIDATE_RESULTS)
        request = {"rerun_state_machine": again.state_dict(iterator, "torch_dist", force=True)}
        loaded = megackpt.load(request, str(root / name))
        assert difference(loaded["failures"], {call.caller: [call]}) is None
        assert again.validate_state_dict(loaded["rerun_state_machine"])
        again.load_state_dict(loaded["rerun_state_machine"])
        for attribute in _KEPT:
            first, second = getattr(machine, attribute), getattr(again, attribute)
            assert difference(first, second) is None, (name, attribute)


def test_a_state_with_a_failed_validation_comes_back_equal(tmp_path: Path, core_ranks: RankPool) -> None:
    core_ranks.run(save_and_resume, 2, tmp_path)
