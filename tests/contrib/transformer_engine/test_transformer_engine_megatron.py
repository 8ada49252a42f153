"""Names, cuts and replicas are those of Megatron-Core's own declarations of its Transformer Engine layers."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megackpt.integrations.transformer_engine import declare_module_of_te, set_parallel_mode
from megackpt.integrations.transformer_engine.site import NAMES
from megackpt.parallel import ParallelGroups, ParallelLayout
from tests.contrib.transformer_engine.te_models import EXPERTS, FFN, HEADS, HIDDEN, IS_NEW, OFFSETS, Group
from tests.contrib.transformer_engine.te_stub import cpu_for_cuda, transformer_engine

transformer_engine()
pytest.importorskip("megatron.core")


@contextmanager
def megatron_ranks(groups: ParallelGroups) -> Iterator[SimpleNamespace]:
    """Let Megatron-Core and TE see the groups of one rank; yield them under Megatron-Core's names."""
    named = {
        "tp": groups.tp, "cp": groups.cp, "dp_cp": groups.dp_cp, "ep": groups.ep,
        "expt_tp": groups.etp, "expt_dp": groups.edp, "hcp": groups.cp,
    }  # fmt: skip
    collection = SimpleNamespace(**{name: Group(axis.size, axis.rank) for name, axis in named.items()})
    answers = {
        "is_initialized": lambda: True,
        "get_world_size": lambda group=None: group.size() if group else groups.layout.world_size,
        "get_rank": lambda group=None: group.rank() if group else groups.rank,
        "get_process_group_ranks": lambda group: list(range(group.size())),
    }
    with ExitStack() as stack:
        stack.enter_context(cpu_for_cuda())
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.distributed, name, answer))
        yield collection


def config(groups: ParallelGroups) -> Any:
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=4,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        ffn_hidden_size=FFN,
        num_moe_experts=EXPERTS,
        tensor_model_parallel_size=groups.tp.size,
        expert_model_parallel_size=groups.ep.size,
        expert_tensor_parallel_size=groups.etp.size,
        sequence_parallel=groups.tp.size > 1,
        moe_grouped_gemm=True,
        add_bias_linear=False,
        **OFFSETS,
        use_cpu_initialization=True,
    )


def linear(kind: str) -> Callable[..., Any]:
    def make(extension: Any, config: Any, collection: Any) -> Any:
        options: dict[str, Any] = {"init_method": torch.nn.init.zeros_, "bias": True, "skip_bias_add": False}
        if kind == "TELinear":
            options |= {"parallel_mode": "duplicated", "skip_weight_param_allocation": False}
        else:
            options |= {"is_expert": False, "tp_group": collection.tp}
            gathers = kind != "TERowParallelLinear"
            options |= {"gather_output": False} if gathers else {"input_is_parallel": True}
        module = getattr(extension, kind)(HIDDEN, FFN, config=config, **options)
        module._tp_group = collection.tp  # a duplicated layer has it from Megatron-Core's global state
        return module

    return make


def experts(mode: str) -> Callable[..., Any]:
    def make(extension: Any, config: Any, collection: Any) -> Any:
        sizes = (HIDDEN, FFN) if mode == "column" else (FFN, HIDDEN)
        module = getattr(extension, f"TE{mode.title()}ParallelGroupedLinear")(
            EXPERTS // config.expert_model_parallel_size,
            *sizes,
            config=config,
            init_method=torch.nn.init.zeros_,
            bias=False,
            skip_bias_add=False,
            is_expert=True,
            pg_collection=collection,
        )
        set_parallel_mode(module, mode)  # type: ignore[arg-type]
        return module

    return make


def attention(extension: Any, config: Any, collection: Any) -> Any:
    from megatron.core.transformer.enums import AttnMaskType

    return extension.TEDotProductAttention(config, 1, AttnMaskType.causal, "self", pg_collection=collection)


MAKERS: dict[str, Callable[..., Any]] = {
    "duplicated": linear("TELinear"),
    "column": linear("TEColumnParallelLinear"),
    "row": linear("TERowParallelLinear"),
    "norm and column": linear("TELayerNormColumnParallelLinear"),
    "experts, column": experts("column"),
    "experts, row": experts("row"),
    "softmax offset": attention,
}
if not IS_NEW:
    del MAKERS["softmax offset"]
LAYOUTS = [
    ParallelLayout(),
    ParallelLayout(tp=2, dp=2),
    ParallelLayout(tp=4, dp=2, ep=4, etp=1),
    ParallelLayout(tp=2, dp=4, ep=2, etp=2),
]


def facts(entity: Any) -> tuple[Any, ...]:
    return (
        entity.key,
        tuple(entity.local_shape),
        tuple(entity.global_shape),
        tuple(entity.global_offset),
        tuple(entity.axis_fragmentations),
        tuple(entity.replica_id),
        entity.prepend_axis_num,
    )


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", MAKERS)
def test_declarations_are_those_of_megatron(name: str, layout: ParallelLayout) -> None:
    for rank in (0, layout.world_size - 1, layout.world_size // 2):
        groups = ParallelGroups.offline(layout, rank)
        with megatron_ranks(groups) as collection:
            extension = importlib.import_module("megatron.core.extensions.transformer_engine")
            if not extension.HAVE_TE:
                pytest.skip("Megatron-Core was imported before the stand-in for Transformer Engine")
            module = MAKERS[name](extension, config(groups), collection)
            theirs = module.sharded_state_dict(
                "layers.part.", ((0, 1, 4),), {"dp_cp_group": collection.dp_cp}
            )
            ours = declare_module_of_te(module, groups, "layers.part.", ((0, 1, 4),), {NAMES: "megatron"})
        expected = {key: facts(entity) for key, entity in theirs.items() if "_extra_state" not in key}
        assert expected
        assert {key: facts(entity) for key, entity in ours.items()} == expected
