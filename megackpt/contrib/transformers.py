"""Hugging Face's Trainer: checkpoints of megackpt in its folders `checkpoint-N`.

    class MyTrainer(TrainerMixin, Trainer): ...

    MyTrainer(...).train(resume_from_checkpoint=True)   # at any number of processes

`checkpoint-N/megackpt` has the model, the optimizer, the scheduler, the gradient scaler and the random
streams, written by all ranks in parallel. Next to it are the model's config, the tokenizer and
`trainer_state.json`, as the Trainer writes them. Nothing is a pickle.

Of a model with adapters of peft, the checkpoint lacks the parameters of the base model that no optimizer
trains, as the Trainer's own does. The adapter is next to it, as peft writes it.

A folder that the Trainer wrote without the mixin is resumed by the Trainer's own functions. It is never
removed.

Source: transformers 5.24 `Trainer`.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist

from megackpt.contrib.torch_state import TorchState, check_fsdp, named_params
from megackpt.entities import ShardedStateDict
from megackpt.entities.sharded_tensor import KeptIfMissing
from megackpt.errors import NotACheckpointError, UnsupportedError
from megackpt.formats.registry import recognise
from megackpt.formats.strategy import MANIFEST
from megackpt.options import LoadOptions
from megackpt.run.collective import load, save
from megackpt.run.local import check_is_distributed_checkpoint, load_plain_tensors
from megackpt.storage import LocalStore
from megackpt.training.state import CommonObject, RankPosition, RngState, TrainingState

if TYPE_CHECKING:
    from megackpt.training.state import Resumable

log = logging.getLogger(__name__)

FOLDER = "megackpt"
"""The checkpoint's folder in `checkpoint-N`."""

_TRAINER_STATE = "trainer_state.json"
_STEP = re.compile(r"checkpoint-(\d+)")

# What the Trainer itself writes, also under FSDP, where state is a folder.
_WEIGHTS = re.compile(r"(?:adapter_)?model\.safetensors(?:\.index\.json)?|pytorch_model.*|adapter_model\.bin")
_OPTIMIZER = re.compile(r"optimizer\.(?:pt|bin)|optimizer_\d+")
_SCHEDULER = "scheduler.pt"

_MODEL_ALONE = LoadOptions(exclude=("optimizer.*",))


