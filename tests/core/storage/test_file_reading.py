"""Reads of local files, and the descriptors that they keep open."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from megackpt import IntegrityError, ShardedTensor, load, save
from megackpt.engine.background.staging_memory import StagingMemory
from megackpt.errors import FormatError
from megackpt.plans.geometry import Ints
from megackpt.plans.planning import CompactCopies, Reads, group_reads
from megackpt.storage import MAX_BORROWED_BYTES, FileOptions, LocalStore, MemoryStore, file_reader, rawio
from megackpt.storage.file_reader import DescriptorCache
from megackpt.storage.rawio import COMMON_POOL, BufferPool, ByteArray, is_cached
from tests.support.counting import open_descriptors
from tests.support.states import sharded

NBYTES = 9 * 1024 * 1024 + 123  # several buffers, and an end that is not aligned
RANGES = [(0, NBYTES), (0, 4096), (1, NBYTES - 1), (4095, 4097 + (1 << 20)), (NBYTES - 70_001, 70_001)]


@pytest.fixture
def content() -> bytes:
    return np.random.default_rng(0).integers(0, 256, NBYTES, dtype=np.uint8).tobytes()


@pytest.fixture
def store(tmp_path: Path, content: bytes) -> LocalStore:
    """A store on a disk with one file, not in the page cache if the file system has one."""
    store = LocalStore(tmp_path)
    (tmp_path / "a").write_bytes(content)
    descriptor = os.open(tmp_path / "a", os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    return store


@pytest.fixture(params=["cached", "around"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(file_reader, "is_cached", lambda *_: request.param == "cached")
    return str(request.param)


@pytest.mark.parametrize(("offset", "nbytes"), RANGES)
def test_a_range_is_the_same_either_way(
    store: LocalStore, content: bytes, way: str, offset: int, nbytes: int
) -> None:
    out = bytearray(nbytes)
    store.read_into("a", offset, memoryview(out))
    assert out == content[offset : offset + nbytes]
    nbytes = min(nbytes, MAX_BORROWED_BYTES)
    with store.borrow("a", offset, nbytes) as data:
        assert data == content[offset : offset + nbytes]


def test_a_range_arrives_in_parts_that_are_complete_when_they_are_reported(
    store: LocalStore, content: bytes, way: str
) -> None:
    out = bytearray(NBYTES - 9)
    messages = []
    for filled in store.stream_into("a", 9, memoryview(out)):
        assert out[:filled] == content[9 : 9 + filled]
        messages.append(filled)
    assert len(messages) > 2
    assert messages == sorted(messages)
    assert messages[-1] == len(out)


def test_a_store_that_ends_before_all_bytes_are_there_is_found_out(tmp_path: Path) -> None:
    class EndsEarly(LocalStore):
        def stream_into(self, name: str, offset_bytes: int, out: memoryview) -> Iterator[int]:
            return iter(()) if len(out) > 1 << 20 else super().stream_into(name, offset_bytes, out)

    def declared() -> dict[str, ShardedTensor]:
        return {"w": sharded("w", torch.arange(1 << 18))}  # 2 MiB

    save(declared(), tmp_path)
    with pytest.raises(IntegrityError, match="'w'"):
        load(declared(), EndsEarly(tmp_path))


def test_a_file_is_cached_if_every_part_of_it_is(store: LocalStore, tmp_path: Path) -> None:
    descriptor = os.open(tmp_path / "a", os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # no reading ahead
    if is_cached(descriptor, 0, NBYTES):
        pytest.skip("this file system keeps files in memory")
    os.pread(descriptor, NBYTES // 2, 0)
    assert not store.is_cached("a")
    os.pread(descriptor, NBYTES, 0)
    assert store.is_cached("a")
    os.close(descriptor)


def test_what_is_not_cached_is_read_around_the_cache_and_leaves_it_alone(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    around: list[bool] = []
    real = os.preadv

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        around.append(bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & rawio._O_DIRECT))
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    descriptor = os.open(tmp_path / "a", os.O_RDONLY)
    if is_cached(descriptor, 0, NBYTES):
        pytest.skip("this file system keeps files in memory")
    store.read_into("a", 0, memoryview(bytearray(NBYTES)))
    assert set(around) == {True}
    assert not is_cached(descriptor, 0, NBYTES)
    around.clear()
    os.pread(descriptor, NBYTES, 0)
    store.read_into("a", 0, memoryview(bytearray(NBYTES)))
    assert set(around) == {False}
    os.close(descriptor)


@pytest.mark.parametrize("has_cachestat", [True, False])
def test_both_ways_to_ask_what_is_cached_agree(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_cachestat: bool
) -> None:
    monkeypatch.setattr(rawio, "_has_cachestat", has_cachestat)
    descriptor = os.open(tmp_path / "a", os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # no reading ahead
    before = is_cached(descriptor, 0, NBYTES)
    os.pread(descriptor, 4 << 20, 0)
    assert is_cached(descriptor, 0, 4 << 20)
    assert is_cached(descriptor, 5 << 20, 4 << 20) == before
    os.close(descriptor)


@pytest.mark.parametrize("by_another_thread", [False, True])
def test_a_file_system_that_has_no_direct_reads_is_read_through_its_cache(
    store: LocalStore, content: bytes, monkeypatch: pytest.MonkeyPatch, by_another_thread: bool
) -> None:
    monkeypatch.setattr(file_reader, "is_cached", lambda *_: False)
    real = os.preadv

    def reject(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & rawio._O_DIRECT:
            if by_another_thread:  # which was rejected first, and comes through here before this one
                rawio.disable_direct(descriptor)
            raise OSError(errno.EINVAL, "direct I/O is not supported")
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", reject)
    out = bytearray(NBYTES - 5)
    store.read_into("a", 5, memoryview(out))
    assert out == content[5:]


@pytest.mark.parametrize("most", [4096 * 8, 1000])
def test_short_answers_of_the_system_are_completed(
    store: LocalStore, content: bytes, way: str, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: real(fd, [buffers[0][:most]], offset))
    out = bytearray(1 << 20)
    store.read_into("a", 777, memoryview(out))
    assert out == content[777 : 777 + (1 << 20)]


@pytest.mark.parametrize(("offset", "nbytes"), [(0, NBYTES + 1), (NBYTES - 100_000, 100_001), (1 << 40, 99)])
def test_a_file_that_ends_early_is_an_error_either_way(
    store: LocalStore, way: str, offset: int, nbytes: int
) -> None:
    with pytest.raises(FormatError, match=r"the file ends at byte .* are needed"):
        store.read_into("a", offset, memoryview(bytearray(nbytes)))
    if nbytes < MAX_BORROWED_BYTES:
        with pytest.raises(FormatError, match="the file ends at byte"), store.borrow("a", offset, nbytes):
            pass


def test_what_is_longer_than_a_buffer_cannot_be_borrowed(store: LocalStore) -> None:
    memory = MemoryStore()
    memory.create()
    memory.write("a", bytes(MAX_BORROWED_BYTES + 1))
    for lender in (store, memory):
        for offset, nbytes in ((0, MAX_BORROWED_BYTES + 1), (-1, 9), (0, -1)):
            with pytest.raises(ValueError, match="cannot be borrowed"), lender.borrow("a", offset, nbytes):
                pass


def test_direct_reading_can_be_switched_off(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_reader, "is_cached", lambda *_: pytest.fail("nobody has to know"))
    store = LocalStore(tmp_path, files=FileOptions(direct=False))
    store.create()
    store.write("a", content)
    out = bytearray(NBYTES)
    store.read_into("a", 0, memoryview(out))
    assert out == content


def test_buffers_are_used_again_by_other_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    COMMON_POOL.clear()
    made: list[int] = []
    real = rawio._new_buffer

    def fresh(nbytes: int) -> ByteArray:
        made.append(nbytes)
        return real(nbytes)

    monkeypatch.setattr(rawio, "_new_buffer", fresh)
    for name in "ab":
        store = LocalStore(tmp_path / name)
        store.create()
        with store.open_writer("f", 64 << 20) as writer:
            writer.write(memoryview(bytes(64 << 20)))
        store.close()
        assert len(made) <= FileOptions().buffers
        with store.borrow("f", 0, MAX_BORROWED_BYTES):
            assert len(made) <= FileOptions().buffers


def test_a_forked_process_has_buffers_of_its_own() -> None:
    with COMMON_POOL._lock:  # as another thread may hold it when the process is forked
        child = os.fork()
        if not child:
            signal.alarm(3)
            COMMON_POOL.take()
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def _groups(
    reads: list[tuple[int, int, int]], file: list[int], offset: list[int], *, most: int
) -> list[Ints]:
    """Group reads, given by chunk, start and stop; nothing is copied out of them."""
    stored, start, stop = np.array(reads).T
    nothing, row = np.zeros((0, 1), np.int64), np.zeros(0, np.int64)
    blocks = CompactCopies(row, row, row, nothing, row, nothing, row, nothing)
    planned = Reads(stored, start, stop, np.zeros(len(reads) + 1, np.int64), blocks)
    return group_reads(planned, np.arange(len(reads)), np.array(file), np.array(offset), most=most)


def test_reads_near_to_each_other_in_one_file_are_grouped() -> None:
    reads = [(0, 0, 904), (1, 0, 100), (1, 100, 200), (2, 0, 9), (3, 0, 9)]
    groups = _groups(reads, [0, 0, 0, 1], [4096, 5000, 300_000, 310_000], most=1 << 20)
    # 300,000 is far, then another file begins
    assert [group.tolist() for group in groups] == [[0, 1, 2], [3], [4]]
    assert [group.tolist() for group in _groups(reads[:1], [0], [0], most=1 << 20)] == [[0]]


def test_a_group_spans_no_more_than_it_may() -> None:
    reads = [(0, start, start + 1000) for start in range(0, 10_000, 1000)]
    assert [len(group) for group in _groups(reads, [0], [50], most=4000)] == [4, 4, 2]
    back = _groups([(0, 5000, 6000), (0, 0, 1000)], [0], [50], most=1 << 20)
    assert [group.tolist() for group in back] == [[0], [1]], "a group begins with its first read"


DEADLINE_S = 20  # of threads that a lock would block for ever


def have_ended(threads: list[threading.Thread]) -> list[bool]:
    """Wait for threads; return for each whether it has ended."""
    for thread in threads:
        thread.join(DEADLINE_S)
    return [not thread.is_alive() for thread in threads]


class SlowOpen:
    """Opens files of a directory; waits for `released` before it returns the file that is called "slow"."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.cache = DescriptorCache(self, limit=4)
        self.is_opening = threading.Event()
        self.released = threading.Event()
        self.opened: list[str] = []

    def __call__(self, name: str) -> int:
        descriptor = os.open(self._directory / name, os.O_RDONLY)
        self.opened.append(name)
        if name == "slow":
            self.is_opening.set()
            assert self.released.wait(DEADLINE_S)
        return descriptor

    def read(self, name: str) -> bytes:
        with self.cache.borrow(name) as descriptor:
            return os.pread(descriptor, 100, 0)

    def start(self, name: str) -> threading.Thread:
        """Read a file in a thread."""
        thread = threading.Thread(target=self.read, args=(name,), daemon=True)
        thread.start()
        return thread


