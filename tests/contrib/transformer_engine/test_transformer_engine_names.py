"""Checkpoints of Transformer Engine's layers in our own layers and back, under either library's names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megackpt import DeclarationError, MismatchError, load, load_plain_tensors, save
from megackpt.integrations.transformer_engine import (
    TransformerEngineMixin,
    canonical_key,
    check_zero_centred,
    sharded_state_dict,
    use_stored_names,
)
from megackpt.integrations.transformer_engine.names import fused_key
from megackpt.mapping import ShardedTensor
from megackpt.parallel import LayerStack, ParallelGroups, ParallelLayout, ShardedModule
from megackpt.testing.world import SimulatedRank, SimulatedWorld
from models.block_config import AttentionConfig, NormConfig
from models.blocks.transformer import TransformerLayer
from models.config import GPTConfig
from models.stage import Stage
from tests.contrib.transformer_engine import te_models
from tests.contrib.transformer_engine.te_models import FFN, HEADS, HIDDEN, IS_NEW, OFFSETS, build

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
    pp, count = groups.pp, 4 // groups.pp.size
    owned = range(pp.rank * count, (pp.rank + 1) * count)
    return LayerStack(
        lambda index: TransformerLayer(Stage(config=CONFIG, groups=groups), index), owned, 4, groups
    )


def te_layers(groups: ParallelGroups) -> nn.Module:
    pp, count = groups.pp, 4 // groups.pp.size
    owned = range(pp.rank * count, (pp.rank + 1) * count)
    return LayerStack(
        lambda index: te_models.layer(groups, fuse_qkv_params=index % 2 == 0, **OFFSETS),
        owned,
        4,
        groups,
    )


@pytest.mark.parametrize(("first", "second"), [(plain_layers, te_layers), (te_layers, plain_layers)])
def test_layers_load_those_of_the_other_library(tmp_path: Path, first: object, second: object) -> None:
    whole = ParallelGroups.offline(ParallelLayout(), 0)
    save(sharded_state_dict(build(first, whole), whole, "decoder.layers."), tmp_path / "first")  # type: ignore[arg-type]
    layout = ParallelLayout(tp=2, pp=2)
    ranks = [ParallelGroups.offline(layout, rank) for rank in range(4)]
    modules = [build(second, groups, seed=1) for groups in ranks]  # type: ignore[arg-type]

    def one_rank(group: SimulatedRank) -> None:
        state = sharded_state_dict(modules[group.rank], ranks[group.rank], "decoder.layers.")
        load(state, tmp_path / "first", group=group)
        save(state, tmp_path / "second", group=group)

    SimulatedWorld(4).run(one_rank)
    expected, actual = load_plain_tensors(tmp_path / "first"), load_plain_tensors(tmp_path / "second")
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[key], expected[key]) for key in expected)


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
    groups = ParallelGroups.offline(ParallelLayout(), 0)
    module = build(te_models.layer, groups)
    save(sharded_state_dict(module, groups, names="megatron"), tmp_path)
    keys = set(load_plain_tensors(tmp_path))
    assert "self_attention.linear_qkv.layer_norm_weight" in keys
    assert "mlp.linear_fc1.layer_norm_bias" in keys
    other = build(te_models.layer, groups, seed=1)
    load(use_stored_names(sharded_state_dict(other, groups), keys), tmp_path)
    for name, value in module.named_parameters():
        assert torch.equal(other.get_parameter(name), value)


def test_an_unknown_choice_of_names_is_an_error() -> None:
    groups = ParallelGroups.offline(ParallelLayout(), 0)
    module = build(te_models.linear(None), groups)
    with pytest.raises(DeclarationError, match="Give 'canonical' or 'megatron'"):
        sharded_state_dict(module, groups, names="mine")  # type: ignore[arg-type]


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
    groups = ParallelGroups.offline(ParallelLayout(), 0)
    first, second = (
        build(normed(zero_centered_gamma=centred), groups) for centred in (stored_centred, not stored_centred)
    )
    state = sharded_state_dict(first, groups)
    save(state, tmp_path)
    keys = set(load_plain_tensors(tmp_path))
    records = {key.removesuffix(".zero_centred") for key in keys if key.endswith(".zero_centred")}
    assert records == (NORMS if stored_centred else set())
    check_zero_centred(state, keys)
    other = sharded_state_dict(second, groups)
    with pytest.raises(MismatchError, match=f"{len(NORMS)} norms are not what the checkpoint has") as raised:
        check_zero_centred(other, keys)
    where = "checkpoint" if stored_centred else "model"
    assert f"'norm.weight': zero-centred in the {where} only" in str(raised.value)
    load(other, tmp_path)  # as of other layers, which record nothing
    assert not [
        e.key for e in sharded_state_dict(first, groups, names="megatron").values() if "zero" in e.key
    ]


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
