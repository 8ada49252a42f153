"""The pickled FP8 state of every era of Transformer Engine: read without running it, and written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megackpt import DeclarationError, FormatError, load_plain_tensors
from megackpt.contrib.transformer_engine.extra_state import (
    Fp8State,
    fill_fp8_state,
    fp8_state_of,
    join_megatron_experts,
    read_extra_state,
    write_extra_state,
)
from tests.contrib.transformer_engine import te_models
from tests.contrib.transformer_engine.te_models import (
    EXPERTS,
    IS_NEW,
    MODULES,
    ONE,
    Make,
    at_every_ep,
    build_fp8,
    delayed,
    expert_vectors,
    fill_experts,
    fp8_tensors,
    needs_new,
    same,
)
from tests.contrib.transformer_engine.te_stub import cpu_for_cuda
from tests.contrib.transformer_engine.test_te_pickles import as_bytes, as_torch_save


def of_te_1(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """What TE 1 pickled: inverse scales in addition, and no recipe."""
    inverse = {f"scale_inv_{d}": 1 / (1 + tensors[f"scale_{d}"]) for d in ("fwd", "bwd")}
    return {**tensors, **inverse, "extra_fp8_variables": {"num_gemms": EXPERTS, "fp8_max_fwd": 448}}


def of_te_2(tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {**tensors, "recipe": delayed(), "extra_fp8_variables": {}}


OF_2_2 = None if IS_NEW else "2.2"


def installed(module: Any, experts: range) -> Any:
    fill_experts(module, experts, check=False)
    with cpu_for_cuda():
        return module.get_extra_state()


@pytest.mark.parametrize(
    ("pack", "pickled", "version"),
    [
        pytest.param(as_torch_save, of_te_1, None, id="before 1.14"),
        pytest.param(as_bytes, of_te_1, None, id="1.14 to 1.x"),
        pytest.param(as_bytes, of_te_2, "2.2.0", id="2.0 to 2.2"),
        pytest.param(None, None, OF_2_2, id="installed"),
    ],
)
def test_every_expert_of_every_era_keeps_its_own_numbers_at_another_ep(
    tmp_path: Path, pack: Any, pickled: Any, version: str | None
) -> None:
    def first(module: Any, experts: range) -> None:
        if pack is None:
            data = installed(module, experts)
        else:
            data = pack(pickled(expert_vectors(experts, by_slot=True)))
        state = read_extra_state(data, experts=len(experts), te_version=version)
        assert state is not None
        assert (state.recipe == {"name": "DelayedScaling"}) == (pickled is of_te_1)
        for tensor in fp8_tensors(module).values():
            tensor.fill_(-1)
        fill_fp8_state(module, state)

    at_every_ep(te_models.experts(None), first, (4, 2, 1, 8), tmp_path)
    arrays = load_plain_tensors(tmp_path / "0")
    assert arrays["fp8.scale_fwd"].shape == (EXPERTS, 3)
    assert arrays["fp8.amax_history_bwd"].shape == (EXPERTS, 4, 2)


def operation(groups: Any) -> Any:
    return te_models.te.ops.BasicLinear(4, 8, device="cpu")


def experts_as_operation(groups: Any) -> Any:
    return te_models.te.ops.GroupedLinear(EXPERTS, 16, 16, bias=False, device="cpu")


INSTALLED = [
    pytest.param(MODULES["linear column"], 1, id="linear"),
    pytest.param(MODULES["gated mlp"], 2, id="mlp"),
    pytest.param(te_models.experts(None), EXPERTS, id="experts"),
]


# TE 2.2 cannot write the state of an operation: its get_extra_state calls a method that it lacks.
@pytest.mark.parametrize(
    ("make", "gemms"), [*INSTALLED, pytest.param(operation, 1, id="operation", marks=needs_new)]
)
def test_the_bytes_of_the_installed_version_are_read(make: Make, gemms: int) -> None:
    experts = EXPERTS if gemms == EXPERTS else 1
    module: Any = build_fp8(make, ONE, seed=3)
    with cpu_for_cuda():
        data = module.get_extra_state()
    state = read_extra_state(data, experts=experts, te_version=OF_2_2)
    expected = fp8_state_of(module, experts)
    assert state is not None
    assert expected is not None
    assert state.recipe == expected.recipe
    assert state.recipe["fp8_format"] == "HYBRID"
    assert same(state.tensors, expected.tensors)
    other = build_fp8(make, ONE)
    fill_fp8_state(other, state)
    assert same(fp8_tensors(other), fp8_tensors(module))


@pytest.mark.parametrize(
    ("make", "gemms"),
    [*INSTALLED, pytest.param(experts_as_operation, EXPERTS, id="experts of operation", marks=needs_new)],
)
def test_written_bytes_are_accepted_by_the_installed_version(
    make: Make, gemms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE", "1")
    source: Any = build_fp8(make, ONE, seed=3)
    target: Any = build_fp8(make, ONE)
    state = fp8_state_of(source, EXPERTS if gemms == EXPERTS else 1)
    assert state is not None
    options: Any = {"is_operation": make is experts_as_operation, "te_version": OF_2_2}
    with cpu_for_cuda():
        target.set_extra_state(write_extra_state(state, delayed(), gemms=gemms, **options))
    assert len(fp8_tensors(source)) == 4
    assert same(fp8_tensors(target), fp8_tensors(source))


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
        tensors = expert_vectors(range(first, first + local), by_slot=False)  # TE from 2.3 on
        for i in range(local):
            split = {
                name: t.view(*t.shape[:-1], -1, local)[..., i]  # view(3, -1)[:, i], as it stands there
                for name, t in tensors.items()
            }
            stored.append(Fp8State(split, {}))
            expected.append({n: t.unflatten(-1, (local, -1))[..., i, :] for n, t in tensors.items()})
    joined = join_megatron_experts(stored, local)
    for state, tensors in zip(joined, expected, strict=True):
        assert same(state.tensors, tensors)
    assert join_megatron_experts(stored, local, te_version="2.2") == stored
    mixed = any(
        not torch.equal(s.tensors["scale_fwd"], e["scale_fwd"]) for s, e in zip(stored, expected, strict=True)
    )
    assert mixed == (local > 1)


def test_wrong_sizes_are_errors() -> None:
    state = read_extra_state(as_bytes(of_te_1(expert_vectors(range(4), by_slot=True))), experts=4)
    assert state is not None
    with pytest.raises(DeclarationError, match=r"has \(12,\) slots fwd and the GroupedLinear has \(24,\)"):
        fill_fp8_state(build_fp8(te_models.experts(None), ONE), state)
    with pytest.raises(FormatError, match="not those of 5 experts"):
        read_extra_state(as_bytes(of_te_1(expert_vectors(range(4), by_slot=True))), experts=5)
    with pytest.raises(DeclarationError, match="Call initialise_fp8_state"):
        fill_fp8_state(te_models.build(te_models.experts(None), ONE), state)
    with pytest.raises(DeclarationError, match="not those of ranks with 3 each"):
        join_megatron_experts([state] * 4, 3)
