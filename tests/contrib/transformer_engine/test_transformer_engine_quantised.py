"""FP8 and MXFP8 parameters: as values at every layout, as codes bit for bit, or from masters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megackpt import (
    DeclarationError,
    LoadReport,
    MismatchError,
    MissingKeyError,
    load,
    load_plain_tensors,
    load_with_report,
    save,
)
from megackpt.contrib.transformer_engine import (
    fused_adam,
    quantise_parameters,
    set_components,
    set_parallel_mode,
    sharded_state_dict,
)
from megackpt.contrib.transformer_engine.quantised import buffers_of, is_quantised, members_of
from megackpt.testing.world import SimulatedRank, SimulatedWorld
from megackpt.training.optim import optim_state_to_sharding_state
from megackpt.training.parallel import ParallelGroups, ParallelLayout
from tests.contrib.transformer_engine import te_models
from tests.contrib.transformer_engine.te_models import (
    EXPERTS,
    IS_NEW,
    ONE,
    Make,
    build,
    fp8_tensors,
    needs_new,
    ranks_of,
    recipe_checks,
    same,
    te,
)
from tests.contrib.transformer_engine.te_stub import cpu_for_cuda, device_answers, quantised_on_cpu

HIDDEN, FFN, HEADS = 64, 256, 8  # MXFP8 has blocks of 32 values, also at tp 4


def recipe(name: str) -> Any:
    from transformer_engine.common import recipe as recipes

    return getattr(recipes, name)()


def build_quantised(make: Make, groups: ParallelGroups, of: str, *, seed: int) -> nn.Module:
    """Build a module with parameters quantised by a recipe; values and FP8 state depend on the seed."""
    init = te.quantized_model_init if IS_NEW else te.fp8_model_init
    with cpu_for_cuda(), recipe_checks(), init(enabled=True, recipe=recipe(of)):
        module = make(groups)
    generator = torch.Generator().manual_seed(seed)
    of_rank = torch.Generator().manual_seed(1000 * seed + groups.rank)  # others are replicas
    for tensor in fp8_tensors(module).values():
        tensor.copy_(torch.rand(tensor.shape, generator=generator) * 8 + 1)
    with reading(), torch.no_grad():
        for parameter in (part for p in module.parameters() for part in (members_of(p) or [p])):
            own = of_rank if is_quantised(parameter) else generator
            parameter.copy_(torch.randn(parameter.shape, generator=own).bfloat16())
    for tensor in fp8_tensors(module).values():  # largest values that are not those of the parameters
        if tensor.ndim == 2:
            tensor.copy_(torch.rand(tensor.shape, generator=generator))
    return module


@contextmanager
def reading() -> Iterator[None]:
    """Let this thread read and write quantised parameters; for other threads, see `device_answers`."""
    with device_answers(), quantised_on_cpu():
        yield


def codes(module: nn.Module) -> dict[str, Tensor]:
    """Copies of all codes and scales, by parameter; of others, their values."""
    return {
        f"{name}.{part}": buffer.detach().clone()
        for name, parameter in single_parameters(module)
        for part, buffer in (
            buffers_of(parameter) if is_quantised(parameter) else {"values": parameter}
        ).items()
    }


def single_parameters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters, and the matrices of grouped ones by the names that they have as parameters."""
    for name, parameter in module.named_parameters():
        if not members_of(parameter):
            yield name, parameter
            continue
        # Made anew, so that they show the memory of the group, in which those of the parameter still are.
        with reading():
            members = parameter.split_into_quantized_tensors()  # type: ignore[attr-defined]
        for number, member in enumerate(members):
            transposed = member.get_metadata().get("data_transpose")
            assert transposed is None or torch.equal(transposed, member._data.movedim(-1, 0))
            kept = buffers_of(members_of(parameter)[number])
            assert all(kept[k].data_ptr() == buffer.data_ptr() for k, buffer in buffers_of(member).items())
            yield f"{name}{number}", member


BF16 = {"params_dtype": torch.bfloat16}
CUT = {"set_parallel_mode": True, **BF16}
linear = te_models.module_of("Linear", HIDDEN, FFN, parallel_mode="column", **BF16)
row = te_models.module_of("Linear", FFN, HIDDEN, parallel_mode="row", **BF16)
mlp = te_models.module_of("LayerNormMLP", HIDDEN, FFN, activation="swiglu", **CUT)
grouped_heads = {"num_gqa_groups": 4, "fuse_qkv_params": True}
attention = te_models.module_of("MultiheadAttention", 4 * HIDDEN, HEADS, **grouped_heads, **CUT)


def experts(groups: ParallelGroups, **options: Any) -> nn.Module:
    count, options = EXPERTS // groups.ep.size, {"bias": False, **BF16, **options}
    module: nn.Module = te.GroupedLinear(count, HIDDEN, FFN, device="cpu", **options)
    set_parallel_mode(module, None)
    set_components(module, "gate", "up")
    return module