def test_a_slow_open_does_not_keep_other_threads_from_other_files(tmp_path: Path) -> None:
    (tmp_path / "slow").write_bytes(b"s")
    (tmp_path / "quick").write_bytes(b"q")
    open_file = SlowOpen(tmp_path)
    slow = open_file.start("slow")
    assert open_file.is_opening.wait(DEADLINE_S)
    quick = open_file.start("quick")
    quick.join(5)
    is_quick = not quick.is_alive()
    open_file.released.set()
    assert have_ended([slow, quick]) == [True, True]
    assert is_quick
    open_file.cache.clear()


def test_a_file_that_is_replaced_while_it_is_opened_is_not_kept(tmp_path: Path) -> None:
    (tmp_path / "slow").write_bytes(b"old")
    open_file, before = SlowOpen(tmp_path), open_descriptors(tmp_path)
    slow = open_file.start("slow")
    assert open_file.is_opening.wait(DEADLINE_S)
    (tmp_path / "new").write_bytes(b"new")
    os.replace(tmp_path / "new", tmp_path / "slow")
    open_file.cache.forget("slow")
    open_file.released.set()
    assert have_ended([slow]) == [True]
    assert [open_file.read("slow") for _ in range(2)] == [b"new", b"new"]
    assert open_file.opened == ["slow", "slow"]  # the second read used the descriptor of the first
    open_file.cache.clear()
    assert open_descriptors(tmp_path) == before


