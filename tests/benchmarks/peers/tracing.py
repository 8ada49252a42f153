"""Where time goes in a save or a load of ours: intervals, timed by wrappers of a store and a strategy.

A save is traced at its two interfaces, `Store` and `SaveStrategy`; what a strategy does between getting a
part of a tensor and writing it counts as its digest. A load chooses its strategy by the checkpoint, so the
few functions that matter are replaced by traced ones while it runs; the engine knows nothing of it. `profile`
writes the intervals as a JSON file for Perfetto and Chrome's tracing page, with one process per rank.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast
from unittest import mock

import torch.distributed as dist

import megackpt.engine.data.read as engine_read
import megackpt.engine.loading.prepare as engine_prepare
import megackpt.engine.loading.source as engine_source
import megackpt.formats.contents as contents
from megackpt.cli.benchmark import page_cache
from megackpt.cli.benchmark.contenders import native
from megackpt.cli.benchmark.measure import timed
from megackpt.cli.benchmark.state import GridLayout, spoil
from megackpt.formats.registry import save_strategy
from megackpt.formats.strategy import MANIFEST, ChunkParts, Json, SaveStrategy
from megackpt.plans.geometry import Ints
from megackpt.plans.planning import SavePlan
from megackpt.run import collective
from megackpt.storage import ForwardingStore, Store, StreamWriter, open_store

if TYPE_CHECKING:
    from tests.benchmarks.peers.run import PeerRun


_LOAD_PHASES: tuple[tuple[ModuleType, str, str], ...] = (
    (engine_source, "open_checkpoint", "open"),
    (engine_prepare, "plan_load", "plan"),
    (engine_read, "plan_reads", "plan"),
    (contents, "digest_list", "digest"),
    (engine_read, "copy_bytes", "copy"),
    (engine_read, "copy_to_flat_bytes", "copy"),
)


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time."""

    name: str  # the phase
    start_s: float  # since the tracer was made
    stop_s: float
    thread: int  # which thread of the process, counted from 0


class Tracer:
    """Takes spans from any thread."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._began = time.perf_counter()
        self._threads: dict[int, int] = {}

    @property
    def now(self) -> float:
        """Seconds since it was made."""
        return time.perf_counter() - self._began

    def add(self, name: str, start_s: float) -> None:
        """Note a span of this thread that ends now."""
        thread = self._threads.setdefault(threading.get_ident(), len(self._threads))
        self.spans.append(Span(name, start_s, self.now, thread))

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Note what the block takes."""
        start = self.now
        try:
            yield
        finally:
            self.add(name, start)

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does the same, as a span."""

        def traced(*args: Any, **kwargs: Any) -> Any:
            with self.span(name):
                return function(*args, **kwargs)

        return traced

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each phase, summed over threads."""
        seconds_of_name: dict[str, float] = {}
        for span in self.spans:
            seconds_of_name[span.name] = seconds_of_name.get(span.name, 0.0) + span.stop_s - span.start_s
        return seconds_of_name


def traced_store(store: Store, tracer: Tracer) -> Store:
    """Return a store that does the same and notes reads, writes and flushes."""
    return _TracedStore(store, tracer)


def traced_strategy(strategy: SaveStrategy, tracer: Tracer) -> SaveStrategy:
    """Return a strategy that does the same, and notes the plan before it, copies and the index."""
    return cast(SaveStrategy, _TracedStrategy(strategy, tracer))


@contextlib.contextmanager
def traced_load(tracer: Tracer) -> Iterator[None]:
    """Note what a load of this process opens, plans, checks and copies while the block runs."""
    with contextlib.ExitStack() as stack:
        for module, name, phase in _LOAD_PHASES:
            traced = tracer.around(phase, getattr(module, name))
            stack.enter_context(mock.patch.object(module, name, traced))
        yield


class _TracedStore(ForwardingStore):
    def __init__(self, store: Store, tracer: Tracer) -> None:
        super().__init__(store)
        self._tracer = tracer

    def is_cached(self, name: str) -> bool:
        return self._inner.is_cached(name)

    def open_writer(self, name: str, nbytes: int) -> StreamWriter:
        with self._tracer.span("write"):  # reserves the disk space
            writer = super().open_writer(name, nbytes)
        return cast(StreamWriter, _TracedWriter(writer, self._tracer))

    def read_into(self, name: str, offset_bytes: int, out: memoryview) -> None:
        with self._tracer.span("read"):
            super().read_into(name, offset_bytes, out)

    def stream_into(self, name: str, offset_bytes: int, out: memoryview) -> Iterator[int]:
        counts = self._inner.stream_into(name, offset_bytes, out)
        while True:
            with self._tracer.span("read"):
                count = next(counts, None)
            if count is None:
                return
            yield count

    @contextlib.contextmanager
    def borrow(self, name: str, offset_bytes: int, nbytes: int) -> Iterator[memoryview]:
        with contextlib.ExitStack() as stack:
            with self._tracer.span("read"):
                data = stack.enter_context(self._inner.borrow(name, offset_bytes, nbytes))
            yield data

    def replace(self, name: str, data: bytes) -> None:
        with self._tracer.span("commit" if name == MANIFEST else "index"):
            super().replace(name, data)

    def sync(self) -> None:
        with self._tracer.span("sync"):
            super().sync()


