"""Progress bars on stderr, where that is a terminal."""

from __future__ import annotations

from types import TracebackType
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

T = TypeVar("T", bound="_Shown")


class _Shown:
    """A progress that is drawn for as long as a context lasts."""

    _progress: Progress

    def __enter__(self: T) -> T:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()


class Bars(_Shown):
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


class RankBar(_Shown):
    """Draws how many of a number of ranks are done. A context manager."""

    def __init__(self, doing: str, ranks: int, *, console: Console | None = None) -> None:
        on = console or Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=on,
            transient=True,
            disable=not on.is_terminal,
        )
        self._task = self._progress.add_task(doing, total=ranks)

    def advance(self, ranks: int) -> None:
        """Move it."""
        self._progress.advance(self._task, ranks)
