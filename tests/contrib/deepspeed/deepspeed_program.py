"""Trains a small model with DeepSpeed on the CPU, and saves a folder for each kind of ZeRO.

    DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 tests/contrib/deepspeed/deepspeed_program.py DIRECTORY

For each case it saves `DIRECTORY/CASE`, and `DIRECTORY/CASE.truth.pt`: whole masters and moments by the names
of the parameters, which DeepSpeed's own addresses of fragments give, and in float32 the weights after further
steps. tests/contrib/deepspeed/folders/ has what it wrote with DeepSpeed 0.19.8 and torch 2.13.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

CASES: dict[str, dict[str, Any]] = {
    "zero1": {"zero_optimization": {"stage": 1}},
    "zero2": {"zero_optimization": {"stage": 2}},
    "zero3": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
    # Several flat groups for one group of parameters.
    "zero3_subgroups": {"zero_optimization": {"stage": 3, "sub_group_size": 40}},
    "zero1_bf16": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}},
    "zero3_bf16": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}},
    "bf16_optimizer": {
        "bf16": {"enabled": True, "immediate_grad_update": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {"stage": 1},
    },
}
STATES = ("exp_avg", "exp_avg_sq")
STEPS, MORE_STEPS = 3, 2
LEARNING_RATE = 1e-2


class Net(nn.Module):
    """A vocabulary, two layers, a second name for a weight, frozen weights and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(12, 6)
        self.fc1 = nn.Linear(6, 10)
        self.fc2 = nn.Linear(10, 6)
        self.head = nn.Linear(6, 12, bias=False)
        self.head.weight = self.emb.weight
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 0.1]))
        self.register_buffer("count", torch.tensor(7))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.frozen(self.fc2(torch.relu(self.fc1(self.emb(tokens)))))
        return hidden


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Return the tokens and targets of a rank in a step."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randint(0, 12, (4,), generator=generator), torch.randn(4, 6, generator=generator)


def mean_square(predicted: Tensor, target: Tensor) -> Tensor:
    """Return the loss of both frameworks."""
    return (predicted.float() - target).square().mean()


def _train(directory: Path, case: str) -> None:
    import deepspeed

    torch.manual_seed(0)
    model = Net()
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
    ]
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **CASES[case],
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(groups, lr=LEARNING_RATE), config=config
    )
    rank = dist.get_rank()
    for step in range(STEPS):
        _step(engine, rank, step)
    engine.save_checkpoint(str(directory / case), client_state={"epoch": 5, "path": Path("data")})
    truth: dict[str, Any] = {"states": _states(engine)}
    if "bf16" not in config:
        for step in range(STEPS, STEPS + MORE_STEPS):
            _step(engine, rank, step)
        truth["after"] = {name: states["fp32_param"] for name, states in _states(engine).items()}
    if rank == 0:
        torch.save(truth, directory / f"{case}.truth.pt")
    dist.barrier()


def _step(engine: Any, rank: int, step: int) -> None:
    tokens, target = batch(rank, step)
    engine.backward(mean_square(engine(tokens), target))
    engine.step()


def _states(engine: Any) -> dict[str, dict[str, Tensor]]:
    """Return whole masters and moments of each trained parameter. Collective."""
    names = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
    if engine.zero_optimization_stage() == 3:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        return {
            name: {
                "fp32_param": safe_get_full_fp32_param(p).clone(),
                **{state: safe_get_full_optimizer_state(p, state).clone() for state in STATES},
            }
            for name, p in names.items()
        }
    own = {name: _fragment(engine.optimizer, p) for name, p in names.items()}
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    whole = {
        name: {state: torch.full((p.numel(),), torch.nan) for state in ("fp32_param", *STATES)}
        for name, p in names.items()
    }
    for of_rank in gathered:
        for name, (start, states) in of_rank.items():
            for state, values in states.items():
                whole[name][state][start : start + len(values)] = values
    return {name: {k: v.view(names[name].shape) for k, v in of.items()} for name, of in whole.items()}


def _fragment(optimizer: Any, param: Any) -> tuple[int, dict[str, Tensor]]:
    """Return where this rank's part of a parameter begins in it, and its values, by DeepSpeed's addresses."""
    if param._hp_mapping is None:
        return 0, {}
    groups = getattr(optimizer, "bit16_groups", None) or optimizer.bf16_groups
    number = next(i for i, group in enumerate(groups) if any(member is param for member in group))
    is_bf16_optimizer = hasattr(optimizer, "fp32_groups_flat_partition")
    kind = "fp32_groups_flat_partition" if is_bf16_optimizer else "single_partition_of_fp32_groups"
    flat, address = getattr(optimizer, kind)[number], param._hp_mapping.hp_fragment_address
    vectors = {"fp32_param": flat.detach(), **{k: optimizer.optimizer.state[flat][k] for k in STATES}}
    values = {k: v.narrow(0, address.start, address.numel).clone() for k, v in vectors.items()}
    return param._hp_mapping.lp_fragment_address.start, values


def main() -> None:
    """Make the folders of all cases."""
    import deepspeed

    deepspeed.init_distributed("gloo")
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    try:
        for case in CASES:
            _train(directory, case)
    except Exception:  # noqa: BLE001 - printed; the other rank would wait
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    main()
