"""Hugging Face's Trainer: checkpoints of megackpt in its folders `checkpoint-N`.

    class MyTrainer(TrainerMixin, Trainer): ...

    MyTrainer(...).train(resume_from_checkpoint=True)   # at any number of processes

`checkpoint-N/megackpt` has the model, the optimizer, the scheduler, the gradient scaler and the random
streams, written by all ranks in parallel. Next to it are the model's config, the tokenizer and
`trainer_state.json`, as the Trainer writes them. Nothing is a pickle.

Source: transformers 5.23 `Trainer`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from megackpt.contrib.torch_state import TorchState
from megackpt.errors import NotACheckpointError, UnsupportedError
from megackpt.run.collective import load, save
from megackpt.run.local import check_is_distributed_checkpoint
from megackpt.training.state import CommonObject, RankPosition, RngState, TrainingState

if TYPE_CHECKING:
    from megackpt.training.state import Resumable

FOLDER = "megackpt"
"""The checkpoint's folder in `checkpoint-N`."""

_TRAINER_STATE = "trainer_state.json"
_STEP = re.compile(r"checkpoint-(\d+)")


class TrainerMixin:
    """Saves and resumes a Trainer through megackpt. Put it before `Trainer` among the bases.

    Works with one process, DistributedDataParallel and FSDP. `resume_from_checkpoint=True` takes the newest
    folder that is whole; one that was being written when the job ended is left out.

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

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train, as `Trainer.train` does. Collective.

        Raises:
            NotACheckpointError: `resume_from_checkpoint=True`, and the output folder has no whole checkpoint.
        """
        if resume_from_checkpoint is True:
            output_dir = self.args.output_dir
            resume_from_checkpoint = newest_checkpoint(output_dir)
            if resume_from_checkpoint is None:
                raise NotACheckpointError(
                    f"{output_dir} has no folder checkpoint-N with a whole checkpoint. To begin anew in that "
                    f"case, give resume_from_checkpoint=newest_checkpoint({output_dir!r}).",
                    path=output_dir,
                )
        return cast(Any, super()).train(resume_from_checkpoint, *args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model; within a checkpoint of the Trainer, all that a resumed run needs. Collective."""
        if not _internal_call or output_dir is None:
            cast(Any, super()).save_model(output_dir, _internal_call)
            return
        if self.is_deepspeed_enabled or self.args.push_to_hub:
            what = "DeepSpeed" if self.is_deepspeed_enabled else "push_to_hub"
            raise UnsupportedError(f"TrainerMixin does not work with {what}. Use Trainer without the mixin.")
        torch_state = self._torch_state()
        state = torch_state.models()
        if not self.args.save_only_model:
            state |= {**torch_state.optimizers(), **self._others().sharded_state_dict()}
        save(state, Path(output_dir, FOLDER))
        if self.args.should_save:
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
        models = TorchState([self.model if model is None else model], [])
        models.load_models(load(models.models(), Path(resume_from_checkpoint, FOLDER)))

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint, self.model_wrapped)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            torch_state = self._torch_state()
            torch_state.load_optimizers(
                load(torch_state.optimizers(is_loading=True), Path(checkpoint, FOLDER))
            )

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Nothing: `_load_rng_state` loads it."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Load everything but tensors: the Trainer calls this right before the first step."""
        if checkpoint is not None:
            others = self._others()
            loaded = load(others.sharded_state_dict(), Path(checkpoint, FOLDER))
            others.resume(loaded, step=self.state.global_step)

    def _torch_state(self) -> TorchState:
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # without accelerate's wrapper
        return TorchState([self.model_wrapped], [optimizer])

    def _others(self) -> TrainingState:
        position = RankPosition(
            layout={"dp": self.args.world_size}, coordinates={"dp": self.args.process_index}
        )
        streams = RngState.of_process(position, seed=self.args.seed, elsewhere="reseed")
        parts: dict[str, Resumable] = {"rng": streams, "scheduler": CommonObject(self.lr_scheduler)}
        if self.accelerator.scaler is not None:
            parts["scaler"] = CommonObject(self.accelerator.scaler)
        return TrainingState(parts)


def newest_checkpoint(output_dir: str) -> str | None:
    """Return the newest folder `checkpoint-N` that is whole, None if there is none. Local.

    Whole are those that have a committed checkpoint and the Trainer's state.
    """
    numbered = [
        (int(match[1]), path) for path in Path(output_dir).glob("*") if (match := _STEP.fullmatch(path.name))
    ]
    for _, path in sorted(numbered, reverse=True):
        if check_is_distributed_checkpoint(path / FOLDER) and _is_json(path / _TRAINER_STATE):
            return str(path)
    return None


def _is_json(path: Path) -> bool:
    try:
        json.loads(path.read_text())
    except (OSError, ValueError):
        return False
    return True
