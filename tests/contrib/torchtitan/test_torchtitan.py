"""The checkpoint manager for torchtitan in one process: what is saved when, what is loaded, wrong configs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import megackpt
from megackpt.errors import CommonStateError, DeclarationError, NotACheckpointError, UnsupportedError
from megackpt.testing.world import SimulatedWorld

pytest.importorskip("torchtitan")

from megackpt.contrib import torchtitan
from megackpt.contrib.torchtitan import MegackptManager


class Part:
    """State of a run, like torchtitan's containers."""

    def __init__(self, **state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = dict(state)


class Renaming:
    """A state dict adapter with the names of another family."""

    hf_assets_path: str | None = None

    def to_hf(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {f"model.{name}": tensor.clone() for name, tensor in state.items()}

    def from_hf(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name.removeprefix("model."): tensor for name, tensor in state.items()}


@pytest.fixture
def managers(tmp_path: Path) -> Iterator[Any]:
    """A function that returns a manager of a model and other state full of one number."""
    made: list[MegackptManager] = []

    def make(number: float, **config: Any) -> MegackptManager:
        model = nn.Linear(2, 3)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(number)
        optimizer = {
            "state.weight.exp_avg": torch.full((3, 2), number),
            "state.weight.step": torch.tensor(number),
            "param_groups.weight.betas": (0.9, number),
        }
        made.append(
            MegackptManager.Config(**{"enable": True, "interval": 5, **config}).build(
                dataloader=Part(dp_rank_0=b"pickled", world_size=number),
                model_parts=[model],
                optimizers=Part(**optimizer),
                lr_schedulers=Part(last_epoch=number),
                states={"train_state": Part(step=number)},
                sd_adapter=Renaming(),
                base_folder=str(tmp_path),
            )
        )
        return made[-1]

    yield make
    for manager in made:
        manager.close()


def numbers(manager: MegackptManager) -> dict[str, float]:
    """Return the number that each part of the state is full of."""
    values = {name: set(weight.flatten().tolist()) for name, weight in manager._model.state_dict().items()}
    optimizer = manager._others["optimizer"].state
    values["moment"] = set(optimizer["state.weight.exp_avg"].flatten().tolist())
    values["count"] = {optimizer["state.weight.step"].item()}
    values["beta"] = {optimizer["param_groups.weight.betas"][1]}
    for part, name in (("lr_scheduler", "last_epoch"), ("dataloader", "world_size"), ("train_state", "step")):
        values[part] = {manager._others[part].state[name]}
    return {name: number for name, (number,) in values.items()}


def steps(manager: MegackptManager) -> tuple[int, ...]:
    return manager.checkpointer.steps()


@pytest.mark.parametrize("excluded", [[], ["dataloader"]])
def test_a_new_run_goes_on_where_another_was_but_for_state_that_is_excluded(
    managers: Any, excluded: list[str]
) -> None:
    assert not managers(1.0).load()
    assert managers(1.0).save(5)
    resumed = managers(2.0, exclude_from_loading=excluded)
    assert resumed.load()
    assert numbers(resumed) == {name: 2.0 if name in excluded else 1.0 for name in numbers(resumed)}
    with pytest.raises(NotACheckpointError, match="iter_0000007"):
        resumed.load(7)


def test_steps_of_torchtitans_own_manager_are_no_new_run(managers: Any, tmp_path: Path) -> None:
    manager = managers(1.0)
    folder = tmp_path / manager._config.folder
    for step in (9, 10):
        (folder / f"step-{step}").mkdir(parents=True)
    with pytest.raises(NotACheckpointError, match=r"steps of torchtitan's .*: step-10 is the newest"):
        manager.load()
    assert manager.save(5)
    assert manager.load()
    assert {path.name for path in folder.glob("step-*")} == {"step-9", "step-10"}


def test_a_manager_saves_at_intervals_at_the_last_step_and_if_asked_at_the_first(managers: Any) -> None:
    manager = managers(1.0, enable_first_step_checkpoint=True, last_save_model_only=False)
    assert [step for step in range(1, 13) if manager.save(step, last_step=step == 12)] == [1, 5, 10, 12]
    assert steps(manager) == (1, 5, 10, 12)


def test_a_manager_keeps_the_newest_steps(managers: Any) -> None:
    manager = managers(1.0, keep_latest_k=2)
    for step in (5, 10, 15):
        manager.save(step)
    assert steps(manager) == (10, 15)


def test_a_manager_that_only_loads_or_is_off_saves_nothing(managers: Any, tmp_path: Path) -> None:
    assert not managers(1.0, load_only=True).save(5, last_step=True)
    off = managers(1.0, enable=False)
    assert not off.save(5)
    assert not off.load()
    assert not list(tmp_path.rglob("metadata.json"))


def test_the_last_save_can_be_the_model_alone_in_another_dtype(managers: Any, tmp_path: Path) -> None:
    managers(1.0, export_dtype="bfloat16").save(5, last_step=True)
    arrays = megackpt.load_plain_tensors(tmp_path / "checkpoint" / "iter_0000005")
    dtypes = {key: tensor.dtype for key, tensor in arrays.items()}
    assert dtypes == dict.fromkeys(("model.weight", "model.bias"), torch.bfloat16)


def test_an_asynchronous_save_is_pending_until_it_is_waited_for(managers: Any) -> None:
    manager = managers(1.0, async_save=True, last_save_model_only=False)
    manager.save(5)
    assert manager.save_future is not None
    manager.maybe_wait_for_staging()
    manager.maybe_wait_for_saving()
    assert manager.save_future is None
    assert steps(manager) == (5,)
    manager.save(6, last_step=True)  # the process ends after it
    assert steps(manager) == (5, 6)


@pytest.mark.parametrize("source", ["seed", "path", "huggingface"])
def test_a_run_begins_with_the_weights_of_another(managers: Any, tmp_path: Path, source: str) -> None:
    weights = {"weight", "bias"}
    config: dict[str, Any] = {}
    if source == "seed":
        managers(1.0, last_save_model_only=False).save(0, last_step=True)
    elif source == "path":
        managers(1.0, folder="other").save(5)
        config = {"initial_load_path": str(tmp_path / "other" / "iter_0000005")}
    else:
        tensors = {f"model.{name}": torch.ones_like(t) for name, t in nn.Linear(2, 3).state_dict().items()}
        (tmp_path / "hf").mkdir()
        # Another dtype than the model's, as many folders have.
        save_file({k: t.bfloat16() for k, t in tensors.items()}, tmp_path / "hf" / "model.safetensors")
        config = {"initial_load_in_hf": True, "initial_load_path": str(tmp_path / "hf")}
    started = managers(2.0, **config)
    assert started.load()
    assert {name for name, number in numbers(started).items() if number == 1.0} == weights


@pytest.mark.parametrize(
    ("config", "error", "text"),
    [
        ({"last_save_in_hf": True}, UnsupportedError, "last_save_in_hf does not work with MegackptManager"),
        (
            {"initial_load_in_hf": True, "initial_load_in_hf_quantized": True, "initial_load_path": "/hf"},
            UnsupportedError,
            r"initial_load_in_hf_quantized does not work .* not quantised",
        ),
        ({"exclude_from_loading": ["data"]}, DeclarationError, r"has 'data', .* Known are 'optimizer'"),
    ],
)
def test_a_config_that_cannot_be_followed_is_an_error(
    managers: Any, config: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        managers(1.0, **config)


def test_weights_for_hugging_face_need_an_adapter_and_a_folder(managers: Any) -> None:
    manager = managers(1.0, initial_load_in_hf=True)
    with pytest.raises(DeclarationError, match="initial_load_in_hf is set without a folder"):
        manager.load()
    manager._adapter = None
    with pytest.raises(UnsupportedError, match="no state dict adapter for this model"):
        manager.load()


def stage(rank: int, value: float) -> dict[str, Any]:
    """State of one of two pipeline stages, and what both have."""
    weights = {"scale": value, f"bias_{rank}": value + rank}
    optimizer = {f"param_groups.{rank}.lr": value + rank, "all": value}
    return {
        "model": {k: torchtitan._tensor(f"model.{k}", torch.full((2,), v)) for k, v in weights.items()},
        "optimizer": torchtitan._declared("optimizer", optimizer),
    }


def test_stages_of_a_pipeline_have_names_of_their_own(tmp_path: Path) -> None:
    world = SimulatedWorld(2)
    world.run(lambda group: megackpt.save(stage(group.rank, 1.0), tmp_path / "step", group=group))

    def one_rank_with_both(group: Any) -> Any:
        request = stage(0, 7.0)
        request["model"] |= stage(1, 7.0)["model"]
        request["optimizer"] |= stage(1, 7.0)["optimizer"]
        return megackpt.load(request, tmp_path / "step", group=group)

    (loaded,) = SimulatedWorld(1).run(one_rank_with_both)
    assert loaded["optimizer"] == {"param_groups.0.lr": 1.0, "param_groups.1.lr": 2.0, "all": 1.0}
    model = {name: tensor.tolist() for name, tensor in loaded["model"].items()}
    assert model == {"scale": [1.0, 1.0], "bias_0": [1.0, 1.0], "bias_1": [2.0, 2.0]}


def test_ranks_that_differ_in_what_is_common_to_them_are_an_error(tmp_path: Path) -> None:
    def save_different(group: Any) -> None:
        megackpt.save(stage(group.rank, float(group.rank)), tmp_path / "step", group=group)

    with pytest.raises((CommonStateError, megackpt.errors.MismatchError), match=r"scale|all"):
        SimulatedWorld(2).run(save_different)
