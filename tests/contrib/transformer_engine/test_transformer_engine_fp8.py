"""FP8 state of delayed scaling: named arrays, and every expert keeps its own numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megackpt import DeclarationError, MismatchError, load, load_plain_tensors, save
from megackpt.contrib.transformer_engine import initialise_fp8_state, sharded_state_dict
from megackpt.training.parallel import ParallelGroups, ParallelLayout
from tests.contrib.transformer_engine import te_models
from tests.contrib.transformer_engine.te_models import (
    EXPERTS,
    HIDDEN,
    IS_NEW,
    MODULES,
    ONE,
    autocast,
    build,
    build_fp8,
    delayed,
    expert_vectors,
    fill_experts,
    fp8_tensors,
    needs_new,
    pass_on,
    ranks_of,
    same,
    stored_same,
    te,
)
from tests.contrib.transformer_engine.te_stub import cpu_for_cuda

STATELESS = ["Float8CurrentScaling", "MXFP8BlockScaling", *(["Float8BlockScaling"] if IS_NEW else [])]


@pytest.mark.parametrize(
    "name",
    [
        "linear column",
        "gated mlp",
        "layer",
        "attention, interleaved",
        pytest.param("fused gated mlp", marks=needs_new),
    ],
)
def test_state_is_loaded_at_every_tp(tmp_path: Path, name: str) -> None:
    whole = build_fp8(MODULES[name], ONE, seed=3)
    save(sharded_state_dict(whole, ONE), tmp_path / "one")
    expected = fp8_tensors(whole)
    assert expected
    for tp in (2, 4):
        ranks = ranks_of(ParallelLayout(tp=tp))
        modules = [build_fp8(MODULES[name], groups) for groups in ranks]
        pass_on(modules, ranks, tmp_path / "one", tmp_path / str(tp))
        assert all(same(fp8_tensors(module), expected) for module in modules)
        assert stored_same(tmp_path / "one", tmp_path / str(tp))


def test_experts_of_every_layer_keep_their_numbers_at_another_pp_and_order_of_layers(tmp_path: Path) -> None:
    layouts = [
        (ParallelLayout(dp=4, ep=4), False),
        (ParallelLayout(pp=2, dp=2, ep=2), True),
        (ParallelLayout(pp=4), False),
        (ParallelLayout(pp=2), True),
        (ParallelLayout(dp=8, ep=8), False),
    ]
    for step, (layout, interleaved) in enumerate(layouts):
        ranks = ranks_of(layout)

        def make(groups: ParallelGroups) -> nn.Module:
            return te_models.expert_layers(groups, interleaved=interleaved)  # noqa: B023 - run at once

        models: list[Any] = [build_fp8(make, groups) for groups in ranks]

        def numbers(*, check: bool) -> None:
            for groups, model in zip(ranks, models, strict=True):  # noqa: B023
                count = EXPERTS // groups.ep.size
                for local, layer in enumerate(model.owned):
                    first = EXPERTS * layer + groups.ep.rank * count  # counted over all layers
                    fill_experts(model[local], range(first, first + count), check=check)

        if step == 0:
            numbers(check=False)
        pass_on(models, ranks, tmp_path / f"{step - 1}" if step else None, tmp_path / f"{step}")
        numbers(check=True)
    assert load_plain_tensors(tmp_path / "0")["fp8.scale_fwd"].shape == (4, EXPERTS, 3)


@needs_new
def test_slots_of_older_versions_are_slot_by_slot(tmp_path: Path) -> None:
    """TE before 2.3 had the inputs of all experts first, then all weights, then all outputs."""
    new = build_fp8(te_models.experts(None), ONE)
    fill_experts(new, range(EXPERTS), check=False)
    save(sharded_state_dict(new, ONE), tmp_path)
    old: Any = build_fp8(te_models.experts(None), ONE)
    old._offsets = {"input": 0, "weight": EXPERTS, "output": 2 * EXPERTS, "grad_output": 0}  # of TE 2.2
    load(sharded_state_dict(old, ONE), tmp_path)
    expected = expert_vectors(range(EXPERTS), by_slot=True)
    for direction in ("fwd", "bwd"):
        state = old.fp8_meta[f"scaling_{direction}"]
        assert torch.equal(state.scale, expected[f"scale_{direction}"])
        assert torch.equal(state.amax_history, expected[f"amax_history_{direction}"])


@pytest.mark.parametrize(("stored", "asked"), [(4, 6), (6, 4), (6, 1)])
def test_a_history_of_another_length_is_that_of_te(tmp_path: Path, stored: int, asked: int) -> None:
    module: Any = build_fp8(te_models.linear(None), ONE, recipe=delayed(stored), seed=3)
    save(sharded_state_dict(module, ONE), tmp_path)
    other = build_fp8(te_models.linear(None), ONE, recipe=delayed(asked), seed=4)
    load(sharded_state_dict(other, ONE), tmp_path)
    with cpu_for_cuda(), autocast(delayed(asked)):
        module.adjust_amax_history_length(asked)
    assert same(fp8_tensors(other), fp8_tensors(module))


def test_the_recipe_is_an_object_of_plain_values(tmp_path: Path) -> None:
    save(sharded_state_dict(build_fp8(te_models.linear(None), ONE), ONE), tmp_path)
    module = build_fp8(te_models.linear(None), ONE)
    fields = load(sharded_state_dict(module, ONE), tmp_path)["fp8.recipe"]
    assert fields["name"] == "DelayedScaling"
    assert fields["fp8_format"] == "HYBRID"
    assert fields["amax_history_len"] == 4
    assert all(isinstance(value, bool | int | float | str) for value in fields.values())


def test_a_module_without_fp8_or_with_a_recipe_without_state_stores_none() -> None:
    from transformer_engine.common import recipe as recipes

    modules = [build_fp8(te_models.mlp("gelu"), ONE, recipe=getattr(recipes, name)()) for name in STATELESS]
    for module in [build(MODULES["layer"], ONE), *modules]:
        assert not [key for key in sharded_state_dict(module, ONE) if "fp8" in key or "extra" in key]


def test_another_number_of_slots_is_an_error(tmp_path: Path) -> None:
    save(sharded_state_dict(build_fp8(te_models.experts(None), ONE), ONE), tmp_path)

    def fewer(groups: ParallelGroups) -> nn.Module:
        module: nn.Module = te.GroupedLinear(4, HIDDEN, te_models.FFN, device="cpu")
        return module

    state = sharded_state_dict(build_fp8(fewer, ONE), ONE)
    state = {key: entity for key, entity in state.items() if "fp8" in key}
    with pytest.raises(MismatchError, match=r"fp8\.scale_fwd"):
        load(state, tmp_path)


def test_state_made_outside_of_autocast_is_an_error() -> None:
    module = build(te_models.linear(None), ONE)
    with cpu_for_cuda(), pytest.raises(DeclarationError, match=r"inside of `with te\.autocast"):
        initialise_fp8_state(module, delayed())
