"""The steps of a run, without ranks: any process can read them, also while a job is running."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from megackpt.engine.checkpoint.step_roots import step_directories
from megackpt.engine.checkpoint.steps import step_name
from megackpt.errors import NotACheckpointError, UnsupportedError
from megackpt.ground.arguments import check_flag, checked_step
from megackpt.run.checkpointer.root_files import (
    StepList,
    newest_step,
    read_metrics,
    read_pins,
    remove_pin,
    scan,
    write_pin,
)
from megackpt.run.local import load_content_metadata
from megackpt.storage import ObjectOptions, Store, is_url


class Run:
    """Numbered steps under a root, `iter_0000100` for step 100. Every method is local.

    Args:
        root: a directory, the URL of one in an object store, or a `Store`.
        objects: options of the object store, if the root is a URL.
        allow_unsafe_pickle: as in `LoadOptions`, for `content_metadata`.

    Attributes:
        root: the directory, or the URL as text.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | Store,
        *,
        objects: ObjectOptions | None = None,
        allow_unsafe_pickle: bool = False,
    ) -> None:
        self._directories = step_directories(root, objects=objects)
        check_flag("allow_unsafe_pickle", allow_unsafe_pickle)
        self._allow_unsafe_pickle = allow_unsafe_pickle
        location = self._directories.location
        is_path = isinstance(root, (str, os.PathLike)) and not is_url(os.fspath(root))
        self.root: Path | str = Path(location) if is_path else location

    def location(self, step: int) -> str:
        """Return the path or URL of a step, even if the step does not exist."""
        return f"{self._directories.location}/{step_name(checked_step(step))}"

    def directory(self, step: int) -> Path:
        """Return the directory of a step, even if the step does not exist.

        Raises:
            UnsupportedError: the root is a URL; see `location`.
        """
        if not isinstance(self.root, Path):
            raise UnsupportedError(
                f"{self.root} is not on a file system, so its steps have no directories. "
                f"Use location({step})."
            )
        return self.root / step_name(checked_step(step))

    def scan(self) -> StepList:
        """Return the committed and the incomplete steps."""
        return scan(self._directories)

    def steps(self) -> tuple[int, ...]:
        """Return the committed steps, ascending."""
        return self.scan().committed

    def latest(self) -> int | None:
        """Return the newest committed step or None; log a warning for each newer one that is incomplete."""
        return newest_step(self._directories)

    def pin(self, step: int) -> None:
        """Protect a committed step from removal until `unpin`. One rank calls it.

        Raises:
            NotACheckpointError: the step is not committed, or another process is removing it.
            StorageError: the pin could not be written.
        """
        step = checked_step(step)
        self._check_committed(step)
        write_pin(self._directories.root, step)
        try:
            self._check_committed(step)  # a removal that began before the pin was written continues
        except NotACheckpointError:
            remove_pin(self._directories.root, step)
            raise

    def unpin(self, step: int) -> None:
        """Permit the next save to remove a step again. One rank calls it.

        Does nothing if the step is not pinned.
        """
        remove_pin(self._directories.root, checked_step(step))

    def pins(self) -> tuple[int, ...]:
        """Return the pinned steps, ascending."""
        return tuple(sorted(read_pins(self._directories.root)))

    def metrics(self, step: int) -> dict[str, float]:
        """Return the metrics of a step; an empty dict if it was saved without metrics."""
        return read_metrics(self._directories.root, checked_step(step))

    def content_metadata(self, step: int) -> Any:
        """Return the `content_metadata` of a step."""
        with contextlib.closing(self._directories.open(step_name(checked_step(step)))) as store:
            return load_content_metadata(store, allow_unsafe_pickle=self._allow_unsafe_pickle)

    def _check_committed(self, step: int) -> None:
        if not self._directories.committed([step_name(step)]):
            steps = ", ".join(map(str, self.steps())) or "none"
            raise NotACheckpointError(
                f"{self.location(step)} is not committed, so it cannot be pinned. Pin one of the committed "
                f"steps: {steps}.",
                path=self.location(step),
            )
