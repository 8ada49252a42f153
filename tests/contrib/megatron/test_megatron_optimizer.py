"""A run of Megatron-Core 0.16.1 goes on in our GPT and optimizers, which take its third step.

Megatron-Core trains two steps at TP2 x DP2 and saves; what it has after its own third step is what ours is
compared with. Gradients are given, so that only state and optimizers are compared. Moments are equal bit for
bit. Masters are not: what stands for Apex's FusedAdam rounds in another order than torch's AdamW.
"""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import megackpt
from megackpt import ShardedTensor
from megackpt.contrib import megatron
from megackpt.contrib.megatron.resuming import resume_from_megatron
from megackpt.entities import ShardedStateDict
from megackpt.errors import MapError
from megackpt.testing.ranks import RankPool
from megackpt.training.optim import (
    DistributedOptimizer,
    MixedPrecisionOptimizer,
    get_param_id_to_sharded_param_map,
    initialise_state,
    optim_state_to_sharding_state,
)
from megackpt.training.parallel import ModelChunks, ParallelGroups, ParallelLayout
from megackpt.training.parallel.attributes import is_marked
from megackpt.training.state import DataPosition, ScheduleState
from models import build_gpt
from models.megatron import megatron_state
from tests.contrib.megatron import megatron_world as world
from tests.contrib.megatron.megatron_world import Case, Layout
from tests.contrib.megatron.test_megatron_into_models import config_of
from tests.support.effort import sampled

BATCH, LR = 8, 1e-2
PATIENCE_S = 600.0  # a machine may be busy
ROUNDING = 1e-7  # relative to the largest value
SCHEDULE = {"max_lr": LR, "min_lr": 1e-3, "lr_warmup_steps": 2 * BATCH, "lr_decay_steps": 10 * BATCH}
GQA = Case("rmsnorm-swiglu-gqa-rope-untied")
TIED = Case("layernorm-gelu-learned-tied", norm="LayerNorm", tied=True, rope=False, swiglu=False)
MOE = Case("moe", experts=4)
DP2, PP2, TP2 = ParallelLayout(dp=2), ParallelLayout(pp=2), ParallelLayout(tp=2)


@dataclasses.dataclass(frozen=True)
class Run:
    """How Megatron-Core trains and saves.

    Attributes:
        case: the architecture.
        form: of the optimizer's state: `fully_reshardable`, `dp_reshardable`, or `whole` for an optimizer
            that is not distributed.
        dtype: of the weights.
        ep: expert parallelism, with tp 1; without experts tp is 2.
    """

    case: Case
    form: str = "fully_reshardable"
    dtype: torch.dtype = torch.bfloat16
    ep: int = 1

    def __str__(self) -> str:
        return f"{self.case.name}-{self.form}-{str(self.dtype).removeprefix('torch.')}"


def train_megatron(run: Run, folder: str, installed: bool) -> None:
    """Train three steps with Megatron-Core, and save after the second and the third. Collective."""
    from tests.contrib.megatron.megatron_stand_ins import CudaIsTheCpu, pretend

    if installed:
        megatron.install()
    if not getattr(CudaIsTheCpu, "is_entered", False):
        pretend()
        CudaIsTheCpu.is_entered = True  # type: ignore[attr-defined]
    layout = Layout(tp=2, world=4) if run.ep == 1 else Layout(ep=run.ep, world=4)
    model = world.build(run.case, layout, seed=1, installed=installed)
    from megatron.core import dist_checkpointing
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    world.fill(model.sharded_state_dict())
    is_bf16 = run.dtype is torch.bfloat16
    model.config.bf16, model.config.params_dtype = is_bf16, run.dtype
    distributed = run.form != "whole"
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=distributed)
    wrapped = DistributedDataParallel(model.config, ddp, model.to(run.dtype))
    options = {"use_distributed_optimizer": distributed, "bf16": is_bf16, "params_dtype": run.dtype}
    config = OptimizerConfig(
        optimizer="adam", lr=LR, min_lr=SCHEDULE["min_lr"], weight_decay=0.01, clip_grad=0.0, **options
    )
    optimizer = get_megatron_optimizer(config, [wrapped])
    decay = {"start_wd": 0.01, "end_wd": 0.01, "wd_incr_steps": 100, "wd_incr_style": "constant"}
    schedule = OptimizerParamScheduler(optimizer, init_lr=0.0, lr_decay_style="cosine", **SCHEDULE, **decay)
    schedule.step(BATCH)
    metadata = {"distrib_optim_sharding_type": run.form} if distributed else {}
    for step in (1, 2, 3):
        declared = model.sharded_state_dict()
        for entity in declared.values():
            if isinstance(getattr(entity, "data", None), torch.nn.Parameter):
                entity.data.main_grad.copy_(_gradient_of(entity, step))
        optimizer.step()
        schedule.step(BATCH)
        if step == 1:
            continue
        state = {
            "model": declared,
            "optimizer": optimizer.sharded_state_dict(declared, metadata=metadata),
            "opt_param_scheduler": schedule.state_dict(),
            "args": Namespace(consumed_train_samples=step * BATCH),
            "iteration": step,
        }
        path = Path(folder) / str(step)
        path.mkdir(parents=True, exist_ok=True)
        torch.distributed.barrier()
        with world.may_start_processes():
            dist_checkpointing.save(state, str(path))


