"""Modules of Transformer Engine declare themselves: saved at one layout, loaded at every other one."""

from __future__ import annotations

from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from megackpt import DeclarationError, load_plain_tensors, save
from megackpt.contrib.transformer_engine import set_components, sharded_state_dict
from megackpt.entities import ShardedTensor
from megackpt.training.parallel import ParallelGroups, ParallelLayout
from tests.contrib.transformer_engine import te_models
from tests.contrib.transformer_engine.te_models import (
    EXPERTS,
    FFN,
    HEADS,
    HIDDEN,
    MODULES,
    ONE,
    Make,
    build,
    needs_new,
    pass_on,
    ranks_of,
    stored_same,
)

TP = [ParallelLayout(tp=1), ParallelLayout(tp=2), ParallelLayout(tp=4)]
STAGES = [ParallelLayout(), ParallelLayout(tp=2, pp=2), ParallelLayout(pp=4), ParallelLayout(tp=4, dp=2)]
EP = [
    ParallelLayout(),
    ParallelLayout(dp=4, ep=4),
    ParallelLayout(dp=8, ep=8),
    ParallelLayout(tp=2, dp=2, ep=2, etp=2),
    ParallelLayout(tp=4, ep=2, etp=1),
]


def load_anew(make: Make, source: Path, target: Path, layout: ParallelLayout) -> None:
    """Load a checkpoint at a layout, into modules with other values, and save it again."""
    ranks = ranks_of(layout)
    pass_on([build(make, groups, seed=1) for groups in ranks], ranks, source, target)


def check_all_layouts(make: Make, layouts: list[ParallelLayout], folder: Path) -> dict[str, Tensor]:
    """Save at each layout what was loaded at the one before; return the arrays, which stay the same."""
    save(sharded_state_dict(build(make, ONE), ONE), folder / "first")
    expected = load_plain_tensors(folder / "first")
    source = folder / "first"
    # Every pair of neighbours, in both directions, and the first one with the last.
    for number, layout in enumerate([*layouts, *reversed(layouts[:-1]), layouts[-1], layouts[0]]):
        target = folder / str(number)
        load_anew(make, source, target, layout)
        actual = load_plain_tensors(target)
        assert actual.keys() == expected.keys()
        for key, value in expected.items():
            assert torch.equal(actual[key], value), f"{key} at {layout}"
        source = target
    return expected


@pytest.mark.parametrize("name", MODULES)
def test_every_module_is_the_same_at_every_tp(tmp_path: Path, name: str) -> None:
    arrays = check_all_layouts(MODULES[name], TP, tmp_path)
    assert all(value.std() > 0.3 for value in arrays.values())  # values were written, not only shapes


def test_layers_of_a_stack_have_an_axis_over_all_stages(tmp_path: Path) -> None:
    arrays = check_all_layouts(te_models.layers, STAGES, tmp_path)
    head = HIDDEN // HEADS
    assert {key: tuple(value.shape) for key, value in arrays.items()} == {
        "input_layernorm.weight": (4, HIDDEN),
        "input_layernorm.bias": (4, HIDDEN),
        "self_attention.linear_qkv.weight.q": (4, HEADS * head, HIDDEN),
        "self_attention.linear_qkv.weight.k": (4, 4 * head, HIDDEN),
        "self_attention.linear_qkv.weight.v": (4, 4 * head, HIDDEN),
        "self_attention.linear_qkv.bias.q": (4, HEADS * head),
        "self_attention.linear_qkv.bias.k": (4, 4 * head),
        "self_attention.linear_qkv.bias.v": (4, 4 * head),
        "self_attention.linear_proj.weight": (4, HIDDEN, HEADS * head),
        "self_attention.linear_proj.bias": (4, HIDDEN),
        "pre_mlp_layernorm.weight": (4, HIDDEN),
        "pre_mlp_layernorm.bias": (4, HIDDEN),
        "mlp.linear_fc1.weight.gate": (4, FFN, HIDDEN),
        "mlp.linear_fc1.weight.up": (4, FFN, HIDDEN),
        "mlp.linear_fc1.bias.gate": (4, FFN),
        "mlp.linear_fc1.bias.up": (4, FFN),
        "mlp.linear_fc2.weight": (4, HIDDEN, FFN),
        "mlp.linear_fc2.bias": (4, HIDDEN),
    }


