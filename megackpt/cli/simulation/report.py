"""What a plan says, as tables for people and JSON for programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.filesize import decimal
from rich.table import Table

from megackpt.cli.simulation.estimate import Cluster, Estimate, seconds_text
from megackpt.cli.simulation.layout import layout_title
from megackpt.cli.simulation.outcome import LoadOutcome, SaveOutcome, Seconds
from megackpt.options import LoadOptions
from megackpt.plans.geometry import Ints
from megackpt.storage import COMMON_POOL, FileOptions
from megackpt.training.parallel import ParallelLayout

SCHEMA = 2
"""Version of the JSON; what a program that knows an older one would misread gets another."""

Line = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """All that one run of `megackpt plan` finds.

    Attributes:
        subject: the model or the checkpoint, and its parameters if they are known.
        parameters: number of parameters; None for a checkpoint.
        save: what a save costs.
        load: what a load costs, if one was planned.
        cluster: what times are estimated for.
        times: the estimate.
    """

    subject: str
    parameters: int | None
    save: SaveOutcome
    load: LoadOutcome | None
    cluster: Cluster
    times: Estimate

    @property
    def host_memory(self) -> dict[str, int]:
        """Bytes of host memory in addition to the state, at most, by purpose, on a rank."""
        writer = FileOptions()
        buffers = {
            "save, buffers": writer.buffers * writer.buffer_bytes,
            "save, plan (rank 0)": self.save.plan_nbytes,
        }
        if self.save.layout is not None:
            buffers["async save, copy of what a rank writes"] = int(self.save.nbytes.max(initial=0))
        if self.load is not None:
            options = LoadOptions()
            buffers["load, buffers"] = options.threads * COMMON_POOL.buffer_bytes
            buffers["load by exchange, buffers"] = options.exchange_bytes
            buffers["load, rows of the index"] = self.load.region_nbytes
        return buffers

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON; bytes are whole numbers, times seconds."""
        return {
            "schema": SCHEMA,
            "subject": self.subject,
            "parameters": self.parameters,
            "save": self.save.to_json(),
            "load": None if self.load is None else self.load.to_json(),
            "host_memory_bytes": self.host_memory,
            "estimate_s": self.times.to_json(),
            "advice": self.times.advice,
        }

    def tables(self) -> Iterator[Table]:
        """Yield what a person reads."""
        yield _table(self._save_title(), _save_lines(self.save))
        if self.load is not None:
            layout = self.load.layout
            yield _table(f"Load at {layout_title(layout)}, {layout.world_size} ranks", _load_lines(self.load))
        yield _table(
            "Host memory of a rank, in addition to the state",
            [(n, decimal(b)) for n, b in self.host_memory.items()],
        )
        lines = list(self._time_lines())
        if lines:
            yield _table("Estimated times", lines)

    def _save_title(self) -> str:
        layout = self.save.layout
        if layout is None:
            return f"{self.subject}, as it is stored"
        return f"Save of {self.subject} at {layout_title(layout)}, {layout.world_size} ranks"

    def _time_lines(self) -> Iterator[Line]:
        times = self.times
        for name, seconds in (
            ("first save", times.first_save),
            ("later saves, with the plan of the first", times.later_save),
            ("- of these, writing", times.writing),
            ("- of these, the index and the description of the state", self._rest(self.save.every_save_s)),
            ("- of the first alone, planning and proof", self._rest(self.save.first_save_s)),
            ("asynchronous save, training waits", times.async_stall),
            ("load, each rank by itself", times.load_direct),
            ("load by exchange", times.load_exchange),
        ):
            if seconds is not None:
                yield name, seconds_text(seconds)
        if times.interval is not None:
            interval = times.interval
            yield "save every (Young 1974)", seconds_text(interval.young)
            yield "save every (Daly 2006)", seconds_text(interval.daly)
            yield "progress, share of time", f"{interval.efficiency:.1%}"

    def _rest(self, seconds: float) -> float | None:
        return None if self.times.writing is None else seconds


def _save_lines(save: SaveOutcome) -> Iterator[Line]:
    yield "bytes", decimal(save.total_nbytes)
    yield "arrays, chunks", f"{save.arrays:,}, {int(save.chunks.sum()):,}"
    yield "files", f"{save.files:,}"
    per = "per rank" if save.layout is not None else "per file"
    yield f"bytes {per}: least, median, most", _bytes(save.nbytes)
    yield f"chunks {per}: least, median, most", _numbers(save.chunks)
    yield "balance, most over mean", f"{save.balance:.3f}"
    if save.stage_balance is not None:
        yield "balance within a stage", f"{save.stage_balance:.3f}"
    yield "index", decimal(save.index_nbytes)
    if save.layout is None:
        return
    yield "measured: a rank describes its state", _times(save.describe_s)
    yield "measured: a rank's own planning", _times(save.rank_s)
    yield "measured, rank 0: merge what ranks declare", seconds_text(save.merge_s)
    yield "measured, rank 0: prove coverage", seconds_text(save.prove_s)
    yield "measured, rank 0: plan, pack each rank's rows", seconds_text(save.plan_s + save.pack_s)
    yield "measured, rank 0: build the index", seconds_text(save.index_s)
    yield "measured, rank 0: in all", seconds_text(save.coordinator_s)
    yield "rank 0 is sent", decimal(save.gathered_nbytes)


def _load_lines(load: LoadOutcome) -> Iterator[Line]:
    if len(load.planned) < load.layout.world_size:
        yield "ranks planned", f"{len(load.planned):,}; sums are taken to be in proportion"
    yield "bytes that all ranks need", decimal(load.total_needed)
    yield "bytes a rank needs: least, median, most", _bytes(load.needed)
    yield "files a rank reads from: least, median, most", _numbers(load.files)
    yield "each by itself: bytes read", decimal(load.total_read)
    yield "each by itself: over-read", f"{load.over_read:.3f}"
    yield f"exchange over {_group_text(load.layout)}: bytes read", decimal(int(load.shared_read.sum()))
    yield f"exchange over {_group_text(load.layout)}: over-read", f"{load.shared_over_read:.3f}"
    yield f"exchange over {_group_text(load.layout)}: bytes sent, at least", decimal(load.exchanged)
    yield "measured: find rows of the index, a rank", _times(load.region_s)
    yield "measured: plan, a rank", _times(load.plan_s)


def _table(title: str, lines: Iterator[Line] | list[Line]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in lines:
        table.add_row(name, value)
    return table


def _bytes(numbers: Ints) -> str:
    return ", ".join(decimal(int(n)) for n in _three(numbers))


def _numbers(numbers: Ints) -> str:
    return ", ".join(f"{int(n):,}" for n in _three(numbers))


def _times(seconds: Seconds) -> str:
    low, middle, high = (1e3 * s for s in _three(seconds))
    return f"median {middle:.1f} ms, most {high:.1f} ms" if low < high else f"{high:.1f} ms"


def _three(numbers: Ints | Seconds) -> tuple[float, float, float]:
    if not len(numbers):
        return 0.0, 0.0, 0.0
    return float(numbers.min()), float(np.median(numbers)), float(numbers.max())


def _group_text(layout: ParallelLayout) -> str:
    return f"DP{layout.dp}" if layout.cp == 1 else f"DP{layout.dp} x CP{layout.cp}"
