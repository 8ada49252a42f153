"""The pickled FP8 state of every era of Transformer Engine: read without running it, and written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megackpt import DeclarationError, FormatError
from megackpt.integrations.transformer_engine.extra_state import (
    Fp8State,
    fill_fp8_state,
    fp8_state_of,
    join_megatron_experts,
    read_extra_state,
    write_extra_state,
)
from tests.contrib.transformer_engine import te_models
from tests.contrib.transformer_engine.te_fp8 import (
    ONE,
    at_every_ep,
    build_fp8,
    delayed,
    expert_numbers,
    experts_by_slot,
    fill_experts,
    fp8_tensors,
)
from tests.contrib.transformer_engine.te_models import EXPERTS, IS_NEW, MODULES, needs_new
from tests.contrib.transformer_engine.te_pickles import as_bytes, as_torch_save
from tests.contrib.transformer_engine.te_stub import cpu_for_cuda


def of_te_1(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """What TE 1 pickled: inverse scales in addition, and no recipe."""
    inverse = {f"scale_inv_{d}": 1 / (1 + tensors[f"scale_{d}"]) for d in ("fwd", "bwd")}
    return {**tensors, **inverse, "extra_fp8_variables": {"num_gemms": EXPERTS, "fp8_max_fwd": 448}}


@pytest.mark.parametrize("pack", [as_torch_save, as_bytes], ids=["before 1.14", "1.14 to 1.x"])
def test_experts_of_te_1_get_their_own_numbers(pack: Any) -> None:
    state = read_extra_state(pack(of_te_1(experts_by_slot(range(EXPERTS)))), experts=EXPERTS)
    assert state is not None
    assert state.recipe == {"name": "DelayedScaling"}
    module = build_fp8(te_models.experts(None), ONE)
    fill_fp8_state(module, state)
    fill_experts(module, range(EXPERTS), check=True)


def test_experts_of_te_2_0_to_2_2_are_recognised_by_the_version() -> None:
    data = as_bytes({**experts_by_slot(range(EXPERTS)), "recipe": delayed(), "extra_fp8_variables": {}})
    state = read_extra_state(data, experts=EXPERTS, te_version="2.2.0")
    module = build_fp8(te_models.experts(None), ONE)
    assert state is not None
    fill_fp8_state(module, state)
    fill_experts(module, range(EXPERTS), check=True)


def te_1_before_14(module: Any, experts: range) -> Any:
    return as_torch_save(of_te_1(experts_by_slot(experts)))


def te_1_from_14(module: Any, experts: range) -> Any:
    return as_bytes(of_te_1(experts_by_slot(experts)))


def te_installed(module: Any, experts: range) -> Any:
    fill_experts(module, experts, check=False)
    with cpu_for_cuda():
        return module.get_extra_state()


@pytest.mark.parametrize("pickled", [te_1_before_14, te_1_from_14, te_installed])
def test_every_expert_of_every_era_keeps_its_own_numbers_at_another_ep(tmp_path: Path, pickled: Any) -> None:
    def first(module: Any, experts: range) -> None:
        data = pickled(module, experts)
        by_slot = pickled is te_installed and not IS_NEW
        state = read_extra_state(data, experts=len(experts), te_version="2.2" if by_slot else None)
        assert state is not None
        for tensor in fp8_tensors(module).values():
            tensor.fill_(-1)
        fill_fp8_state(module, state)

    at_every_ep(te_models.experts(None), first, (4, 2, 1, 8), tmp_path)


@pytest.mark.parametrize("name", ["linear column", "gated mlp"])
def test_the_bytes_of_the_installed_version_are_read(name: str) -> None:
    module: Any = build_fp8(MODULES[name], ONE, seed=3)
    with cpu_for_cuda():
        data = module.get_extra_state()
    state = read_extra_state(data)
    assert state is not None
    assert state.recipe == fp8_state_of(module).recipe  # type: ignore[union-attr]
    assert state.recipe["fp8_format"] == "HYBRID"
    other = build_fp8(MODULES[name], ONE)
    fill_fp8_state(other, state)
    expected, actual = fp8_tensors(module), fp8_tensors(other)
    assert all(torch.equal(actual[key], expected[key]) for key in expected)


def test_the_bytes_of_a_grouped_module_and_of_an_operation_are_read() -> None:
    grouped: Any = build_fp8(te_models.experts(None), ONE)
    fill_experts(grouped, range(EXPERTS), check=False)
    operation: Any = build_fp8(lambda groups: te_models.te.ops.BasicLinear(4, 8, device="cpu"), ONE, seed=3)
    # TE 2.2 cannot write the state of an operation: its get_extra_state calls a method that it lacks.
    for module, experts in ((grouped, EXPERTS), *([(operation, 1)] if IS_NEW else [])):
        with cpu_for_cuda():
            data = module.get_extra_state()
        state = read_extra_state(data, experts=experts, te_version=None if IS_NEW else "2.2")
        expected = fp8_state_of(module, experts)
        assert state is not None
        assert expected is not None
        assert state.tensors.keys() == expected.tensors.keys()
        assert all(torch.equal(state.tensors[key], expected.tensors[key]) for key in expected.tensors)


@pytest.mark.parametrize("name", ["linear column", "gated mlp"])
def test_written_bytes_are_accepted_by_the_installed_version(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE", "1")
    source, target = build_fp8(MODULES[name], ONE, seed=3), build_fp8(MODULES[name], ONE)
    state = fp8_state_of(source)
    assert state is not None
    gemms = 2 if name == "gated mlp" else 1
    with cpu_for_cuda():
        target.set_extra_state(write_extra_state(state, delayed(), gemms=gemms))
    expected, actual = fp8_tensors(source), fp8_tensors(target)
    assert all(torch.equal(actual[key], expected[key]) for key in expected)


@pytest.mark.parametrize("kind", ["module", pytest.param("operation", marks=needs_new)])
def test_written_bytes_of_experts_are_accepted_by_the_installed_version(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE", "1")

    def operation(groups: Any) -> Any:
        return te_models.te.ops.GroupedLinear(EXPERTS, 16, 16, bias=False, device="cpu")

    make = te_models.experts(None) if kind == "module" else operation
    source: Any = build_fp8(make, ONE, seed=3)
    target: Any = build_fp8(make, ONE)
    state = fp8_state_of(source, EXPERTS)
    assert state is not None
    data = write_extra_state(
        state,
        delayed(),
        gemms=EXPERTS,
        is_operation=kind == "operation",
        te_version=None if IS_NEW else "2.2",
    )
    with cpu_for_cuda():
        target.set_extra_state(data)
    expected, actual = fp8_tensors(source), fp8_tensors(target)
    assert len(expected) == 4
    assert all(torch.equal(actual[key], expected[key]) for key in expected)


def test_a_history_of_another_length_is_padded_or_cut() -> None:
    state = fp8_state_of(build_fp8(te_models.linear(None), ONE, recipe=delayed(4), seed=3))
    assert state is not None
    for length in (2, 7):
        module: Any = build_fp8(te_models.linear(None), ONE, recipe=delayed(length), seed=4)
        fill_fp8_state(module, state)
        history = module.fp8_meta["scaling_fwd"].amax_history
        assert torch.equal(history[:4], state.tensors["amax_history_fwd"][:length])
        assert not history[4:].any()


@pytest.mark.parametrize("local", [1, 2, 4])
def test_experts_that_megatron_split_wrongly_are_put_back(local: int) -> None:
    """Its split takes rows for slots, which TE from 2.3 on does not have: numbers of experts are mixed."""
    stored, expected = [], []
    for first in range(0, EXPERTS, local):
        experts = range(first, first + local)
        tensors = {}
        for direction, slots in (("fwd", 3), ("bwd", 2)):
            scale, history = expert_numbers(experts, 4, slots)
            tensors[f"scale_{direction}"] = scale.flatten()  # TE from 2.3 on
            tensors[f"amax_history_{direction}"] = history.flatten(1)
        for i in range(local):
            split = {
                name: t.view(*t.shape[:-1], -1, local)[..., i]  # view(3, -1)[:, i], as it stands there
                for name, t in tensors.items()
            }
            stored.append(Fp8State(split, {}))
            expected.append({n: t.unflatten(-1, (local, -1))[..., i, :] for n, t in tensors.items()})
    joined = join_megatron_experts(stored, local)
    for state, tensors in zip(joined, expected, strict=True):
        assert all(torch.equal(state.tensors[name], tensors[name]) for name in tensors)
    assert join_megatron_experts(stored, local, te_version="2.2") == stored
    mixed = any(
        not torch.equal(s.tensors["scale_fwd"], e["scale_fwd"]) for s, e in zip(stored, expected, strict=True)
    )
    assert mixed == (local > 1)


def test_wrong_sizes_are_errors() -> None:
    state = read_extra_state(as_bytes(of_te_1(experts_by_slot(range(4)))), experts=4)
    assert state is not None
    with pytest.raises(DeclarationError, match="has 12 slots fwd and the GroupedLinear has 24"):
        fill_fp8_state(build_fp8(te_models.experts(None), ONE), state)
    with pytest.raises(FormatError, match="not those of 5 experts"):
        read_extra_state(as_bytes(of_te_1(experts_by_slot(range(4)))), experts=5)
    with pytest.raises(DeclarationError, match="Call initialise_fp8_state"):
        fill_fp8_state(te_models.build(te_models.experts(None), ONE), state)
    with pytest.raises(DeclarationError, match="not those of ranks with 3 each"):
        join_megatron_experts([state] * 4, 3)
