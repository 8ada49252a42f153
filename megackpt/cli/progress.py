"""A progress bar on stderr, where that is a terminal."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


class Bars:
    """Draws what a conversion says of its progress, one bar for each part. A context manager.

    Under torchrun only rank 0 draws, its own share.
    """

    def __init__(self, *, is_root: bool, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not (is_root and self._console.is_terminal),
        )

    def begin(self, doing: str, nbytes: int) -> None:
        """Draw another bar."""
        self._task = self._progress.add_task(doing, total=nbytes)

    def advance(self, nbytes: int) -> None:
        """Move the last one."""
        self._progress.advance(self._task, nbytes)

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
