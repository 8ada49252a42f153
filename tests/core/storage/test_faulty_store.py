"""FaultyStore: what it records, and that it fails where it is told to."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megackpt.errors import StorageError
from megackpt.storage import FileOptions, LocalStore, MemoryStore, Store
from megackpt.testing.faulty_store import READS, FaultyStore, Operation, access_denied, io_error
from megackpt.testing.store_suite import read_range, write_stream

SMALL = FileOptions(direct_from_bytes=1, buffer_bytes=64 << 10, buffers=3, threads=2)


def _save(store: Store) -> None:
    """A little save: two streams of two writes, then the commit."""
    store.create()
    for name in ("a", "b"):
        write_stream(store, name, b"12", part_bytes=1)
    store.sync()
    store.replace("commit", b"done")


def test_faulty_store_records_what_is_done() -> None:
    store = FaultyStore(MemoryStore())
    _save(store)
    stream = ["open_writer", "writer.write", "writer.write", "writer.close"]
    assert [op.kind for op in store.operations] == ["create", *stream, *stream, "sync", "replace"]
    assert store.operations[2] == Operation(index=2, kind="writer.write", name="a", nbytes=1)


@pytest.mark.parametrize("index", range(11))
def test_faulty_store_fails_at_each_operation_in_turn(tmp_path: Path, index: int) -> None:
    store = FaultyStore(LocalStore(tmp_path, files=SMALL), fail_at=index, error=io_error)
    with pytest.raises(StorageError, match="EIO") as caught:
        _save(store)
    assert caught.value.errno == errno.EIO
    assert len(store.operations) == index + 1
    failed = store.operations[-1].name
    assert failed not in LocalStore(tmp_path).names()
    assert not LocalStore(tmp_path).exists("commit")


def test_faulty_store_fails_where_a_function_chooses_and_may_do_the_work_first() -> None:
    inner = MemoryStore()
    store = FaultyStore(
        inner, fail_at=lambda op: op.kind == "replace", error=access_denied, after=True, kinds={"replace"}
    )
    with pytest.raises(StorageError, match=r"memory:/commit: cannot replace: .*EACCES"):
        _save(store)
    assert inner.read("commit", max_bytes=4) == b"done"
    assert len(store.operations) == 1


def test_faulty_store_fails_reads() -> None:
    inner = MemoryStore()
    inner.write("a", b"1")
    store = FaultyStore(inner, fail_at=1, kinds=READS, error=lambda: StorageError("my own"))
    assert store.exists("a")
    with pytest.raises(StorageError, match="my own"):
        read_range(store, "a", 0, 1)


def test_faulty_store_calls_a_hook_that_may_kill_the_process(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys; from megackpt.storage import LocalStore\n"
        "from megackpt.testing.faulty_store import FaultyStore\n"
        "kill = lambda operation: os.kill(os.getpid(), signal.SIGKILL)\n"
        "store = FaultyStore(LocalStore(sys.argv[1]), fail_at=1, hook=kill)\n"
        "store.write('a', b'1'); store.write('b', b'2')"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert LocalStore(tmp_path).names() == ["a"]
