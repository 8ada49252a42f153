"""Declarations of modules: composition, replica ids, stacks, and declarations that are errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from megackpt import DeclarationError, ShardedLayout, ShardedObject, ShardedTensor
from megackpt.parallel import (
    ColumnParallelLinear,
    LayerStack,
    ModelChunks,
    ParallelGroups,
    ParallelLayout,
    RowParallelLinear,
    ShardedModule,
    TpSharding,
    is_marked,
    mark,
    second_copy,
    sharded_state_dict,
)

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
        == [
            "m.0.0.weight",
            "m.0.1.weight",
            "m.1.0.weight",
        ]
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


@pytest.mark.parametrize(
    ("declare", "key", "message"),
    [
        (
            lambda: _row_cut(wieght=0), "m.wieght",
            r"'m\.wieght'.*RowCutLinear.*'bias', 'weight'.*Correct",
        ),
        *(
            (
                lambda dim=dim: _row_cut(weight=TpSharding(dim=dim)), None,
                rf"'m\.weight'.*cuts dim {dim}.*\(2, 3\).*dim from 0 to 1",
            )
            for dim in (-1, 2)
        ),
        (
            lambda: _row_cut(weight=TpSharding(dim=0, components={"a": 1, "b": 2})), None,
            r"'m\.weight'.*'a': 1, 'b': 2",
        ),
        (
            lambda: sharded_state_dict(_marked(), GROUPS, "m."), None,
            r"'m\.0\.weight'.*marked tensor_model_parallel.*Declare it",
        ),
        (
            lambda: Scale(ONE).sharded_state_dict("m.", ((1, 0, 2),)), None,
            r"\(1, 0, 2\).*axes 0 to 0.*tp_sharding",
        ),
        (
            lambda: TpSharding(dim=0, components={"a": 1}, allow_shape_mismatch=True), None,
            r"components \['a'\] cannot have allow_shape_mismatch.*pad none",
        ),
        (lambda: second_copy(ENTITY, "e"), None, r"'w' cannot be declared as a copy of 'e'.*replica id 0"),
    ],
)  # fmt: skip
def test_declarations_that_do_not_fit_are_an_error(
    declare: Callable[[], object], key: str | None, message: str
) -> None:
    with pytest.raises(DeclarationError, match=message) as caught:
        declare()
    assert key is None or caught.value.key == key


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
