"""Transformer Engine's FusedAdam with every form of moments and masters, resumed at every change of layout.

The class is TE's own. In place of its kernels are Adam on lists of tensors, in torch, and the casts to float8
of `te_kernels`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from megackpt import (
    DeclarationError,
    LoadReport,
    MismatchError,
    MissingKeyError,
    ShardedTensor,
    load,
    load_plain_tensors,
    load_with_report,
    save,
)
from megackpt.contrib.transformer_engine import fused_adam, sharded_state_dict
from megackpt.errors import OptimizerError
from megackpt.training.optim import (
    DistributedOptimizer,
    MixedPrecisionOptimizer,
    WholeMatrixOptimizer,
    join_master,
    split_master,
)
from megackpt.training.parallel.groups import ParallelGroups
from megackpt.training.parallel.layout import ParallelLayout
from tests.contrib.apex.foreign_optimizers import CHANGES, Kind, outcome, row_of_docs
from tests.contrib.megatron.test_installing import needs_megatron
from tests.contrib.megatron.test_optimizer_ranges import EXACT, resumed_by
from tests.contrib.transformer_engine import te_models
from tests.contrib.transformer_engine.te_stub import cpu_for_cuda, te_version, transformer_engine
from tests.support.fake_apex import are_equal, declare, make_params, set_grads

te = transformer_engine()
te_optimizers = pytest.importorskip("transformer_engine.pytorch.optimizers")

FORMS: dict[str, dict[str, Any]] = {
    "float32": {},
    "float32, masters": {"master_weights": True},
    "int16 remainders": {"master_weights": True, "store_param_remainders": True},
    "float16": {"exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.float16, "master_weights": True},
    "float16 masters": {"master_weights": True, "master_weight_dtype": torch.float16},
    "float8": {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.float16, "master_weights": True},
}
if te_version() >= (2, 20):
    moments = dict.fromkeys(("exp_avg_dtype", "exp_avg_sq_dtype"), torch.bfloat16)
    FORMS["bfloat16"] = {**moments, "master_weights": True}
SCALED = {"float16", "float16 masters", "float8"}


def adam(remainders: bool) -> Any:
    """Replace a kernel: gradients, weights, moments, and masters or their remainders, updated in place."""

    def kernel(
        chunk: int, noop: Tensor, lists: Any, lr: float, beta1: float, beta2: float, eps: float, step: int,
        mode: int, bias_correction: int, weight_decay: float, *rest: Any,
    ) -> None:  # fmt: skip
        for grad, weight, m, v, *masters in zip(*lists, strict=True):
            master = masters[0] if masters else weight.float()
            if remainders:
                master = join_master(weight, masters[0])
            first, second = m.float(), v.float()
            first.lerp_(grad.float(), 1 - beta1)
            second.lerp_(grad.float() ** 2, 1 - beta2)
            update = first / (1 - beta1**step) / ((second / (1 - beta2**step)).sqrt() + eps)
            master.sub_(lr * (update + weight_decay * master))
            m.copy_(first)
            v.copy_(second)
            if remainders:
                split_master(master, weight=weight, remainder=masters[0])
            else:
                weight.copy_(master)

    return kernel


def make(params: Any, **options: Any) -> Any:
    optimizer = te_optimizers.FusedAdam(params, **{"lr": 0.01, "weight_decay": 0.1, **options})
    optimizer.multi_tensor_adam = adam(remainders=False)
    optimizer.multi_tensor_adam_param_remainder = adam(remainders=True)
    return optimizer


def kind(form: str) -> Kind:
    return Kind(
        make=lambda params, groups: make(params, **FORMS[form]),
        declare=lambda o, model, is_loading, groups: fused_adam.sharded_state_dict(o, model, is_loading),
        restore=fused_adam.load_sharded_state_dict,
    )


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("form", FORMS)
def test_three_steps_after_a_load_equal_those_of_the_uninterrupted_run(form: str, change: str) -> None:
    with cpu_for_cuda():
        assert outcome(kind(form), change) == expected(form, change)


def expected(form: str, change: str) -> str:
    return "rounded" if form in SCALED and change in ("tp", "ep") else "exact"


def test_the_table_in_the_docs_is_that_of_the_forms() -> None:
    text = (Path(__file__).parents[3] / "docs" / "optimizers.md").read_text()
    rows = [row_of_docs(f"`FusedAdam`, {form}", [expected(form, c) for c in CHANGES]) for form in FORMS]
    assert [row for row in rows if row not in text] == []


def codes_of(optimizer: Any) -> dict[tuple[int, str], list[Tensor]]:
    """Return codes and scales as they are in memory."""
    codes = {}
    for position, param in enumerate(p for g in optimizer.param_groups for p in g["params"]):
        for name, stored in optimizer.state[param].items():
            if hasattr(stored, "_scale_inv"):
                codes[position, name] = [stored._data, stored._scale_inv.clone()]
            else:
                scale = optimizer._scales.get(param, {}).get(name, torch.ones(1))
                codes[position, name] = [stored, *scale.clone()]
    return codes


def pass_on(
    params: list[Parameter], optimizer: Any, form: str, path: Path, moments: Any
) -> tuple[list[Parameter], Any, LoadReport]:
    """Save a model and its optimizer, and load them into others; return these, and the report."""
    model = declare(params)
    declared = fused_adam.sharded_state_dict(optimizer, model, moments=moments)
    save({"model": model, "optimizer": declared}, path)
    fresh = make_params(1, torch.bfloat16)
    resumed, model = make(fresh, **FORMS[form]), declare(fresh)
    declared = fused_adam.sharded_state_dict(resumed, model, True, moments=moments)
    state, report = load_with_report({"model": model, "optimizer": declared}, path)
    fused_adam.load_sharded_state_dict(resumed, state["optimizer"])
    return fresh, resumed, report


def are_same_codes(first: Any, second: Any) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(a, b) for key in first for a, b in zip(first[key], second[key], strict=True)
    )


@pytest.mark.parametrize("moments", ["portable", "codes"])
@pytest.mark.parametrize("form", sorted(SCALED | {"bfloat16"} & FORMS.keys()))
def test_codes_and_scales_are_restored_bit_for_bit_and_are_in_the_report(
    form: str, moments: Any, tmp_path: Path
) -> None:
    params = make_params(0, torch.bfloat16)
    with cpu_for_cuda():
        optimizer = make(params, **FORMS[form])
        train(params, optimizer, range(3))
        fresh, resumed, report = pass_on(params, optimizer, form, tmp_path / "a", moments)
        assert are_same_codes(codes_of(optimizer), codes_of(resumed))
        train(params, optimizer, range(3, 6))
        train(fresh, resumed, range(3, 6))
        assert are_equal(params, fresh)
        # Moments as small as in late training, whose second ones are near the smallest float32.
        optimizer.set_scaled_state(params[1], "exp_avg_sq", torch.rand(13) * 1e-37)
        _, resumed, _ = pass_on(params, optimizer, form, tmp_path / "b", moments)
        assert are_same_codes(codes_of(optimizer), codes_of(resumed))
    scales = {key for key in report.loaded if key.startswith("optimizer.scale.")}
    assert bool(scales) == (moments == "portable" and form in SCALED)
    assert not report.excluded
    of_codes = {text for text in report.transformed.values() if "of FusedAdam from stored" in text}
    assert bool(of_codes) == (moments == "codes")


def save_and_ask(saved: str, asked: str, path: Path, *, moments: tuple[Any, Any], cut: bool = False) -> Any:
    """Save one optimizer of one parameter, and return another one and what it asks to load."""
    params, fresh = make_params(0, torch.bfloat16)[:1], make_params(1, torch.bfloat16)[:1]
    optimizer = make(params, **FORMS[saved])
    set_grads(params, 0)
    optimizer.step()
    save({"optimizer": fused_adam.sharded_state_dict(optimizer, whole(params), moments=moments[0])}, path)
    model = whole(fresh)
    if cut:
        fresh = [Parameter(fresh[0].detach()[2:].clone())]
        model = {"w": ShardedTensor.from_rank_offsets("w", fresh[0], (0, 1, 2), replica_id=(0, 0, 0))}
    resumed = make(fresh, **FORMS[asked])
    request = {"optimizer": fused_adam.sharded_state_dict(resumed, model, True, moments=moments[1])}
    return optimizer, resumed, request


def whole(params: list[Parameter]) -> Any:
    return {"w": ShardedTensor.from_rank_offsets("w", params[0], replica_id=(0, 0, 0))}


PORTABLE = r'Save and load moments="portable" \(float32 values\) for others'


def test_codes_at_other_slices_or_of_another_dtype_are_an_error_that_names_the_portable_form(
    tmp_path: Path,
) -> None:
    codes, portable = ("codes", "codes"), ("portable", "portable")
    with cpu_for_cuda():
        _, resumed, request = save_and_ask("float8", "float8", tmp_path / "cut", moments=codes, cut=True)
        before = codes_of(resumed)
        with pytest.raises(MismatchError, match=rf"scale_of_codes.exp_avg.float8(.|\n)*{PORTABLE}"):
            load_with_report(request, tmp_path / "cut")
        assert are_same_codes(before, codes_of(resumed))
        _, _, request = save_and_ask("float8", "float16", tmp_path / "dtype", moments=codes)
        with pytest.raises(MissingKeyError, match=rf"codes.exp_avg.float16(.|\n)*{PORTABLE}"):
            load_with_report(request, tmp_path / "dtype")
        _, _, request = save_and_ask("float8", "float8", tmp_path / "form", moments=("portable", "codes"))
        with pytest.raises(MissingKeyError, match=PORTABLE):
            load_with_report(request, tmp_path / "form")
        save_and_ask("float8", "float8", tmp_path / "portable", moments=portable)
        with pytest.raises(DeclarationError, match=r"moments is 'raw'. Give one of \['portable', 'codes'\]"):
            save_and_ask("float8", "float8", tmp_path / "unknown", moments=("raw", "raw"))
    # Of the parameter's 24 elements: 1 + 2 bytes of codes each, or 4 + 4 of values, and masters of 4.
    sizes = [moment_bytes(tmp_path / name) for name in ("form", "cut")]
    assert sizes == [24 * (4 + 4), 24 * (1 + 2)]


def moment_bytes(path: Path) -> int:
    """Return the bytes of moments, without scales and masters."""
    arrays = load_plain_tensors(path)
    return sum(array.nbytes for key, array in arrays.items() if ".exp_avg" in key and ".scale" not in key)


@pytest.mark.skipif("bfloat16" not in FORMS, reason="TE 2.20 and later")
def test_codes_of_bfloat16_have_no_scale_and_load_at_other_slices(tmp_path: Path) -> None:
    with cpu_for_cuda():
        codes = ("codes", "codes")
        optimizer, resumed, request = save_and_ask("bfloat16", "bfloat16", tmp_path, moments=codes, cut=True)
        state, _ = load_with_report(request, tmp_path)
        fused_adam.load_sharded_state_dict(resumed, state["optimizer"])
        (stored,), (loaded,) = optimizer.state.values(), resumed.state.values()
    assert torch.equal(stored["exp_avg_sq"][2:], loaded["exp_avg_sq"])
    assert torch.equal(stored["master_param"][2:], loaded["master_param"])


def test_at_other_slices_the_report_has_what_is_scaled_anew(tmp_path: Path) -> None:
    portable = ("portable", "portable")
    with cpu_for_cuda():
        optimizer, resumed, request = save_and_ask("float16", "float16", tmp_path, moments=portable, cut=True)
        state, report = load_with_report(request, tmp_path)
        fused_adam.load_sharded_state_dict(resumed, state["optimizer"])
        (whole,), (half,) = optimizer.state, resumed.state
        moments = optimizer.get_unscaled_state(whole, "exp_avg"), resumed.get_unscaled_state(half, "exp_avg")
    assert report.excluded == {f"optimizer.scale.{name}.2.w" for name in ("exp_avg", "exp_avg_sq")}
    # Half of float16's last bit, of the value before and of the one after.
    torch.testing.assert_close(moments[1], moments[0][2:], rtol=2**-10, atol=0)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_loads_what_every_other_has_saved(form: str, tmp_path: Path) -> None:
    """Into float32 without a loss; masters of float16 and moments of fewer bits are rounded."""
    params = make_params(0, torch.bfloat16)
    with cpu_for_cuda():
        optimizer = make(params, **FORMS[form])
        train(params, optimizer, range(2))
        model = declare(params)
        save({"model": model, "optimizer": fused_adam.sharded_state_dict(optimizer, model)}, tmp_path)
        values = [optimizer.get_unscaled_state(p, "exp_avg").float() for p in params]
        for other in FORMS:
            fresh = make_params(1, torch.bfloat16)
            resumed = make(fresh, **FORMS[other])
            model = declare(fresh)
            declared = fused_adam.sharded_state_dict(resumed, model, True)
            if not FORMS[form].get("master_weights"):
                for states in declared["state"].values():
                    states.pop("fp32_param", None)
            state, _ = load_with_report({"model": model, "optimizer": declared}, tmp_path)
            fused_adam.load_sharded_state_dict(resumed, state["optimizer"])
            for value, p, q in zip(values, params, fresh, strict=True):
                got = resumed.get_unscaled_state(q, "exp_avg").float()
                assert torch.equal(got, value) or resumed.exp_avg_dtype != torch.float32
                assert torch.allclose(got, value, rtol=2**-4, atol=2**-17 * float(value.abs().max()))
                assert torch.equal(p, q) or other == "int16 remainders"
        assert resumed.param_groups[0]["step"] == 2


def test_our_wrappers_reject_moments_whose_scales_are_outside_of_the_state() -> None:
    groups = ParallelGroups.offline(ParallelLayout(), 0)
    with cpu_for_cuda(), pytest.raises(OptimizerError, match=r"keeps scales.*fused_adam"):
        MixedPrecisionOptimizer(
            make_params(0, torch.bfloat16), lambda g: make(g, exp_avg_dtype=torch.float16), groups
        )


@pytest.mark.parametrize("form", [form for form in FORMS if form in ("float32", "bfloat16")])
@pytest.mark.parametrize("wrapper", [DistributedOptimizer, MixedPrecisionOptimizer, WholeMatrixOptimizer])
def test_our_wrappers_go_on_with_it(wrapper: Any, form: str, tmp_path: Path) -> None:
    groups = ParallelGroups.offline(ParallelLayout(), 0)
    options = {**FORMS[form], "master_weights": False}  # the wrapper has the masters
    params, fresh = make_params(0, torch.bfloat16), make_params(1, torch.bfloat16)
    with cpu_for_cuda():
        optimizer, resumed = (wrapper(p, lambda g: make(g, **options), groups) for p in (params, fresh))
        train(params, optimizer, range(2))
        model = declare(params)
        save({"model": model, "optimizer": optimizer.sharded_state_dict(model)}, tmp_path)
        model = declare(fresh)
        request = {"model": model, "optimizer": resumed.sharded_state_dict(model)}
        resumed.load_sharded_state_dict(load_with_report(request, tmp_path)[0]["optimizer"])
        train(params, optimizer, range(2, 5))
        train(fresh, resumed, range(2, 5))
    assert are_equal(params, fresh)
    assert not are_equal(params, make_params(0, torch.bfloat16))


def train(params: list[Parameter], optimizer: Any, steps: range) -> None:
    for step in steps:
        set_grads(params, step)
        optimizer.step()
        optimizer.zero_grad()


def test_another_optimizer_is_an_error() -> None:
    params = make_params(0, torch.float32)
    with pytest.raises(DeclarationError, match="Adam is not the FusedAdam of Transformer Engine"):
        fused_adam.sharded_state_dict(torch.optim.Adam(params), declare(params))


@pytest.mark.parametrize("name", te_models.MODULES)
def test_scaled_moments_of_every_module_come_back(tmp_path: Path, name: str) -> None:
    with cpu_for_cuda():
        (module, before), (other, after) = (trained(name, seed) for seed in (1, 2))
        save(declared(module, before), tmp_path)
        loaded = load(declared(other, after, is_loading=True), tmp_path)
        fused_adam.load_sharded_state_dict(after, loaded["optimizer"])
    for old, new in zip(before.state.values(), after.state.values(), strict=True):
        assert all(torch.equal(old[key], new[key]) for key in old)
    assert list(before._scales.values()) == list(after._scales.values())


def trained(name: str, seed: int) -> tuple[Any, Any]:
    module = te_models.build(te_models.MODULES[name], te_models.ONE, seed=seed)
    optimizer = make(module.parameters(), **FORMS["float16"])
    generator = torch.Generator().manual_seed(seed)
    for param in module.parameters():
        param.grad = torch.randn(param.shape, generator=generator)
    optimizer.step()
    return module, optimizer


def declared(module: Any, optimizer: Any, *, is_loading: bool = False) -> Any:
    model = sharded_state_dict(module, te_models.ONE)
    return {"model": model, "optimizer": fused_adam.sharded_state_dict(optimizer, model, is_loading)}


@needs_megatron
def test_megatron_core_s_distributed_optimizer_resumes_every_form_of_states(tmp_path: Path) -> None:
    """Its own form stores remainders of masters as numbers, which it cannot load: that differs."""
    answers = resumed_by(tmp_path, str(Path(te.__file__).parents[2]))
    assert len(answers) == 5
    for form, of_form in answers.items():
        assert {name: of_form[name] for name in EXACT} == EXACT, form
        assert of_form["equal to gathered"] == ("remainders" not in form), form
    assert answers["remainders"]["equal after tp 2"]
    assert answers["float32"]["equal after tp 2"]
