"""Copies of tensors into buffers before they are written, and from a device."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megackpt import StorageError
from megackpt.comm import encode_error
from megackpt.engine.background import staging_memory
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
from megackpt.engine.background.trainer_connection import Heartbeat, StagedStream, StreamRowParts
from megackpt.engine.data.device_copies import (
    AHEAD,
    ByteArray,
    ByteSource,
    Downloads,
    HostBuffers,
    Uploads,
    bytes_on_device,
    host_parts,
    rows_to_host,
    to_host,
)
from megackpt.engine.data.tensor_bytes import parts_of, source_block, target_block
from megackpt.engine.saving import local_state
from megackpt.plans.planning import StridedCopy

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


class RowParts:
    """Rows in parts of a number of bytes; every second part is a tensor, as if it were on a device."""

    def __init__(self, rows: list[np.ndarray], part_bytes: int) -> None:
        self._rows, self._part_bytes = rows, part_bytes

    def sources(self, rows: Sequence[int]) -> Iterator[Iterator[ByteSource]]:
        return (self._parts(self._rows[row]) for row in rows)

    def _parts(self, data: np.ndarray) -> Iterator[ByteSource]:
        for number, at in enumerate(range(0, len(data), self._part_bytes)):
            part = data[at : at + self._part_bytes]
            yield torch.from_numpy(part) if number % 2 else part


class LateDownloads(Downloads):
    """Copies from devices that are made at the last moment."""

    def __init__(self) -> None:
        super().__init__()
        self._begun: list[tuple[torch.Tensor, ByteArray]] = []

    def copy(self, source: ByteSource, target: ByteArray) -> None:
        if isinstance(source, torch.Tensor):
            self._begun.append((source, target))
        else:
            super().copy(source, target)

    def wait(self) -> None:
        for source, target in self._begun:
            super().copy(source, target)
        self._begun.clear()


def job_at(start: int) -> Job:
    return Job(
        number=1, label="", attempt="", location=CheckpointLocation(root="", name=""), strategy=b"",
        hooks=(), plan=0, exchanged=True, object_sizes=None, verify=None, common=None, start=start,
        in_order=True, keeps=False, commit_fields={}, unpadded={},
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
        with patch.object(staging_memory, "Downloads", LateDownloads):
            copy_rows(memory.array, target, range(len(rows)), RowParts(rows, part_bytes), reader)
        thread.join(20)
        assert results == [row.tobytes() for row in rows]
        start += layout.stop
    memory.close()


class QuickReader(Reader):
    """Frees all that is reported, at once."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.reported: list[int] = []

    def report_staged(self, position: int) -> None:
        self.reported.append(position)
        self.consumed = position


@pytest.mark.parametrize(("pages", "reported"), [(4, [4]), (8, [1, 2, 3, 4, 8])])
def test_each_quarter_of_the_memory_is_reported_unless_all_rows_fit(pages: int, reported: list[int]) -> None:
    reader = QuickReader(4 * PAGE)
    rows = RowParts([np.zeros(pages * PAGE, np.uint8)], PAGE)
    target = StreamRange(start=0, layout=lay_out_rows(np.array([pages * PAGE])))
    copy_rows(np.zeros(4 * PAGE, np.uint8), target, [0], rows, reader)
    assert reader.reported == [page * PAGE for page in reported]


def test_no_copy_is_under_way_after_an_error() -> None:
    class Failing(RowParts):
        def _parts(self, data: np.ndarray) -> Iterator[ByteSource]:
            yield torch.from_numpy(data)
            raise StorageError("no more")

    memory = np.zeros(PAGE, np.uint8)
    target = StreamRange(start=0, layout=lay_out_rows(np.array([9])))
    with (
        patch.object(staging_memory, "Downloads", LateDownloads),
        pytest.raises(StorageError, match="no more"),
    ):
        copy_rows(memory, target, [0], Failing([np.arange(9, dtype=np.uint8)], 9), Reader(PAGE))
    assert memory[:9].tolist() == list(range(9))


class Pins:
    """Stands for the registration of memory with CUDA: the ranges of addresses that are pinned."""

    def __init__(self, memory: StagingMemory) -> None:
        self.memory = memory
        self.pinned: list[tuple[int, int]] = []
        self.error: str | None = None

    def pin(self, array: ByteArray, device: torch.device) -> None:
        if self.error is not None:
            raise RuntimeError(self.error)
        self.pinned.append((array.ctypes.data, array.nbytes))

    def unpin(self, array: ByteArray) -> None:
        self.pinned.remove((array.ctypes.data, array.nbytes))
        assert os.fstat(self.memory.descriptor).st_size == array.nbytes  # the pages still exist


@pytest.fixture
def pins(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pins]:
    pins = Pins(StagingMemory())
    monkeypatch.setattr(staging_memory, "pin", pins.pin)
    monkeypatch.setattr(staging_memory, "unpin", pins.unpin)
    yield pins
    pins.memory.close()


DEVICE = torch.device("cuda")


