"""Output of the commands: tables on stdout, and bars that show progress on stderr."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from types import TracebackType

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.filesize import decimal
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Table
from rich.text import Text

from megackpt.cli.entry import is_quiet, is_rank_0

# Tables on stdout.
#
# Keys are text from files of any origin, so characters that move the cursor are escaped. On a terminal, a key
# that is too long for its column wraps at dots, and is repeated on one line below the table, to be copied. In
# a file or pipe nothing wraps: a row is a line.

_PIPED_WIDTH = 1 << 20  # characters of a line in a file: more than any table needs
_NUMBER = re.compile(r"([0-9]+)")
_MIN_KEY_WIDTH = 16  # characters


def stdout() -> Console:
    """Return the console to print on."""
    return Console(
        width=None if sys.stdout.isatty() else _PIPED_WIDTH, markup=False, highlight=False, emoji=False
    )


def show(*tables: RenderableType) -> None:
    """Print tables. Repeated keys may be longer than a line of the terminal, which wraps them itself."""
    console = stdout()
    for table in tables:
        console.print(table, crop=False)


def table_of(
    title: str,
    rows: Iterable[Sequence[str]],
    *,
    left: Sequence[str],
    right: Sequence[str] = (),
    styles: Sequence[str] = (),
) -> Group:
    """Return a table of plain text with a title; left are columns of text, right are columns of numbers.

    styles has the style of each row, if rows have any. Files, pipes and terminals with NO_COLOR get none.
    """
    table = Table()
    for name in left:
        table.add_column(name, overflow="fold")
    for name in right:
        table.add_column(name, justify="right")
    wrapped: dict[str, None] = {}
    for number, row in enumerate(rows):
        cells = [_printable(cell) for cell in row]
        keys: list[RenderableType] = [_Key(cell, wrapped) for cell in cells[: len(left)]]
        style = styles[number] if styles else None
        table.add_row(*keys, *map(Text, cells[len(left) :]), style=style)
    return Group(Text(_printable(title)), table, _WrappedKeys(wrapped))


def limited_table(
    title: str, left: Sequence[str], right: Sequence[str], rows: Sequence[Sequence[str]], limit: int
) -> Group:
    """Return a table of the first rows, with a title that says so; of all rows if limit is 0."""
    shown = rows[:limit] if limit else rows
    more = f", the first {limit}" if len(shown) < len(rows) else ""
    return table_of(f"{title}{more}", shown, left=left, right=right)


def natural(key: str) -> list[tuple[int, str]]:
    """Return a sort key by which numbers in keys are in order.

    >>> sorted(["layers.10", "layers.2"], key=natural)
    ['layers.2', 'layers.10']
    """
    return [(int(part) if part.isdecimal() else -1, part) for part in _NUMBER.split(key)]


def counted(number: int, noun: str) -> str:
    """Return a number with a noun, in the plural unless it is 1.

    >>> counted(1, "step"), counted(2, "copy"), counted(1200, "array")
    ('1 step', '2 copies', '1,200 arrays')
    """
    plural = f"{noun[:-1]}ies" if noun.endswith("y") and noun[-2] not in "aeiou" else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def listed(steps: Sequence[int]) -> str:
    """Return steps as text; of more than eight, the first, the last and their number.

    >>> listed([1, 2]), listed(range(100, 1100, 100))
    ('1, 2', '100, 200, 300, ..., 1000 (10)')
    """
    if len(steps) <= 8:
        return ", ".join(map(str, steps))
    return f"{', '.join(map(str, steps[:3]))}, ..., {steps[-1]} ({len(steps)})"


class _Key:
    """A cell that wraps at dots and slashes, and adds its text to `wrapped` if it does."""

    def __init__(self, text: str, wrapped: dict[str, None]) -> None:
        self._text, self._wrapped = text, wrapped

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        length = Text(self._text).cell_len
        return Measurement(min(length, _MIN_KEY_WIDTH), length).clamp(max_width=options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if Text(self._text).cell_len <= options.max_width:
            yield Text(self._text)
            return
        if " " not in self._text:
            self._wrapped[self._text] = None
            yield Text("\n".join(_lines(self._text, options.max_width)), overflow="fold")
        else:  # a sentence
            yield Text(self._text, overflow="fold")


class _WrappedKeys:
    """The keys that the table above has wrapped, a line for each."""

    def __init__(self, wrapped: dict[str, None]) -> None:
        self._wrapped = wrapped

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for text in self._wrapped:
            yield Text(text, no_wrap=True, overflow="ignore")


def _lines(key: str, width: int) -> list[str]:
    """Cut a key into lines after dots and slashes; a part that is longer than a line stays whole.

    >>> _lines("decoder.layers.3.mlp", 10)
    ['decoder.', 'layers.3.', 'mlp']
    """
    lines = [""]
    for part in key.replace(".", ".\0").replace("/", "/\0").split("\0"):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += part
    return lines


def _printable(text: str) -> str:
    """Return text with characters escaped that move the cursor or control the terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


_BAR_WIDTH = 40
_WIDTH_OF_TEXT = 72  # columns that text next to a bar takes at most
_LINE_EVERY_S = 10.0

# Progress on stderr, as bars on a terminal: how much is done, how fast, and how long the rest takes.
#
# Every command works inside `with ProgressBars() as bars:`, and imports torch there, which may take seconds.
# Until the command reports a phase of known size, a bar without an end shows what it does and for how long.
# Results are printed after the block.


class ProgressBars:
    """The bars of one command, one for each phase. A context manager, and a `Progress` of the library.

    Under torchrun rank 0 alone draws bars, of its own share. Where stderr is not a terminal, a line is
    printed every ten seconds instead. With `--quiet`, there is neither.
    """

    def __init__(self, doing: str = "reading metadata", *, console: Console | None = None) -> None:
        console = console or Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=max(4, min(_BAR_WIDTH, console.width - _WIDTH_OF_TEXT))),
            _Figures(),
            console=console,
            disable=is_quiet() or not (is_rank_0() and console.is_terminal),
        )
        self._first = self._progress.add_task(doing, total=None)
        is_printed = is_rank_0() and not is_quiet() and not console.is_terminal
        self._lines = ProgressLines(console) if is_printed else None

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
        if self._lines is not None:
            self._lines.advance(amount)

    def _begin(self, doing: str, total: int, *, is_bytes: bool) -> None:
        self._progress.update(self._first, visible=False)
        self._task = self._progress.add_task(doing, total=total, visible=total > 0, is_bytes=is_bytes)
        if self._lines is not None:
            self._lines.begin(doing, total, is_bytes=is_bytes)


class ProgressLines:
    """Prints how much of a phase is done, as a line every ten seconds: a log then shows that work goes on.

    Args:
        console: where to print.
        clock: returns seconds.
    """

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self.begin("", 0, is_bytes=False)

    def begin(self, doing: str, total: int, *, is_bytes: bool) -> None:
        """Begin a phase of a known size."""
        self._doing, self._total, self._is_bytes, self._done = doing, total, is_bytes, 0
        self._printed_s = self._clock()

    def advance(self, amount: int) -> None:
        """Count what is done. Several threads may call it."""
        self._done += amount
        now = self._clock()
        if self._total and now - self._printed_s >= _LINE_EVERY_S:
            self._printed_s = now
            done, total = (decimal(n) if self._is_bytes else f"{n:,}" for n in (self._done, self._total))
            text = f"megackpt: {self._doing}: {done} of {total} ({self._done / self._total:.0%})"
            self._console.print(text, highlight=False, soft_wrap=True)


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