def grouped_experts(groups: ParallelGroups) -> nn.Module:
    """All experts of a rank as one parameter; set NVTE_GROUPED_LINEAR_SINGLE_PARAM."""
    return experts(groups, single_grouped_weight=True)


RECIPES = ["DelayedScaling", "Float8CurrentScaling", "MXFP8BlockScaling"]
RECIPES += ["NVFP4BlockScaling"] if IS_NEW else []
MODULES = {"linear": linear, "row": row, "mlp": mlp, "attention": attention}
TP = [ParallelLayout(tp=2), ParallelLayout(tp=4), ParallelLayout(tp=1, dp=2)]


def pass_on(
    modules: list[nn.Module], layout: ParallelLayout, source: Path | None, target: Path, form: Any
) -> list[LoadReport]:
    return te_models.pass_on(modules, ranks_of(layout), source, target, quantised=form)


@pytest.mark.parametrize("name", MODULES)
def test_values_with_delayed_scaling_are_the_same_at_every_tp(tmp_path: Path, name: str) -> None:
    """One scale for all ranks: quantised values are quantised to themselves, with the scales of the load."""
    whole = build_quantised(MODULES[name], ONE, "DelayedScaling", seed=1)
    pass_on([whole], ParallelLayout(), None, tmp_path / "first", "values")
    expected = load_plain_tensors(tmp_path / "first")
    source = tmp_path / "first"
    for number, layout in enumerate([*TP, ParallelLayout()]):
        modules = [build_quantised(MODULES[name], g, "DelayedScaling", seed=2) for g in ranks_of(layout)]
        pass_on(modules, layout, source, tmp_path / str(number), "values")
        source = tmp_path / str(number)
        # Also the histories of largest values, to which quantising adds.
        assert same(load_plain_tensors(source), expected)
    assert same(codes(modules[0]), codes(whole))
    assert same(fp8_tensors(modules[0]), fp8_tensors(whole))


@pytest.mark.parametrize(
    ("name", "of"),
    [*(("linear", of) for of in RECIPES), *((name, of) for of in RECIPES[2:] for name in [*MODULES][1:])],
)
def test_codes_and_scales_are_loaded_bit_for_bit_at_the_same_layout(
    tmp_path: Path, name: str, of: str
) -> None:
    layout = ParallelLayout(tp=2)
    first = [build_quantised(MODULES[name], g, of, seed=1) for g in ranks_of(layout)]
    second = [build_quantised(MODULES[name], g, of, seed=5) for g in ranks_of(layout)]
    pass_on(first, layout, None, tmp_path / "first", "codes")
    reports = pass_on(second, layout, tmp_path / "first", tmp_path / "second", "codes")
    for module, original, report in zip(second, first, reports, strict=True):
        expected = codes(original)
        assert any("scale_inv" in key for key in expected)
        assert same(codes(module), expected)
        with reading():
            for parameter, other in zip(module.parameters(), original.parameters(), strict=True):
                if is_quantised(parameter):
                    assert torch.equal(parameter.dequantize(), other.dequantize())
        assert any("Tensor from stored codes and scales" in how for how in report.transformed.values())
    other = build_quantised(MODULES[name], ONE, of, seed=7)
    before = codes(other)
    advice = r'(scale_inv|data)(.|\n)*load quantised="values" for others'
    with pytest.raises((MismatchError, MissingKeyError), match=advice), reading():
        load(sharded_state_dict(other, ONE, quantised="codes"), tmp_path / "first")
    assert same(codes(other), before)


OF_BLOCKS = ["rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv"]


@pytest.mark.parametrize(
    ("of", "kind", "parts"),
    [
        ("DelayedScaling", "Float8Tensor", ["data", "fp8_scale_inv"]),
        ("MXFP8BlockScaling", "MXFP8Tensor", OF_BLOCKS),
        ("NVFP4BlockScaling", "NVFP4Tensor", [*OF_BLOCKS, "amax_rowwise", "amax_columnwise"]),
    ],
)
def test_keys_of_codes_are_those_of_every_version(
    tmp_path: Path, of: str, kind: str, parts: list[str]
) -> None:
    """Both tested versions of TE write them, but for NVFP4, so each loads what the other has saved."""
    if of not in RECIPES:
        pytest.skip("this version of TE has no such recipe")
    module = build_quantised(linear, ONE, of, seed=1)
    with reading():
        save(sharded_state_dict(module, ONE, quantised="codes"), tmp_path)
    keys = {key for key in load_plain_tensors(tmp_path) if key.startswith("weight")}
    dtype = "kFloat4E2M1" if kind == "NVFP4Tensor" else "kFloat8E4M3"
    assert keys == {f"weight.{kind}.{dtype}.{part}" for part in parts}


