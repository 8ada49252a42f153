"""The report of a run on rank 0: JSON lines in a file, text and a progress bar on the terminal."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

POINTS_IN_SUMMARY = 5


class Report:
    """Progress and metrics of a run; silent on all ranks but 0. A context manager.

    Metrics are only ever appended: after a crash, the steps since the last checkpoint are trained again and
    have a second line. The last line of a step counts.
    """

    def __init__(self, metrics: Path | None, *, steps: int, done: int, is_root: bool) -> None:
        self._console = Console(stderr=True, quiet=not is_root, highlight=False, markup=False, soft_wrap=True)
        self._metrics = metrics
        self._file: TextIO | None = None
        if is_root and metrics is not None:
            metrics.parent.mkdir(parents=True, exist_ok=True)
            self._file = metrics.open("a")
        self._losses: dict[int, float] = {}
        self._seconds = 0.0
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not (is_root and self._console.is_terminal),  # a log file gets the lines only
        )
        self._task = self._progress.add_task("", total=steps, completed=done)

    def __enter__(self) -> Report:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
        if self._file is not None:
            self._file.close()

    def print_line(self, text: str) -> None:
        """Print a line above the bar."""
        self._console.print(text)

    def event(self, **fields: Any) -> None:
        """Append a JSON line and flush it, so that it survives a crash."""
        if self._file is not None:
            self._file.write(json.dumps(fields) + "\n")
            self._file.flush()

    def start(self, *, step: int, layout: dict[str, int], note: str) -> None:
        """Report the begin of the run."""
        self.print_line(note)
        self.event(event="start", step=step, layout=layout, note=note)

    def step(self, step: int, **fields: Any) -> None:
        """Report one step of training."""
        self.event(step=step, **fields)
        self._losses[step] = fields["loss"]
        self._seconds += fields["seconds"]
        self._progress.update(self._task, completed=step, description=f"loss {fields['loss']:.4f}")

    def saved(self, step: int, *, seconds: float, is_committed: bool) -> None:
        """Report a checkpoint, or that one is being written."""
        how = "saved" if is_committed else "staged, to be written meanwhile,"
        self.print_line(f"step {step}: loss {self._losses[step]:.4f}, checkpoint {how} in {seconds:.2f} s")
        self.event(event="save", step=step, seconds=round(seconds, 3))

    def end(self, step: int, checkpoint: str | None) -> None:
        """Report the end of the run: the course of the loss, and where checkpoint and metrics are."""
        if self._losses:
            shown = (f"{self._losses[at]:.4f} at step {at}" for at in _spread(list(self._losses)))
            self.print_line(f"loss: {', '.join(shown)}; {self._seconds / len(self._losses):.2f} s a step")
        else:
            self.print_line(f"nothing left to train: step {step} was done before")
        self.print_line(f"step {step} is done; checkpoint: {checkpoint}, metrics: {self._metrics}")


def _spread(steps: list[int]) -> list[int]:
    """Return some of the steps, evenly spread, with the first and the last."""
    gaps = max(1, min(POINTS_IN_SUMMARY, len(steps)) - 1)
    return sorted({steps[round(i * (len(steps) - 1) / gaps)] for i in range(gaps + 1)})
