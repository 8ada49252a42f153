"""The state of Megatron-Core's rerun state machine, which holds named tuples, comes back equal."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megackpt
from megackpt.comm import SingleProcess
from megackpt.storage import open_store
from megackpt.testing.identical import difference
from megackpt.testing.ranks import RankPool

_KEPT = (
    "mode", "state", "current_iteration", "rerun_requested", "checkpoint_requested", "failed_validation_call",
    "initial_result", "suspicious_node", "suspicious_device", "data_iterator_checkpoints",
    "large_value_counts", "max_values",
)  # fmt: skip


def failed_machine(rerun: Any) -> tuple[Any, Any]:
    """A machine, with its data, of which one rank has found a result to check on another device."""
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


def test_a_state_with_a_failed_validation_comes_back_equal(tmp_path: Path, rank_pool: RankPool) -> None:
    if (
        importlib.util.find_spec("megatron.core") is None
    ):  # an import here would allow classes in this process
        pytest.skip("megatron-core is not installed")
    rank_pool.run(save_and_resume, 2, tmp_path)
