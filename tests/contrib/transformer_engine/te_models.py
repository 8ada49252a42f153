"""Modules of Transformer Engine for tests, built for one rank, and their FP8 state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from megackpt import LoadReport, load_plain_tensors, load_with_report, save
from megackpt.contrib.transformer_engine import (
    initialise_fp8_state,
    set_components,
    set_parallel_mode,
    sharded_state_dict,
)
from megackpt.testing.world import SimulatedRank, SimulatedWorld
from megackpt.training.parallel import LayerStack, ParallelGroups, ParallelLayout
from tests.contrib.transformer_engine.te_stub import (
    cpu_for_cuda,
    device_answers,
    quantised_on_cpu,
    te_version,
    transformer_engine,
)

te = transformer_engine()

HIDDEN, FFN, HEADS, EXPERTS = 16, 32, 8, 8

# The tests run with two versions of TE: 2.20 and 2.2, which lacks some modules and arguments.
IS_NEW = te_version() >= (2, 20)
needs_new = pytest.mark.skipif(not IS_NEW, reason="TE 2.2 does not have it")
QK_NORM = {"qk_norm_type": "RMSNorm"} if IS_NEW else {}
OFFSETS = {"softmax_type": "learnable"} if IS_NEW else {}
NEW_MODULES = ("softmax offset", "fused gated mlp, interleaved")


class Group:
    """A process group that knows its size and this rank, and nothing else."""

    def __init__(self, size: int, rank: int = 0) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


Make = Callable[[ParallelGroups], nn.Module]


def module_of(kind: str, *sizes: int, cut: bool = True, **options: Any) -> Make:
    """Return what makes a module of TE; one that is cut is told the size of tp."""
    return lambda groups: getattr(te, kind)(
        *sizes, tp_size=groups.tp.size if cut else 1, device="cpu", **options
    )


def linear(mode: str | None, **options: Any) -> Make:
    return module_of("Linear", HIDDEN, FFN, cut=mode is not None, parallel_mode=mode, **options)


def gated_linear(groups: ParallelGroups) -> nn.Module:
    module = linear("column")(groups)
    set_components(module, "gate", "up")
    return module


def mlp(activation: str, *, parallel: bool = True) -> Make:
    options = {"activation": activation, "set_parallel_mode": parallel}
    return module_of("LayerNormMLP", HIDDEN, FFN, cut=parallel, **options)


def attention(**kwargs: Any) -> Make:
    options = {"num_gqa_groups": 4, "set_parallel_mode": True, **QK_NORM, **OFFSETS, **kwargs}
    return module_of("MultiheadAttention", HIDDEN, HEADS, **options)


def layer(groups: ParallelGroups, **kwargs: Any) -> nn.Module:
    options = {"num_gqa_groups": 4, "activation": "swiglu", "fuse_qkv_params": True, **kwargs}
    return module_of("TransformerLayer", HIDDEN, FFN, HEADS, set_parallel_mode=True, **options)(groups)


def stack(
    groups: ParallelGroups, make: Callable[[int], nn.Module], *, interleaved: bool = False
) -> nn.Module:
    """Return four layers, cut over pp; interleaved, a rank has every pp-th of them."""
    pp, count = groups.pp, 4 // groups.pp.size
    owned = range(pp.rank, 4, pp.size) if interleaved else range(pp.rank * count, (pp.rank + 1) * count)
    return LayerStack(make, owned, 4, groups)


def layers(groups: ParallelGroups) -> nn.Module:
    return stack(groups, lambda index: layer(groups))


def expert_layers(groups: ParallelGroups, *, interleaved: bool = False) -> nn.Module:
    return stack(groups, lambda index: experts("column")(groups), interleaved=interleaved)


def experts(mode: str | None) -> Make:
    def build(groups: ParallelGroups) -> nn.Module:
        # As Megatron-Core builds them: TE is told nothing of etp.
        etp, count = groups.etp.size, EXPERTS // groups.ep.size
        sizes = (HIDDEN, FFN // etp) if mode == "column" else (HIDDEN // etp, FFN)
        module: nn.Module = te.GroupedLinear(count, *sizes, device="cpu")
        set_parallel_mode(module, mode)  # type: ignore[arg-type]
        if mode == "column":
            set_components(module, "gate", "up")
        return module

    return build


def grouped_experts(groups: ParallelGroups) -> nn.Module:
    """All experts of a rank as one parameter."""
    module: nn.Module = te.GroupedLinear(
        EXPERTS // groups.ep.size,
        HIDDEN,
        FFN // groups.etp.size,
        single_grouped_weight=True,
        single_grouped_bias=True,
        device="cpu",
    )
    set_parallel_mode(module, "column")
    set_components(module, "gate", "up")
    return module


def fused_mlp(activation: str, **options: Any) -> Make:
    def build(groups: ParallelGroups) -> nn.Module:
        ops, size = te.ops, groups.tp.size
        columns, rows = (
            {"tensor_parallel_mode": mode, "tensor_parallel_group": Group(size)} if size > 1 else {}
            for mode in ("column", "row")
        )
        inner = 2 * FFN if activation.endswith("GLU") else FFN
        module: nn.Module = ops.Sequential(
            ops.LayerNorm(HIDDEN, device="cpu"),
            ops.Linear(HIDDEN, inner, device="cpu", **columns),
            getattr(ops, activation)(**options),
            ops.Linear(FFN, HIDDEN, device="cpu", bias=False, **rows),
        )
        return module

    return build


def fused_experts(groups: ParallelGroups, block: int | None = None) -> nn.Module:
    """Experts as a sequence of operations, not cut over etp; gate and up alternate in blocks of rows."""
    ops, count = te.ops, EXPERTS // groups.ep.size
    module: nn.Module = ops.Sequential(
        ops.GroupedLinear(count, HIDDEN, 2 * FFN, bias=False, device="cpu"),
        ops.ScaledSwiGLU(glu_interleave_size=block),
        ops.GroupedLinear(count, FFN, HIDDEN, bias=False, device="cpu"),
    )
    return module


MODULES: Mapping[str, Make] = {
    "linear": linear(None),
    "linear column": linear("column"),
    "linear row": linear("row"),
    "linear split": linear("column", parameters_split={"query": 16, "key": 8, "value": 8}),
    "linear gate and up": gated_linear,
    "norm and linear": module_of("LayerNormLinear", HIDDEN, FFN, parallel_mode="column"),
    "gated mlp": mlp("swiglu"),
    "plain mlp": mlp("gelu"),
    "gated mlp, whole": mlp("geglu", parallel=False),
    "layer norm": lambda groups: te.LayerNorm(HIDDEN, device="cpu"),
    "rms norm": lambda groups: te.RMSNorm(HIDDEN, device="cpu"),
    "softmax offset": lambda groups: te.DotProductAttention(HEADS, 2, tp_size=groups.tp.size, **OFFSETS),
    "attention, interleaved": attention(fuse_qkv_params=True, input_layernorm=True),
    "attention, one after the other": attention(fuse_qkv_params=True, qkv_weight_interleaved=False),
    "attention, three parameters": attention(input_layernorm=True),
    "cross attention": attention(attention_type="cross", input_layernorm=True),
    "cross attention, interleaved": attention(attention_type="cross", fuse_qkv_params=True),
    "layer": layer,
    "decoder layer": lambda groups: layer(groups, layer_type="decoder", output_layernorm=True),
    "fused gated mlp": fused_mlp("SwiGLU"),
    "fused gated mlp, interleaved": fused_mlp("SwiGLU", glu_interleave_size=4),
    "fused plain mlp": fused_mlp("GELU"),
}


if not IS_NEW:
    MODULES = {name: make for name, make in MODULES.items() if name not in NEW_MODULES}


def build(make: Make, groups: ParallelGroups, *, seed: int = 0) -> nn.Module:
    """Build a module and fill it with values that depend on the seed and this rank."""
    with cpu_for_cuda(), mock.patch.object(torch.distributed, "get_world_size", _world_size):
        module = make(groups)
    generator = torch.Generator().manual_seed(1000 * seed + groups.rank)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return module


def _world_size(group: Any = None) -> int:
    return group.size() if isinstance(group, Group) else 1


ONE = ParallelGroups.offline(ParallelLayout(), 0)


def ranks_of(layout: ParallelLayout) -> list[ParallelGroups]:
    return [ParallelGroups.offline(layout, rank) for rank in range(layout.world_size)]


def pass_on(
    modules: list[nn.Module],
    ranks: list[ParallelGroups],
    source: Path | None,
    target: Path,
    prefix: str = "",
    **options: Any,
) -> list[LoadReport]:
    """Load a checkpoint into the modules of all ranks, if there is one, and save them; return the reports."""
    reports = [LoadReport()] * len(ranks)

    def one_rank(group: SimulatedRank) -> None:
        own = modules[group.rank], ranks[group.rank], prefix
        with quantised_on_cpu():
            if source is not None:
                state = sharded_state_dict(*own, **options)
                _, reports[group.rank] = load_with_report(state, source, group=group)
            save(sharded_state_dict(*own, **options), target, group=group)

    with device_answers():
        SimulatedWorld(len(ranks)).run(one_rank)
    return reports


def same(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    return actual.keys() == expected.keys() and all(torch.equal(actual[key], expected[key]) for key in actual)


def stored_same(first: Path, second: Path) -> bool:
    return same(load_plain_tensors(first), load_plain_tensors(second))


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
        for meta, key in product(filter(None, metas.values()), ("scaling_fwd", "scaling_bwd")):
            if hasattr(meta.get(key), "amax_history"):
                tensors[f"{name}.{key}.scale"] = meta[key].scale
                tensors[f"{name}.{key}.amax_history"] = meta[key].amax_history
    return tensors


def expert_vectors(experts: range, length: int = 4, *, by_slot: bool = not IS_NEW) -> dict[str, Tensor]:
    """Return scales and histories of experts that tell expert and slot apart, in TE's own order.

    From 2.3 on: input, weight, output of expert 0, then of expert 1. Before: inputs of all experts, ...
    """
    tensors = {}
    for direction, slots in (("fwd", 3), ("bwd", 2)):
        scale = torch.tensor([[100.0 * e + s for s in range(slots)] for e in experts])
        scale = scale.t() if by_slot else scale
        history = torch.arange(length).view(-1, 1, 1) * 10000.0 + scale
        tensors |= {f"scale_{direction}": scale.flatten(), f"amax_history_{direction}": history.flatten(1)}
    return tensors


def fill_experts(module: Any, experts: range, *, check: bool) -> None:
    """Set the numbers of each expert; with `check` they have to be there already."""
    vectors = expert_vectors(experts, len(module.fp8_meta["scaling_fwd"].amax_history))
    for direction in ("fwd", "bwd"):
        state = module.fp8_meta[f"scaling_{direction}"]
        for own, name in ((state.scale, "scale"), (state.amax_history, "amax_history")):
            assert not check or torch.equal(own, vectors[f"{name}_{direction}"])
            own.copy_(vectors[f"{name}_{direction}"])


def at_every_ep(
    make: Make, first: Callable[[Any, range], None], sizes: tuple[int, ...], folder: Path
) -> None:
    """Save FP8 state at `sizes[0]` ranks of ep, load it at each next size, and check all numbers."""
    for step, ep in enumerate(sizes):
        ranks, count = ranks_of(ParallelLayout(dp=ep, ep=ep)), EXPERTS // ep
        modules = [build_fp8(make, groups) for groups in ranks]
        owned = [range(rank * count, (rank + 1) * count) for rank in range(ep)]
        for module, experts in zip(modules, owned, strict=True):
            if step == 0:
                first(module, experts)
        pass_on(modules, ranks, folder / f"{step - 1}" if step else None, folder / f"{step}")
        for module, experts in zip(modules, owned, strict=True):
            fill_experts(module, experts, check=True)
