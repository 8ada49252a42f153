"""Errors that an option cures end in that option, with the keys and paths of the user.

Each error is raised for real. What its text ends in is pasted, and then the save or load succeeds.
"""

from __future__ import annotations

import ast
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed.checkpoint as dcp

import megackpt
from megackpt import (
    CheckpointError,
    KeyRule,
    LoadOptions,
    MissingKeyError,
    Policy,
    SaveOptions,
    ShardedObject,
    ShardedTensor,
    load,
    save,
)
from megackpt.comm import Group
from megackpt.run import PlanCache
from megackpt.testing.world import SimulatedWorld
from tests.support.pasted import pasted
from tests.support.states import sharded

Options = TypeVar("Options", SaveOptions, LoadOptions)


@dataclass(frozen=True)
class Case:
    """A save or a load that fails with `options`.

    Attributes:
        field: the option that its error ends in.
        run: does it, in a directory.
        options: what it fails with.
    """

    field: str
    run: Callable[[Path, Any], object]
    options: SaveOptions | LoadOptions = field(default_factory=LoadOptions)


def saved(path: Path, **tensors: torch.Tensor) -> Path:
    save({key.replace("__", "."): sharded(key.replace("__", "."), t) for key, t in tensors.items()}, path)
    return path


def asks(**tensors: torch.Tensor) -> dict[str, Any]:
    return {key: sharded(key.replace("__", "."), tensor) for key, tensor in tensors.items()}


ONES, ZEROS = torch.ones(4, 2), torch.zeros(4, 2)


def asks_another(request: Callable[[], dict[str, Any]], **arguments: Any) -> Callable[[Path, Any], object]:
    """Load a request from a checkpoint with the arrays a.w and b."""

    def run(path: Path, options: LoadOptions) -> object:
        if not path.exists():
            saved(path, a__w=ONES, b=ONES)
        return load(request(), path, options=options, **arguments)

    return run


def common_differs(path: Path, options: SaveOptions) -> object:
    state = {"args": {"seed": 0, "lr[1]": [1, 2]}, "names": {"a b": 1}}

    def on_rank(group: Group) -> None:
        state_of_rank = {**state, "args": {"seed": group.rank, "lr[1]": [1, group.rank]}}
        save(state_of_rank, path, options=options, group=group)

    return SimulatedWorld(2).run(on_rank)


def replicas_differ(path: Path, options: SaveOptions) -> object:
    def on_rank(group: Group) -> None:
        tensor = sharded("w", torch.full((4,), float(group.rank)), replica_id=group.rank)
        save({"w": tensor}, path, options=options, group=group)

    return SimulatedWorld(2).run(on_rank)


def common_of_requests_differs(path: Path, options: LoadOptions) -> object:
    if not path.exists():
        saved(path, w=ONES)

    def on_rank(group: Group) -> None:
        state = {"w": sharded("w", torch.zeros(4, 2), replica_id=group.rank), "stage": group.rank}
        load(state, path, options=options, group=group)

    return SimulatedWorld(2).run(on_rank)


def structure_changes(path: Path, options: SaveOptions) -> object:
    plans = PlanCache()
    save(asks(a=torch.ones(4)), path, options=SaveOptions(), plans=plans)
    return save(asks(a=torch.ones(5)), path, options=options, plans=plans)


def unsafe_pickle(path: Path, options: LoadOptions) -> object:
    if not path.exists():
        dcp.save({"w": torch.ones(2), "o": Harmless()}, checkpoint_id=path, no_dist=True)
    asked = {"w": sharded("w", torch.zeros(2)), "o": ShardedObject("o", None, (1,), (0,))}
    return load(asked, path, options=options)


class Harmless:
    """A class that no checkpoint may name."""

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (pickle.dumps(1),)


