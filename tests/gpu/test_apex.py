"""NVIDIA Apex with its own kernels, on a CUDA device: an optimizer that is loaded goes on bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import Parameter

from megackpt import ShardedTensor, load, save
from megackpt.contrib.apex import load_sharded_state_dict, sharded_state_dict

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA device on this machine", allow_module_level=True)
pytest.importorskip("amp_C", reason="the kernels of Apex are not built")
apex: Any = pytest.importorskip("apex.optimizers")

SHAPES = [(64, 48), (48,), (7, 9, 11), (3000,)]
Build = Callable[[Any], Any]


def capturable(groups: list[dict[str, Any]]) -> Any:
    """Return a FusedAdam with masters, which wants rates as tensors."""
    with_tensors = [{**group, "lr": torch.tensor(group["lr"])} for group in groups]
    return apex.FusedAdam(with_tensors, capturable=True, master_weights=True)


# Optimizer, and dtype of the parameters.
WHOLE: dict[str, tuple[Build, torch.dtype]] = {
    "FusedAdam fp32": (apex.FusedAdam, torch.float32),
    "FusedAdam bf16": (apex.FusedAdam, torch.bfloat16),
    "FusedAdam masters": (capturable, torch.float16),
    "FusedAdam masters bf16": (capturable, torch.bfloat16),
    "FusedAdagrad": (apex.FusedAdagrad, torch.float32),
    "FusedSGD": (partial(apex.FusedSGD, lr=0.1, momentum=0.9, dampening=0.5), torch.float32),
    "FusedLAMB": (apex.FusedLAMB, torch.float32),
    "FusedNovoGrad": (apex.FusedNovoGrad, torch.float32),
    "FusedMixedPrecisionLamb": (
        partial(apex.FusedMixedPrecisionLamb, reduced_precision_dtype=torch.bfloat16),
        torch.bfloat16,
    ),
}
DISTRIBUTED: dict[str, tuple[dict[str, Any], torch.dtype]] = {
    "float32 masters": ({}, torch.bfloat16),
    "remainders": (
        {"store_params": False, "store_param_remainders": True, "param_sync_dtype": torch.bfloat16},
        torch.bfloat16,
    ),
    "no masters": ({"store_params": False}, torch.float32),
    "bfloat16 states": ({"dtype": torch.bfloat16}, torch.bfloat16),
    "scaled states": ({"dtype": torch.float16, "with_scaled_states": True}, torch.bfloat16),
}


class Run:
    """Parameters of a seed, and their optimizer."""

    def __init__(self, build: Build, dtype: torch.dtype, *, seed: int) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)
        self.params = [
            Parameter(torch.randn(shape, generator=generator, device="cuda").to(dtype)) for shape in SHAPES
        ]
        rates = (0.01, 0.003)
        halves = (self.params[:2], self.params[2:])
        self.optimizer = build([{"params": half, "lr": lr} for half, lr in zip(halves, rates, strict=True)])

    def train(self, steps: range) -> None:
        for step in steps:
            generator = torch.Generator("cuda").manual_seed(100 + step)
            self.optimizer.zero_grad()
            for param in self.params:
                grad = torch.randn(param.shape, generator=generator, device="cuda").to(param.dtype)
                (param * grad).sum().backward()  # Apex listens to autograd
            self.optimizer.step()

    def state(self, *, is_loading: bool) -> dict[str, Any]:
        model = {
            str(number): ShardedTensor.from_rank_offsets(f"p{number}", param, replica_id=(0, 0, 0))
            for number, param in enumerate(self.params)
        }
        return {"model": model, "optimizer": sharded_state_dict(self.optimizer, model, is_loading=is_loading)}


def goes_on(build: Build, dtype: torch.dtype, directory: Path) -> None:
    """Save an optimizer after three steps, load it into a fresh one, and compare two steps of both."""
    first, second = (Run(build, dtype, seed=seed) for seed in (1, 2))
    first.train(range(3))
    save(first.state(is_loading=False), directory)
    loaded = load(second.state(is_loading=True), directory)
    load_sharded_state_dict(second.optimizer, loaded["optimizer"])
    for step in (3, 4):
        for run in (first, second):
            run.train(range(step, step + 1))
        for number, (expected, actual) in enumerate(zip(first.params, second.params, strict=True)):
            assert torch.equal(expected, actual), f"parameter {number} after step {step}"


@pytest.mark.parametrize("name", WHOLE)
def test_an_optimizer_that_is_loaded_goes_on_bit_for_bit(tmp_path: Path, name: str) -> None:
    goes_on(*WHOLE[name], tmp_path / "c")


@pytest.fixture
def nccl(tmp_path: Path) -> Iterator[None]:
    """A group of this process alone."""
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("nccl")
@pytest.mark.parametrize("name", DISTRIBUTED)
def test_a_distributed_optimizer_that_is_loaded_goes_on_bit_for_bit(tmp_path: Path, name: str) -> None:
    module: Any = pytest.importorskip("apex.contrib.optimizers.distributed_fused_adam")
    options, dtype = DISTRIBUTED[name]
    goes_on(partial(module.DistributedFusedAdam, **options), dtype, tmp_path / "c")
