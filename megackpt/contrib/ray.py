"""Ray Train: steps that every worker writes where Ray expects its checkpoints, so that Ray uploads nothing.

    from megackpt.contrib.ray import get_checkpoint, report, step_directory

    save(state, step_directory(step))                       # in the training function, on every worker
    report({"loss": loss}, step_directory(step))            # instead of ray.train.report
    path = get_checkpoint()                                 # instead of ray.train.get_checkpoint

Ray lists the steps in the run's folder (`RunConfig.storage_path` and `name`) and removes those that
`CheckpointConfig(num_to_keep=...)` does not keep. A trainer with the same storage path and name resumes the
run, with any number of workers.

Source: ray 2.60 `ray.train.report`, `ray.train.v2._internal.execution`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray.train

from megackpt.errors import NotACheckpointError, UnsupportedError
from megackpt.run.local import check_is_distributed_checkpoint


def step_directory(step: int) -> str:
    """Return the directory of a step, `iter_0000100` for step 100, in the folder of this run. Local.

    Raises:
        UnsupportedError: the run's storage path is not a directory. All nodes need to have it in common.
    """
    storage = ray.train.get_context().get_storage()
    if storage.storage_filesystem.type_name != "local":
        raise UnsupportedError(
            f"Ray stores this run in a file system of kind {storage.storage_filesystem.type_name}, and steps "
            f"of megackpt have to be in a directory. Give RunConfig(storage_path=...) one of all nodes."
        )
    return str(Path(storage.experiment_fs_path, f"iter_{step:07d}"))


def report(metrics: Mapping[str, Any], checkpoint_dir: str | None = None) -> None:
    """Report metrics and a saved step to Ray, without a copy of the step. All workers call it.

    Args:
        metrics: numbers and text; Ray keeps those of rank 0 with the checkpoint.
        checkpoint_dir: a `step_directory` that was saved; after an asynchronous save, once it is committed.
            None: only metrics.

    Raises:
        NotACheckpointError: on rank 0, if the step is not committed.
        ValueError: checkpoint_dir is not in the folder of this run.
    """
    if checkpoint_dir is None:
        ray.train.report(dict(metrics))
        return
    # Only rank 0 looks: a network file system may show a new file to other nodes seconds later.
    is_first = ray.train.get_context().get_world_rank() == 0
    if is_first and not check_is_distributed_checkpoint(checkpoint_dir):
        raise NotACheckpointError(
            f"{checkpoint_dir} has no committed checkpoint, so Ray could not resume from it. Report a step "
            f"after its save, and after `Checkpointer.wait` if the save is asynchronous.",
            path=checkpoint_dir,
        )
    ray.train.report(
        dict(metrics),
        ray.train.Checkpoint.from_directory(checkpoint_dir),
        checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD,
    )


def get_checkpoint() -> str | None:
    """Return the directory of the step that was reported last; None in a new run. Local."""
    checkpoint = ray.train.get_checkpoint()
    return None if checkpoint is None else str(checkpoint.path)
