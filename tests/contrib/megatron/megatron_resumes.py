"""Optimizers of Megatron-Core that are resumed on two ranks, over megackpt: what differs afterwards.

    megatron_resumes.py FOLDER RESULTS.json [FOLDER_OF_TRANSFORMER_ENGINE]

as torch.distributed.run starts it. With Transformer Engine the distributed optimizer has its FusedAdam, in
each form of states that Megatron-Core can ask for; without it the optimizers are Muon's. Classes are the real
ones, on torch in place of kernels; `stand_for_emerging_optimizers` gives Muon its base class.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.contrib.megatron.megatron_stand_ins import answer, stand_for_emerging_optimizers
from tests.system.interop.jobs import Job
from tests.system.interop.megatron_peer import build_model, build_optimizer, parts_of, start

stand_for_emerging_optimizers()
start(["--megackpt"])  # before Megatron-Core is imported

from megatron.core import dist_checkpointing, distributed, optimizer, parallel_state  # noqa: E402, F401
from megatron.core.models.gpt import gpt_layer_specs, gpt_model  # noqa: E402, F401
from megatron.core.optimizer import (  # noqa: E402
    distrib_optimizer,
    layer_wise_optimizer,
    muon,
    optimizer_config,
)

import megackpt  # noqa: E402
from megackpt.contrib import megatron  # noqa: E402

HALF = {"exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.float16}
FORMS_OF_FUSED_ADAM: dict[str, dict[str, Any]] = {
    "remainders": {},  # the default of Megatron-Core
    "float32": {"store_param_remainders": False},
    "float16 moments": {**HALF, "store_param_remainders": False},
    "float8 moments, remainders": {**HALF, "exp_avg_dtype": torch.uint8},
    "float16 masters": {"main_params_dtype": torch.float16},
}
FORMS_OF_MUON = {"muon": False, "muon, layer-wise": True}
METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}
OptimizerConfig = optimizer.OptimizerConfig
layer_wise = layer_wise_optimizer.LayerWiseDistributedOptimizer
layer_wise.allgather_params = layer_wise.broadcast_params  # gloo gathers only tensors of one size


def use_fused_adam(folder: str) -> AbstractContextManager[None]:
    """Let Megatron-Core make Transformer Engine's optimizer; return where its kernels are torch's."""
    sys.path.append(folder)  # Megatron-Core, imported without it, calls no kernel
    fused = importlib.import_module("tests.contrib.transformer_engine.test_transformer_engine_fused_adam")
    optimizer.Adam, distrib_optimizer.Adam = fused.make, fused.te_optimizers.FusedAdam
    optimizer.is_te_min_version = optimizer_config.is_te_min_version = lambda *_, **__: True
    kernels: AbstractContextManager[None] = fused.cpu_for_cuda()
    return kernels


class Rank:
    """One rank's model and optimizer; those of another seed have other weights."""

    def __init__(self, form: str, *, tp: int = 1, seed: int = 5) -> None:
        job = Job("write", "muon" if form in FORMS_OF_MUON else "distopt", "", tp=tp)
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(tp)
        torch.manual_seed(seed)
        self.model = build_model(job)
        if form in FORMS_OF_MUON:
            config = OptimizerConfig(lr=0.1, bf16=True, params_dtype=torch.bfloat16, clip_grad=0.0)
            self.optimizer = muon.get_megatron_muon_optimizer(
                config, [self.model.wrapped], layer_wise_distributed_optimizer=FORMS_OF_MUON[form]
            )
            return
        options = {"use_precision_aware_optimizer": True, "clip_grad": 0.0, **FORMS_OF_FUSED_ADAM[form]}
        optimizer.OptimizerConfig = partial(OptimizerConfig, **options)
        self.optimizer = build_optimizer(job, self.model)

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        for param in self.model.wrapped.parameters():
            param.main_grad.copy_(torch.randn(param.shape, generator=generator))
        self.optimizer.step()

    def declare(self, *, is_loading: bool = False, gather: bool = False) -> dict[str, Any]:
        megatron.install(gather_optimizer=gather)
        model = self.model.sharded_state_dict()
        declared = self.optimizer.sharded_state_dict(model, is_loading, metadata=METADATA)
        return {"model": model, "optimizer": declared}

    def save(self, path: str, *, gather: bool = False) -> None:
        dist_checkpointing.save(self.declare(gather=gather), path, ("torch_dist", 1))

    def load(self, path: str) -> None:
        loaded = dist_checkpointing.load(self.declare(is_loading=True), path)
        self.model.load_state_dict(loaded["model"], strict=True)
        self.optimizer.load_state_dict(loaded["optimizer"])

    def values(self) -> list[Tensor]:
        """Return weights, steps, masters and moments as they are in memory."""
        values = list(self.model.wrapped.parameters())
        for inner in (part.optimizer for part in parts_of(self.optimizer)):
            for group in inner.param_groups:
                values += [torch.tensor(float(group.get("step", 0))), *group["params"]]
                for states in (inner.state.get(param, {}) for param in group["params"]):
                    values += [getattr(states[name], "_data", states[name]) for name in sorted(states)]
        return [value.detach().clone() for value in values]


def differing(first: list[Tensor], second: list[Tensor]) -> int:
    """Return how many values differ, of all ranks together. Collective."""
    count = torch.tensor(sum(not torch.equal(a, b) for a, b in zip(first, second, strict=True)))
    dist.all_reduce(count)
    return int(count)


def resume(form: str, folder: Path) -> dict[str, Any]:
    """Save after two steps; resume, take the third step, and load at another layout. Collective."""
    paths = {name: str(folder / f"{form}-{name}") for name in ("ranges", "gathered", "again")}
    rank = Rank(form, seed=1)
    rank.step(1)
    rank.step(2)
    rank.save(paths["ranges"])
    rank.save(paths["gathered"], gather=True)
    saved = rank.values()
    rank.step(3)
    resumed, other = Rank(form), Rank(form)
    answers: dict[str, Any] = {"other weights": differing(saved[:1], resumed.values()[:1])}
    for reader, name in ((resumed, "ranges"), (other, "gathered")):
        reader.load(paths[name])
        answers[f"read from {name}"] = differing(saved, reader.values())
    resumed.step(3)
    answers["third step"] = differing(rank.values(), resumed.values())
    if form != "muon, layer-wise":
        at_tp2 = Rank(form, tp=2)
        at_tp2.load(paths["ranges"])
        at_tp2.save(paths["again"])
        answers["equal after tp 2"] = megackpt.diff(paths["ranges"], paths["again"]).is_equal
    answers["equal to gathered"] = megackpt.diff(paths["ranges"], paths["gathered"]).is_equal
    return answers


def main(folder: Path) -> dict[str, Any]:
    """Resume each form; return the answers. Collective."""
    with use_fused_adam(sys.argv[3]) if sys.argv[3:] else nullcontext():
        forms = FORMS_OF_FUSED_ADAM if sys.argv[3:] else FORMS_OF_MUON
        return {form: resume(form, folder) for form in forms}


if __name__ == "__main__":
    answer(main)