def test_memory_is_pinned_once_until_its_size_changes_or_it_is_closed(pins: Pins) -> None:
    pins.memory.pin(DEVICE)
    assert not pins.pinned  # it has no pages
    for pages in (2, 3):
        pins.memory.resize(pages * PAGE)
        assert not pins.pinned
        for _ in range(2):
            pins.memory.pin(DEVICE)
            pins.memory.resize(pages * PAGE)
            assert pins.pinned == [(pins.memory.array.ctypes.data, pages * PAGE)]
    pins.memory.close()
    assert not pins.pinned


def test_memory_that_cannot_be_pinned_takes_copies_and_one_warning_is_logged(
    pins: Pins, caplog: pytest.LogCaptureFixture
) -> None:
    pins.error = "no locked memory"
    with caplog.at_level(logging.WARNING):
        for pages in (2, 2, 3):
            pins.memory.resize(pages * PAGE)
            pins.memory.pin(DEVICE)
    assert [record.getMessage() for record in caplog.records] == [
        "8,192 bytes of staging memory cannot be pinned (no locked memory), so asynchronous saves of CUDA "
        "tensors stall training longer. Raise the limit of locked memory (ulimit -l), or give "
        "AsyncOptions.staging_bytes a smaller number."
    ]
    with Downloads() as downloads:
        downloads.copy(torch.arange(9, dtype=torch.uint8), pins.memory.array[5:14])
    assert pins.memory.array[5:14].tolist() == list(range(9))


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
    with patch("megackpt.engine.background.trainer_connection.BEAT_S", 0.02):
        waiting = threading.Thread(target=reader.stream.wait, args=(1,), kwargs={"job": 1})
        waiting.start()
        deadline = time.monotonic() + 20
        while reader.beats < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        reader.stream.stage(1)
        waiting.join()
    assert reader.beats >= 3


VALUES = torch.arange(420, dtype=torch.int16).reshape(7, 6, 10)
VIEWS = {
    "transposed": VALUES.permute(2, 0, 1),
    "contiguous": VALUES,
    "every second": VALUES[:, ::2],
    "rows longer than a buffer": VALUES[:, :, :9].transpose(0, 1),
    "one row": VALUES[:1].transpose(1, 2),
    "a scalar": VALUES[3, 2, 1],
    "flags": (VALUES % 3 == 0).permute(2, 1, 0),
    "expanded": VALUES[0, 0, :4].expand(30, 4),
    "conjugate": torch.view_as_complex(torch.rand(9, 8, 2, dtype=torch.float64)).t().conj(),
}


def true_bytes(tensor: torch.Tensor) -> bytes:
    return np.ascontiguousarray(tensor.resolve_conj().numpy()).tobytes()


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("buffer_bytes", [16, 50, 4096])
def test_parts_that_went_through_buffers_or_not_are_the_elements_in_order(
    name: str, buffer_bytes: int
) -> None:
    tensor = VIEWS[name]
    buffers = HostBuffers(buffer_bytes, limit=3)
    parts = list(parts_of(tensor, buffer_bytes))
    assert all(part.numel() * part.element_size() <= buffer_bytes for part in parts)
    arrived = list((label, bytes(share)) for label, share in to_host(enumerate(parts), buffers))
    assert [label for label, _ in arrived] == list(range(len(parts)))
    assert b"".join(share for _, share in arrived) == true_bytes(tensor)
    assert b"".join(bytes(p) for p in host_parts(tensor, part_bytes=buffer_bytes)) == true_bytes(tensor)
    copied = np.zeros(len(true_bytes(tensor)), np.uint8)
    position = 0
    with Downloads() as downloads:
        for part in bytes_on_device(tensor, buffer_bytes):  # copied from where they are
            assert len(part) <= buffer_bytes
            downloads.copy(part, copied[position : position + len(part)])
            position += len(part)
    assert copied.tobytes() == true_bytes(tensor)


def test_a_part_stays_while_the_next_are_copied_and_no_more_of_them_than_asked() -> None:
    asked = []

    def parts() -> Iterator[tuple[int, torch.Tensor]]:
        for i in range(20):
            asked.append(i)
            yield i, torch.full((8,), i)

    buffers = HostBuffers(64, limit=8)
    for label, share in to_host(parts(), buffers):
        assert asked == list(range(min(label + AHEAD + 1, 20)))
        assert np.frombuffer(share, np.int64).tolist() == [label] * 8
    assert buffers.nbytes == (AHEAD + 1) * 64


def test_copies_run_ahead_into_the_next_row() -> None:
    rows, asked = [[b"aa", b"bb"], [b"cc"], [b"dd", b"ee", b"ff"]], []

    def parts(row: list[bytes]) -> Iterator[torch.Tensor]:
        for data in row:
            asked.append(data)
            yield torch.frombuffer(bytearray(data), dtype=torch.uint8)

    buffers = HostBuffers(2, limit=8)
    in_order = rows_to_host(map(parts, rows), buffers)
    assert [bytes(share) for share in next(in_order)] == rows[0]
    assert asked == [b"aa", b"bb", b"cc", b"dd", b"ee"]
    assert [[bytes(share) for share in row] for row in in_order] == rows[1:]
    assert buffers.nbytes == (AHEAD + 1) * 2