def test_two_threads_that_open_one_file_leave_one_descriptor(tmp_path: Path) -> None:
    (tmp_path / "slow").write_bytes(b"s")
    open_file, before = SlowOpen(tmp_path), open_descriptors(tmp_path)
    threads = [open_file.start("slow") for _ in range(2)]
    assert open_file.is_opening.wait(DEADLINE_S)
    open_file.released.set()
    assert have_ended(threads) == [True, True]
    assert open_descriptors(tmp_path) == before + 1
    open_file.cache.clear()
    assert open_descriptors(tmp_path) == before


def test_a_finalizer_may_give_a_buffer_back_while_another_one_is_taken() -> None:
    """The garbage collector runs finalizers in any thread, also in one that holds the lock of the pool."""
    pool = BufferPool(4096, limit=2)
    buffer = pool.take()

    class Idle(list[object]):
        def __bool__(self) -> bool:  # `take` asks this with the lock held
            pool.give_back(buffer)
            return False

    pool._idle = Idle()  # type: ignore[assignment]
    taking = threading.Thread(target=pool.take, daemon=True)
    taking.start()
    assert have_ended([taking]) == [True]


@pytest.fixture
def interrupts(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[int]]:
    """Return a function that lets the n-th close raise KeyboardInterrupt once it has closed."""
    close = os.close

    def at(number: int) -> list[int]:
        closed: list[int] = []

        def closing(descriptor: int) -> None:
            close(descriptor)
            closed.append(descriptor)
            if len(closed) == number:
                raise KeyboardInterrupt

        monkeypatch.setattr(os, "close", closing)
        return closed

    return at


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_a_path_is_walked_without_closing_a_directory_twice(
    tmp_path: Path, interrupts: Callable[[int], list[int]], number: int
) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_bytes(b"content")
    store = LocalStore(tmp_path)
    closed = interrupts(number)
    with pytest.raises(KeyboardInterrupt):  # an OSError in its place: a number that was closed before
        store.read("a/b/file", max_bytes=100)
    assert len(closed) >= number


def test_staging_memory_is_closed_once(interrupts: Callable[[int], list[int]]) -> None:
    memory = StagingMemory()
    closed = interrupts(1)
    with pytest.raises(KeyboardInterrupt):
        memory.close()
    memory.close()
    assert len(closed) == 1