@pytest.mark.parametrize("mode", ["column", "row"])
def test_experts_have_an_axis_over_all_ranks_of_ep(tmp_path: Path, mode: str) -> None:
    arrays = check_all_layouts(te_models.experts(mode), EP, tmp_path)
    if mode == "column":
        assert arrays["weight.gate"].shape == arrays["weight.up"].shape == (EXPERTS, FFN // 2, HIDDEN)
        assert arrays["bias.gate"].shape == (EXPERTS, FFN // 2)
    else:
        assert arrays["weight"].shape == (EXPERTS, FFN, HIDDEN)


def test_experts_of_a_stack_have_axes_over_layers_and_experts(tmp_path: Path) -> None:
    layouts = [ParallelLayout(pp=2, dp=2, ep=2), ParallelLayout(tp=2, pp=4), ParallelLayout(dp=4, ep=4)]
    arrays = check_all_layouts(te_models.expert_layers, layouts, tmp_path)
    assert arrays["weight.gate"].shape == (4, EXPERTS, FFN // 2, HIDDEN)
    assert arrays["bias.up"].shape == (4, EXPERTS, FFN // 2)


@pytest.mark.parametrize("layout", TP, ids=str)
def test_modules_on_meta_are_declared_as_those_on_the_cpu(layout: ParallelLayout) -> None:
    groups = ParallelGroups.offline(layout, layout.world_size - 1)

    def boxes(module: nn.Module) -> dict[str, tuple[object, ...]]:
        state = sharded_state_dict(module, groups)
        tensors = [
            (name, tensor)
            for name, entity in state.items()
            for tensor in ([entity] if isinstance(entity, ShardedTensor) else entity.tensors())  # type: ignore[attr-defined]
        ]
        return {
            f"{name}: {t.key} {t.global_offset}": (t.global_shape, t.local_shape, t.replica_id, t.dtype)
            for name, t in tensors
        }

    for name, make in MODULES.items():
        module = build(make, groups)
        expected = boxes(module)
        assert boxes(module.to("meta")) == expected, name


@needs_new
def test_one_grouped_tensor_is_stored_as_single_experts_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    single = build(te_models.experts("column"), ONE)
    save(sharded_state_dict(single, ONE), tmp_path / "single")
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")
    for layout in EP:
        load_anew(te_models.grouped_experts, tmp_path / "single", tmp_path / str(layout), layout)
        assert stored_same(tmp_path / str(layout), tmp_path / "single")


@needs_new
def test_experts_of_fused_operations_have_the_names_of_an_mlp(tmp_path: Path) -> None:
    arrays = check_all_layouts(te_models.fused_experts, EP[:3], tmp_path)
    assert {key: tuple(value.shape) for key, value in arrays.items()} == {
        "linear_fc1.weight.gate": (EXPERTS, FFN, HIDDEN),
        "linear_fc1.weight.up": (EXPERTS, FFN, HIDDEN),
        "linear_fc2.weight": (EXPERTS, HIDDEN, FFN),
    }
    gate, up = build(te_models.fused_experts, ONE).get_parameter("0.weight3").chunk(2)
    assert torch.equal(arrays["linear_fc1.weight.gate"][3], gate)
    assert torch.equal(arrays["linear_fc1.weight.up"][3], up)


def alternating(make: Make) -> Make:
    """As Megatron-Core's `moe_mlp_glu_interleave_size`, in modules that do not know it."""

    def make_alternating(groups: ParallelGroups) -> nn.Module:
        module = make(groups)
        set_components(module, "gate", "up", block=4)
        return module

    return make_alternating


FUSED = "fused gated mlp, interleaved"


BOTH = ("weight", "bias")


@pytest.mark.parametrize(
    ("make", "layouts", "own", "stored", "names"),
    [
        pytest.param(alternating(te_models.linear("column")), TP, "{}", "{}", BOTH, id="linear"),
        pytest.param(alternating(te_models.experts("column")), EP, "{}{}", "{}", BOTH, id="experts"),
        pytest.param(MODULES.get(FUSED), TP[:1], "1.{}", "linear_fc1.{}", BOTH, id="fused", marks=needs_new),
        pytest.param(
            partial(te_models.fused_experts, block=4), EP[:2], "0.{}{}", "linear_fc1.{}", BOTH[:1],
            id="fused experts", marks=needs_new,
        ),
    ],
)  # fmt: skip
def test_parts_that_alternate_are_stored_in_order(
    tmp_path: Path, make: Make, layouts: list[ParallelLayout], own: str, stored: str, names: tuple[str, ...]
) -> None:
    arrays = check_all_layouts(make, layouts, tmp_path)
    module, of_experts = build(make, ONE), own.endswith("{}{}")
    for name, number in product(names, range(EXPERTS if of_experts else 1)):
        parameter = module.get_parameter(own.format(name, number))
        # TE's own split: [blocks, gate and up, 4, in].
        for part, rows in zip(("gate", "up"), parameter.unflatten(0, (-1, 2, 4)).unbind(1), strict=True):
            array = arrays[f"{stored.format(name)}.{part}"]
            assert torch.equal(array[number] if of_experts else array, rows.flatten(0, 1))


@needs_new
def test_what_one_grouped_parameter_cannot_have_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")
    ops = te_models.te.ops

    def interleaved(groups: ParallelGroups) -> nn.Module:
        first = ops.GroupedLinear(2, 16, 16, bias=False, device="cpu", single_grouped_weight=True)
        second = ops.GroupedLinear(2, 8, 16, bias=False, device="cpu")
        module: nn.Module = ops.Sequential(first, ops.ScaledSwiGLU(glu_interleave_size=4), second)
        return module

    with pytest.raises(DeclarationError, match=r"gate and up alternate \(glu_interleave_size\) in one param"):
        sharded_state_dict(build(interleaved, ONE), ONE)
    quantised = build(te_models.grouped_experts, ONE)
    quantised.weight.quantizer = object()  # type: ignore[union-attr, assignment]
    with pytest.raises(DeclarationError, match="all experts are one quantised GroupedTensor"):
        sharded_state_dict(quantised, ONE)


def test_a_bias_that_is_summed_over_tp_keeps_one_for_each_rank() -> None:
    def make(groups: ParallelGroups) -> nn.Module:
        cut = {"tensor_parallel_mode": "row", "tensor_parallel_group": te_models.Group(groups.tp.size)}
        module: nn.Module = te_models.te.ops.Linear(HIDDEN, FFN, device="cpu", **cut)
        return module

    groups = ParallelGroups.offline(ParallelLayout(tp=2), 1)
    state = sharded_state_dict(build(make, groups), groups)
    assert {e.key: (e.global_shape, e.global_offset) for e in state.values()} == {  # type: ignore[union-attr]
        "weight": ((FFN, HIDDEN), (0, HIDDEN // 2)),
        "bias.summands": ((2 * FFN,), (FFN,)),
    }


@pytest.mark.parametrize("interleaved", [True, False])
def test_heads_are_stored_in_order_however_they_are_interleaved(tmp_path: Path, interleaved: bool) -> None:
    module = build(te_models.attention(fuse_qkv_params=True, qkv_weight_interleaved=interleaved), ONE)
    save(sharded_state_dict(module, ONE), tmp_path)
    weight, head, shared = module.qkv.weight.detach(), HIDDEN // HEADS, HEADS // 4
    # TE's own split: [groups, q.. k v, head] where interleaved, else [q.. k v, groups, head].
    order = (4, shared + 2, head, HIDDEN) if interleaved else (shared + 2, 4, head, HIDDEN)
    parts = weight.view(order).split((shared, 1, 1), dim=1 if interleaved else 0)
    stored = load_plain_tensors(tmp_path)
    for name, part in zip("qkv", parts, strict=True):
        assert torch.equal(stored[f"linear_qkv.weight.{name}"], part.reshape(-1, HIDDEN))


def test_a_module_of_another_tp_is_an_error() -> None:
    alone, pair = (ParallelGroups.offline(ParallelLayout(tp=n), 0) for n in (1, 2))
    for name in {"linear column", "linear row", "gated mlp", "softmax offset", "layer"} & MODULES.keys():
        with pytest.raises(DeclarationError, match=r"has tp_size 2, but tp has 1 ranks here"):
            sharded_state_dict(build(MODULES[name], pair), alone)
        with pytest.raises(DeclarationError, match=r"has tp_size 1, but tp has 2 ranks here"):
            sharded_state_dict(build(MODULES[name], alone), pair)
