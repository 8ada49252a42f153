"""Random states of CUDA devices, of torch's own generators and of Megatron's tracker, go on bit for bit."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from megackpt import load, save
from megackpt.training_state import RankPosition, RngState, Seeds, TrackedRng

pytestmark = pytest.mark.gpu


def tracker_of(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = pytest.importorskip("megatron.core.tensor_parallel.random")
    tracker = module.CudaRNGStatesTracker()
    tracker.add(name, 17)
    return tracker


def draws(tracker: Any) -> list[Any]:
    devices = [torch.rand(3, device=f"cuda:{n}").tolist() for n in range(torch.cuda.device_count())]
    with tracker.fork("model-parallel-rng"):
        return [*devices, torch.rand(3, device="cuda").tolist()]


def test_streams_of_all_devices_and_of_the_tracker_go_on(tmp_path: Path) -> None:
    tracker = tracker_of("model-parallel-rng")
    rng = RngState.of_process(RankPosition.single_process(), seed=1, tracker=tracker)
    draws(tracker)
    save(rng.sharded_state_dict(), tmp_path / "c")
    expected = draws(tracker)
    draws(tracker)
    rng.resume(load(rng.sharded_state_dict(), tmp_path / "c"), step=1)
    assert draws(tracker) == expected


def test_fresh_states_of_the_tracker_are_those_of_cuda_generators() -> None:
    tracker = tracker_of("model-parallel-rng")
    before = tracker.get_states()["model-parallel-rng"]
    TrackedRng(tracker).reseed(Seeds(base=1, step=3, position=RankPosition.single_process()))
    fresh = tracker.get_states()["model-parallel-rng"]
    assert fresh.shape == before.shape
    assert not torch.equal(fresh, before)
    assert len(draws(tracker)[-1]) == 3