@needs_new
def test_codes_of_nvfp4_with_another_bound_of_scales_are_an_error(tmp_path: Path) -> None:
    """Of the 4over6 variants: equal bytes mean other values."""
    module = build_quantised(linear, ONE, "NVFP4BlockScaling", seed=1)
    weight = module.get_parameter("weight")
    weight._nvfp4_use_4over6, weight._nvfp4_e4m3_max = True, 256
    with reading():
        save(sharded_state_dict(module, ONE, quantised="codes"), tmp_path)
        weight._nvfp4_e4m3_max = 448
        with pytest.raises(MissingKeyError, match=r"nvfp4_use_4over6\.nvfp4_e4m3_max_448"):
            load(sharded_state_dict(module, ONE, quantised="codes"), tmp_path)


@pytest.mark.parametrize("of", RECIPES)
def test_every_expert_keeps_its_codes_at_another_ep(tmp_path: Path, of: str) -> None:
    expected: dict[str, Tensor] = {}
    for step, ep in enumerate((4, 2, 1, 8)):
        layout = ParallelLayout(dp=ep, ep=ep)
        modules = [build_quantised(experts, g, of, seed=10 * step + g.rank) for g in ranks_of(layout)]
        source = tmp_path / str(step - 1) if step else None
        pass_on(modules, layout, source, tmp_path / str(step), "codes")
        actual = codes_of_experts(modules)
        expected = expected or actual
        assert same(actual, expected)
    assert len({value.sum().item() for key, value in expected.items() if key.endswith(".data")}) != 1


def codes_of_experts(modules: list[nn.Module]) -> dict[str, Tensor]:
    """Return codes and scales of all ranks of ep, by global expert."""
    count, result = EXPERTS // len(modules), {}
    for rank, module in enumerate(modules):
        for key, value in codes(module).items():
            local, _, part = key.partition(".")
            result[f"{rank * count + int(local.removeprefix('weight'))}.{part}"] = value
    return result


