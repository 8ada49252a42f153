"""Progress on stderr, where that is a terminal: how much is done, how fast, and how long the rest takes.

Every command works inside `with ProgressBars() as bars:`, and imports torch there, which may take seconds.
Until the command reports a phase of known size, a bar without an end shows what it does and for how long.
Results are printed after the block.
"""

from __future__ import annotations

from datetime import timedelta
from types import TracebackType

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from megackpt.cli.entry import is_quiet, is_rank_0


class ProgressBars:
    """The bars of one command, one for each phase. A context manager, and a `Progress` of the library.

    Under torchrun rank 0 alone draws bars, of its own share. With `--quiet`, and where stderr is not a
    terminal, nothing is drawn.
    """

    def __init__(self, doing: str = "reading metadata", *, console: Console | None = None) -> None:
        console = console or Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            _Figures(),
            console=console,
            disable=is_quiet() or not (is_rank_0() and console.is_terminal),
        )
        self._first = self._progress.add_task(doing, total=None)

    def __enter__(self) -> ProgressBars:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.update(self._first, visible=False)
        self._progress.stop()

    def begin(self, doing: str, nbytes: int) -> None:
        """Draw another bar, of bytes."""
        self._begin(doing, nbytes, is_bytes=True)

    def begin_count(self, doing: str, things: int) -> None:
        """Draw another bar, of things that are counted."""
        self._begin(doing, things, is_bytes=False)

    def advance(self, amount: int) -> None:
        """Move the last bar."""
        self._progress.advance(self._task, amount)

    def _begin(self, doing: str, total: int, *, is_bytes: bool) -> None:
        self._progress.update(self._first, visible=False)
        self._task = self._progress.add_task(doing, total=total, visible=total > 0, is_bytes=is_bytes)


class _Figures(ProgressColumn):
    """How much of a phase is done, its rate and its remaining time; seconds alone if its size is unknown."""

    def render(self, task: Task) -> Text:
        seconds = (task.finished_time if task.finished else task.elapsed) or 0.0
        if task.total is None:
            return Text(_clock(seconds))
        is_bytes = task.fields["is_bytes"]
        amount, total = (decimal(int(n)) if is_bytes else f"{n:,.0f}" for n in (task.completed, task.total))
        speed = task.finished_speed or task.speed or 0.0
        rate = f"{decimal(int(speed)) if is_bytes else f'{speed:,.1f}'}/s"
        if task.finished:
            return Text(f"{total}, {rate}, in {_clock(seconds)}")
        left = "" if task.time_remaining is None else f", {_clock(task.time_remaining)} left"
        return Text(f"{amount} of {total}, {rate}{left}")


def _clock(seconds: float) -> str:
    """Return seconds as hours, minutes and seconds.

    >>> _clock(3671.9)
    '1:01:11'
    """
    return str(timedelta(seconds=int(seconds)))
