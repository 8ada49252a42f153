"""Declarations of modules and their errors; parallel layers on one rank against plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megackpt import DeclarationError, ShardedLayout, ShardedObject, ShardedTensor
from megackpt.training.parallel import (
    ColumnParallelLinear,
    LayerNorm,
    LayerStack,
    ModelChunks,
    ParallelGroups,
    ParallelLayout,
    QKVParallelLinear,
    RMSNorm,
    RowParallelLinear,
    ShardedModule,
    TpSharding,
    VocabParallelEmbedding,
    VocabParallelOutput,
    sharded_state_dict,
    vocab_parallel_cross_entropy,
)
from megackpt.training.parallel.attributes import RowRange, copied_rows, is_marked, mark
from megackpt.training.parallel.embedding import padded_vocab_size
from megackpt.training.parallel.mixin import second_copy
from models import GPTConfig, MoEConfig, build_gpt, init_weights
from tests.support.optimizers import tensors_of

LAYOUT = ParallelLayout(tp=2, pp=2, dp=2)
GROUPS = ParallelGroups.offline(LAYOUT, 3)  # tp 1, dp 1, pp 0
ONE = ParallelGroups.create(ParallelLayout())


class Scale(ShardedModule):
    tp_sharding = {"weight": 0}  # noqa: RUF012

    def __init__(self, groups: ParallelGroups) -> None:
        super().__init__(groups)
        self.weight = nn.Parameter(torch.ones(4 // groups.tp.size))
        self.shift = nn.Parameter(torch.zeros(4))


class RowCutLinear(ShardedModule, nn.Linear):
    tp_sharding = {"weight": 0, "bias": 0}  # noqa: RUF012


class WithExtraState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.arange(3))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 7}

    def set_extra_state(self, state: Any) -> None:  # whatever get_extra_state gave
        self.calls = state["calls"]


def test_a_declared_tensor_is_cut_and_an_undeclared_one_replicated() -> None:
    state = Scale(GROUPS).sharded_state_dict("scale.")
    weight, shift = state["scale.weight"], state["scale.shift"]
    assert (weight.key, weight.global_shape, weight.global_offset) == ("scale.weight", (4,), (2,))
    assert weight.replica_id == (0, 0, 1)
    assert (shift.global_shape, shift.global_offset, shift.replica_id) == ((4,), (0,), (0, 1, 1))


def test_entities_wrap_the_parameters_themselves() -> None:
    module = nn.Sequential(RowCutLinear(GROUPS, 3, 2), nn.Linear(2, 2))
    state = sharded_state_dict(module, GROUPS)
    assert {name: id(e.data) for name, e in state.items()} == {n: id(p) for n, p in module.named_parameters()}


def test_a_declaration_can_be_put_before_a_module_class() -> None:
    layer = RowCutLinear(GROUPS, 3, 2, bias=False)
    state = layer.sharded_state_dict()
    assert list(state) == ["weight"]
    assert state["weight"].global_shape == (4, 3)
    assert is_marked(layer.weight, "tensor_model_parallel")


@pytest.mark.parametrize("layer", [ColumnParallelLinear, RowParallelLinear])
def test_a_declared_parameter_that_a_layer_was_built_without_is_left_out(layer: type[nn.Module]) -> None:
    assert list(layer(2, 2, ONE, bias=False).sharded_state_dict()) == ["weight"]


def test_names_are_those_of_the_module_s_state_dict() -> None:
    module = nn.ModuleDict({"a": Scale(ONE), "b": nn.Sequential(WithExtraState(), nn.LayerNorm(2))})
    assert list(sharded_state_dict(module, ONE)) == list(module.state_dict())


def test_a_loaded_state_goes_back_through_load_state_dict() -> None:
    module = WithExtraState()
    state = sharded_state_dict(module, GROUPS, "m.")
    extra = state["m._extra_state"]
    assert isinstance(extra, ShardedObject)
    assert (extra.data, extra.global_shape, extra.replica_id) == ({"calls": 7}, (1,), (0, 1, 1))
    module.load_state_dict({name[2:]: entity.data for name, entity in state.items()})
    assert module.calls == 7


def test_sharded_offsets_become_leading_axes() -> None:
    state = RowParallelLinear(4, 3, GROUPS).sharded_state_dict("l.", ((0, 2, 5), (1, 0, 6)))
    weight = state["l.weight"]
    assert (weight.global_shape, weight.global_offset) == ((5, 6, 3, 4), (2, 0, 0, 2))
    assert weight.prepend_axis_num == 2


def test_extra_state_of_a_stacked_layer_has_one_element_per_layer() -> None:
    extra = sharded_state_dict(WithExtraState(), ONE, "", ((0, 2, 5),))["_extra_state"]
    assert (extra.global_shape, extra.global_offset) == ((5,), (2,))


def test_a_stack_has_one_key_and_local_names() -> None:
    stack = LayerStack(lambda _: Scale(ONE), range(2, 4), 6, ONE)
    state = stack.sharded_state_dict("layers.")
    assert list(state) == [f"layers.{name}" for name in stack.state_dict()]
    assert [state[f"layers.{i}.weight"].key for i in (0, 1)] == ["layers.weight"] * 2
    assert [state[f"layers.{i}.weight"].global_offset for i in (0, 1)] == [(2, 0), (3, 0)]
    assert state["layers.0.weight"].global_shape == (6, 4)


def test_layers_of_different_structure_have_keys_with_their_global_index() -> None:
    def build(index: int) -> nn.Module:
        return nn.LayerNorm(4, bias=False) if index % 2 else nn.Linear(2, 3, bias=False)

    stack = LayerStack(build, (1, 4), 6, ONE, homogeneous=False)
    state = stack.sharded_state_dict("layers.")
    assert list(state) == [f"layers.{name}" for name in stack.state_dict()]
    assert [(e.key, e.global_shape, e.prepend_axis_num) for e in state.values()] == [
        ("layers.1.weight", (4,), 0),
        ("layers.4.weight", (3, 2), 0),
    ]
    inner = stack.sharded_state_dict("", ((0, 1, 3),))  # a stack of stacks keeps the outer axis
    assert [(e.key, e.global_shape) for e in inner.values()] == [
        ("1.weight", (3, 4)),
        ("4.weight", (3, 3, 2)),
    ]


def test_chunks_are_one_state_dict_with_their_own_names() -> None:
    stacks = [LayerStack(lambda _: nn.LayerNorm(4, bias=False), owned, 6, ONE) for owned in ((1, 2), (5,))]
    chunks = ModelChunks(stacks, ONE)
    state = chunks.sharded_state_dict("m.")
    assert (
        list(state)
        == [f"m.{name}" for name in chunks.state_dict()]
        == ["m.0.0.weight", "m.0.1.weight", "m.1.0.weight"]
    )
    assert {e.key for e in state.values()} == {"m.weight"}
    assert [e.global_offset[0] for e in state.values()] == [1, 2, 5]
    assert (len(chunks), chunks[1]) == (2, list(chunks)[1])


def test_a_fused_output_is_stored_as_its_components() -> None:
    layer = ColumnParallelLinear(3, {"q": 8, "kv": 4}, GROUPS)
    weight, bias = (layer.sharded_state_dict("l.")[f"l.{n}"] for n in ("weight", "bias"))
    assert isinstance(weight, ShardedLayout)
    assert [(t.key, t.global_shape, t.global_offset) for t in weight.tensors()] == [
        ("l.weight.q", (8, 3), (4, 0)),
        ("l.weight.kv", (4, 3), (2, 0)),
    ]
    assert [(t.key, t.global_shape, t.global_offset) for t in bias.tensors()] == [
        ("l.bias.q", (8,), (4,)),
        ("l.bias.kv", (4,), (2,)),
    ]
    assert weight.data is layer.weight


def test_a_second_copy_is_no_main_replica() -> None:
    copy = second_copy(Scale(GROUPS).sharded_state_dict()["weight"], "embedding.weight")
    assert (copy.key, copy.replica_id) == ("embedding.weight", (1, 0, 1))


def _row_cut(**tp_sharding: Any) -> dict[str, Any]:
    return RowCutLinear(ONE, 3, 2, tp_sharding=tp_sharding).sharded_state_dict("m.")


def _marked() -> nn.Module:
    layer = nn.Linear(3, 2)
    mark(layer.weight, "tensor_model_parallel")
    return nn.Sequential(layer)


ENTITY = ShardedTensor.from_rank_offsets("w", torch.zeros(2))


def test_metadata_reaches_every_child_that_can_ask_for_it() -> None:
    class Asked(nn.Module):
        def sharded_state_dict(self, **arguments: Any) -> dict[str, Any]:  # records what it was given
            self.arguments = arguments
            return {}

    asked = Asked()
    stack = LayerStack(lambda _: nn.Sequential(asked), range(1, 2), 4, ONE)
    sharded_state_dict(nn.ModuleDict({"s": stack}), ONE, "m.", metadata={"format": 2})
    expected = {"prefix": "m.s.0.", "sharded_offsets": ((0, 1, 4),), "metadata": {"format": 2}}
    assert asked.arguments == expected


def test_a_stack_is_a_sequence_of_the_layers_of_its_stage() -> None:
    stack = LayerStack(lambda index: nn.Linear(1, index + 1), range(2, 5), 6, ONE)
    assert len(stack) == 3
    assert [layer.out_features for layer in stack] == [3, 4, 5]
    assert (stack[0], stack[-1]) == (stack.get_submodule("0"), stack.get_submodule("2"))
    assert stack[1:] == list(stack)[1:]
    with pytest.raises(IndexError):
        stack[3]
    for index, layer in zip(stack.owned, stack, strict=True):
        assert layer.out_features == index + 1
    assert list(LayerStack(nn.Identity, range(0), 6, ONE)) == []


@pytest.fixture(autouse=True)
def _layer_seed() -> None:
    torch.manual_seed(0)


def _tp(size: int, rank: int = 0) -> ParallelGroups:
    return ParallelGroups.offline(ParallelLayout(tp=size), rank)


def test_norms_are_those_of_torch() -> None:
    x = torch.randn(3, 8)
    torch.testing.assert_close(RMSNorm(8, ONE, eps=1e-3)(x), F.rms_norm(x, (8,), eps=1e-3))
    torch.testing.assert_close(LayerNorm(8, ONE, eps=1e-3)(x), F.layer_norm(x, (8,), eps=1e-3))


def test_a_zero_centred_norm_starts_as_the_identity_and_adds_1_to_its_weight() -> None:
    x = torch.randn(3, 8)
    norm = RMSNorm(8, ONE, eps=1e-3, zero_centred=True)
    assert torch.count_nonzero(norm.weight) == 0
    torch.testing.assert_close(norm(x), F.rms_norm(x, (8,), eps=1e-3))
    weight = torch.randn(8)
    norm.weight.data.copy_(weight - 1)
    torch.testing.assert_close(norm(x), F.rms_norm(x, (8,), weight, eps=1e-3))


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_norm_parameters_ask_for_a_sum_over_tp_under_sequence_parallelism(kind: type[RMSNorm]) -> None:
    for sequence_parallel in (False, True):
        norm = kind(8, ONE, sequence_parallel=sequence_parallel)
        assert all(is_marked(p, "sequence_parallel") == sequence_parallel for p in norm.parameters())


def test_only_what_is_cut_is_marked_tensor_parallel() -> None:
    column, row = ColumnParallelLinear(4, 4, ONE), RowParallelLinear(4, 4, ONE)
    marked = [is_marked(p, "tensor_model_parallel") for p in (*column.parameters(), *row.parameters())]
    assert marked == [True, True, True, False]


def test_fused_components_are_in_order() -> None:
    layer = ColumnParallelLinear(4, {"gate": 6, "up": 2}, ONE, bias=False)
    y = layer(torch.eye(4))
    gate, up = layer.split(y)
    assert torch.equal(gate, layer.weight.T[:, :6])
    assert torch.equal(up, layer.weight.T[:, 6:])


LOSS = vocab_parallel_cross_entropy
LABELS = torch.tensor([-1, 3])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: _row_cut(wieght=0), r"'m\.wieght'.*RowCutLinear.*'bias', 'weight'.*Correct"),
        (lambda: TpSharding(dim=-1), r"TpSharding\.dim is -1; give an int of at least 0"),
        (lambda: _row_cut(weight=TpSharding(dim=2)), r"'m\.weight'.*cuts dim 2.*\(2, 3\).*dim from 0 to 1"),
        (
            lambda: _row_cut(weight=TpSharding(dim=0, components={"a": 1, "b": 2})),
            r"'m\.weight'.*'a': 1, 'b': 2",
        ),
        (
            lambda: sharded_state_dict(_marked(), GROUPS, "m."),
            r"'m\.0\.weight'.*marked tensor_model_parallel.*Declare it",
        ),
        (lambda: Scale(ONE).sharded_state_dict("m.", ((1, 0, 2),)), r"\(1, 0, 2\).*axes 0 to 0.*tp_sharding"),
        (
            lambda: TpSharding(dim=0, components={"a": 1}, allow_shape_mismatch=True),
            r"components \['a'\] cannot have allow_shape_mismatch.*pad none",
        ),
        (lambda: second_copy(ENTITY, "e"), r"'w' cannot be declared as a copy of 'e'.*replica id 0"),
        (lambda: ColumnParallelLinear(4, 4, ONE).split(torch.zeros(1, 4)), r"no named components.*mapping"),
        (lambda: RowParallelLinear(6, 4, _tp(4)), r"in_features 6.*tp=4"),
        (
            lambda: ColumnParallelLinear(4, {"gate": 8, "up": 6}, _tp(4)),
            r"component 'up' of out_features 6.*tp=4",
        ),
        # Query groups are not cut inside a head: 2 groups of 8 features would divide by tp=4 as features do.
        (lambda: QKVParallelLinear(32, 12, 6, 8, _tp(4)), r"num_query_groups 6.*tp=4"),
        (lambda: QKVParallelLinear(32, 6, 2, 8, _tp(4)), r"num_heads 6.*tp=4"),
        (lambda: QKVParallelLinear(32, 4, 3, 8, ONE), r"num_heads 4.*num_query_groups 3"),
        (
            lambda: ColumnParallelLinear(4, {"q": 8, "k": 4}, _tp(4), copies={"k": 3}),
            r"component 'k': 3 neighbouring ranks.*tp=4.*divides tp",
        ),
        (
            lambda: TpSharding(dim=0, components={"k": 4}, copies={"x": 2}),
            r"copies is \{'x': 2\}.*components \['k'\]",
        ),
        (lambda: TpSharding(dim=0, copies=0), r"copies is 0.*at least 1"),
        (
            lambda: ColumnParallelLinear(4, {"gate": 2, "up": 2}, ONE, gather_output=True),
            r"gather_output.*'gate', 'up'.*interleaved",
        ),
        (
            lambda: RowParallelLinear(4, 4, ONE, input_is_parallel=False, sequence_parallel=True),
            r"input_is_parallel=True",
        ),
        (
            lambda: VocabParallelEmbedding(5, 2, ONE)(torch.tensor([0, 5])),
            r"token ids range from 0 to 5.*ids 0 to 4.*tokenizer",
        ),
        (lambda: LOSS(torch.zeros(2, 8), LABELS, ONE.tp, vocab_size=5), r"label ids range from -1 to 3"),
        (
            lambda: VocabParallelOutput(5, 2, ONE, tied=True)(torch.zeros(1, 2)),
            r"tied VocabParallelOutput has no weight.*embedding",
        ),
    ],
)
def test_what_cannot_be_declared_cut_or_computed_is_an_error(
    make: Callable[[], object], message: str
) -> None:
    with pytest.raises(DeclarationError, match=message):
        make()


def test_errors_of_declarations_have_the_key_or_the_rank() -> None:
    with pytest.raises(DeclarationError) as caught:
        _row_cut(wieght=0)
    assert caught.value.key == "m.wieght"
    with pytest.raises(DeclarationError, match=r"out_features 6.*tp=4.*multiple of 4") as caught:
        ColumnParallelLinear(4, 6, _tp(4, 1))
    assert caught.value.rank == 1


def test_more_ranks_than_key_heads_have_one_head_each_and_neighbours_the_same() -> None:
    layers = [QKVParallelLinear(32, 8, 2, 8, _tp(4, rank)) for rank in range(4)]
    assert layers[1].local_components == {"q": 16, "k": 8, "v": 8}
    placed = [layer.sharded_state_dict()["weight"].tensors() for layer in layers]
    q, k, v = ([(t[i].global_offset[0], t[i].replica_id) for t in placed] for i in range(3))
    assert q == [(0, (0, 0, 0)), (16, (0, 0, 0)), (32, (0, 0, 0)), (48, (0, 0, 0))]
    assert k == v == [(0, (0, 0, 0)), (0, (0, 1, 0)), (8, (0, 0, 0)), (8, (0, 1, 0))]
    assert {t[1].global_shape for t in placed} == {(16, 32)}
    assert [copied_rows(layer.weight) for layer in layers] == [(), (RowRange(0, 16, 32),)] * 2


def test_a_whole_tensor_may_have_copies() -> None:
    class Keys(ShardedModule):
        def __init__(self, groups: ParallelGroups) -> None:
            super().__init__(groups, tp_sharding={"weight": TpSharding(dim=1, copies=2)})
            self.weight = torch.nn.Parameter(torch.zeros(3, 4))

    entity = Keys(_tp(4, 3)).sharded_state_dict()["weight"]
    assert (entity.global_shape, entity.global_offset, entity.replica_id) == ((3, 8), (0, 4), (0, 1, 0))
    assert copied_rows(entity.data) == (RowRange(1, 0, 4),)


@pytest.mark.parametrize(
    ("vocab", "tp", "rows"), [(100, 1, 128), (128, 1, 128), (129, 2, 256), (100, 3, 384)]
)
def test_vocabulary_is_padded_to_a_multiple_of_tp_blocks(vocab: int, tp: int, rows: int) -> None:
    assert padded_vocab_size(vocab, tp=tp) == rows


def test_padding_rows_begin_as_zero_on_every_rank() -> None:
    for rank in range(4):
        layer = VocabParallelEmbedding(9, 2, _tp(4, rank), make_divisible=4)
        real = max(0, min(4, 9 - 4 * rank))
        assert torch.count_nonzero(layer.weight[:real]) == 2 * real
        assert torch.count_nonzero(layer.weight[real:]) == 0
        entity = layer.sharded_state_dict()["weight"]
        assert (entity.global_shape, entity.global_offset) == ((16, 2), (4 * rank, 0))
        assert entity.allow_shape_mismatch


def test_padding_takes_no_part_in_the_loss_and_gets_no_gradient() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 8, requires_grad=True)
    labels = torch.randint(0, 5, (2, 3))
    losses = vocab_parallel_cross_entropy(logits, labels, ONE.tp, vocab_size=5)
    expected = F.cross_entropy(logits[..., :5].flatten(0, 1), labels.flatten(), reduction="none")
    torch.testing.assert_close(losses.flatten(), expected)
    losses.sum().backward()
    assert logits.grad is not None
    assert torch.count_nonzero(logits.grad[..., 5:]) == 0


def test_cross_entropy_of_huge_logits_is_finite() -> None:
    logits = torch.tensor([[1e4, -1e4]])
    losses = vocab_parallel_cross_entropy(logits, torch.tensor([1]), ONE.tp, vocab_size=2)
    assert losses.tolist() == [2e4]


CONFIG = GPTConfig(
    vocab_size=32, hidden_size=16, num_layers=4, num_heads=4, seq_length=16, make_vocab_divisible=1
)
SPLIT = replace(CONFIG, layer_blocks=(("attention",), ("mlp",)) * 2)


def test_layers_of_one_block_compute_what_layers_of_two_do() -> None:
    whole, split = (
        build_gpt(config, ParallelGroups.create(ParallelLayout()))
        for config in (replace(CONFIG, num_layers=2), SPLIT)
    )
    init_weights(whole, 1)
    values = {}
    for key, value in whole.state_dict().items():
        for layer in range(2):
            # Layer n of the one is layers 2n and 2n + 1 of the other.
            of_attention = ".self_attention." in key or ".input_layernorm." in key
            number = 2 * layer + (not of_attention)
            if f"layers.{layer}." in key:
                key = key.replace(f"layers.{layer}.", f"layers.{number}.")
                break
        values[key] = value
    split.load_state_dict(values)
    tokens = torch.arange(12).view(2, 6)
    (whole_chunk,), (split_chunk,) = whole, split
    assert torch.equal(whole_chunk(tokens), split_chunk(tokens))


def test_layers_of_different_kinds_have_keys_of_their_own() -> None:
    groups = ParallelGroups.create(ParallelLayout())
    keys = {tensor.key for tensor in tensors_of(build_gpt(SPLIT, groups).sharded_state_dict())}
    assert {key for key in keys if ".layers.0." in key} == {
        "decoder.layers.0.input_layernorm.weight",
        *(f"decoder.layers.0.self_attention.linear_qkv.weight.{part}" for part in "qkv"),
        "decoder.layers.0.self_attention.linear_proj.weight",
    }
    assert "decoder.layers.3.mlp.linear_fc2.weight" in keys
    equal_layers = build_gpt(replace(CONFIG, layer_blocks=(("mlp",),) * 4), groups)
    assert "decoder.layers.mlp.linear_fc2.weight" in {
        t.key for t in tensors_of(equal_layers.sharded_state_dict())
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_blocks": (("mlp",),)}, "layer_blocks has 1 layers, but num_layers is 4"),
        ({"layer_blocks": ((),) * 4}, r"layer_blocks\[0\] is \(\)"),
        ({"layer_blocks": (("mlp",), ("mlp", "attention")) * 2}, r"layer_blocks\[1\].*in this order"),
        ({"layer_blocks": (("mlp", "moe"),) * 4}, "Give one of attention"),
        ({"layer_blocks": (("conv",),) * 4}, "one of mlp, moe"),
        ({"layer_blocks": (("moe",),) * 4}, "layers with experts, and moe is None"),
        (
            {"layer_blocks": (("mlp",),) * 4, "moe": MoEConfig(num_experts=2, ffn_hidden_size=8)},
            "has no layers with experts",
        ),
    ],
)
def test_blocks_that_a_layer_cannot_have_are_an_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        replace(CONFIG, **changes)


def test_a_model_without_attention_may_have_any_number_of_heads() -> None:
    config = replace(CONFIG, num_heads=1, ffn_hidden_size=12, layer_blocks=(("mlp",),) * 4)
    config.check_layout(ParallelLayout(tp=2))
    with pytest.raises(DeclarationError, match="num_heads 1 is not a multiple of tp=2"):
        replace(config, layer_blocks=(("attention",),) * 4).check_layout(ParallelLayout(tp=2))
