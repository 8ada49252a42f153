"""Hugging Face accelerate: what `Accelerator.save_state` saves, without pickles, at any number of processes.

    from megackpt.contrib.accelerate import load_state, newest, save_state

    save_state(accelerator, "run/step_100", step=100)   # instead of accelerator.save_state("run/step_100")
    path = newest("run")                                # None in a new run
    done = load_state(accelerator, path).step

A hook of `Accelerator.save_state` can keep it from writing models, but not from pickling optimizers. So these
are functions.

Source: accelerate 1.15 `Accelerator.save_state`, `accelerate.checkpointing`.
"""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from megackpt.contrib.torch_state import TorchState, check_fsdp
from megackpt.entities import ShardedStateDict, StateDict
from megackpt.errors import NotACheckpointError, UnsupportedError
from megackpt.formats.registry import recognise
from megackpt.formats.strategy import MANIFEST
from megackpt.options import LoadOptions, SaveOptions
from megackpt.run.collective import load, save
from megackpt.storage import Location, is_url, opened_store
from megackpt.training.state import CommonObject, RankPosition, RngState, TrainingState, loader_object

if TYPE_CHECKING:
    from megackpt.training.state import Resumable

Accelerator: TypeAlias = Any  # accelerate has no types

_OWN_FORMATS = ("DEEPSPEED", "MEGATRON_LM")
_STEP = "step"
_RANDOM_STATES = "random_states_{}.pkl"


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


class Resumed(list[str]):
    """A sentence on each part that does not go on as it was; empty if all do.

    Attributes:
        step: the step that was given to `save_state`; None if none was, as in a folder of accelerate's own.
    """

    def __init__(self, notes: Iterable[str], step: int | None) -> None:
        super().__init__(notes)
        self.step = step


def save_state(
    accelerator: Accelerator,
    checkpoint_dir: Location,
    *,
    step: int | None = None,
    options: SaveOptions | None = None,
) -> None:
    """Save the state of an accelerator as one checkpoint. Collective; see `AcceleratorState` and `save`.

    step is the step of the run, which `load_state` returns.
    """
    state = AcceleratorState(accelerator).sharded_state_dict()
    save(state if step is None else {**state, _STEP: step}, checkpoint_dir, options=options)


def load_state(
    accelerator: Accelerator,
    checkpoint_dir: Location,
    *,
    step: int | None = None,
    options: LoadOptions | None = None,
) -> Resumed:
    """Load a checkpoint into an accelerator, at any number of processes. Collective.

    A folder of `Accelerator.save_state` is loaded by `Accelerator.load_state`, pickles included: on as many
    processes as saved it.

    Args:
        accelerator: after `prepare`.
        checkpoint_dir: what `save_state` wrote, or `Accelerator.save_state`.
        step: as for `AcceleratorState.resume`; None for the step that `save_state` was given, or 0.
        options: of the load; not used for a folder of accelerate's own.

    Raises:
        CheckpointError: as `load` and `AcceleratorState.resume`.
    """
    state = AcceleratorState(accelerator)
    if (own := _folder_of_accelerate(checkpoint_dir)) is not None:
        return Resumed(_load_own(accelerator, own), None)
    loaded = load(state.sharded_state_dict(is_loading=True), checkpoint_dir, options=options)
    stored = loaded.get(_STEP)
    done = stored if isinstance(stored, int) else None
    return Resumed(state.resume(loaded, step=step if step is not None else done or 0), done)


def newest(root: str | os.PathLike[str]) -> str | None:
    """Return the newest checkpoint in a directory, None if there is none. Local.

    The newest is the directory whose name ends with the largest number. Only committed checkpoints of
    `save_state` and finished ones of `Accelerator.save_state` count.

    Raises:
        NotACheckpointError: there is none of these, but another tool's checkpoint is among them.
    """
    numbered = [
        (int(match[0]), path)
        for path in Path(root).glob("*")
        if (match := re.search(r"\d+\Z", path.name)) and path.is_dir()
    ]
    paths = [path for _, path in sorted(numbered, reverse=True)]
    for path in paths:
        if (path / MANIFEST).is_file() or _folder_of_accelerate(path) is not None:
            return str(path)
    for path in paths:
        with opened_store(path) as store:
            seen = recognise(store)
        if seen is not None:
            raise NotACheckpointError(
                f"{root} has no checkpoint that load_state loads; {path} is {seen.name}. {seen.advice}",
                path=str(path),
            )
    return None


def _folder_of_accelerate(location: Location) -> Path | None:
    """Return the path of a folder that `Accelerator.save_state` has finished; None for anything else."""
    if not isinstance(location, (str, os.PathLike)) or is_url(os.fspath(location)):
        return None
    path = Path(location)
    states = path / _RANDOM_STATES.format(0)  # which it writes after models and optimizers
    is_whole = not (path / MANIFEST).exists() and states.is_file() and zipfile.is_zipfile(states)
    return path if is_whole else None


def _load_own(accelerator: Accelerator, path: Path) -> list[str]:
    """Load a folder of accelerate's own; return what does not go on."""
    check_fsdp(path, accelerator)
    # accelerate says so in its log only.
    states = _RANDOM_STATES.format(accelerator.process_index)
    has_states = (path / states).is_file()
    accelerator.load_state(str(path))
    return [] if has_states else [f"{path} has no {states}: random streams of this rank begin anew."]


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
