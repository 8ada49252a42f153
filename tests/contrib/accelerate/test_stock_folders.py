"""Folders of the Trainer and accelerate themselves: a run goes on from them, and they are not removed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import megackpt
from megackpt.contrib.accelerate import AcceleratorState, load_state, newest, save_state
from megackpt.contrib.torch_state import TorchState, check_fsdp
from megackpt.contrib.transformers import FOLDER, TrainerMixin, newest_checkpoint
from megackpt.errors import NotACheckpointError, UnsupportedError
from tests.system.examples.command_line import torchrun

transformers = pytest.importorskip("transformers", reason="the extra huggingface is not installed")
accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")


ROWS = torch.randint(0, 32, (16, 8), generator=torch.Generator().manual_seed(0))
TOKENS = [{"input_ids": row, "labels": row} for row in ROWS]


class OurTrainer(TrainerMixin, transformers.Trainer):  # type: ignore[misc, name-defined]  # no types
    pass


def trainer(
    kind: type,
    root: Path,
    steps: int,
    *,
    model: Any = None,
    data: Any = TOKENS,
    callbacks: Any = (),
    **chosen: Any,
) -> Any:
    """A Trainer, by default of a model with dropout, so that the random streams count."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "attention_dropout": 0.3}
    model = model or transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "logging_steps": 1}
    often = {"save_steps": 2, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "seed": 1}
    arguments = transformers.TrainingArguments(
        output_dir=str(root), max_steps=steps, **{**quiet, **often, **chosen}
    )
    return kind(model, arguments, train_dataset=data, eval_dataset=data, callbacks=list(callbacks))


def losses(trained: Any) -> list[float]:
    return [entry["loss"] for entry in trained.state.log_history if "loss" in entry]


