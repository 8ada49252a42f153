"""State of a torch optimizer with named parameters is loaded by their names, whatever their order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import distribute_tensor, init_device_mesh

from megackpt import LoadOptions, MismatchError, SaveOptions, load, save
from megackpt.storage import MemoryStore


class Trained:
    """Parameters with one letter each, and their optimizer after some steps; "|" begins a new group.

    Attributes:
        names: what the state calls the parameters, in their order; their letters unless given.
    """

    def __init__(self, groups: str, *, steps: int = 2, names: Sequence[str] = ()) -> None:
        letters = groups.replace("|", "")
        self.names = list(names or letters)
        self.params = {name: nn.Parameter(torch.full((3,), float(ord(name)))) for name in letters}
        members = [{"params": [(name, self.params[name]) for name in group]} for group in groups.split("|")]
        self.optimizer = torch.optim.AdamW(members, lr=0.1)
        for step in range(steps):
            for name, param in self.params.items():
                param.grad = torch.full_like(param, ord(name) + step)
            self.optimizer.step()

    def state(self) -> dict[str, Any]:
        state = self.optimizer.state_dict()
        names = iter(self.names)
        for group in state["param_groups"]:
            group["param_names"] = [next(names) for _ in group["params"]]
        return state

    def saved(self, **arguments: Any) -> MemoryStore:
        save({"opt": self.state()}, store := MemoryStore(), **arguments)
        return store

    def load(self, store: MemoryStore, **arguments: Any) -> dict[str, Any]:
        """Load the optimizer, and return its moments."""
        loaded = load({"opt": self.state()}, store, **arguments)["opt"]
        assert [name for group in loaded["param_groups"] for name in group["param_names"]] == self.names
        self.optimizer.load_state_dict(loaded)
        return self.moments()

    def moments(self) -> dict[str, Any]:
        state = self.optimizer.state
        return {name: state[p]["exp_avg"].tolist() for name, p in self.params.items() if p in state}


@pytest.mark.parametrize("plain_tensors", ["arrays", "common"])
@pytest.mark.parametrize("has_state", [True, False])
@pytest.mark.parametrize("order", ["cab", "abc", "cba"])
def test_another_order_of_parameters_gets_the_moments_of_each_name(
    plain_tensors: Any, has_state: bool, order: str
) -> None:
    stored = Trained("abc")
    store = stored.saved(options=SaveOptions(plain_tensors=plain_tensors))
    assert Trained(order, steps=int(has_state)).load(store) == stored.moments()


@pytest.mark.parametrize(
    ("stored", "asked"), [("", "_orig_mod."), ("module.", ""), ("l._orig_mod.", "_fsdp_wrapped_module.l.")]
)
def test_names_that_differ_by_wrappers_are_of_the_same_parameter(stored: str, asked: str) -> None:
    wrapped = Trained("abc", names=[f"{stored}{name}" for name in "abc"])
    other = Trained("cab", steps=1, names=[f"{asked}{name}" for name in "cab"])
    assert other.load(wrapped.saved()) == wrapped.moments()


@pytest.mark.parametrize("is_same_order", [True, False])
@pytest.mark.parametrize("names", [["a", "module.a", "b"], ["a", "a", "b"]], ids=",".join)
def test_parameters_with_names_that_are_equal_without_wrappers(names: list[str], is_same_order: bool) -> None:
    """Two models in one optimizer, one of them wrapped, or both with the same names."""
    stored = Trained("abc", names=names)
    order = [0, 1, 2] if is_same_order else [1, 2, 0]
    other = Trained("".join("abc"[n] for n in order), steps=1, names=[names[n] for n in order])
    store = stored.saved()
    if len(set(names)) < len(names) and not is_same_order:
        with pytest.raises(MismatchError, match=r"'opt' have one name.*\n  a\nGive param_names that differ"):
            other.load(store)
        state = other.state()
        del state["param_groups"][0]["param_names"]
        load({"opt": state}, store)
    else:
        assert other.load(store) == stored.moments()


def test_parameters_of_one_side_only_are_named(caplog: pytest.LogCaptureFixture) -> None:
    stored, other = Trained("abc"), Trained("dcb", steps=1)
    loaded = other.load(stored.saved())
    assert "has no state of:\n  d" in caplog.text
    assert "has state of parameters that are not asked for:\n  a" in caplog.text
    assert loaded == {name: stored.moments()[name] for name in "cb"}


def test_state_in_dtensors_of_another_order_is_an_error() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))

        def sharded(names: str) -> dict[str, Any]:
            params = {name: nn.Parameter(distribute_tensor(torch.ones(2), mesh)) for name in names}
            optimizer = torch.optim.AdamW(params.items())
            for param in params.values():
                param.grad = torch.ones_like(param)
            optimizer.step()
            return {"opt": optimizer.state_dict()}

        save(sharded("ab"), store := MemoryStore())
        load(sharded("ab"), store)
        with pytest.raises(MismatchError, match=r"'opt' are not in the order of the checkpoint.*DTensor"):
            load(sharded("ba"), store)
    finally:
        dist.destroy_process_group()


def state_at(path: str, state: Any) -> Any:
    """Nest a state: "x.0" in a list in a dict."""
    for step in reversed(path.split(".")):
        state = [state] if step == "0" else {step: state}
    return state


@pytest.mark.parametrize("path", ["opts.0", "run.deep.opt", "a.0.b.0"])
def test_optimizers_in_lists_and_deep_dicts_are_loaded_by_name(path: str) -> None:
    stored, other = Trained("abc"), Trained("cab")
    save(state_at(path, stored.state()), store := MemoryStore())
    loaded = load(state_at(path, other.state()), store)
    for step in path.split("."):
        loaded = loaded[0 if step == "0" else step]
    other.optimizer.load_state_dict(loaded)
    assert other.moments() == stored.moments()


@pytest.mark.parametrize("plain_tensors", ["arrays", "common"])
def test_options_speak_of_the_numbers_of_the_request(plain_tensors: Any) -> None:
    stored, other = Trained("abc"), Trained("cab", steps=1)
    before = other.moments()
    store = stored.saved(options=SaveOptions(plain_tensors=plain_tensors))
    loaded = other.load(store, options=LoadOptions(exclude=("opt.state.0.*",)))
    assert loaded == {**stored.moments(), "c": before["c"]}


def test_a_group_that_is_new_keeps_its_settings() -> None:
    stored, other = Trained("ab"), Trained("ab", steps=1)
    other.optimizer.add_param_group({"params": [("d", nn.Parameter(torch.ones(2)))], "lr": 7.0})
    other.names.append("d")
    assert other.load(stored.saved()) == stored.moments()
    assert [group["lr"] for group in other.optimizer.param_groups] == [0.1, 7.0]
    other.optimizer.step()  # all settings are there


@pytest.mark.parametrize(
    ("stored", "asked"), [("ab|c", "a|bc"), ("abc", "a|bc"), ("a|bc", "abc"), ("ab|c", "ca|b")]
)
def test_other_groups_of_the_same_parameters(stored: str, asked: str) -> None:
    before = Trained(stored, steps=1)
    assert Trained(asked, steps=1).load(before.saved()) == before.moments()


def test_names_that_the_checkpoint_has_under_another_path_are_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    save({"o1": Trained("abc").state()}, store := MemoryStore())
    renamed = LoadOptions(rename={"o1.*": "o2.*"})
    load({"o2": Trained("cab", steps=1).state()}, store, options=renamed)
    assert "loaded by the positions of the parameters" in caplog.text
