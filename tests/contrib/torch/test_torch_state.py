"""State of torch optimizers by the names of their parameters: unused, frozen, thawed and new parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from megackpt import MismatchError, load, save
from megackpt.contrib.torch_state import TorchState, param_names
from megackpt.storage import MemoryStore


class Towers(nn.Module):
    """Two towers. A step uses one or both. `module` is a name that wrappers have, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.left = nn.Linear(4, 4, bias=False)
        self.module = nn.Sequential(nn.Linear(4, 4, bias=False))

    def forward(self, inputs: torch.Tensor, towers: str) -> torch.Tensor:
        outputs = [tower(inputs) for name, tower in (("l", self.left), ("m", self.module)) if name in towers]
        return torch.stack([output.square().mean() for output in outputs]).sum()


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=init_device_mesh("cpu", (1,)))


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "none": lambda model: model,
    "DDP": lambda model: DistributedDataParallel(model, find_unused_parameters=True),
    "compiled": lambda model: torch.compile(model, backend="eager"),  # type: ignore[return-value]
    "compiled DDP": lambda model: torch.compile(  # type: ignore[return-value]
        DistributedDataParallel(model, find_unused_parameters=True), backend="eager"
    ),
    "checkpointed": checkpoint_wrapper,
    "FSDP2": sharded,
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5),
}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, towers: str, number: int) -> None:
    torch.manual_seed(number)
    optimizer.zero_grad()
    model(torch.randn(3, 4), towers).backward()
    optimizer.step()


def full(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def weights(model: nn.Module) -> dict[str, list[Any]]:
    names = param_names(model)
    return {names[id(param)]: full(param.detach()).tolist() for param in model.parameters()}


def with_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> set[str]:
    names = param_names(model)
    return {names[id(param)] for param in model.parameters() if optimizer.state.get(param)}


def saved(model: nn.Module, optimizer: torch.optim.Optimizer) -> MemoryStore:
    save(TorchState([model], [optimizer]).sharded_state_dict(), store := MemoryStore())
    return store


def load_into(
    model: nn.Module, optimizer: torch.optim.Optimizer, store: MemoryStore, *, is_loading: bool = True
) -> None:
    state = TorchState([model], [optimizer])
    loaded = load(state.sharded_state_dict(is_loading=is_loading), store)
    state.load_models(loaded)
    state.load_optimizers(loaded)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_names_have_no_wrappers_and_a_submodule_may_be_called_like_one(wrapper: str) -> None:
    model = WRAPPERS[wrapper](Towers())
    assert sorted(param_names(model).values()) == ["left.weight", "module.0.weight"]
    state = TorchState([model], [torch.optim.SGD(model.parameters())]).models()
    assert sorted(state["model"]) == ["left.weight", "module.0.weight"]


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("saved_as", WRAPPERS)
@pytest.mark.parametrize("loaded_as", ["none", "FSDP2"])
@pytest.mark.parametrize("towers", ["l", "lm"])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_run_goes_on_bit_for_bit(
    make: str, saved_as: str, loaded_as: str, towers: str, frozen: bool
) -> None:
    """A tower that was never used has no state after the resume, and a frozen one has that of before."""
    model = WRAPPERS[saved_as](Towers())
    optimizer = OPTIMIZERS[make](model.parameters())
    for number in range(3):
        step(model, optimizer, towers, number)
    last = next(param for param in reversed(list(model.parameters())))
    last.requires_grad_(not frozen)
    if frozen:
        optimizer.zero_grad()
    before = with_state(model, optimizer)
    store = saved(model, optimizer)
    assert with_state(model, optimizer) == before, "a save makes no state"

    again = WRAPPERS[loaded_as](Towers())
    next(param for param in reversed(list(again.parameters()))).requires_grad_(not frozen)
    other = OPTIMIZERS[make](again.parameters())
    load_into(again, other, store)
    assert with_state(again, other) == before
    # Thawed, both towers train on.
    for run, its_optimizer in ((model, optimizer), (again, other)):
        for param in run.parameters():
            param.requires_grad_(True)
        for number in range(3, 6):
            step(run, its_optimizer, "lm", number)
    assert weights(again) == weights(model)


@pytest.mark.parametrize("loaded_as", ["none", "FSDP2"])
def test_a_group_that_is_added_at_a_resume_keeps_its_settings(
    loaded_as: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = Towers()
    optimizer = torch.optim.AdamW(model.left.parameters(), lr=0.1, weight_decay=0.3)
    step(model, optimizer, "l", 0)
    store = saved(model, optimizer)
    again = WRAPPERS[loaded_as](Towers())
    left, right = again.parameters()
    other = torch.optim.AdamW(
        [{"params": [right], "lr": 5.0}, {"params": [left], "lr": 1.0}], weight_decay=0.3
    )
    load_into(again, other, store)
    assert [group["lr"] for group in other.param_groups] == [5.0, 0.1]
    assert with_state(again, other) == {"left.weight"}
    assert "no state of the optimizer for:\n  module.0.weight" in caplog.text
    assert "no group of the optimizer with the parameters of group 0" in caplog.text


def test_groups_that_were_one_are_an_error() -> None:
    model = Towers()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer, "lm", 0)
    store = saved(model, optimizer)
    other = torch.optim.AdamW([{"params": [param]} for param in model.parameters()])
    with pytest.raises(MismatchError, match="groups 0 and 1 were saved in one group, 0"):
        load_into(model, other, store)


@pytest.mark.parametrize("is_loading", [True, False])
def test_a_checkpoint_that_torchs_functions_have_named_loads(is_loading: bool) -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model = Towers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer, "lm", 0)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    save({"model": of_model, "optimizer": of_optimizer}, store := MemoryStore())
    again = Towers()
    other = torch.optim.AdamW(again.parameters(), lr=0.5)
    load_into(again, other, store, is_loading=is_loading)
    for run, its_optimizer in ((model, optimizer), (again, other)):
        step(run, its_optimizer, "lm", 1)
    assert weights(again) == weights(model)


