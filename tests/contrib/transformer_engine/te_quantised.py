"""Modules of Transformer Engine with FP8 and MXFP8 parameters for tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megackpt.integrations.transformer_engine import set_components, set_parallel_mode
from megackpt.integrations.transformer_engine.quantised import buffers_of, is_quantised, members_of
from megackpt.parallel import ParallelGroups
from tests.contrib.transformer_engine.te_fp8 import fp8_tensors, recipe_checks
from tests.contrib.transformer_engine.te_models import EXPERTS, IS_NEW, te
from tests.contrib.transformer_engine.te_stub import cpu_for_cuda, device_answers, quantised_on_cpu

HIDDEN, FFN, HEADS = 64, 256, 8  # MXFP8 has blocks of 32 values, also at tp 4

Make = Callable[[ParallelGroups], nn.Module]
BFLOAT16 = {"params_dtype": torch.bfloat16, "device": "cpu"}


def recipe(name: str) -> Any:
    from transformer_engine.common import recipe as recipes

    return getattr(recipes, name)()


def build_quantised(make: Make, groups: ParallelGroups, of: str, *, seed: int) -> nn.Module:
    """Build a module with parameters quantised by a recipe; values and FP8 state depend on the seed."""
    init = te.quantized_model_init if IS_NEW else te.fp8_model_init
    with cpu_for_cuda(), recipe_checks(), init(enabled=True, recipe=recipe(of)):
        module = make(groups)
    generator = torch.Generator().manual_seed(seed)
    of_rank = torch.Generator().manual_seed(1000 * seed + groups.rank)  # others are replicas
    for tensor in fp8_tensors(module).values():
        tensor.copy_(torch.rand(tensor.shape, generator=generator) * 8 + 1)
    with reading(), torch.no_grad():
        for parameter in (part for p in module.parameters() for part in (members_of(p) or [p])):
            own = of_rank if is_quantised(parameter) else generator
            parameter.copy_(torch.randn(parameter.shape, generator=own).bfloat16())
    for tensor in fp8_tensors(module).values():  # largest values that are not those of the parameters
        if tensor.ndim == 2:
            tensor.copy_(torch.rand(tensor.shape, generator=generator))
    return module


@contextmanager
def reading() -> Iterator[None]:
    """Let this thread read and write quantised parameters; for other threads, see `device_answers`."""
    with device_answers(), quantised_on_cpu():
        yield


def codes(module: nn.Module) -> dict[str, Tensor]:
    """Copies of all codes and scales, by parameter; of others, their values."""
    return {
        f"{name}.{part}": buffer.detach().clone()
        for name, parameter in single_parameters(module)
        for part, buffer in (
            buffers_of(parameter) if is_quantised(parameter) else {"values": parameter}
        ).items()
    }


def single_parameters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters, and the matrices of grouped ones by the names that they have as parameters."""
    for name, parameter in module.named_parameters():
        if not members_of(parameter):
            yield name, parameter
            continue
        # Made anew, so that they show the memory of the group, in which those of the parameter still are.
        with reading():
            members = parameter.split_into_quantized_tensors()  # type: ignore[attr-defined]
        for number, member in enumerate(members):
            transposed = member.get_metadata().get("data_transpose")
            assert transposed is None or torch.equal(transposed, member._data.movedim(-1, 0))
            kept = buffers_of(members_of(parameter)[number])
            assert all(kept[k].data_ptr() == buffer.data_ptr() for k, buffer in buffers_of(member).items())
            yield f"{name}{number}", member


def linear(groups: ParallelGroups) -> nn.Module:
    module: nn.Module = te.Linear(HIDDEN, FFN, parallel_mode="column", tp_size=groups.tp.size, **BFLOAT16)
    return module


def row(groups: ParallelGroups) -> nn.Module:
    module: nn.Module = te.Linear(FFN, HIDDEN, parallel_mode="row", tp_size=groups.tp.size, **BFLOAT16)
    return module


def mlp(groups: ParallelGroups) -> nn.Module:
    module: nn.Module = te.LayerNormMLP(
        HIDDEN, FFN, activation="swiglu", set_parallel_mode=True, tp_size=groups.tp.size, **BFLOAT16
    )
    return module


def attention(groups: ParallelGroups) -> nn.Module:
    module: nn.Module = te.MultiheadAttention(
        4 * HIDDEN, HEADS, num_gqa_groups=4, tp_size=groups.tp.size, set_parallel_mode=True,
        fuse_qkv_params=True, **BFLOAT16,
    )  # fmt: skip
    return module


def experts(groups: ParallelGroups) -> nn.Module:
    module: nn.Module = te.GroupedLinear(EXPERTS // groups.ep.size, HIDDEN, FFN, bias=False, **BFLOAT16)
    set_parallel_mode(module, None)
    set_components(module, "gate", "up")
    return module


def grouped_experts(groups: ParallelGroups) -> nn.Module:
    """All experts of a rank as one parameter; set NVTE_GROUPED_LINEAR_SINGLE_PARAM."""
    module: nn.Module = te.GroupedLinear(
        EXPERTS // groups.ep.size, HIDDEN, FFN, bias=False, single_grouped_weight=True, **BFLOAT16
    )
    set_parallel_mode(module, None)
    set_components(module, "gate", "up")
    return module