CASES = {
    "a key that is not stored": Case(
        "rules", asks_another(lambda: asks(a__w=ZEROS.clone(), x__new=ZEROS.clone()))
    ),
    "many keys that are not stored": Case(
        "rules",
        asks_another(lambda: asks(b=ZEROS.clone(), **{f"n__{i}__weight": ZEROS.clone() for i in range(9)})),
    ),
    "a stored key that nobody asks for": Case(
        "rules", asks_another(lambda: asks(b=ZEROS.clone()), strict="raise_all")
    ),
    "a request that must be complete": Case(
        "rules", asks_another(lambda: asks(b=ZEROS.clone())), LoadOptions(complete=True)
    ),
    "an empty dict": Case("rules", asks_another(lambda: {**asks(b=ZEROS.clone()), "a": {}})),
    "names without their prefix": Case("rename", asks_another(lambda: asks(w=ZEROS.clone()))),
    "names with a prefix": Case(
        "rename", asks_another(lambda: asks(model__a__w=ZEROS.clone(), model__b=ZEROS.clone()))
    ),
    "another dtype": Case("rules", asks_another(lambda: asks(b=ZEROS.half(), a__w=ZEROS.half()))),
    "another shape and dtype": Case(
        "rules", asks_another(lambda: asks(b=torch.zeros(5, 1).half(), a__w=torch.zeros(3, 2)))
    ),
    "another layout": Case(
        "rules",
        asks_another(lambda: {"b": sharded("b", torch.zeros(2, 2), (0, 0, 2))}),
        LoadOptions(rules=(KeyRule(keys="*", resharded=Policy.ERROR),)),
    ),
    "a target without memory": Case(
        "load_on_device", asks_another(lambda: asks(b=torch.zeros(4, 2, device="meta")))
    ),
    "common state of requests": Case("complete", common_of_requests_differs, LoadOptions(complete=True)),
    "a pickle of another library": Case("allow_unsafe_pickle", unsafe_pickle),
    "common state": Case("rank0_values", common_differs, SaveOptions()),
    "samples of replicas": Case("sample_replicas", replicas_differ, SaveOptions()),
    "bits of replicas": Case("compare_replicas", replicas_differ, SaveOptions(compare_replicas=Policy.ERROR)),
    "a structure that has changed": Case(
        "assume_constant_structure", structure_changes, SaveOptions(assume_constant_structure=True)
    ),
    "arrays in a format without references": Case(
        "plain_tensors",
        lambda path, options: save({"w": ONES}, path, "torch_dist", options=options),
        SaveOptions(plain_tensors="arrays"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_error_ends_in_an_option_that_cures_it(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    with pytest.raises(CheckpointError) as caught:
        case.run(tmp_path / "c", case.options)
    option = pasted(str(caught.value))
    case.run(tmp_path / "c", with_pasted(case.options, option, case.field))


def with_pasted(options: Options, option: Options, name: str) -> Options:
    """Return options with one field of the pasted ones; pasted rules come before others."""
    default = type(option)()
    changed = [f.name for f in fields(option) if getattr(option, f.name) != getattr(default, f.name)]
    assert changed in ([name], [])  # the pasted value may be the default
    value = getattr(option, name)
    if name == "rules":
        assert isinstance(options, LoadOptions)
        value += options.rules
    return replace(options, **{name: value})


ELSEWHERE = {
    "exclude": "a map or a file of another library with what cannot be loaded",
    "spread": "both options and a group are given or neither",
}
"""Fields that texts name, and that are tried with what they need."""


def test_the_cases_have_every_option_that_a_text_of_an_error_names() -> None:
    named = set()
    for path in Path(megackpt.__file__).parent.rglob("*.py"):
        if path.parts[-2] in ("contrib", "cli", "testing") or "contrib" in path.parts:
            continue
        tree = ast.parse(path.read_text())
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                for kind in ("LoadOptions(", "SaveOptions("):
                    rest = node.value.partition(kind)[2]
                    named |= {rest.partition("=")[0]} if "=" in rest else set()
    assert named - {case.field for case in CASES.values()} - set(ELSEWHERE) == set()


def test_the_stack_that_has_a_layer_is_named_with_how_to_ask_for_it(tmp_path: Path) -> None:
    layers = torch.arange(12.0).reshape(3, 4)
    saved(tmp_path / "c", layers__x=layers)
    with pytest.raises(MissingKeyError) as caught:
        load({"x": sharded("layers.2.x", torch.zeros(4))}, tmp_path / "c")
    text = str(caught.value)
    call = text[text.index("from_rank_offsets(") : text.index("))") + 1]
    data = torch.zeros(4)
    tensor = eval(f"ShardedTensor.{call}", {"ShardedTensor": ShardedTensor, "data": data})
    load({"x": tensor}, tmp_path / "c")
    assert torch.equal(data, layers[2])
