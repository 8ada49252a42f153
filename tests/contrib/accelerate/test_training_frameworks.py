"""accelerate and the Trainer in one process: what is saved, which folder is resumed, wrong input."""

from __future__ import annotations

import shutil
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import megackpt
from megackpt.contrib.accelerate import AcceleratorState, load_state, save_state
from megackpt.contrib.torch_state import TorchState
from megackpt.contrib.transformers import FOLDER, TrainerMixin, newest_checkpoint
from megackpt.errors import NotACheckpointError, UnsupportedError


def step(models: list[nn.Module], optimizers: list[Any]) -> list[torch.Tensor]:
    """Step with each optimizer; return copies of all parameters."""
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    return [parameter.detach().clone() for model in models for parameter in model.parameters()]


def prepared(seed: int) -> tuple[Any, list[nn.Module], list[Any], Any]:
    """Two models, each with an optimizer, and a schedule, of an Accelerator of their own."""
    accelerate = pytest.importorskip("accelerate")
    torch.manual_seed(seed)
    accelerator = accelerate.Accelerator(cpu=True)
    models = [nn.Linear(4, 3), nn.Linear(4, 2)]
    adamw = torch.optim.AdamW(models[0].parameters())
    sgd = torch.optim.SGD(models[1].parameters(), momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(adamw, 1, 0.5)
    *all_models, adamw, sgd, schedule = accelerator.prepare(*models, adamw, sgd, schedule)
    return accelerator, all_models, [adamw, sgd], schedule


def test_an_accelerator_goes_on_where_another_was(tmp_path: Path) -> None:
    accelerator, models, optimizers, schedule = prepared(0)
    step(models, optimizers)
    schedule.step()
    save_state(accelerator, tmp_path / "step")
    expected, drawn = step(models, optimizers), torch.rand(2)

    resumed, models, optimizers, schedule = prepared(1)
    assert load_state(resumed, tmp_path / "step") == []
    assert schedule.get_last_lr() == [0.0005]
    assert all(map(torch.equal, step(models, optimizers), expected))
    assert torch.equal(torch.rand(2), drawn)


def test_names_are_those_of_parameters_so_that_other_programs_can_read_them(tmp_path: Path) -> None:
    accelerator, _, _, _ = prepared(0)
    save_state(accelerator, tmp_path / "step")
    keys = set(megackpt.load_tensors_metadata(tmp_path / "step"))
    assert {"model.weight", "model_1.bias", "optimizer.state.weight.exp_avg"} <= keys


def test_an_accelerator_over_a_framework_with_its_own_format_is_an_error() -> None:
    kind = types.SimpleNamespace(name="DEEPSPEED")
    with pytest.raises(
        UnsupportedError, match=r"DEEPSPEED has a checkpoint format of its own: call accelerator\."
    ):
        AcceleratorState(types.SimpleNamespace(distributed_type=kind))


def test_an_optimizer_over_two_models_is_an_error() -> None:
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    both = torch.optim.SGD([*models[0].parameters(), *models[1].parameters()])
    with pytest.raises(
        UnsupportedError, match=r"Optimizer 0 \(SGD\) has parameters that are not all of one model"
    ):
        TorchState(models, [both])


def test_a_folder_that_is_not_whole_is_left_out(tmp_path: Path) -> None:
    for step in (5, 10, 15, 20):
        megackpt.save({"model": {"weight": torch.zeros(1)}}, tmp_path / f"checkpoint-{step}" / FOLDER)
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
    (tmp_path / "checkpoint-10" / FOLDER / "metadata.json").unlink()  # killed before the commit
    (tmp_path / "checkpoint-15" / "trainer_state.json").write_text('{"epo')
    (tmp_path / "checkpoint-20" / "trainer_state.json").unlink()
    (tmp_path / "checkpoint-99x").mkdir()
    assert newest_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-5")


def test_a_run_without_a_checkpoint_begins_anew_or_is_an_error(tmp_path: Path) -> None:
    assert newest_checkpoint(str(tmp_path)) is None
    trainer = TrainerMixin()
    trainer.args = types.SimpleNamespace(output_dir=str(tmp_path), world_size=2)
    with pytest.raises(UnsupportedError, match=r"each rank would train a model of its own.*use_cpu=True"):
        trainer.train()  # the Trainer counts two processes, torch.distributed one
    trainer.args.world_size = 1
    with pytest.raises(NotACheckpointError, match=r"has no folder checkpoint-N with a whole checkpoint"):
        trainer.train(resume_from_checkpoint=True)


class Towers(nn.Module):
    """Two towers of which a step may use one."""

    def __init__(self, *, has_right: bool = True) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.left = nn.Linear(4, 4)
        if has_right:
            self.right = nn.Linear(4, 4)
        self.uses_right = False

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.left(x) + (self.right(x) if self.uses_right else 0)
        return {"loss": out.square().mean()}


def before_step(kind: str, model: Any, number: int) -> None:
    """Choose what the step with this number trains; the checkpoint is that of step 2."""
    if hasattr(model, "right"):
        model.uses_right = kind != "never used" and (kind != "added" or number >= 2)
        is_frozen = {"frozen": number >= 1, "thawed": 1 <= number < 3}.get(kind, False)
        model.right.requires_grad_(not is_frozen)


def run_trainer(kind: str, root: Path, model: nn.Module, *, resumes: bool) -> None:
    transformers = pytest.importorskip("transformers", reason="the extra huggingface is not installed")
    from megackpt.contrib.transformers import TrainerMixin

    class OurTrainer(TrainerMixin, transformers.Trainer):  # type: ignore[misc, name-defined]  # no types
        pass

    class Chosen(transformers.TrainerCallback):  # type: ignore[misc, name-defined]  # no types
        def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            before_step(kind, model, state.global_step)

    arguments = transformers.TrainingArguments(
        output_dir=str(root), max_steps=4, save_steps=2, report_to=[], use_cpu=True, disable_tqdm=True,
        seed=1, learning_rate=0.1, weight_decay=0.1,
    )  # fmt: skip
    batches = [{"x": row} for row in torch.randn(64, 4, generator=torch.Generator().manual_seed(3))]
    run = OurTrainer(model, arguments, train_dataset=batches, callbacks=[Chosen()])
    run.train(resume_from_checkpoint=resumes)
    if not resumes:
        shutil.rmtree(root / "checkpoint-4")


def run_accelerator(kind: str, root: Path, model: nn.Module, *, resumes: bool) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator._models.clear(), accelerator._optimizers.clear(), accelerator._schedulers.clear()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    if resumes:
        load_state(accelerator, root / "step_2")
    for number in range(2 if resumes else 0, 4):
        before_step(kind, model, number)
        optimizer.zero_grad()
        model(torch.ones(2, 4) + number)["loss"].backward()
        optimizer.step()
        if number == 1:
            save_state(accelerator, root / "step_2")


@pytest.mark.parametrize("kind", ["never used", "frozen", "thawed", "added"])
@pytest.mark.parametrize("run", [run_trainer, run_accelerator])
def test_a_run_goes_on_bit_for_bit_whatever_it_trains(run: Any, kind: str, tmp_path: Path) -> None:
    run(kind, tmp_path / "whole", whole := Towers(), resumes=False)
    run(kind, tmp_path / "run", Towers(has_right=kind != "added"), resumes=False)
    again = Towers()
    with torch.no_grad():
        again.left.weight.zero_()
    run(kind, tmp_path / "run", again, resumes=True)
    weights = whole.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in again.state_dict().items())