class _TracedWriter:
    def __init__(self, writer: StreamWriter, tracer: Tracer) -> None:
        self._writer, self._tracer = writer, tracer

    def write(self, data: memoryview) -> None:
        _end_of_digest(self._tracer)
        with self._tracer.span("write"):
            self._writer.write(data)

    def close(self) -> None:
        with self._tracer.span("sync"):
            self._writer.close()

    def __enter__(self) -> _TracedWriter:
        self._writer.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        with self._tracer.span("sync"):
            self._writer.__exit__(*error)


@SaveStrategy.register
class _TracedStrategy:
    def __init__(self, strategy: SaveStrategy, tracer: Tracer) -> None:
        self._strategy, self._tracer = strategy, tracer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._strategy, name)

    def rounds(self, plan: SavePlan, rank: int) -> list[Ints]:
        self._tracer.add("plan", 0.0)
        return self._strategy.rounds(plan, rank)

    def write_chunks(
        self, store: Store, *, attempt: str, rank: int, plan: SavePlan, rows: Ints, parts: ChunkParts
    ) -> bytes:
        traced = _TracedParts(parts, self._tracer)
        return self._strategy.write_chunks(
            store, attempt=attempt, rank=rank, plan=plan, rows=rows, parts=traced
        )

    def write_index(self, store: Store, *, attempt: str, plan: SavePlan, receipts: list[list[bytes]]) -> Json:
        with self._tracer.span("index"):
            return self._strategy.write_index(store, attempt=attempt, plan=plan, receipts=receipts)

    def write_common(self, store: Store, *, attempt: str, common: Any) -> Json:
        with self._tracer.span("index"):
            return self._strategy.write_common(store, attempt=attempt, common=common)


_taken = threading.local()  # when this thread last got a part that it has not written yet


class _TracedParts(ChunkParts):
    """Parts whose making is noted as a copy; what follows until they are written, as their digest."""

    def __init__(self, parts: ChunkParts, tracer: Tracer) -> None:
        self._parts, self._tracer = parts, tracer

    def __call__(self, row: int) -> Iterator[memoryview]:
        return self._traced(self._parts(row))

    def in_order(self, rows: Sequence[int]) -> Iterator[Iterator[memoryview]]:
        return map(self._traced, self._parts.in_order(rows))

    def _traced(self, parts: Iterator[memoryview]) -> Iterator[memoryview]:
        while True:
            start = self._tracer.now
            part = next(parts, None)
            if part is None:
                return
            self._tracer.add("copy", start)
            _taken.at = self._tracer.now
            yield part


def _end_of_digest(tracer: Tracer) -> None:
    taken = getattr(_taken, "at", None)
    if taken is not None:
        tracer.add("digest", taken)
        _taken.at = None


Phases = dict[str, list[dict[str, float]]]


def profile(run: PeerRun, path: Path) -> Phases:
    """Trace a save and a load, cold where that is possible; write the trace to path. Collective."""
    state, declared = run.state(GridLayout(tp=run.ranks)), native()
    directory = run.root / "profile"
    strategy = save_strategy(None)

    def save(tracer: Tracer, store: Store) -> None:
        collective.save(declared.declare(state), store, traced_strategy(strategy, tracer))

    def load(tracer: Tracer, store: Store) -> None:
        with traced_load(tracer):
            collective.load(declared.declare(state), store)

    phases_of_case: Phases = {}
    events: list[dict[str, Any]] = []
    for name, work in (("save", save), ("load", load)):
        tracer = Tracer()
        with contextlib.closing(open_store(directory)) as store:
            seconds = timed(partial(work, tracer, traced_store(store, tracer)))
        own = {"all": seconds, **tracer.seconds()}, _events(name, tracer, rank=run.rank)
        ranks: list[Any] = [None] * run.ranks
        dist.all_gather_object(ranks, own)
        phases_of_case[name] = [phases for phases, _ in ranks]
        events += [event for _, of_rank in ranks for event in of_rank]
        spoil(state)
        if run.rank == 0:
            page_cache.drop(directory)
    if run.rank == 0:
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    return phases_of_case


def _events(name: str, tracer: Tracer, *, rank: int) -> list[dict[str, Any]]:
    """Spans as complete events, in microseconds. Source: Trace Event Format, Chromium project."""
    lane = 0 if name == "save" else 1
    pid = 2 * rank + lane
    named: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": f"{name}, rank {rank}"}}
    ]
    return named + [
        {
            "name": span.name,
            "ph": "X",
            "ts": span.start_s * 1e6,
            "dur": (span.stop_s - span.start_s) * 1e6,
            "pid": pid,
            "tid": span.thread,
        }
        for span in tracer.spans
    ]