@needs_new
@pytest.mark.parametrize("form", ["codes", "values"])
@pytest.mark.parametrize("of", RECIPES[1:])  # TE makes no such parameter with delayed scaling
def test_one_quantised_parameter_of_all_experts_is_stored_as_single_ones_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of: str, form: Any
) -> None:
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")
    expected: dict[str, Tensor] = {}
    kinds = [experts, grouped_experts, grouped_experts] * 2
    for step, (make, ep) in enumerate(zip(kinds, (4, 2, 8, 1, 1, 2), strict=True)):
        layout = ParallelLayout(dp=ep, ep=ep)
        modules = [build_quantised(make, g, of, seed=10 * step + g.rank) for g in ranks_of(layout)]
        source = tmp_path / str(step - 1) if step else None
        reports = pass_on(modules, layout, source, tmp_path / str(step), form)
        got = codes_of_experts(modules) if form == "codes" else load_plain_tensors(tmp_path / str(step))
        expected = expected or got
        assert same(got, expected)
        if make is grouped_experts:
            assert [len(members_of(p)) for p in modules[0].parameters()] == [EXPERTS // ep]
            assert all("Tensor" in report.transformed["weight"] for report in reports)


@needs_new
@pytest.mark.parametrize("of", RECIPES[1:])
def test_masters_of_all_experts_are_written_as_those_of_single_ones(
    monkeypatch: pytest.MonkeyPatch, of: str
) -> None:
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")
    single = build_quantised(experts, ONE, of, seed=1)
    grouped = build_quantised(grouped_experts, ONE, of, seed=2)
    masters = torch.randn(EXPERTS, FFN, HIDDEN)
    with reading():
        quantise_parameters(zip(single.parameters(), masters, strict=True))
        quantise_parameters([(grouped.get_parameter("weight"), masters)])
    assert same(codes(grouped), codes(single))


@pytest.mark.parametrize("of", RECIPES)
def test_plain_values_are_quantised_and_back(tmp_path: Path, of: str) -> None:
    plain = build(mlp, ONE, seed=3)
    save(sharded_state_dict(plain, ONE), tmp_path / "plain")
    module = build_quantised(mlp, ONE, of, seed=1)
    expected = build_quantised(mlp, ONE, of, seed=1)
    history = {key: value.clone() for key, value in fp8_tensors(module).items()}
    with reading(), torch.no_grad():
        for parameter, value in zip(expected.parameters(), plain.parameters(), strict=True):
            parameter.copy_(value)
        state = {k: e for k, e in sharded_state_dict(module, ONE).items() if "fp8." not in k}
        _, report = load_with_report(state, tmp_path / "plain")
        save(state, tmp_path / "quantised")
    assert same(codes(module), codes(expected))
    assert same(fp8_tensors(module), history)
    kind = type(module.get_parameter("fc1_weight")).__name__
    assert report.transformed == dict.fromkeys(
        ["linear_fc1.weight", "linear_fc2.weight"], f"{kind} quantised from bfloat16 values"
    )
    assert f"transformed: 2 arrays, {kind} quantised from bfloat16 values" in str(report)
    load(sharded_state_dict(plain, ONE), tmp_path / "quantised")
    with reading(), torch.no_grad():
        for parameter, value in zip(module.parameters(), plain.parameters(), strict=True):
            assert torch.equal(parameter.dequantize() if is_quantised(parameter) else parameter, value)


@pytest.mark.parametrize("of", RECIPES)
def test_values_that_the_parameter_has_are_not_quantised_again(tmp_path: Path, of: str) -> None:
    """MXFP8 would have other codes: those of columns are quantised from the codes of rows."""
    module = build_quantised(linear, ONE, of, seed=1)
    before = codes(module)
    with reading():
        save(sharded_state_dict(module, ONE), tmp_path)
        load(sharded_state_dict(module, ONE), tmp_path)
    assert same(codes(module), before)


@pytest.mark.parametrize("form", ["values", "codes", "masters"])
def test_states_of_optimizers_are_those_of_plain_parameters(tmp_path: Path, form: Any) -> None:
    layout = ParallelLayout(tp=2)
    whole = {name: torch.randn(FFN, HIDDEN) for name in ("exp_avg", "master_param")}
    stored = {}

    def optimizer_of(rank: int, module: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
        weight = module.get_parameter("weight")
        entity = next(e for e in state.values() if e.data is weight)
        own = {k: v.chunk(2)[rank].clone() for k, v in whole.items()} | {"step": torch.tensor(3.0)}
        optimizer = {"state": {0: own}, "param_groups": [{"params": [0]}]}
        optim_state_to_sharding_state(optimizer, {0: entity})
        return optimizer

    for kind in (form, "plain"):
        modules = [
            build(linear, g)
            if kind == "plain"
            else build_quantised(linear, g, "MXFP8BlockScaling", seed=g.rank)
            for g in ranks_of(layout)
        ]

        def one_rank(group: SimulatedRank) -> None:
            with quantised_on_cpu():
                module, groups = modules[group.rank], ranks_of(layout)[group.rank]  # noqa: B023 - run at once
                state = sharded_state_dict(module, groups, quantised=form)
                save(optimizer_of(group.rank, module, state), tmp_path / kind, group=group)  # noqa: B023

        with device_answers():
            SimulatedWorld(2).run(one_rank)
        stored[kind] = load_plain_tensors(tmp_path / kind)
    assert same(stored[form], stored["plain"])
    assert torch.equal(stored[form]["optimizer.state.master_param.weight"], whole["master_param"])


@pytest.mark.parametrize("of", RECIPES)
def test_a_load_of_fused_adam_quantises_parameters_from_its_masters(tmp_path: Path, of: str) -> None:
    """The checkpoint has no weights; with the stored scales, masters give the same codes."""
    module, other = (build_quantised(linear, ONE, of, seed=seed) for seed in (1, 2))
    kernels = pytest.importorskip("transformer_engine.pytorch.optimizers")
    masters = torch.randn(FFN, HIDDEN)
    with cpu_for_cuda():
        optimizer, resumed = (
            kernels.FusedAdam(m.parameters(), master_weights=True, store_param_remainders=False)
            for m in (module, other)
        )
        state = sharded_state_dict(module, ONE, quantised="masters")
        declared = fused_adam.sharded_state_dict(optimizer, state)
        optimizer.state[module.get_parameter("weight")]["master_param"].copy_(masters)
        quantise_parameters([(module.get_parameter("weight"), masters)])
        save({"model": state, "optimizer": declared}, tmp_path)
        assert "weight" not in load_plain_tensors(tmp_path)
        state = sharded_state_dict(other, ONE, quantised="masters")
        request = {"model": state, "optimizer": fused_adam.sharded_state_dict(resumed, state, True)}
        loaded, report = load_with_report(request, tmp_path)
        assert "the optimizer's masters" in report.transformed["weight"]
        fused_adam.load_sharded_state_dict(resumed, loaded["optimizer"])
        assert same(codes(other), codes(module))
        assert same(fp8_tensors(other), fp8_tensors(module))
        with pytest.raises(DeclarationError, match="this FusedAdam has no masters"):
            fused_adam.sharded_state_dict(kernels.FusedAdam(other.parameters()), state)


def test_an_unknown_form_is_an_error() -> None:
    module = build_quantised(linear, ONE, "DelayedScaling", seed=1)
    with pytest.raises(DeclarationError, match=r"quantised is 'bytes'. Give one of \['values', 'codes'"):
        sharded_state_dict(module, ONE, quantised="bytes")  # type: ignore[arg-type]
