"""A tensor has one behaviour whatever its kind: plain, an entity, a DTensor; an array or in common state."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor, init_device_mesh

from megackpt import (
    CheckpointError,
    KeyRule,
    LoadOptions,
    MissingKeyError,
    Policy,
    SaveOptions,
    load,
    load_plain_tensors,
    load_tensors_metadata,
    save,
)
from megackpt.run import remove_sharded_tensors
from megackpt.storage import MemoryStore
from tests.support.effort import few
from tests.support.pasted import pasted
from tests.support.states import sharded

SHAPES = [(), (0,), (3,), (2, 3), (2, 0, 1)]
DTYPES = [torch.float32, torch.bfloat16, torch.int64]

# How a tensor is saved: what makes the leaf, the format, and how plain tensors are stored.
SAVED = [
    ("entity", "megackpt", "auto"),
    ("plain", "megackpt", "auto"),
    ("overlapping", "megackpt", "auto"),
    ("plain", "megackpt", "common"),
    ("plain", "torch_dist", "auto"),
]
ASKED = ["entity", "plain"]


@dataclass(frozen=True)
class Leaf:
    """One tensor: what is stored, and what a load asks for."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    asked_shape: tuple[int, ...]
    asked_dtype: torch.dtype


def unchanged(shape: tuple[int, ...]) -> Leaf:
    return Leaf(shape, torch.float32, shape, torch.float32)


@st.composite
def leaves(draw: st.DrawFn) -> Leaf:
    shape, dtype = draw(st.sampled_from(SHAPES)), draw(st.sampled_from(DTYPES))
    asked_shape = shape
    if shape and draw(st.booleans()):
        asked_shape = (max(0, shape[0] + draw(st.sampled_from([-1, 1]))), *shape[1:])
    return Leaf(shape, dtype, asked_shape, draw(st.sampled_from([dtype, dtype, *DTYPES])))


def tensor_of(kind: str, key: str, value: torch.Tensor) -> Any:
    match kind:
        case "entity":
            return sharded(key, value)
        case "overlapping":  # the same elements, of which several share memory
            return value.flatten()[:1].expand(value.shape) if value.dim() and value.numel() else value
    return value


def value_of(leaf: Leaf, number: int) -> torch.Tensor:
    # All elements are equal, so that a tensor with strides of 0 can have them.
    return torch.full(leaf.shape, 10 * number + 1).to(leaf.dtype)


def outcome(
    saved: tuple[str, str, str], asked: str, pair: tuple[Leaf, Leaf], options: LoadOptions, strict: str
) -> Any:
    """Return what a load does to its two targets, or its error."""
    kind, backend, plain_tensors = saved
    store = MemoryStore()
    state = {"m": {f"t{i}": tensor_of(kind, f"m.t{i}", value_of(leaf, i)) for i, leaf in enumerate(pair)}}
    save(state, store, backend, options=SaveOptions(plain_tensors=plain_tensors))  # type: ignore[arg-type]
    name = "n" if options.rename else "m"
    targets = {f"t{i}": torch.full(leaf.asked_shape, -5).to(leaf.asked_dtype) for i, leaf in enumerate(pair)}
    request = {name: {key: tensor_of(asked, f"{name}.{key}", t) for key, t in targets.items()}}
    try:
        loaded = load(request, store, options=options, strict=strict)
    except CheckpointError as error:
        return type(error)
    for key, target in targets.items():
        result = loaded.get(name, {}).get(key, target)
        assert torch.equal(result, target), "what is returned is what was filled"
    return [(t.dtype, tuple(t.shape), t.tolist()) for t in targets.values()]


@settings(max_examples=few(60, of=1000), deadline=None)
@given(
    st.tuples(leaves(), leaves()),
    st.booleans(),
    st.sampled_from([(), ("*.t0",), ("*.t*",)]),
    st.sampled_from([None, Policy.WARN, Policy.IGNORE, Policy.ERROR]),
    st.sampled_from([None, Policy.WARN, Policy.ERROR]),
    st.sampled_from(["assume_ok_unexpected", "raise_all", "raise_unexpected", "log_all", "ignore_all"]),
)
def test_every_kind_gives_the_result_of_an_entity(
    pair: tuple[Leaf, Leaf],
    is_renamed: bool,
    exclude: tuple[str, ...],
    cast: Policy | None,
    resized: Policy | None,
    strict: str,
) -> None:
    rules = (KeyRule(keys="*", cast=cast, padded=resized, cut=resized),)
    rename = {"m.*": "n.*"} if is_renamed else {}
    options = LoadOptions(rename=rename, exclude=exclude, rules=rules)
    expected = outcome(SAVED[0], "entity", pair, options, strict)
    for saved, asked in itertools.product(SAVED, ASKED):
        assert outcome(saved, asked, pair, options, strict) == expected, (saved, asked)


