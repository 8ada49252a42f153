"""Names of Transformer Engine's layers are ours and Megatron-Core's, and so are their cuts and replicas."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from megackpt import DeclarationError, MismatchError, load, load_plain_tensors, save
from megackpt.contrib.transformer_engine import (
    TransformerEngineMixin,
    canonical_key,
    check_zero_centred,
    declare_module_of_te,
    set_parallel_mode,
    sharded_state_dict,
    use_stored_names,
)
from megackpt.contrib.transformer_engine.names import fused_key
from megackpt.contrib.transformer_engine.site import NAMES
from megackpt.entities import ShardedTensor
from megackpt.training.parallel import ParallelGroups, ParallelLayout, ShardedModule
from models.block_config import AttentionConfig, NormConfig
from models.blocks.transformer import TransformerLayer
from models.config import GPTConfig
from models.stage import Stage
from tests.contrib.transformer_engine import te_models
from tests.contrib.transformer_engine.te_models import (
    EXPERTS,
    FFN,
    HEADS,
    HIDDEN,
    IS_NEW,
    OFFSETS,
    ONE,
    Group,
    Make,
    build,
    pass_on,
    ranks_of,
    stack,
    stored_same,
)
from tests.contrib.transformer_engine.te_stub import cpu_for_cuda

CONFIG = GPTConfig(
    vocab_size=32,
    hidden_size=HIDDEN,
    num_layers=4,
    num_heads=HEADS,
    num_query_groups=4,
    ffn_hidden_size=FFN,
    linear_bias=True,
    norm=NormConfig(kind="layer"),
    attention=AttentionConfig(sinks=IS_NEW, qk_norm=False),
)


def plain_layers(groups: ParallelGroups) -> nn.Module:
    """The same layers as `te_models.layers`, of our own classes."""
    return stack(groups, lambda index: TransformerLayer(Stage(config=CONFIG, groups=groups), index))


def te_layers(groups: ParallelGroups) -> nn.Module:
    return stack(groups, lambda index: te_models.layer(groups, fuse_qkv_params=index % 2 == 0, **OFFSETS))


@pytest.mark.parametrize(("first", "second"), [(plain_layers, te_layers), (te_layers, plain_layers)])
def test_layers_load_those_of_the_other_library(tmp_path: Path, first: Make, second: Make) -> None:
    prefix = "decoder.layers."
    pass_on([build(first, ONE)], [ONE], None, tmp_path / "first", prefix)
    ranks = ranks_of(ParallelLayout(tp=2, pp=2))
    modules = [build(second, groups, seed=1) for groups in ranks]
    pass_on(modules, ranks, tmp_path / "first", tmp_path / "second", prefix)
    assert stored_same(tmp_path / "first", tmp_path / "second")


@pytest.mark.parametrize(
    ("fused", "canonical"),
    [
        ("a.0.self_attention.linear_qkv.layer_norm_weight", "a.0.input_layernorm.weight"),
        ("mlp.linear_fc1.layer_norm_bias", "pre_mlp_layernorm.bias"),
        ("x.cross_attention.linear_q.layer_norm_weight", "x.pre_cross_attn_layernorm.weight"),
        ("self_attention.core_attention.softmax_offset", "self_attention.softmax_offset"),
    ],
)
def test_every_alias_has_an_inverse(fused: str, canonical: str) -> None:
    assert canonical_key(fused) == canonical
    assert canonical_key(canonical) == canonical
    assert fused_key(canonical) == fused_key(fused) == fused


def test_names_that_only_end_like_an_alias_stay() -> None:
    assert canonical_key("my_mlp.linear_fc1.layer_norm_weight") == "my_mlp.linear_fc1.layer_norm_weight"


def test_a_checkpoint_with_megatrons_names_is_loaded(tmp_path: Path) -> None:
    module = build(te_models.layer, ONE)
    save(sharded_state_dict(module, ONE, names="megatron"), tmp_path)
    keys = set(load_plain_tensors(tmp_path))
    assert "self_attention.linear_qkv.layer_norm_weight" in keys
    assert "mlp.linear_fc1.layer_norm_bias" in keys
    other = build(te_models.layer, ONE, seed=1)
    load(use_stored_names(sharded_state_dict(other, ONE), keys), tmp_path)
    for name, value in module.named_parameters():
        assert torch.equal(other.get_parameter(name), value)


def test_an_unknown_choice_of_names_is_an_error() -> None:
    module = build(te_models.linear(None), ONE)
    with pytest.raises(DeclarationError, match="Give 'canonical' or 'megatron'"):
        sharded_state_dict(module, ONE, names="mine")  # type: ignore[arg-type]


def normed(**options: Any) -> Any:
    """Norms of every kind: alone, before a linear layer and an MLP, and as an operation."""

    def make(groups: ParallelGroups) -> nn.Module:
        te, size = te_models.te, {"device": "cpu", **options}
        mlp = te.ops.Sequential(
            te.ops.RMSNorm(HIDDEN, **size),
            te.ops.Linear(HIDDEN, FFN, device="cpu"),
            te.ops.GELU(),
            te.ops.Linear(FFN, HIDDEN, device="cpu"),
        )
        layer = te_models.layer(groups, normalization="RMSNorm", **options)
        return nn.ModuleDict({"norm": te.RMSNorm(HIDDEN, **size), "layer": layer, "fused": mlp})

    return make


NORMS = {
    "norm.weight",
    "layer.input_layernorm.weight",
    "layer.pre_mlp_layernorm.weight",
    "fused.linear_fc1.layer_norm_weight",
}


@pytest.mark.parametrize("stored_centred", [True, False])
def test_a_zero_centred_norm_is_recorded_and_checked(tmp_path: Path, stored_centred: bool) -> None:
    first, second = (
        build(normed(zero_centered_gamma=centred), ONE) for centred in (stored_centred, not stored_centred)
    )
    state = sharded_state_dict(first, ONE)
    save(state, tmp_path)
    keys = set(load_plain_tensors(tmp_path))
    records = {key.removesuffix(".zero_centred") for key in keys if key.endswith(".zero_centred")}
    assert records == (NORMS if stored_centred else set())
    check_zero_centred(state, keys)
    other = sharded_state_dict(second, ONE)
    with pytest.raises(MismatchError, match=f"{len(NORMS)} norms are not what the checkpoint has") as raised:
        check_zero_centred(other, keys)
    where = "checkpoint" if stored_centred else "model"
    assert f"'norm.weight': zero-centred in the {where} only" in str(raised.value)
    load(other, tmp_path)  # as of other layers, which record nothing
    megatron = sharded_state_dict(first, ONE, names="megatron")
    assert not [entity.key for entity in megatron.values() if "zero" in entity.key]


class Projection(TransformerEngineMixin, te_models.te.Linear):  # type: ignore[misc, name-defined]
    """A class of a user."""


class Block(ShardedModule):
    """A container of ours with children of TE, in a list."""

    def __init__(self, groups: ParallelGroups) -> None:
        super().__init__(groups)
        self.parts = nn.ModuleList([te_models.mlp("swiglu")(groups), te_models.linear("row")(groups)])
        self.out = Projection(
            groups, HIDDEN, FFN, parallel_mode="column", tp_size=groups.tp.size, device="cpu"
        )


def test_containers_and_derived_classes_declare_their_te_modules() -> None:
    groups = ParallelGroups.offline(ParallelLayout(tp=2), 1)
    state = build(Block, groups).sharded_state_dict()  # type: ignore[operator]
    boxes = {t.key: t for e in state.values() for t in ([e] if isinstance(e, ShardedTensor) else e.tensors())}
    assert boxes["parts.0.linear_fc1.weight.up"].global_offset == (FFN // 2, 0)
    assert boxes["parts.1.weight"].global_offset == (0, HIDDEN // 2)
    assert boxes["out.weight"].global_offset == (FFN // 2, 0)
    assert boxes["out.weight"].data is state["out.weight"].data


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
    fields = ("local_shape", "global_shape", "global_offset", "axis_fragmentations", "replica_id")
    return entity.key, entity.prepend_axis_num, *(tuple(getattr(entity, field)) for field in fields)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", MAKERS)
def test_declarations_are_those_of_megatron(name: str, layout: ParallelLayout) -> None:
    pytest.importorskip("megatron.core")
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
