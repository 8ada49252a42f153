"""Modules of Transformer Engine for tests, built for one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from megackpt.integrations.transformer_engine import set_components, set_parallel_mode
from megackpt.parallel import LayerStack, ParallelGroups
from tests.contrib.transformer_engine.te_stub import cpu_for_cuda, te_version, transformer_engine

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


def linear(mode: str | None, **kwargs: Any) -> Callable[[ParallelGroups], nn.Module]:
    size = HIDDEN, FFN

    def build(groups: ParallelGroups) -> nn.Module:
        tp = groups.tp.size if mode else 1
        module: nn.Module = te.Linear(*size, parallel_mode=mode, tp_size=tp, device="cpu", **kwargs)
        return module

    return build


def gated_linear(groups: ParallelGroups) -> nn.Module:
    module = linear("column")(groups)
    set_components(module, "gate", "up")
    return module


def norm_linear(groups: ParallelGroups) -> nn.Module:
    module: nn.Module = te.LayerNormLinear(
        HIDDEN, FFN, parallel_mode="column", tp_size=groups.tp.size, device="cpu"
    )
    return module


def mlp(activation: str, *, parallel: bool = True) -> Callable[[ParallelGroups], nn.Module]:
    def build(groups: ParallelGroups) -> nn.Module:
        tp = groups.tp.size if parallel else 1
        module: nn.Module = te.LayerNormMLP(
            HIDDEN, FFN, activation=activation, set_parallel_mode=parallel, tp_size=tp, device="cpu"
        )
        return module

    return build


def norm(name: str) -> Callable[[ParallelGroups], nn.Module]:
    return lambda groups: getattr(te, name)(HIDDEN, device="cpu")


def attention_core(groups: ParallelGroups) -> nn.Module:
    module: nn.Module = te.DotProductAttention(HEADS, 2, tp_size=groups.tp.size, **OFFSETS)
    return module


def attention(**kwargs: Any) -> Callable[[ParallelGroups], nn.Module]:
    def build(groups: ParallelGroups) -> nn.Module:
        module: nn.Module = te.MultiheadAttention(
            HIDDEN,
            HEADS,
            num_gqa_groups=4,
            tp_size=groups.tp.size,
            set_parallel_mode=True,
            device="cpu",
            **QK_NORM,
            **OFFSETS,
            **kwargs,
        )
        return module

    return build


def layer(groups: ParallelGroups, **kwargs: Any) -> nn.Module:
    options = {"num_gqa_groups": 4, "activation": "swiglu", "fuse_qkv_params": True, **kwargs}
    module: nn.Module = te.TransformerLayer(
        HIDDEN, FFN, HEADS, set_parallel_mode=True, tp_size=groups.tp.size, device="cpu", **options
    )
    return module


def layers(groups: ParallelGroups) -> nn.Module:
    """Four layers, cut over pp."""
    pp, count = groups.pp, 4 // groups.pp.size
    owned = range(pp.rank * count, (pp.rank + 1) * count)
    return LayerStack(lambda index: layer(groups), owned, 4, groups)


def experts(mode: str | None) -> Callable[[ParallelGroups], nn.Module]:
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


def expert_layers(groups: ParallelGroups, *, interleaved: bool = False) -> nn.Module:
    """Four layers of experts, cut over pp; interleaved, a rank has every pp-th of them."""
    pp, count = groups.pp, 4 // groups.pp.size
    owned = range(pp.rank, 4, pp.size) if interleaved else range(pp.rank * count, (pp.rank + 1) * count)
    return LayerStack(lambda index: experts("column")(groups), owned, 4, groups)


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


def fused_mlp(activation: str, **options: Any) -> Callable[[ParallelGroups], nn.Module]:
    def build(groups: ParallelGroups) -> nn.Module:
        ops, size = te.ops, groups.tp.size
        parallel = {"tensor_parallel_group": Group(size)} if size > 1 else {}
        columns = {"tensor_parallel_mode": "column", **parallel} if size > 1 else {}
        rows = {"tensor_parallel_mode": "row", **parallel} if size > 1 else {}
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


MODULES: Mapping[str, Callable[[ParallelGroups], nn.Module]] = {
    "linear": linear(None),
    "linear column": linear("column"),
    "linear row": linear("row"),
    "linear split": linear("column", parameters_split={"query": 16, "key": 8, "value": 8}),
    "linear gate and up": gated_linear,
    "norm and linear": norm_linear,
    "gated mlp": mlp("swiglu"),
    "plain mlp": mlp("gelu"),
    "gated mlp, whole": mlp("geglu", parallel=False),
    "layer norm": norm("LayerNorm"),
    "rms norm": norm("RMSNorm"),
    "softmax offset": attention_core,
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


def build(make: Callable[[ParallelGroups], nn.Module], groups: ParallelGroups, *, seed: int = 0) -> nn.Module:
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
