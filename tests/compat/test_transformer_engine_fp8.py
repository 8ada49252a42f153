"""FP8 state of delayed scaling: named arrays, and every expert keeps its own numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from megackpt import DeclarationError, MismatchError, load, load_plain_tensors, save
from megackpt.integrations.transformer_engine import initialise_fp8_state, sharded_state_dict
from megackpt.parallel import ParallelGroups, ParallelLayout
from megackpt.testing.world import SimulatedRank, SimulatedWorld
from tests import te_models
from tests.te_models import EXPERTS, HIDDEN, MODULES, build, te
from tests.te_stub import cpu_for_cuda

Make = Callable[[ParallelGroups], nn.Module]

ONE = ParallelGroups.offline(ParallelLayout(), 0)


def delayed(length: int = 4) -> Any:
    from transformer_engine.common.recipe import DelayedScaling

    return DelayedScaling(amax_history_len=length)


def build_fp8(make: Make, groups: ParallelGroups, *, recipe: Any = None, seed: int = 0) -> nn.Module:
    """Build a module with FP8 state that depends on the seed, 0 for state as TE makes it."""
    recipe = delayed() if recipe is None else recipe
    module = build(make, groups, seed=seed)
    # TE rejects recipes that the device of the stand-in could not compute with.
    supported = {f"check_{name}_support": lambda: (True, "") for name in ("mxfp8", "fp8_block_scaling")}
    with (
        cpu_for_cuda(),
        mock.patch.multiple("transformer_engine.pytorch.quantization", **supported),
        te.autocast(enabled=True, recipe=recipe),
    ):
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
        for meta in metas.values():
            for key in ("scaling_fwd", "scaling_bwd"):
                if meta and key in meta:
                    tensors[f"{name}.{key}.scale"] = meta[key].scale
                    tensors[f"{name}.{key}.amax_history"] = meta[key].amax_history
    return tensors


@pytest.mark.parametrize(
    "name", ["linear column", "gated mlp", "layer", "attention, interleaved", "fused gated mlp"]
)
def test_state_is_loaded_at_every_tp(tmp_path: Path, name: str) -> None:
    whole = build_fp8(MODULES[name], ONE, seed=3)
    save(sharded_state_dict(whole, ONE), tmp_path / "one")
    for tp in (2, 4):
        groups = [ParallelGroups.offline(ParallelLayout(tp=tp), rank) for rank in range(tp)]
        modules = [build_fp8(MODULES[name], g) for g in groups]

        def one_rank(group: SimulatedRank) -> None:
            state = sharded_state_dict(modules[group.rank], groups[group.rank])  # noqa: B023 - run at once
            load(state, tmp_path / "one", group=group)
            save(state, tmp_path / str(tp), group=group)  # noqa: B023

        SimulatedWorld(tp).run(one_rank)
        expected = fp8_tensors(whole)
        assert expected
        for module in modules:
            actual = fp8_tensors(module)
            assert actual.keys() == expected.keys()
            assert all(torch.equal(actual[key], expected[key]) for key in expected)
        first, second = load_plain_tensors(tmp_path / "one"), load_plain_tensors(tmp_path / str(tp))
        assert first.keys() == second.keys()
        assert all(torch.equal(first[key], second[key]) for key in first)


def expert_numbers(experts: range, length: int, slots: int) -> tuple[Tensor, Tensor]:
    """Scales `[experts, slots]` and histories `[length, experts, slots]` that tell expert and slot apart."""
    scale = torch.tensor([[100.0 * e + s for s in range(slots)] for e in experts])
    rows = torch.arange(length).view(-1, 1, 1) * 10000.0
    return scale, rows + scale


def fill_experts(module: Any, experts: range, *, check: bool) -> None:
    """Set the numbers of each expert, in TE's order: input, weight, output of expert 0, then of expert 1."""
    for key, slots in (("scaling_fwd", 3), ("scaling_bwd", 2)):
        state = module.fp8_meta[key]
        scale, history = expert_numbers(experts, len(state.amax_history), slots)
        if check:
            assert torch.equal(state.scale, scale.flatten())
            assert torch.equal(state.amax_history, history.flatten(1))
        state.scale.copy_(scale.flatten())
        state.amax_history.copy_(history.flatten(1))