class OnDevice(torch.Tensor):
    """A tensor in host memory that says that it is on a device."""

    is_cuda = property(lambda self: True)


def test_rows_of_devices_and_of_host_memory_come_in_order_and_only_those_of_devices_take_buffers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensors = [torch.arange(n, dtype=torch.uint8) for n in (9, 5, 7, 0, 4)]
    tensors = [t.as_subclass(OnDevice) if row in (0, 2, 3, 4) else t for row, t in enumerate(tensors)]
    table = SimpleNamespace(nbytes=np.array([t.numel() for t in tensors]))
    plan = SimpleNamespace(entity=np.arange(5), writer=np.zeros(5), table=table)
    local = SimpleNamespace(
        flattened=SimpleNamespace(tensors=[SimpleNamespace(data=tensor) for tensor in tensors]),
        blobs=(),
        declared=SimpleNamespace(table=table),
        rank=0,
    )
    monkeypatch.setattr(local_state, "follow", lambda tensors: None)
    copied: list[int] = []

    def note_copied(tensor: torch.Tensor, part_bytes: int) -> Iterator[torch.Tensor]:
        copied.append(len(tensor))
        return parts_of(tensor, part_bytes)

    monkeypatch.setattr(local_state, "parts_in_buffers", note_copied)
    monkeypatch.setattr(
        local_state, "host_parts", lambda tensor, part_bytes: iter([memoryview(tensor.numpy())])
    )
    rows = local_state.StateRowParts(local, plan, part_bytes=4)  # type: ignore[arg-type]
    data = [b"".join(map(bytes, parts)) for parts in rows.in_order(range(5))]
    assert data == [bytes(range(n)) for n in (9, 5, 7, 0, 4)]
    assert copied == [9, 7, 4]  # neither the row in host memory nor the empty one
    parts_of_rows = [list(parts) for parts in rows.sources(range(5))]
    assert [[bytes(part.tolist()) for part in parts] for parts in parts_of_rows] == [
        [bytes(range(4)), bytes(range(4, 8)), b"\x08"],
        [bytes(range(5))],
        [bytes(range(4)), bytes(range(4, 7))],
        [b""],
        [bytes(range(4))],
    ]
    assert [isinstance(parts[0], torch.Tensor) for parts in parts_of_rows] == [True, False, True, False, True]
    assert rows.device == tensors[0].device


def test_what_is_left_of_a_row_is_passed_over() -> None:
    rows_of_bytes = [[bytes([row, i]) for i in range(4)] for row in range(3)]
    rows = ([torch.frombuffer(bytearray(b), dtype=torch.uint8) for b in row] for row in rows_of_bytes)
    in_order = rows_to_host(rows, HostBuffers(2, limit=8))
    assert [bytes(next(of_row)) for of_row in in_order] == [bytes([row, 0]) for row in range(3)]


def test_copies_that_nobody_takes_give_their_buffers_back() -> None:
    buffers = HostBuffers(8, limit=8)
    arriving = to_host(((i, torch.zeros(1)) for i in range(9)), buffers)
    next(arriving)
    assert buffers.nbytes == 0
    arriving.close()
    assert buffers.nbytes == (AHEAD + 1) * 8


def test_buffers_are_used_again_and_no_more_of_them_kept_than_the_limit() -> None:
    buffers = HostBuffers(32, limit=2)
    taken = [buffers.take() for _ in range(5)]
    assert len({buffer.data_ptr() for buffer in taken}) == 5
    for buffer in taken:
        buffers.give(buffer)
    assert buffers.nbytes == 64
    assert {buffers.take().data_ptr() for _ in range(2)} == {buffer.data_ptr() for buffer in taken[:2]}


def test_a_buffer_made_in_inference_mode_is_filled_outside_of_it() -> None:
    buffers = HostBuffers(64, limit=2)
    with torch.inference_mode():
        list(to_host([(0, torch.zeros(4))], buffers))
    buffers.take().fill_(1)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int64, torch.complex128])
def test_blocks_go_up_packed_and_to_their_positions_from_several_threads(dtype: torch.dtype) -> None:
    stored = torch.arange(600).to(dtype).reshape(20, 30)
    data = memoryview(stored.numpy().tobytes())
    target = torch.zeros(30, 20, dtype=dtype)
    # Each copy takes rows 2i and 2i + 1 of columns 3:27, and puts them where the transpose has them.
    copies = [
        StridedCopy(0, (2, 24), 60 * i + 3, (30, 1), 3 * 20 + 2 * i, (1, 20)) for i in range(len(stored) // 2)
    ]
    buffers = HostBuffers(48 * dtype.itemsize, limit=3)
    with Uploads([target], buffers) as uploads, ThreadPoolExecutor(4) as pool:

        def upload(copy: StridedCopy) -> None:
            uploads.copy(source_block(data, 0, dtype.itemsize, copy), target_block(target, copy))

        list(pool.map(upload, copies))
    expected = torch.zeros_like(target)
    expected[3:27] = stored[:, 3:27].t()
    assert torch.equal(target, expected)
    assert buffers.nbytes <= 3 * buffers.buffer_bytes
