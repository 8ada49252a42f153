"""State of a torch optimizer with named parameters is loaded by their names, whatever their order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import distribute_tensor, init_device_mesh

from megackpt import LoadOptions, MismatchError, SaveOptions, load, save
from megackpt.storage import MemoryStore


def trained(names: list[str], *, steps: int = 2) -> tuple[dict[str, nn.Parameter], torch.optim.Optimizer]:
    params = {name: nn.Parameter(torch.full((3,), float(ord(name)))) for name in names}
    optimizer = torch.optim.AdamW(params.items(), lr=0.1)
    for step in range(steps):
        for name, param in params.items():
            param.grad = torch.full_like(param, ord(name) + step)
        optimizer.step()
    return params, optimizer


def moments(params: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {name: optimizer.state[param]["exp_avg"].tolist() for name, param in params.items()}


@pytest.mark.parametrize("plain_tensors", ["arrays", "common"])
@pytest.mark.parametrize("has_state", [True, False])
@pytest.mark.parametrize("order", ["cab", "abc", "cba"])
def test_another_order_of_parameters_gets_the_moments_of_each_name(
    plain_tensors: Any, has_state: bool, order: str
) -> None:
    params, optimizer = trained(list("abc"))
    save(
        {"opt": optimizer.state_dict()},
        store := MemoryStore(),
        options=SaveOptions(plain_tensors=plain_tensors),
    )
    again, other = trained(list(order), steps=int(has_state))
    loaded = load({"opt": other.state_dict()}, store)
    other.load_state_dict(loaded["opt"])
    assert moments(again, other) == moments(params, optimizer)
    assert other.state_dict()["param_groups"][0]["param_names"] == list(order)


@pytest.mark.parametrize(
    ("stored", "asked"), [("", "_orig_mod."), ("module.", ""), ("l._orig_mod.", "_fsdp_wrapped_module.l.")]
)
def test_names_that_differ_by_wrappers_are_of_the_same_parameter(stored: str, asked: str) -> None:
    params, optimizer = trained(list("abc"))
    state = optimizer.state_dict()
    state["param_groups"][0]["param_names"] = [f"{stored}{name}" for name in "abc"]
    save({"opt": state}, store := MemoryStore())
    again, other = trained(list("cab"), steps=1)
    state = other.state_dict()
    state["param_groups"][0]["param_names"] = wrapped = [f"{asked}{name}" for name in "cab"]
    loaded = load({"opt": state}, store)["opt"]
    assert loaded["param_groups"][0]["param_names"] == wrapped
    other.load_state_dict(loaded)
    assert moments(again, other) == moments(params, optimizer)


@pytest.mark.parametrize("is_same_order", [True, False])
@pytest.mark.parametrize("names", [["a", "module.a", "b"], ["a", "a", "b"]], ids=",".join)
def test_parameters_with_names_that_are_equal_without_wrappers(names: list[str], is_same_order: bool) -> None:
    """Two models in one optimizer, one of them wrapped, or both with the same names."""
    params, optimizer = trained(list("abc"))
    state = optimizer.state_dict()
    state["param_groups"][0]["param_names"] = names
    save({"opt": state}, store := MemoryStore())
    order = [0, 1, 2] if is_same_order else [1, 2, 0]
    again, other = trained(["abc"[n] for n in order], steps=1)
    state = other.state_dict()
    state["param_groups"][0]["param_names"] = [names[n] for n in order]
    if len(set(names)) < len(names) and not is_same_order:
        with pytest.raises(MismatchError, match=r"'opt' have one name.*\n  a\nGive param_names that differ"):
            load({"opt": state}, store)
        del state["param_groups"][0]["param_names"]
        load({"opt": state}, store)
    else:
        other.load_state_dict(load({"opt": state}, store)["opt"])
        assert moments(again, other) == moments(params, optimizer)


def test_parameters_of_one_side_only_are_named(caplog: pytest.LogCaptureFixture) -> None:
    params, optimizer = trained(list("abc"))
    save({"opt": optimizer.state_dict()}, store := MemoryStore())
    again, other = trained(list("dcb"), steps=1)
    other.load_state_dict(load({"opt": other.state_dict()}, store)["opt"])
    assert "has no state of:\n  d" in caplog.text
    assert "has state of parameters that are not asked for:\n  a" in caplog.text
    known = {name: again[name] for name in "cb"}
    assert moments(known, other) == {name: moments(params, optimizer)[name] for name in "cb"}
    assert again["d"] not in other.state


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
    params, optimizer = trained(list("abc"))
    save(state_at(path, optimizer.state_dict()), store := MemoryStore())
    again, other = trained(list("cab"))
    loaded = load(state_at(path, other.state_dict()), store)
    for step in path.split("."):
        loaded = loaded[0 if step == "0" else step]
    other.load_state_dict(loaded)
    assert moments(again, other) == moments(params, optimizer)


@pytest.mark.parametrize("plain_tensors", ["arrays", "common"])
def test_options_speak_of_the_numbers_of_the_request(plain_tensors: Any) -> None:
    params, optimizer = trained(list("abc"))
    options = SaveOptions(plain_tensors=plain_tensors)
    save({"opt": optimizer.state_dict()}, store := MemoryStore(), options=options)
    again, other = trained(list("cab"), steps=1)
    before = moments(again, other)
    exclude = LoadOptions(exclude=("opt.state.0.*",))
    other.load_state_dict(load({"opt": other.state_dict()}, store, options=exclude)["opt"])
    assert moments(again, other) == {**moments(params, optimizer), "c": before["c"]}


def test_a_group_that_is_new_keeps_its_settings() -> None:
    params, optimizer = trained(list("ab"))
    save({"opt": optimizer.state_dict()}, store := MemoryStore())
    again, other = trained(list("ab"), steps=1)
    other.add_param_group({"params": [("d", nn.Parameter(torch.ones(2)))], "lr": 7.0})
    other.load_state_dict(load({"opt": other.state_dict()}, store)["opt"])
    assert [group["lr"] for group in other.param_groups] == [0.1, 7.0]
    assert moments(again, other) == moments(params, optimizer)
    other.step()  # all settings are there


@pytest.mark.parametrize(
    ("stored", "asked"), [("ab|c", "a|bc"), ("abc", "a|bc"), ("a|bc", "abc"), ("ab|c", "ca|b")]
)
def test_other_groups_of_the_same_parameters(stored: str, asked: str) -> None:
    def grouped(groups: str) -> tuple[dict[str, nn.Parameter], torch.optim.Optimizer]:
        params = {name: nn.Parameter(torch.full((3,), float(ord(name)))) for name in groups if name != "|"}
        members = [{"params": [(name, params[name]) for name in group]} for group in groups.split("|")]
        optimizer = torch.optim.AdamW(members, lr=0.1)
        for name, param in params.items():
            param.grad = torch.full_like(param, ord(name))
        optimizer.step()
        return params, optimizer

    params, optimizer = grouped(stored)
    save({"opt": optimizer.state_dict()}, store := MemoryStore())
    again, other = grouped(asked)
    other.load_state_dict(load({"opt": other.state_dict()}, store)["opt"])
    assert moments(again, other) == moments(params, optimizer)


def test_names_that_the_checkpoint_has_under_another_path_are_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _, optimizer = trained(list("abc"))
    save({"o1": optimizer.state_dict()}, store := MemoryStore())
    _, other = trained(list("cab"), steps=1)
    load({"o2": other.state_dict()}, store, options=LoadOptions(rename={"o1.*": "o2.*"}))
    assert "loaded by the positions of the parameters" in caplog.text