@pytest.fixture
def mesh() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("saved", SAVED, ids="-".join)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_dtensor_takes_a_tensor_of_each_kind(
    mesh: Any, saved: tuple[str, str, str], shape: tuple[int, ...]
) -> None:
    kind, backend, plain_tensors = saved
    value = value_of(unchanged(shape), 1)
    store = MemoryStore()
    options = SaveOptions(plain_tensors=plain_tensors)  # type: ignore[arg-type]
    save({"m": {"t": tensor_of(kind, "m.t", value)}, "step": 1}, store, backend, options=options)
    target = distribute_tensor(torch.zeros(shape), mesh, [Replicate()])
    loaded = load({"m": {"t": target}}, store)
    assert isinstance(loaded["m"]["t"], DTensor)
    assert torch.equal(target.to_local(), value)
    assert loaded["step"] == 1


@pytest.mark.parametrize("saved", SAVED, ids="-".join)
def test_lists_of_arrays_have_every_kind(tmp_path: Path, saved: tuple[str, str, str]) -> None:
    kind, backend, plain_tensors = saved
    values = {f"t{i}": value_of(unchanged(shape), i) for i, shape in enumerate(SHAPES)}
    state = {"m": {key: tensor_of(kind, f"m.{key}", value) for key, value in values.items()}}
    options = SaveOptions(plain_tensors=plain_tensors)  # type: ignore[arg-type]
    save(state, tmp_path, backend, options=options)
    loaded = load_plain_tensors(tmp_path)
    assert sorted(loaded) == sorted(load_tensors_metadata(tmp_path)) == [f"m.{key}" for key in sorted(values)]
    assert all(torch.equal(loaded[f"m.{key}"], value) for key, value in values.items())


def test_what_nothing_asks_for_is_returned_as_it_was_saved() -> None:
    store = MemoryStore()
    save({"n": torch.tensor(7), "deep": [{"e": torch.zeros(0)}, 3]}, store)
    loaded = load({}, store, strict="raise_all")
    assert (loaded["n"].item(), loaded["deep"][0]["e"].shape, loaded["deep"][1]) == (7, (0,), 3)


def test_a_load_that_finds_nothing_is_an_error_with_the_rename_to_paste() -> None:
    store = MemoryStore()
    save({"module": {"w": torch.ones(3), "scale": torch.tensor(2.0)}, "step": 3}, store)
    request = {"w": torch.zeros(3), "scale": torch.zeros(())}
    with pytest.raises(MissingKeyError, match=r"LoadOptions\(rename=\{\"module\.\*\": \"\*\"\}\)"):
        load(request, store)
    load(request, store, options=LoadOptions(rename={"module.*": "*"}))
    assert (request["w"].tolist(), request["scale"].item()) == ([1.0] * 3, 2.0)
    longer = {"ddp": {"module": {"w": torch.zeros(3)}}}
    with pytest.raises(MissingKeyError, match=r"LoadOptions\(rename=\{\"\*\": \"ddp\.\*\"\}\)"):
        load(longer, store)
    load(longer, store, options=LoadOptions(rename={"*": "ddp.*"}))
    assert longer["ddp"]["module"]["w"].tolist() == [1.0] * 3


@pytest.mark.parametrize(
    "stored",
    [
        {'m"x': {"a": 1.0}},
        {"m*x": {"a": 1.0}},
        {"m[0]": {"a": 1.0}},
        {"model": {"a": 1.0, "c": 2.0}, "c": 3.0},
        {"ema": {"a": 1.0}, "model": {"a": 2.0}},
        {"module": {"a": 1.0}},
    ],
)
def test_a_rename_that_is_proposed_works(stored: dict[str, Any]) -> None:
    tensors = {
        top: {k: torch.tensor([v]) for k, v in value.items()}
        if isinstance(value, dict)
        else torch.tensor([value])
        for top, value in stored.items()
    }
    save(tensors, store := MemoryStore())
    with pytest.raises(MissingKeyError) as caught:
        load({"a": torch.zeros(1)}, store)
    proposed = re.search(r"rename=(\{.*?\})", str(caught.value))
    if "ema" in stored:
        assert "(or below 'model.')" in str(caught.value)
    if proposed is not None:
        request = {"a": torch.zeros(1)}
        load(request, store, options=LoadOptions(rename=ast.literal_eval(proposed[1])))
        assert request["a"].item() == 1.0
    assert (proposed is not None) == bool({"ema", "module"} & stored.keys())