def gradient(step: int, key: str, shape: tuple[int, ...]) -> Tensor:
    """Return the gradient of an array of Megatron-Core, in values that bfloat16 has."""
    return (0.01 * world.oracle(f"gradient {step} of {key}", shape)).bfloat16().float()


def _gradient_of(entity: Any, step: int) -> Tensor:
    """Return this rank's part of a gradient, in the shape of the parameter of Megatron-Core."""
    whole = torch.zeros(entity.data.shape)
    dtype = {"dtype": torch.float32} if hasattr(entity, "dtype") else {}
    for part in world.tensors_of({"": dataclasses.replace(entity, data=whole, **dtype)}):
        part.data.copy_(gradient(step, part.key, part.global_shape)[part.global_slice()])
    return whole


def build(run: Run, layout: ParallelLayout, kind: str, **changed: Any) -> tuple[ModelChunks, Any]:
    """Return our model and an optimizer with Megatron-Core's groups. Collective."""
    config = dataclasses.replace(config_of(run.case), params_dtype=run.dtype, **changed)
    groups = ParallelGroups.create(layout)
    model = build_gpt(config, groups)
    params = list(model.parameters())
    plain = [p for name, p in model.named_parameters() if p.ndim == 1 or name.endswith("bias")]
    others = [p for p in params if not any(p is q for q in plain)]
    decays = [{"params": others, "weight_decay": 0.5, "name": "decay"}]
    all_groups = [*decays, {"params": plain, "weight_decay": 0.0, "name": "plain"}]
    if kind == "torch":
        return model, torch.optim.AdamW(all_groups, lr=0.5)
    classes = {"distributed": DistributedOptimizer, "whole": MixedPrecisionOptimizer}
    return model, classes[kind](all_groups, lambda g: torch.optim.AdamW(g, lr=0.5), groups)


def declare(model: ModelChunks, optimizer: Any) -> ShardedStateDict:
    """Declare the state of an optimizer. Local."""
    state = model.sharded_state_dict()
    if not isinstance(optimizer, torch.optim.Optimizer):
        declared: ShardedStateDict = optimizer.sharded_state_dict(state)
        return declared
    initialise_state(optimizer)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    declared = optimizer.state_dict()
    optim_state_to_sharding_state(declared, get_param_id_to_sharded_param_map(state, params))
    return declared


def take_over(
    run: Run, layout: ParallelLayout, kind: str, folder: str, changed: dict[str, Any]
) -> dict[str, float]:
    """Go on from the second step and take the third; return the largest difference by state. Collective."""
    model, optimizer = build(run, layout, kind, **changed)
    path = f"{folder}/2"
    keys = megackpt.load_sharded_metadata(path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))  # whatever is not loaded shows
    if not isinstance(optimizer, torch.optim.Optimizer):
        optimizer.reload_model_params()
    declared = declare(model, optimizer)
    megackpt.load(megatron_state(model, keys, optimizer=declared), path)
    common = megackpt.load_common_state_dict(path)
    schedule, data = ScheduleState(SCHEDULE, when_different="checkpoint"), DataPosition({})
    progress = resume_from_megatron(optimizer, declared, common)
    schedule.resume({"fields": progress.schedule}, step=progress.iteration)
    data.consumed = progress.consumed_samples
    assert (progress.iteration, data.consumed, schedule.values["num_steps"]) == (2, 2 * BATCH, 3 * BATCH)

    _set_gradients(model, optimizer, f"{folder}/gradients")
    optimizer.step()
    again = declare(model, optimizer)
    request = megatron_state(model, keys, optimizer=again)
    stepped = {key: tensor.data.clone() for key, tensor in request.items()}
    megackpt.load(request, f"{folder}/3")
    worst: dict[str, float] = {}
    for key, tensor in request.items():
        kind = key.split(".")[2] if key.startswith("optimizer.") else "weights"
        largest = tensor.data.abs().max().clamp_min(1e-30)
        difference = float((tensor.data.float() - stepped[key].float()).abs().max() / largest)
        worst[kind] = max(worst.get(kind, 0.0), difference)
    return worst


