"""The steps of a run, as anybody may look at them: without ranks, and while a job is running.

Owns what is local: which steps there are, where they are, pins and metrics. Saving and loading them is up to
`checkpointer`.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import Any

from megackpt.api import load_content_metadata
from megackpt.arguments import check_flag, checked_step
from megackpt.checkpointer.root_files import StepList, read_metrics, read_pins, remove_pin, scan, write_pin
from megackpt.engine.checkpoint.steps import step_directories, step_name
from megackpt.errors import NotACheckpointError, UnsupportedError
from megackpt.storage import ObjectOptions, Store, is_url

log = logging.getLogger(__name__)


class Run:
    """Numbered steps under a root, `iter_0000100` for step 100. Everything here is local.

    root is a directory, the URL of one in an object store (objects are the options for it), or a `Store`.
    allow_unsafe_pickle as in `LoadOptions`.

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
        self._places = step_directories(root, objects=objects)
        check_flag("allow_unsafe_pickle", allow_unsafe_pickle)
        self._trusted = allow_unsafe_pickle
        where = self._places.location
        is_path = isinstance(root, (str, os.PathLike)) and not is_url(os.fspath(root))
        self.root: Path | str = Path(where) if is_path else where

    def location(self, step: int) -> str:
        """Return the path or URL where a step is or would be."""
        return f"{self._places.location}/{step_name(checked_step(step))}"

    def directory(self, step: int) -> Path:
        """Return the directory where a step is or would be.

        Raises:
            UnsupportedError: the root is an URL; see `location`.
        """
        if not isinstance(self.root, Path):
            raise UnsupportedError(
                f"{self.root} is not on a file system, so its steps have no directories. "
                f"Use location({step})."
            )
        return self.root / step_name(checked_step(step))

    def scan(self) -> StepList:
        """Look at the root. Local."""
        return scan(self._places)

    def steps(self) -> tuple[int, ...]:
        """Return the committed steps, ascending. Local."""
        return self.scan().committed

    def latest(self) -> int | None:
        """Return the newest committed step or None; warn of a newer one that is torn. Local."""
        found = self.scan()
        newest = found.committed[-1] if found.committed else None
        for step in found.incomplete:
            if newest is None or step > newest:
                log.warning(
                    "%s is not committed (its save did not finish) and is ignored; the newest committed "
                    "step is %s.",
                    self.location(step),
                    newest,
                )
        return newest

    def pin(self, step: int) -> None:
        """Let nothing remove a committed step, until it is unpinned. Local: one rank calls it.

        Raises:
            NotACheckpointError: it is not committed, or is being removed right now.
            StorageError: the store refused.
        """
        step = checked_step(step)
        self._check_committed(step)
        write_pin(self._places.root, step)
        try:
            self._check_committed(step)  # a removal that had begun before goes on
        except NotACheckpointError:
            remove_pin(self._places.root, step)
            raise

    def unpin(self, step: int) -> None:
        """Let a step be removed again, after the next save at the earliest. Local: one rank calls it.

        One that is not pinned is fine.
        """
        remove_pin(self._places.root, checked_step(step))

    def pins(self) -> tuple[int, ...]:
        """Return the pinned steps, ascending. Local."""
        return tuple(sorted(read_pins(self._places.root)))

    def metrics(self, step: int) -> dict[str, float]:
        """Return the metrics that a step was saved with; none if there were none. Local."""
        return read_metrics(self._places.root, checked_step(step))

    def content_metadata(self, step: int) -> Any:
        """Return what the step was saved with as `content_metadata`. Local."""
        with contextlib.closing(self._places.open(step_name(checked_step(step)))) as store:
            return load_content_metadata(store, allow_unsafe_pickle=self._trusted)

    def _check_committed(self, step: int) -> None:
        if not self._places.committed([step_name(step)]):
            raise NotACheckpointError(
                f"{self.location(step)} is not committed, so it cannot be pinned. Committed are "
                f"{list(self.steps())}.",
                path=self.location(step),
            )
