"""Hugging Face accelerate: what `Accelerator.save_state` saves, without pickles, at any number of processes.

    from megackpt.contrib.accelerate import load_state, save_state

    save_state(accelerator, "run/step_100")     # instead of accelerator.save_state("run/step_100")
    load_state(accelerator, "run/step_100")

A hook of `Accelerator.save_state` can keep it from writing models, but not from pickling optimizers. So these
are functions.

Source: accelerate 1.15 `Accelerator.save_state`, `accelerate.checkpointing`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from megackpt.contrib.torch_state import TorchState
from megackpt.entities import ShardedStateDict, StateDict
from megackpt.errors import UnsupportedError
from megackpt.options import LoadOptions, SaveOptions
from megackpt.run.collective import load, save
from megackpt.storage import Location
from megackpt.training.state import CommonObject, RankPosition, RngState, TrainingState, loader_object

if TYPE_CHECKING:
    from megackpt.training.state import Resumable

Accelerator: TypeAlias = Any  # accelerate has no types

_OWN_FORMATS = ("DEEPSPEED", "MEGATRON_LM")


class AcceleratorState:
    """The state of everything that an Accelerator has prepared, for `save`, `load` or a `Checkpointer`.

    These are models, optimizers, schedulers, the gradient scaler, objects of `register_for_checkpointing`,
    data loaders that know their position (`use_stateful_dataloader`), and the random streams of each rank.

    Args:
        accelerator: after `prepare`.
        seed: of the random streams that begin anew when the number of processes has changed.

    Raises:
        UnsupportedError: DeepSpeed or Megatron-LM runs under the accelerator; they have formats of their own.
    """

    def __init__(self, accelerator: Accelerator, *, seed: int = 0) -> None:
        if accelerator.distributed_type.name in _OWN_FORMATS:
            raise UnsupportedError(
                f"{accelerator.distributed_type.name} has a checkpoint format of its own: call "
                f"accelerator.save_state."
            )
        self._accelerator = accelerator
        self._torch = TorchState(
            accelerator._models, [wrapper.optimizer for wrapper in accelerator._optimizers]
        )
        self._others = TrainingState(_parts(accelerator, seed))

    def sharded_state_dict(self, is_loading: bool = False) -> ShardedStateDict:
        """Declare all state, to save it or, with is_loading, to load it. Collective under FSDP."""
        return {
            **self._torch.sharded_state_dict(is_loading),
            **self._others.sharded_state_dict(),
            "accumulation_step": self._accelerator.step,
        }

    def resume(self, loaded: StateDict, *, step: int = 0) -> list[str]:
        """Continue from what a load returned. Collective.

        Args:
            loaded: what a load returned for `sharded_state_dict`.
            step: the step of the run; random streams that begin anew at different steps are different.

        Returns:
            A sentence on each part that does not go on as it was, such as random streams of other ranks.

        Raises:
            MismatchError: a part cannot be continued; the text has the reason.
        """
        self._torch.load_models(loaded)
        self._torch.load_optimizers(loaded)
        self._accelerator.step = loaded["accumulation_step"]
        return self._others.resume(loaded, step=step)


def save_state(
    accelerator: Accelerator, checkpoint_dir: Location, *, options: SaveOptions | None = None
) -> None:
    """Save the state of an accelerator as one checkpoint. Collective; see `AcceleratorState` and `save`."""
    save(AcceleratorState(accelerator).sharded_state_dict(), checkpoint_dir, options=options)


def load_state(
    accelerator: Accelerator, checkpoint_dir: Location, *, step: int = 0, options: LoadOptions | None = None
) -> list[str]:
    """Load a checkpoint into an accelerator, at any number of processes. Collective.

    Arguments, result and errors are those of `AcceleratorState.resume` and `load`.
    """
    state = AcceleratorState(accelerator)
    loaded = load(state.sharded_state_dict(is_loading=True), checkpoint_dir, options=options)
    return state.resume(loaded, step=step)


def _parts(accelerator: Accelerator, seed: int) -> dict[str, Resumable]:
    position = RankPosition(
        layout={"dp": accelerator.num_processes}, coordinates={"dp": accelerator.process_index}
    )
    parts: dict[str, Resumable] = {"rng": RngState.of_process(position, seed=seed, elsewhere="reseed")}
    common: dict[str, list[Any]] = {
        "scheduler": accelerator._schedulers,
        "scaler": [] if accelerator.scaler is None else [accelerator.scaler],
        "object": accelerator._custom_objects,
    }
    for name, things in common.items():
        parts |= {f"{name}_{number}": CommonObject(thing) for number, thing in enumerate(things)}
    for number, loader in enumerate(accelerator._dataloaders):
        if getattr(loader, "use_stateful_dataloader", False):
            parts[f"loader_{number}"] = loader_object(loader, position)
    return parts