class TrainerMixin:
    """Saves and resumes a Trainer through megackpt. Put it before `Trainer` among the bases.

    Works with one process, DistributedDataParallel and FSDP. `resume_from_checkpoint=True` takes the newest
    folder that is whole; one that was being written when the job ended is left out. `save_total_limit` counts
    and removes only folders that the mixin has written.

    Raises:
        UnsupportedError: at the first save, with DeepSpeed, or if checkpoints are pushed to the hub.
    """

    args: Any
    state: Any
    model: Any
    model_wrapped: Any
    optimizer: Any
    lr_scheduler: Any
    accelerator: Any
    processing_class: Any
    is_deepspeed_enabled: bool

    _limit: int | None = None  # `save_total_limit`, while the Trainer trains

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train, as `Trainer.train` does. Collective.

        Raises:
            UnsupportedError: the ranks of torch.distributed are several runs to the Trainer, not one.
            NotACheckpointError: `resume_from_checkpoint=True`, and the output folder has no whole checkpoint;
                or the folder to resume from has none; or the Trainer wrote it with FSDP, and this run has no
                FSDP, or the other way round.
        """
        ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if ranks != self.args.world_size:
            raise UnsupportedError(
                f"The Trainer trains with {self.args.world_size} process(es), and torch.distributed has "
                f"{ranks}: each rank would train a model of its own. Without GPUs, give "
                f"TrainingArguments(use_cpu=True)."
            )
        if resume_from_checkpoint is True:
            output_dir = self.args.output_dir
            resume_from_checkpoint = newest_checkpoint(output_dir)
            if resume_from_checkpoint is None:
                raise NotACheckpointError(
                    f"{output_dir} has no folder checkpoint-N with a whole checkpoint. To begin anew in that "
                    f"case, give resume_from_checkpoint=newest_checkpoint({output_dir!r}).",
                    path=output_dir,
                )
        elif resume_from_checkpoint:
            fault = _fault(Path(resume_from_checkpoint))
            if fault:
                raise NotACheckpointError(fault, path=str(resume_from_checkpoint))
        if resume_from_checkpoint and not _is_ours(resume_from_checkpoint):
            check_fsdp(Path(resume_from_checkpoint), self.accelerator)
        # The Trainer would also remove folders that it has written without the mixin.
        self._limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            result = cast(Any, super()).train(resume_from_checkpoint, *args, **kwargs)
            best = self.state.best_model_checkpoint
            if self._limit == 1 and best is not None and self.args.should_save:
                _remove_all_but(1, _our_folders(self.args.output_dir), kept={Path(best)})
            return result
        finally:
            self.args.save_total_limit, self._limit = self._limit, None

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        cast(Any, super())._save_checkpoint(model, trial)
        if self._limit is not None and self._limit > 0 and self.args.should_save:
            ours = _our_folders(cast(Any, self)._get_output_dir(trial=trial))
            best = self.state.best_model_checkpoint
            _remove_all_but(self._limit, ours, kept={*ours[-1:], *([Path(best)] if best else [])})

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model; within a checkpoint of the Trainer, all that a resumed run needs. Collective."""
        if not _internal_call or output_dir is None:
            cast(Any, super()).save_model(output_dir, _internal_call)
            return
        if self.is_deepspeed_enabled or self.args.push_to_hub:
            what = "DeepSpeed" if self.is_deepspeed_enabled else "push_to_hub"
            raise UnsupportedError(f"TrainerMixin does not work with {what}. Use Trainer without the mixin.")
        state = self._model_state(self.model_wrapped)
        if not self.args.save_only_model:
            state |= {**self._torch_state().optimizers(), **self._others().sharded_state_dict()}
        save(state, Path(output_dir, FOLDER))
        if self.args.should_save:
            if _has_optimizer(Path(output_dir)):
                log.warning(
                    "%s also has files of a Trainer without TrainerMixin. Move them away: a resume cannot "
                    "know which of the two to take.",
                    output_dir,
                )
            if _has_adapters(self.model):
                # Read back, as each rank has only its part of it.
                stored = load_plain_tensors(Path(output_dir, FOLDER), options=_MODEL_ALONE)
                weights = {key.removeprefix("model."): tensor for key, tensor in stored.items()}
                self.model.save_pretrained(output_dir, state_dict=weights)
            elif hasattr(self.model, "config"):  # a model of transformers
                self.model.config.save_pretrained(output_dir)
            if self.processing_class is not None:
                self.processing_class.save_pretrained(output_dir)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Nothing: `save_model` has saved them."""

    def _save_scaler(self, output_dir: str) -> None:
        """Nothing: `save_model` has saved it."""

    def _save_rng_state(self, output_dir: str) -> None:
        """Nothing: `save_model` has saved the random streams."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not _is_ours(resume_from_checkpoint):
            cast(Any, super())._load_from_checkpoint(resume_from_checkpoint, model)
            return
        model = self.model if model is None else model
        loaded = load(self._model_state(model, is_loading=True), Path(resume_from_checkpoint, FOLDER))
        TorchState([model], []).load_models(loaded)

    def _load_best_model(self) -> None:
        if _is_ours(self.state.best_model_checkpoint):
            self._load_from_checkpoint(self.state.best_model_checkpoint, self.model_wrapped)
        else:
            cast(Any, super())._load_best_model()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and not _is_ours(checkpoint):
            cast(Any, super())._load_optimizer_and_scheduler(checkpoint)
        elif checkpoint is not None:
            torch_state = self._torch_state()
            torch_state.load_optimizers(
                load(torch_state.optimizers(is_loading=True), Path(checkpoint, FOLDER))
            )

    def _load_scaler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and not _is_ours(checkpoint):
            cast(Any, super())._load_scaler(checkpoint)
        # `_load_rng_state` loads ours.

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Load everything but tensors: the Trainer calls this right before the first step."""
        if checkpoint is not None and not _is_ours(checkpoint):
            cast(Any, super())._load_rng_state(checkpoint)
        elif checkpoint is not None:
            others = self._others()
            loaded = load(others.sharded_state_dict(), Path(checkpoint, FOLDER))
            others.resume(loaded, step=self.state.global_step)

    def _torch_state(self) -> TorchState:
        return TorchState([self.model_wrapped], [self._own_optimizer()])

    def _own_optimizer(self) -> Any:
        return getattr(self.optimizer, "optimizer", self.optimizer)  # without accelerate's wrapper

    def _model_state(self, model: Any, *, is_loading: bool = False) -> ShardedStateDict:
        """Declare a model. The base of adapters is not saved, and loaded if an older version has saved it."""
        state = TorchState([model], []).models()
        if not _has_adapters(self.model):
            return state
        optimizer = self._own_optimizer()
        trained = {id(p) for group in (optimizer.param_groups if optimizer else ()) for p in group["params"]}
        base = {name for name, p in named_params(model) if not p.requires_grad and id(p) not in trained}
        return {
            "model": {
                name: KeptIfMissing(value) if name in base else value
                for name, value in state["model"].items()
                if is_loading or name not in base
            }
        }

    def _others(self) -> TrainingState:
        position = RankPosition(
            layout={"dp": self.args.world_size}, coordinates={"dp": self.args.process_index}
        )
        streams = RngState.of_process(position, seed=self.args.seed, elsewhere="reseed")
        parts: dict[str, Resumable] = {"rng": streams, "scheduler": CommonObject(self.lr_scheduler)}
        if self.accelerator.scaler is not None:
            parts["scaler"] = CommonObject(self.accelerator.scaler)
        return TrainingState(parts)


def _has_adapters(model: Any) -> bool:
    """Return whether a model is one of peft, or one of transformers with adapters of peft."""
    return bool(getattr(model, "peft_config", None))


def newest_checkpoint(output_dir: str) -> str | None:
    """Return the newest folder `checkpoint-N` that is whole, None if there is none. Local.

    Whole are those that have the Trainer's state, and a committed checkpoint or what the Trainer writes
    without the mixin.

    Raises:
        NotACheckpointError: a newer folder is finished, and TrainerMixin cannot resume from it.
    """
    for path in reversed(_numbered(output_dir)):
        # The Trainer writes its state last.
        if not _is_json(path / _TRAINER_STATE) or (_has_ours(path) and not _is_ours(path)):
            continue
        fault = _fault(path)
        if fault:
            raise NotACheckpointError(
                f"{fault} To resume from an older folder, name it: resume_from_checkpoint=PATH.",
                path=str(path),
            )
        return str(path)
    return None


def _numbered(output_dir: str | Path) -> list[Path]:
    """Return the folders `checkpoint-N` in the order of their numbers."""
    paths = [path for path in Path(output_dir).glob("*") if _STEP.fullmatch(path.name)]
    return sorted(paths, key=lambda path: int(path.name.rpartition("-")[2]))


def _fault(path: Path) -> str:
    """Return why TrainerMixin cannot resume from a folder, and what to do; "" if it can."""
    names = [entry.name for entry in path.iterdir()] if path.is_dir() else []
    has_optimizer = any(map(_OPTIMIZER.fullmatch, names)) and _SCHEDULER in names
    if _is_ours(path) and has_optimizer:
        return (
            f"{path} has a checkpoint of megackpt, and one of a Trainer without TrainerMixin. Keep one: move "
            f"{FOLDER}, or optimizer.pt and its neighbours, out of the folder."
        )
    has_weights = any(map(_WEIGHTS.fullmatch, names))
    if _is_ours(path) or (has_weights and has_optimizer):
        return ""
    if has_weights:
        return (
            f"{path} has the weights of a model, and no state of an optimizer and a schedule "
            f"(save_only_model?). Load the weights with from_pretrained, and train from there."
        )
    if steps := _numbered(path):
        return f"{path} is a folder of several steps. Name one of them, such as {steps[-1]}."
    with closing(LocalStore(path)) as store:
        seen = recognise(store)
    what = "no checkpoint that TrainerMixin resumes from" if seen is None else seen.name
    advice = "Name a folder checkpoint-N of a save that has finished." if seen is None else seen.advice
    return f"{path} is {what}: it has no {FOLDER}/{MANIFEST}. {advice}"


def _is_ours(path: str | os.PathLike[str]) -> bool:
    """Return whether a folder has a committed checkpoint of the mixin."""
    return check_is_distributed_checkpoint(Path(path, FOLDER))


def _has_ours(path: Path) -> bool:
    """Return whether the mixin has written to a folder, finished or not."""
    return (path / FOLDER).is_dir()


def _has_optimizer(path: Path) -> bool:
    """Return whether a folder has the optimizer as the Trainer itself writes it."""
    return any(_OPTIMIZER.fullmatch(entry.name) for entry in path.iterdir())


def _our_folders(run_dir: str) -> list[Path]:
    """Return the folders that have nothing but what the mixin has written, the oldest first."""
    ours = [path for path in _numbered(run_dir) if _has_ours(path) and not _has_optimizer(path)]
    # By time, as the Trainer does: after a resume from an earlier step, larger numbers may be older.
    return sorted(ours, key=lambda path: path.stat().st_mtime)


def _remove_all_but(limit: int, ours: list[Path], *, kept: set[Path]) -> None:
    """Remove the oldest folders, except for those in kept, until `limit` are left."""
    others = [path for path in ours if path not in kept]
    for path in others[: max(len(ours) - max(limit, len(kept.intersection(ours))), 0)]:
        shutil.rmtree(path, ignore_errors=True)


def _is_json(path: Path) -> bool:
    try:
        json.loads(path.read_text())
    except (OSError, ValueError):
        return False
    return True
