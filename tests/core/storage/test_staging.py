"""Bytes pass through the staging memory unchanged, however small the memory is."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megackpt import StorageError
from megackpt.comm import encode_error
from megackpt.engine.background.heartbeat import Heartbeat
from megackpt.engine.background.messages import (
    AliveMessage,
    CheckpointLocation,
    ConsumedMessage,
    FromWriter,
    Job,
)
from megackpt.engine.background.staging_memory import (
    RowLayout,
    StagingMemory,
    StreamRange,
    copy_rows,
    lay_out_rows,
    map_memory,
)
from megackpt.engine.background.stream import StagedStream, StreamRowParts
from megackpt.formats.strategy import ChunkParts

PAGE = 4096


class Reader:
    """Both ends of a stream in one process."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.consumed = capacity, 0
        self.news = threading.Condition()
        self.beats = 0
        self.stream = StagedStream(self.send, Heartbeat(self.send))

    def send(self, message: FromWriter) -> None:
        if isinstance(message, AliveMessage):
            self.beats += 1
            return
        assert isinstance(message, ConsumedMessage)
        with self.news:
            self.consumed = message.position
            self.news.notify_all()

    def room_from(self, position: int) -> int:
        with self.news:
            assert self.news.wait_for(lambda: self.consumed + self.capacity > position, 20)
            return self.consumed + self.capacity

    def report_staged(self, position: int) -> None:
        self.stream.stage(position)


class RowParts(ChunkParts):
    """Rows in parts of a number of bytes."""

    def __init__(self, rows: list[np.ndarray], part_bytes: int) -> None:
        self._rows, self._part_bytes = rows, part_bytes

    def __call__(self, row: int) -> Iterator[memoryview]:
        data = self._rows[row].data
        return (data[at : at + self._part_bytes] for at in range(0, len(data), self._part_bytes))


def job_at(start: int) -> Job:
    return Job(
        number=1, label="", attempt="", location=CheckpointLocation(root="", name=""), strategy=b"",
        hooks=(), plan=0, sizes=np.zeros(0, np.int64), report=b"", verify=None, common=None, start=start,
        in_order=True, keeps=False,
    )  # fmt: skip


@settings(max_examples=20, deadline=None)
@given(
    pages=st.integers(1, 4),
    saves=st.lists(st.lists(st.integers(1, 3 * PAGE), max_size=5), min_size=1, max_size=3),
    part_bytes=st.integers(1, 5000),
    seed=st.integers(0, 2**32 - 1),
)
def test_rows_arrive_as_they_were(pages: int, saves: list[list[int]], part_bytes: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    memory = StagingMemory()
    memory.resize(pages * PAGE)
    assert memory.nbytes == pages * PAGE
    seen = map_memory(memory.descriptor, memory.nbytes, writable=False)
    reader, start = Reader(memory.nbytes), 0
    for sizes in saves:
        rows = [generator.integers(0, 256, n).astype(np.uint8) for n in sizes]
        layout = lay_out_rows(np.array(sizes, np.int64))
        assert (layout.start % 64 == 0).all()
        results: list[bytes] = []

        def read(
            count: int = len(sizes),
            start: int = start,
            results: list[bytes] = results,
            layout: RowLayout = layout,
        ) -> None:
            parts = StreamRowParts(reader.stream, seen, range(count), layout, job_at(start))
            results += [b"".join(map(bytes, row_parts)) for row_parts in parts.in_order(range(count))]
            reader.stream.consume(start + layout.stop)

        thread = threading.Thread(target=read)
        thread.start()
        target = StreamRange(start=start, layout=layout)
        copy_rows(memory.array, target, range(len(rows)), RowParts(rows, part_bytes), reader)
        thread.join(20)
        assert results == [row.tobytes() for row in rows]
        start += layout.stop
    memory.close()


def test_a_reader_raises_the_error_of_a_row_that_will_never_come() -> None:
    reader = Reader(PAGE)
    parts = StreamRowParts(
        reader.stream, np.zeros(PAGE, np.uint8), [0], lay_out_rows(np.array([9])), job_at(0)
    )
    threading.Timer(0.1, reader.stream.cancel, (1, encode_error(StorageError("no copy")))).start()
    with pytest.raises(StorageError, match="no copy"):
        next(parts(0))


def test_a_reader_that_waits_for_bytes_sends_heartbeats() -> None:
    reader = Reader(PAGE)
    with (
        patch("megackpt.engine.background.stream.BEAT_S", 0.02),
        patch("megackpt.engine.background.heartbeat.BEAT_S", 0.0),
    ):
        waiting = threading.Thread(target=reader.stream.wait, args=(1,), kwargs={"job": 1})
        waiting.start()
        deadline = time.monotonic() + 20
        while reader.beats < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        reader.stream.stage(1)
        waiting.join()
    assert reader.beats >= 3