WRAPPED = {
    "not at all": ["l.0.w", "l.1.w", "😀.w"],
    "DDP": ["module.l.0.w", "module.l.1.w", "module.😀.w"],
    "FSDP1": [f"_fsdp_wrapped_module.{name}" for name in ("l.0._fsdp_wrapped_module.w", "l.1.w", "😀.w")],
    "one module": ["l._orig_mod.0.w", "l._orig_mod.1.w", "😀.w"],
    "a module in that": ["l._orig_mod.0.w", "l._orig_mod.1._checkpoint_wrapped_module.w", "😀.w"],
    "the last": ["l.0.w", "l.1.w", "😀._orig_mod.w"],
    "several": ["_orig_mod.l.0.w", "_orig_mod.l.module.1.w", "_orig_mod.😀.w"],
}


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize(("stored", "asked"), list(itertools.permutations(WRAPPED, 2)))
def test_names_that_differ_by_wrappers_are_an_error_with_a_rename_that_works(
    stored: str, asked: str, is_sharded: bool
) -> None:
    def state(names: list[str], values: list[float]) -> dict[str, Any]:
        tensors = {name: torch.tensor([value]) for name, value in zip(names, values, strict=True)}
        leaves = {n: sharded(f"state.{n}", t) if is_sharded else t for n, t in tensors.items()}
        return {"state": leaves, "tensors": tensors}

    save({"state": state(WRAPPED[stored], [1.0, 2.0, 3.0])["state"]}, store := MemoryStore())
    request = state(WRAPPED[asked], [0.0] * 3)
    with pytest.raises(MissingKeyError) as caught:
        load({"state": request["state"]}, store)
    load({"state": request["state"]}, store, options=pasted(str(caught.value)))
    assert [tensor.item() for tensor in request["tensors"].values()] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("stored", "asked"),
    [
        (["a.w", "module.a.w"], ["_orig_mod.a.w"]),  # which of the two?
        (["a.w"], ["_orig_mod.a.w", "module.a.w"]),
        (["a.w", "b.w"], ["a.w", "module.b.w"]),
        (["module.a.w", "module.b.w"], ["module.a.w", "b.w"]),
        (["a", "b"], ["a", "m.b"]),
        (["m.a", "m.b"], ["m.a", "b"]),
    ],
)
def test_a_rename_is_proposed_if_it_has_one_answer_and_loses_no_other_key(
    stored: list[str], asked: list[str]
) -> None:
    number = {"a": 1.0, "b": 2.0}
    value = {name: number[name.removesuffix(".w")[-1]] for name in {*stored, *asked}}
    save({name: sharded(name, torch.tensor([value[name]])) for name in stored}, store := MemoryStore())
    request = {name: torch.zeros(1) for name in asked}
    state = {name: sharded(name, tensor) for name, tensor in request.items()}
    with pytest.raises(MissingKeyError) as caught:
        load(state, store)
    if "rename=" in str(caught.value):
        load(state, store, options=pasted(str(caught.value)))
        assert {name: tensor.item() for name, tensor in request.items()} == {n: value[n] for n in asked}
    else:
        assert not any(name.endswith("b.w") for name in stored), "a wrapper is the only difference"


def test_wrappers_of_many_modules_are_an_error_with_advice() -> None:
    saved = {f"l.{i}._orig_mod.w": torch.ones(1) for i in range(9)}
    save({**saved, "e": torch.ones(1)}, store := MemoryStore())
    asked = {f"l.{i}.w": torch.zeros(1) for i in range(9)}
    with pytest.raises(MissingKeyError, match=r"wrapped in another way .* Wrap them as in the save, or"):
        load({**asked, "e": torch.zeros(1)}, store)


def test_a_pattern_that_matches_nothing_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    save({"m": {"w": torch.ones(3), "n": torch.tensor(1)}}, store)
    options = LoadOptions(
        rename={"model.*": "x.*", "m.[nw]": "y", "m.w": "m.v"}, exclude=("m.n", "head.*", "new")
    )
    load({"m": {"v": torch.zeros(3)}, "new": torch.zeros(1)}, store, options=options)
    idle = [record.getMessage() for record in caplog.records if "matches no key" in record.getMessage()]
    assert [text.partition(": ")[2].split(" matches")[0] for text in idle] == [
        "exclude 'head.*'",
        "rename {'m.[nw]': ...}",
        "rename {'model.*': ...}",
    ]


def test_a_removal_names_the_tensors_that_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save({"m": {"w": torch.ones(3), "n": torch.tensor(1)}, "k": torch.tensor(2)}, tmp_path)
    remove_sharded_tensors(tmp_path, "m.")
    assert sorted(load_plain_tensors(tmp_path)) == ["k", "m.n"]
    assert "1 tensors below 'm.' are stored in common state itself and stay:\n  m.n" in caplog.text
