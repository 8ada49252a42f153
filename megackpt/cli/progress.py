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

from megackpt.cli.entry import is_rank_0

T = TypeVar("T", bound="_DrawnProgress")


class _DrawnProgress:
    """A progress display that is drawn for as long as a `with` block lasts."""

    _progress: Progress

    def __enter__(self: T) -> T:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()


class ByteBars(_DrawnProgress):
    """One bar of bytes for each phase of a command. A context manager.

    Under torchrun rank 0 alone draws bars, of its own share.
    """

    def __init__(self, *, console: Console | None = None) -> None:
        console = console or Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not (is_rank_0() and console.is_terminal),
        )

    def begin(self, doing: str, nbytes: int) -> None:
        """Draw another bar."""
        self._task = self._progress.add_task(doing, total=nbytes)

    def advance(self, nbytes: int) -> None:
        """Move the last bar."""
        self._progress.advance(self._task, nbytes)


class RankCountBar(_DrawnProgress):
    """A bar that counts ranks. A context manager."""

    def __init__(self, doing: str, ranks: int, *, console: Console | None = None) -> None:
        console = console or Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task(doing, total=ranks)

    def advance(self, ranks: int) -> None:
        """Move the bar."""
        self._progress.advance(self._task, ranks)