def test_every_expert_keeps_its_own_numbers_at_another_ep(tmp_path: Path) -> None:
    make = te_models.experts("column")
    source: Path | None = None
    for step, ep in enumerate((4, 2, 1, 8, 4)):
        groups = [ParallelGroups.offline(ParallelLayout(dp=ep, ep=ep), rank) for rank in range(ep)]
        modules = [build_fp8(make, g) for g in groups]
        count = EXPERTS // ep
        owned = [range(rank * count, (rank + 1) * count) for rank in range(ep)]
        if source is None:
            for module, experts in zip(modules, owned, strict=True):
                fill_experts(module, experts, check=False)
        target = tmp_path / f"{step}"

        def one_rank(group: SimulatedRank) -> None:
            state = sharded_state_dict(modules[group.rank], groups[group.rank])  # noqa: B023 - run at once
            if source is not None:  # noqa: B023
                load(state, source, group=group)  # noqa: B023
            save(state, target, group=group)  # noqa: B023

        SimulatedWorld(ep).run(one_rank)
        for module, experts in zip(modules, owned, strict=True):
            fill_experts(module, experts, check=True)
        source = target
        arrays = load_plain_tensors(target)
        assert arrays["fp8.scale_fwd"].shape == (EXPERTS, 3)
        assert arrays["fp8.amax_history_bwd"].shape == (EXPERTS, 4, 2)


def test_slots_of_older_versions_are_slot_by_slot(tmp_path: Path) -> None:
    """TE before 2.3 had the inputs of all experts first, then all weights, then all outputs."""
    new = build_fp8(te_models.experts(None), ONE)
    fill_experts(new, range(EXPERTS), check=False)
    save(sharded_state_dict(new, ONE), tmp_path)
    old: Any = build_fp8(te_models.experts(None), ONE)
    old._offsets = {
        "input": 0,
        "weight": EXPERTS,
        "output": 2 * EXPERTS,
        "grad_output": 0,
        "grad_input": EXPERTS,
    }
    load(sharded_state_dict(old, ONE), tmp_path)
    scale, history = expert_numbers(range(EXPERTS), 4, 3)
    assert torch.equal(old.fp8_meta["scaling_fwd"].scale, scale.t().flatten())
    assert torch.equal(old.fp8_meta["scaling_fwd"].amax_history, history.transpose(1, 2).flatten(1))


@pytest.mark.parametrize(("stored", "asked"), [(4, 6), (6, 4), (6, 1)])
def test_a_history_of_another_length_is_that_of_te(tmp_path: Path, stored: int, asked: int) -> None:
    module: Any = build_fp8(te_models.linear(None), ONE, recipe=delayed(stored), seed=3)
    save(sharded_state_dict(module, ONE), tmp_path)
    other = build_fp8(te_models.linear(None), ONE, recipe=delayed(asked), seed=4)
    load(sharded_state_dict(other, ONE), tmp_path)
    with cpu_for_cuda(), te.autocast(enabled=True, recipe=delayed(asked)):
        module.adjust_amax_history_length(asked)
    expected, actual = fp8_tensors(module), fp8_tensors(other)
    assert all(torch.equal(actual[key], expected[key]) for key in expected)


def test_the_recipe_is_an_object_of_plain_values(tmp_path: Path) -> None:
    save(sharded_state_dict(build_fp8(te_models.linear(None), ONE), ONE), tmp_path)
    module = build_fp8(te_models.linear(None), ONE)
    fields = load(sharded_state_dict(module, ONE), tmp_path)["fp8.recipe"]
    assert fields["name"] == "DelayedScaling"
    assert fields["fp8_format"] == "HYBRID"
    assert fields["amax_history_len"] == 4
    assert all(isinstance(value, bool | int | float | str) for value in fields.values())


@pytest.mark.parametrize("name", ["Float8CurrentScaling", "MXFP8BlockScaling", "Float8BlockScaling"])
def test_recipes_without_state_store_nothing(name: str) -> None:
    from transformer_engine.common import recipe as recipes

    module = build_fp8(te_models.mlp("gelu"), ONE, recipe=getattr(recipes, name)())
    assert not [key for key in sharded_state_dict(module, ONE) if "fp8" in key]


def test_a_module_without_fp8_stores_no_state() -> None:
    assert not [
        k for k in sharded_state_dict(build(MODULES["layer"], ONE), ONE) if "fp8" in k or "extra" in k
    ]


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