def folders(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps of the Trainer without the mixin."""
    root = tmp_path_factory.mktemp("stock")
    trainer(transformers.Trainer, root, 2).train()
    return root


@pytest.fixture
def run(stock: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stock, tmp_path / "run"))


@pytest.mark.parametrize("how", ["True", "path", "newest"])
def test_a_run_goes_on_from_a_folder_of_the_trainer_as_the_trainer_does(how: str, run: Path) -> None:
    expected = trainer(transformers.Trainer, run.parent / "other", 5, save_strategy="no")
    expected.train(resume_from_checkpoint=str(run / "checkpoint-2"))
    chosen: dict[str, Any] = {
        "True": True,
        "path": str(run / "checkpoint-2"),
        "newest": newest_checkpoint(str(run)),
    }
    resumed = trainer(OurTrainer, run, 5)
    resumed.train(resume_from_checkpoint=chosen[how])
    assert len(losses(resumed)) == 5
    assert losses(resumed) == losses(expected)
    weights = expected.model.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in resumed.model.state_dict().items())
    assert newest_checkpoint(str(run)) == str(run / "checkpoint-5")
    assert FOLDER in folders(run / "checkpoint-5")


def test_a_limit_removes_only_what_the_mixin_has_written(run: Path) -> None:
    again = trainer(OurTrainer, run, 6, save_total_limit=1, save_steps=1)
    again.train(resume_from_checkpoint=True)
    assert folders(run) == ["checkpoint-2", "checkpoint-6"]
    assert "optimizer.pt" in folders(run / "checkpoint-2")
    assert again.args.save_total_limit == 1


def test_the_best_model_is_kept_and_loaded_if_the_trainer_wrote_it(run: Path) -> None:
    state = json.loads((run / "checkpoint-2" / "trainer_state.json").read_text())
    best = {"best_model_checkpoint": str(run / "checkpoint-2"), "best_metric": -1e9, "best_global_step": 2}
    (run / "checkpoint-2" / "trainer_state.json").write_text(json.dumps({**state, **best}))
    chosen = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1, "save_steps": 1}
    chosen |= {"save_total_limit": 1, "metric_for_best_model": "loss", "greater_is_better": False}
    resumed = trainer(OurTrainer, run, 4, **chosen)
    resumed.train(resume_from_checkpoint=True)
    assert "checkpoint-2" in folders(run)
    stored = megackpt.load_plain_tensors(run / "checkpoint-2")
    weights = resumed.model.state_dict()
    assert all(torch.equal(weights[name], value) for name, value in stored.items())


def weights_only(folder: Path) -> None:
    (folder / "optimizer.pt").unlink()


def of_deepspeed(folder: Path) -> None:
    (folder / "optimizer.pt").unlink()
    (folder / "model.safetensors").unlink()
    (folder / "global_step2").mkdir()
    (folder / "global_step2" / "mp_rank_00_model_states.pt").write_bytes(b"")


def also_ours(folder: Path) -> None:
    megackpt.save({"model": {"weight": torch.zeros(1)}}, folder / FOLDER)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            weights_only,
            r"checkpoint-2 has the weights of a model, and no state of an optimizer .*from_pretrained",
        ),
        (of_deepspeed, r"Trainer under DeepSpeed.*go on with the Trainer without the mixin"),
        (also_ours, r"has a checkpoint of megackpt, and one of a Trainer without TrainerMixin. Keep one"),
    ],
)
def test_a_folder_that_the_mixin_cannot_resume_is_an_error_and_no_new_run(
    change: Callable[[Path], None], named: str, run: Path
) -> None:
    change(run / "checkpoint-2")
    with pytest.raises(NotACheckpointError, match=named):
        newest_checkpoint(str(run))
    for chosen in (True, str(run / "checkpoint-2")):
        with pytest.raises(NotACheckpointError, match=named):
            trainer(OurTrainer, run, 3).train(resume_from_checkpoint=chosen)


NO_FSDP = None
FSDP_FILES = {
    NO_FSDP: "model.safetensors",
    "SHARDED_STATE_DICT": "pytorch_model_fsdp_0",
    "FULL_STATE_DICT": "pytorch_model_fsdp.bin",
    "LOCAL_STATE_DICT": "pytorch_model_fsdp_rank1.bin",
}


@pytest.mark.parametrize("now", [NO_FSDP, "SHARDED_STATE_DICT", "FULL_STATE_DICT"])
@pytest.mark.parametrize("before", FSDP_FILES)
def test_a_folder_of_another_kind_of_fsdp_is_an_error(
    before: str | None, now: str | None, tmp_path: Path
) -> None:
    plugin = SimpleNamespace(state_dict_type=SimpleNamespace(name=now))
    host = SimpleNamespace(
        distributed_type=SimpleNamespace(name="FSDP" if now else "MULTI_CPU"),
        state=SimpleNamespace(fsdp_plugin=plugin if now else None),
    )
    (tmp_path / FSDP_FILES[before]).touch()
    if before == now:
        check_fsdp(tmp_path, host)
        return
    text = (
        f"was saved with .*{before or 'no FSDP'}, and this run has .*{now or 'no FSDP'}. .* resume it so, and"
    )
    with pytest.raises(NotACheckpointError, match=text):
        check_fsdp(tmp_path, host)


def test_a_folder_of_the_trainer_with_fsdp_is_resumed_with_fsdp(tmp_path: Path) -> None:
    """Two ranks: the Trainer without the mixin, then with it from its step 2, then one without FSDP."""
    first, whole = fsdp_ranks("stock", tmp_path), tmp_path / "checkpoint-4"
    assert sorted(path.name for path in whole.glob("*_0")) == ["optimizer_0", "pytorch_model_fsdp_0"]
    shutil.rmtree(whole)
    assert fsdp_ranks("ours", tmp_path) == first
    assert FOLDER in folders(whole)
    assert FOLDER not in folders(tmp_path / "checkpoint-2")
    shutil.rmtree(whole)
    for chosen in (True, str(tmp_path / "checkpoint-2")):
        with pytest.raises(
            NotACheckpointError, match="saved with FSDP with SHARDED_STATE_DICT, and this run"
        ):
            trainer(OurTrainer, tmp_path, 4).train(resume_from_checkpoint=chosen)


def fsdp_ranks(kind: str, root: Path) -> str:
    """Run this file on two ranks, as at its end; return the losses of a run."""
    launch = torchrun(2, "-m", __name__, kind, root)
    done = subprocess.run(launch, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("losses ")]
    assert lines, done.stderr
    return lines[0]


def test_the_folder_of_all_steps_is_an_error_with_the_newest(run: Path) -> None:
    with pytest.raises(NotACheckpointError, match=r"is a folder of several steps. .*/checkpoint-2\."):
        trainer(OurTrainer, run, 3).train(resume_from_checkpoint=str(run))


def test_a_save_of_the_trainer_that_did_not_finish_is_left_out(run: Path) -> None:
    shutil.copytree(run / "checkpoint-2", run / "checkpoint-4")
    (run / "checkpoint-4" / "trainer_state.json").unlink()
    assert newest_checkpoint(str(run)) == str(run / "checkpoint-2")


def adapted() -> Any:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    torch.manual_seed(1)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(trainer(OurTrainer, Path("unused"), 1).model, config)


def test_a_folder_has_the_adapter_and_not_its_base_as_that_of_the_trainer(tmp_path: Path) -> None:
    again = trainer(OurTrainer, tmp_path / "run", 4, model=adapted())
    again.train()
    shutil.rmtree(tmp_path / "run" / "checkpoint-4")
    written = tmp_path / "run" / "checkpoint-2"
    arrays = megackpt.load_tensors_metadata(written / FOLDER)
    assert {"lora_" in key for key in arrays} == {True}
    resumed = trainer(OurTrainer, tmp_path / "run", 4, model=adapted())
    resumed.train(resume_from_checkpoint=True)
    weights = again.model.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in resumed.model.state_dict().items())
    # What peft reads has the weights of this step, too.
    of_peft = type(again.model).from_pretrained(adapted().unload(), str(written))
    stored = megackpt.load_plain_tensors(written / FOLDER)
    assert all(
        torch.equal(value, stored[f"model.{name}"])
        for name, value in of_peft.state_dict().items()
        if "lora_" in name
    )


def test_a_base_that_an_older_version_has_saved_is_loaded(tmp_path: Path) -> None:
    model = adapted()
    base = {name: torch.ones_like(tensor) for name, tensor in model.state_dict().items()}
    megackpt.save({"model": base}, tmp_path / FOLDER)
    trainer(OurTrainer, tmp_path, 1, model=model)._load_from_checkpoint(str(tmp_path))
    assert all(bool((value == 1).all()) for value in model.state_dict().values())


class Run(NamedTuple):
    """Two models, each with an optimizer, and a schedule, of an Accelerator of their own."""

    accelerator: Any
    models: list[nn.Module]
    optimizers: list[Any]
    schedule: Any


def prepared(seed: int) -> Run:
    torch.manual_seed(seed)
    accelerator = accelerate.Accelerator(cpu=True)
    models = [nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2)), nn.Linear(4, 2)]
    adamw = torch.optim.AdamW(models[0].parameters())
    sgd = torch.optim.SGD(models[1].parameters(), lr=1e-3, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(adamw, 1, 0.5)
    *all_models, adamw, sgd, schedule = accelerator.prepare(*models, adamw, sgd, schedule)
    return Run(accelerator, all_models, [adamw, sgd], schedule)


def train(run: Run, steps: int) -> list[torch.Tensor]:
    """Take steps with each optimizer; return copies of all parameters."""
    for _ in range(steps):
        for model, optimizer in zip(run.models, run.optimizers, strict=True):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
        run.schedule.step()
    return [parameter.detach().clone() for model in run.models for parameter in model.parameters()]


@pytest.mark.parametrize("writer", ["megackpt", "accelerate"])
def test_an_accelerator_goes_on_where_another_was(writer: str, tmp_path: Path) -> None:
    run = prepared(0)
    train(run, 2)
    if writer == "accelerate":
        run.accelerator.save_state(str(tmp_path / "step_2"))
    else:
        save_state(run.accelerator, tmp_path / "step_2")
    expected, drawn = train(run, 2), torch.rand(2)

    resumed, path = prepared(1), newest(tmp_path)
    assert path == str(tmp_path / "step_2")
    loaded = load_state(resumed.accelerator, path)
    assert (loaded, loaded.step) == ([], None)
    assert resumed.schedule.get_last_lr() == [0.00025]
    assert all(map(torch.equal, train(resumed, 2), expected))
    assert torch.equal(torch.rand(2), drawn)


def test_random_streams_that_a_folder_of_accelerate_lacks_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator = prepared(0).accelerator
    accelerator.save_state(str(tmp_path / "step_2"))
    # As on the second of two ranks, whose file is not there.
    for name, number in (("num_processes", 2), ("process_index", 1)):
        monkeypatch.setitem(accelerator.state._shared_state, name, number)
    (note,) = load_state(accelerator, tmp_path / "step_2")
    assert "step_2 has no random_states_1.pkl: random streams of this rank begin anew" in note


def test_a_folder_has_the_step_and_the_names_of_parameters_which_other_programs_can_read(
    tmp_path: Path,
) -> None:
    accelerator = prepared(0).accelerator
    save_state(accelerator, tmp_path / "step_20", step=20)
    assert load_state(accelerator, tmp_path / "step_20").step == 20
    keys = set(megackpt.load_tensors_metadata(tmp_path / "step_20"))
    assert {"model.0.weight", "model_1.bias", "optimizer.state.0.weight.exp_avg"} <= keys


def test_the_newest_is_the_largest_number_that_is_whole(tmp_path: Path) -> None:
    assert newest(tmp_path) is None
    accelerator = prepared(0).accelerator
    for name in ("step_9", "step_10"):
        save_state(accelerator, tmp_path / name)
    accelerator.save_state(str(tmp_path / "step_11"))
    accelerator.save_state(str(tmp_path / "step_12"))
    os.truncate(tmp_path / "step_12" / "random_states_0.pkl", 100)  # killed
    (tmp_path / "logs").mkdir()
    assert newest(tmp_path) == str(tmp_path / "step_11")
    shutil.rmtree(tmp_path / "step_11")
    assert newest(tmp_path) == str(tmp_path / "step_10")


def test_checkpoints_of_others_alone_are_no_new_run(tmp_path: Path) -> None:
    (tmp_path / "step_5").mkdir()
    (tmp_path / "step_5" / "manifest.ocdbt").write_bytes(b"")
    with pytest.raises(NotACheckpointError, match=r"step_5 is a checkpoint of Orbax. It is not read"):
        newest(tmp_path)


def train_with_fsdp(kind: str, root: Path) -> None:
    """Train four steps with FSDP2 on processors, for which accelerate has to believe in a device."""
    os.environ["ACCELERATE_USE_FSDP"] = "true"
    original = accelerate.state.AcceleratorState.__init__

    def with_fsdp(self: Any, *args: Any, **chosen: Any) -> None:
        accelerate.PartialState(cpu=True, backend="gloo")
        accelerate.PartialState._shared_state["distributed_type"] = accelerate.DistributedType.MULTI_XPU
        original(self, *args, **chosen)

    accelerate.state.AcceleratorState.__init__ = with_fsdp
    fsdp = {"version": 2, "state_dict_type": "SHARDED_STATE_DICT"}
    fsdp |= {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "cpu_ram_efficient_loading": False}
    run = trainer(
        OurTrainer if kind == "ours" else transformers.Trainer,
        root,
        4,
        fsdp="full_shard auto_wrap",
        fsdp_config=fsdp,
        per_device_train_batch_size=2,
    )
    run.train(resume_from_checkpoint=kind == "ours")
    if run.args.process_index == 0:
        print("losses", losses(run), flush=True)


def test_an_accelerator_over_a_framework_with_its_own_format_is_an_error() -> None:
    kind = SimpleNamespace(name="DEEPSPEED")
    with pytest.raises(
        UnsupportedError, match=r"DEEPSPEED has a checkpoint format of its own: call accelerator\."
    ):
        AcceleratorState(SimpleNamespace(distributed_type=kind))


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
    trainer.args = SimpleNamespace(output_dir=str(tmp_path), world_size=2)
    with pytest.raises(UnsupportedError, match=r"each rank would train a model of its own.*use_cpu=True"):
        trainer.train()  # the Trainer counts two processes, torch.distributed one
    trainer.args.world_size = 1
    with pytest.raises(NotACheckpointError, match=r"has no folder checkpoint-N with a whole checkpoint"):
        trainer.train(resume_from_checkpoint=True)


class Towers(nn.Module):
    """Two towers. A step uses one or both."""

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
    class Chosen(transformers.TrainerCallback):  # type: ignore[misc, name-defined]  # no types
        def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            before_step(kind, model, state.global_step)

    rows = [{"x": row} for row in torch.randn(64, 4, generator=torch.Generator().manual_seed(3))]
    decayed = {"learning_rate": 0.1, "weight_decay": 0.1}
    run = trainer(OurTrainer, root, 4, model=model, data=rows, callbacks=[Chosen()], **decayed)
    run.train(resume_from_checkpoint=resumes)
    if not resumes:
        shutil.rmtree(root / "checkpoint-4")


def run_accelerator(kind: str, root: Path, model: nn.Module, *, resumes: bool) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
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


if __name__ == "__main__":
    train_with_fsdp(sys.argv[1], Path(sys.argv[2]))