@torch.no_grad()
def _set_gradients(model: ModelChunks, optimizer: Any, path: str) -> None:
    """Give each parameter its gradient, by the boxes of the parameter. Collective."""
    weights = [parameter.clone() for parameter in model.parameters()]
    megackpt.load(megatron_state(model, megackpt.load_sharded_metadata(path)), path)
    for parameter, weight in zip(model.parameters(), weights, strict=True):
        parameter.grad = parameter.clone()
        parameter.copy_(weight)
    if isinstance(optimizer, torch.optim.Optimizer):
        return
    groups = optimizer.groups
    for parameter in model.parameters():  # a step sums parts of the gradient, and each rank has all of it
        if is_marked(parameter, "is_duplicate"):
            parameter.grad.zero_()
        if is_marked(parameter, "sequence_parallel"):
            parameter.grad /= (groups.etp if is_marked(parameter, "expert_parallel") else groups.tp).size
        if is_marked(parameter, "expert_parallel"):
            parameter.grad *= groups.dp_cp.size // groups.edp.size


class Saved:
    """Runs of Megatron-Core, each trained once."""

    def __init__(self, root: Path) -> None:
        self.root, self.pools = root, (RankPool(), RankPool())  # without install(), and with

    def at(self, run: Run, installed: bool) -> str:
        """Return the folder of a run, with the checkpoints of two steps and the gradient of the third."""
        folder = self.root / f"{run}-{installed}"
        if not folder.exists():
            self.pools[installed].run(train_megatron, 4, run, str(folder), installed, timeout_s=PATIENCE_S)
            stored = megackpt.load_sharded_metadata(str(folder / "2"))
            weights = {
                k: e for k, e in stored.items() if "optimizer." not in k and isinstance(e, ShardedTensor)
            }
            values = {k: gradient(3, k, e.global_shape).to(run.dtype) for k, e in weights.items()}
            shapes = {k: ShardedTensor.from_rank_offsets(k, value) for k, value in values.items()}
            megackpt.save(shapes, str(folder / "gradients"))
        return str(folder)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, megatron_core: None) -> Iterator[Saved]:
    runs = Saved(tmp_path_factory.mktemp("megatron"))
    yield runs
    for pool in runs.pools:
        pool.close()


PADDED = {"make_vocab_divisible": 48}
TABLE: list[tuple[Run, bool, ParallelLayout, str, dict[str, Any]]] = [
    (Run(GQA), False, DP2, "distributed", {}),
    (Run(GQA), False, PP2, "distributed", {}),
    (Run(GQA), False, TP2, "whole", {}),
    (Run(GQA), True, TP2, "distributed", PADDED),
    (Run(GQA), True, ParallelLayout(dp=2, pp=2), "whole", {}),
    (Run(TIED), False, TP2, "distributed", PADDED),
    (Run(TIED), False, PP2, "distributed", {}),
    (Run(TIED), True, DP2, "distributed", {}),
    (Run(GQA, dtype=torch.float32), False, DP2, "distributed", {}),
    (Run(GQA, dtype=torch.float32), False, TP2, "torch", {}),
    (Run(TIED, "whole", torch.float32), False, TP2, "torch", PADDED),
    (Run(TIED, "whole"), False, PP2, "distributed", {}),
    (Run(MOE, ep=2), False, ParallelLayout(dp=2, ep=2), "distributed", {}),
    (Run(MOE, ep=2), False, ParallelLayout(dp=2), "distributed", {}),
    (Run(MOE, ep=2), True, TP2, "whole", {}),
]


@sampled(5)
@pytest.mark.parametrize(
    ("run", "installed", "layout", "kind", "changed"),
    TABLE,
    ids=[f"{run}-{'ours' if i else 'theirs'}-{layout}-{k}-{len(c)}" for run, i, layout, k, c in TABLE],
)
def test_the_third_step_is_megatron_core_s(
    run: Run,
    installed: bool,
    layout: ParallelLayout,
    kind: str,
    changed: dict[str, Any],
    saved: Saved,
    rank_pool: RankPool,
) -> None:
    folder = saved.at(run, installed)
    answers = rank_pool.run(
        take_over, layout.world_size, run, layout, kind, folder, changed, timeout_s=PATIENCE_S
    )
    rounding = 2.0**-8 if run.dtype is torch.bfloat16 else ROUNDING
    limits = {"weights": rounding, "fp32_param": ROUNDING, "exp_avg": 0.0, "exp_avg_sq": 0.0}
    for worst in answers:
        assert {"weights", "exp_avg", "exp_avg_sq"} <= worst.keys()
        assert all(difference <= limits[state] for state, difference in worst.items()), worst


def test_buckets_of_one_layout_are_rejected(saved: Saved) -> None:
    keys = megackpt.load_sharded_metadata(f"{saved.at(Run(GQA, 'dp_reshardable'), False)}/2")
    model, optimizer = build(Run(GQA), ParallelLayout(), "distributed")
    megatron_state(model, keys)  # the weights can be read
    with pytest.raises(MapError, match=r"dp_reshardable.*--dist-ckpt-optim-fully-reshardable"):
        megatron_state(model, keys, optimizer=declare(model, optimizer))
