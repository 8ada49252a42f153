"""Threads that open files do not wait for each other; buffers may come back at any moment."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from megackpt.storage.file_reader import DescriptorCache
from megackpt.storage.rawio import BufferPool

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


def read(cache: DescriptorCache, name: str) -> bytes:
    with cache.borrow(name) as descriptor:
        return os.pread(descriptor, 100, 0)


def test_a_slow_open_does_not_keep_other_threads_from_other_files(tmp_path: Path) -> None:
    (tmp_path / "slow").write_bytes(b"s")
    (tmp_path / "quick").write_bytes(b"q")
    open_file = SlowOpen(tmp_path)
    cache = DescriptorCache(open_file, limit=4)
    slow = threading.Thread(target=read, args=(cache, "slow"), daemon=True)
    slow.start()
    assert open_file.is_opening.wait(DEADLINE_S)
    quick = threading.Thread(target=read, args=(cache, "quick"), daemon=True)
    quick.start()
    quick.join(5)
    is_quick = not quick.is_alive()
    open_file.released.set()
    assert have_ended([slow, quick]) == [True, True]
    assert is_quick
    cache.clear()


def test_a_file_that_is_replaced_while_it_is_opened_is_not_kept(tmp_path: Path) -> None:
    (tmp_path / "slow").write_bytes(b"old")
    open_file = SlowOpen(tmp_path)
    cache = DescriptorCache(open_file, limit=4)
    before = len(os.listdir("/proc/self/fd"))
    slow = threading.Thread(target=read, args=(cache, "slow"), daemon=True)
    slow.start()
    assert open_file.is_opening.wait(DEADLINE_S)
    (tmp_path / "new").write_bytes(b"new")
    os.replace(tmp_path / "new", tmp_path / "slow")
    cache.forget("slow")
    open_file.released.set()
    assert have_ended([slow]) == [True]
    assert read(cache, "slow") == b"new"
    assert read(cache, "slow") == b"new"
    assert open_file.opened == ["slow", "slow"]  # the second read used the descriptor of the first
    cache.clear()
    assert len(os.listdir("/proc/self/fd")) == before


def test_two_threads_that_open_one_file_leave_one_descriptor(tmp_path: Path) -> None:
    (tmp_path / "slow").write_bytes(b"s")
    open_file = SlowOpen(tmp_path)
    cache = DescriptorCache(open_file, limit=4)
    before = len(os.listdir("/proc/self/fd"))
    threads = [threading.Thread(target=read, args=(cache, "slow"), daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert open_file.is_opening.wait(DEADLINE_S)
    open_file.released.set()
    assert have_ended(threads) == [True, True]
    assert len(os.listdir("/proc/self/fd")) == before + 1
    cache.clear()
    assert len(os.listdir("/proc/self/fd")) == before


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