def test_lbfgs_loads_into_one_that_has_taken_a_step(caplog: pytest.LogCaptureFixture) -> None:
    def trained(steps: int) -> tuple[nn.Module, torch.optim.LBFGS]:
        model = Towers()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1)
        for number in range(steps):
            step_with_closure(model, optimizer, number)
        return model, optimizer

    def step_with_closure(model: nn.Module, optimizer: torch.optim.LBFGS, number: int) -> None:
        def closure() -> torch.Tensor:
            torch.manual_seed(number)
            optimizer.zero_grad()
            loss = model(torch.randn(3, 4), "lm")
            loss.backward()
            return loss  # type: ignore[no-any-return]

        optimizer.step(closure)

    model, optimizer = trained(2)
    store = saved(model, optimizer)
    again, other = trained(3)
    load_into(again, other, store)
    assert "no state of the optimizer" not in caplog.text
    step_with_closure(model, optimizer, 5)
    step_with_closure(again, other, 5)
    assert weights(again) == weights(model)


def test_state_that_the_checkpoint_lacks_goes(caplog: pytest.LogCaptureFixture) -> None:
    """SGD had no momentum when it was saved: its parameters have no buffers after the load."""
    model = Towers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer, "lm", 0)
    store = saved(model, optimizer)
    load_into(model, optimizer, store)
    assert caplog.text == ""  # it never has state
    other = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step(model, other, "lm", 1)
    load_into(model, other, store)
    assert with_state(model, other) == set()
    assert "no state of the optimizer for:\n  left.weight" in caplog.text


def test_state_of_parameters_that_the_optimizer_lacks_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model = Towers()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer, "lm", 0)
    store = saved(model, optimizer)
    load_into(model, torch.optim.AdamW(model.left.parameters()), store)
    assert "state of parameters that the optimizer does not have; it is left out:\n  module." in caplog.text
