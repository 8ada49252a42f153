"""FP8 state of Transformer Engine's modules for tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from megackpt import load, save
from megackpt.integrations.transformer_engine import initialise_fp8_state, sharded_state_dict
from megackpt.parallel import ParallelGroups, ParallelLayout
from megackpt.testing.world import SimulatedRank, SimulatedWorld
from tests.contrib.transformer_engine.te_models import EXPERTS, IS_NEW, build, te
from tests.contrib.transformer_engine.te_stub import cpu_for_cuda

Make = Callable[[ParallelGroups], nn.Module]

ONE = ParallelGroups.offline(ParallelLayout(), 0)


QUANTIZATION = f"transformer_engine.pytorch.{'quantization' if IS_NEW else 'fp8'}"


def autocast(recipe: Any) -> Any:
    """TE's context in which modules use FP8."""
    if not IS_NEW:
        return te.fp8_autocast(enabled=True, fp8_recipe=recipe)
    return te.autocast(enabled=True, recipe=recipe)


def delayed(length: int = 4) -> Any:
    from transformer_engine.common.recipe import DelayedScaling

    return DelayedScaling(amax_history_len=length)


def recipe_checks() -> Any:
    """Let TE accept recipes that the device of the stand-in could not compute with."""
    newer = ["check_fp8_block_scaling_support", "check_nvfp4_support"] if IS_NEW else []
    checks = ["check_mxfp8_support", *newer]
    return mock.patch.multiple(QUANTIZATION, **{check: lambda: (True, "") for check in checks})


def build_fp8(make: Make, groups: ParallelGroups, *, recipe: Any = None, seed: int = 0) -> nn.Module:
    """Build a module with FP8 state that depends on the seed, 0 for state as TE makes it."""
    recipe = delayed() if recipe is None else recipe
    module = build(make, groups, seed=seed)
    with cpu_for_cuda(), recipe_checks(), autocast(recipe):
        initialise_fp8_state(module, recipe)
    generator = torch.Generator().manual_seed(seed)
    for tensor in fp8_tensors(module).values() if seed else ():
        tensor.copy_(torch.rand(tensor.shape, generator=generator))
    return module


def fp8_tensors(module: nn.Module) -> dict[str, Tensor]:
    """TE's own tensors, by module, direction and name."""
    tensors = {}
    for name, child in module.named_modules():
        metas = getattr(child, "_fp8_metas", None) or {"both": getattr(child, "fp8_meta", {})}
        for meta in metas.values():
            for key in ("scaling_fwd", "scaling_bwd"):
                if meta and hasattr(meta.get(key), "amax_history"):
                    tensors[f"{name}.{key}.scale"] = meta[key].scale
                    tensors[f"{name}.{key}.amax_history"] = meta[key].amax_history
    return tensors


def expert_numbers(experts: range, length: int, slots: int) -> tuple[Tensor, Tensor]:
    """Scales `[experts, slots]` and histories `[length, experts, slots]` that tell expert and slot apart."""
    scale = torch.tensor([[100.0 * e + s for s in range(slots)] for e in experts])
    rows = torch.arange(length).view(-1, 1, 1) * 10000.0
    return scale, rows + scale


def fill_experts(module: Any, experts: range, *, check: bool) -> None:
    """Set the numbers of each expert, in TE's own order; with `check` they have to be there already.

    From 2.3 on: input, weight, output of expert 0, then of expert 1. Before: inputs of all experts, ...
    """
    length = len(module.fp8_meta["scaling_fwd"].amax_history)
    vectors = experts_in_order(experts, length) if IS_NEW else experts_by_slot(experts, length)
    for direction in ("fwd", "bwd"):
        state = module.fp8_meta[f"scaling_{direction}"]
        scale, history = vectors[f"scale_{direction}"], vectors[f"amax_history_{direction}"]
        if check:
            assert torch.equal(state.scale, scale)
            assert torch.equal(state.amax_history, history)
        state.scale.copy_(scale)
        state.amax_history.copy_(history)


def experts_in_order(experts: range, length: int = 4) -> dict[str, Tensor]:
    """The vectors of TE from 2.3 on: all slots of an expert, then those of the next."""
    tensors = {}
    for direction, slots in (("fwd", 3), ("bwd", 2)):
        scale, history = expert_numbers(experts, length, slots)
        tensors[f"scale_{direction}"] = scale.flatten()
        tensors[f"amax_history_{direction}"] = history.flatten(1)
    return tensors


def experts_by_slot(experts: range, length: int = 4) -> dict[str, Tensor]:
    """The vectors of TE before 2.3: a slot of all experts, then the next slot."""
    tensors = {}
    for direction, slots in (("fwd", 3), ("bwd", 2)):
        scale, history = expert_numbers(experts, length, slots)
        tensors[f"scale_{direction}"] = scale.t().reshape(-1)
        tensors[f"amax_history_{direction}"] = history.transpose(1, 2).flatten(1)
    return tensors


def at_every_ep(
    make: Make, first: Callable[[Any, range], None], sizes: tuple[int, ...], folder: Path
) -> None:
    """Save FP8 state at `sizes[0]` ranks of ep, load it at each next size, and check every expert's numbers.

    `first` sets the numbers of the module of a rank, which has a range of the experts.
    """
    for step, ep in enumerate(sizes):
        groups = [ParallelGroups.offline(ParallelLayout(dp=ep, ep=ep), rank) for rank in range(ep)]
        modules, count = [build_fp8(make, g) for g in groups], EXPERTS // ep
        owned = [range(rank * count, (rank + 1) * count) for rank in range(ep)]
        for module, experts in zip(modules, owned, strict=True):
            if step == 0:
                first(module, experts)

        def one_rank(group: SimulatedRank) -> None:
            state = sharded_state_dict(modules[group.rank], groups[group.rank])  # noqa: B023 - run at once
            if step:  # noqa: B023
                load(state, folder / f"{step - 1}", group=group)  # noqa: B023
            save(state, folder / f"{step}", group=group)  # noqa: B023

        SimulatedWorld(ep).run(one_rank)
        for module, experts in zip(modules, owned, strict=True):
            fill_experts(module, experts, check=True)
