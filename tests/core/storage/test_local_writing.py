"""Files that are written whole or not at all, and the digests of what was written."""

from __future__ import annotations

import errno
import fcntl
import itertools
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megackpt import SaveOptions, ShardedTensor, save
from megackpt.engine.checkpoint.opening import open_checkpoint
from megackpt.engine.data.tensor_bytes import as_bits, byte_view
from megackpt.errors import FormatError, MissingExtraError, StorageError
from megackpt.formats.array_digests import ArrayDigester
from megackpt.plans.geometry import Box, box_ranges
from megackpt.plans.metadata import ArraySpec, ChunkTable
from megackpt.storage import (
    BlockDigester,
    FileOptions,
    LocalStore,
    MemoryStore,
    block_digests,
    digest_of,
    file_writer,
    rawio,
)
from megackpt.storage.crc64 import Crc64
from megackpt.testing.format_trials import declared_chunks
from megackpt.testing.layouts import arrays, boxes, owned_chunks
from megackpt.testing.store_suite import read_range, some_bytes, write_stream
from tests.support.counting import open_descriptors
from tests.support.effort import few
from tests.support.states import save_on_ranks, sharded

# Small buffers, so that streams of a few megabytes go around the pipeline many times.
SMALL = FileOptions(direct_from_bytes=1, buffer_bytes=64 << 10, buffers=3, threads=2)
BUFFERED = FileOptions(direct=False)
MEGABYTES = 3 * (1 << 20) + 12_345


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalStore]:
    local = LocalStore(tmp_path / "ckpt", files=SMALL)
    local.create()
    yield local
    local.close()


# What the system rejects.


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        # There is room on the disk of the test, so another limit is reached.
        (errno.ENOSPC, r"ENOSPC\)\. 5 bytes were needed, [\d,]+ bytes are free\. .*inodes \(df -i\).*lfs df"),
        (errno.EDQUOT, r"EDQUOT\)\. 5 bytes were needed, .*your quota \(quota -s\).*raise the quota"),
        (errno.EACCES, r"EACCES\)\. The process runs as uid \d+: check the owner and mode"),
        (errno.EROFS, r"EROFS\)\. The file system is mounted read-only"),
        (errno.EIO, r"EIO\)\. The device reports a fault: see the kernel log"),
        (errno.EBUSY, r"EBUSY\)\. Check the file system"),
    ],
)
def test_a_failed_write_names_what_where_and_how_and_leaves_nothing(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, advice: str
) -> None:
    monkeypatch.setattr(os, "fsync", _raiser(code))
    message = rf"ckpt/a: cannot write: {os.strerror(code)} \({advice}"
    with pytest.raises(StorageError, match=message) as caught:
        store.write("a", b"12345")
    assert caught.value.errno == code
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.path == str(tmp_path / "ckpt" / "a")
    assert store.names() == []


def test_a_failed_replace_keeps_the_old_file_and_no_other(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.replace("m", b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", _raiser(errno.EIO))
        with pytest.raises(StorageError, match=r"ckpt/m: cannot replace: .*EIO"):
            store.replace("m", b"new")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", _raiser(errno.ENOSPC))
        with pytest.raises(StorageError, match=r"\.m\..*\.tmp: cannot write: .*ENOSPC"):
            store.replace("m", b"new")
    assert store.read("m", max_bytes=3) == b"old"
    assert store.names() == ["m"]


@pytest.mark.parametrize("step", ["rename", "fsync"])
def test_a_process_killed_inside_replace_leaves_the_old_bytes(tmp_path: Path, step: str) -> None:
    store = LocalStore(tmp_path)
    store.replace("m", b"old")
    program = (
        "import os, signal, sys; from megackpt.storage import LocalStore\n"
        f"os.{step} = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)\n"
        "LocalStore(sys.argv[1]).replace('m', b'new')"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert store.read("m", max_bytes=3) == b"old"
    (leftover,) = set(store.names()) - {"m"}
    assert leftover.startswith(".m.")
    assert leftover.endswith(".tmp")


def test_a_stream_too_large_for_the_disk_is_rejected_before_it_begins(store: LocalStore) -> None:
    state = os.statvfs(store.location)
    nbytes = state.f_bfree * state.f_frsize + (1 << 40)
    message = rf"ckpt/a: cannot reserve space: .*ENOSPC.* {nbytes:,} bytes were needed, [\d,]+ bytes are free"
    with pytest.raises(StorageError, match=message):
        store.open_writer("a", nbytes)
    assert store.names() == []


def test_space_is_reserved_before_the_first_byte(store: LocalStore, tmp_path: Path) -> None:
    with store.open_writer("a", MEGABYTES) as writer:
        assert (tmp_path / "ckpt" / "a").stat().st_blocks * 512 >= MEGABYTES
        writer.write(memoryview(bytes(MEGABYTES)))


@pytest.mark.parametrize("answer", [errno.ENOSPC, errno.EDQUOT])
def test_a_failed_reservation_is_raised_at_once(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, answer: int
) -> None:
    monkeypatch.setattr(rawio, "_fallocate", _fallocate_answering(answer))
    with pytest.raises(StorageError, match=r"ckpt/a: cannot reserve space: .*9,999 bytes were needed"):
        store.open_writer("a", 9_999)
    assert store.names() == []


def _fallocate_answering(code: int) -> Callable[[int, int, int, int], int]:
    import ctypes

    def fallocate(descriptor: int, mode: int, offset: int, nbytes: int) -> int:
        ctypes.set_errno(code)
        return -1

    return fallocate


def _raiser(code: int) -> Callable[..., None]:
    def reject(*args: object, **kwargs: object) -> None:
        raise OSError(code, os.strerror(code))

    return reject


# Streams around the page cache.


def test_large_streams_use_direct_io_with_aligned_requests(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = _record_pwrite(monkeypatch)
    write_stream(store, "a", some_bytes(MEGABYTES), part_bytes=77_777)
    if not any(direct for direct, _, _ in requests):
        pytest.skip("the file system of the temporary directory has no direct I/O")
    assert all(direct for direct, _, _ in requests)
    assert all(offset % 4096 == 0 and nbytes % 4096 == 0 for _, offset, nbytes in requests)
    assert max(nbytes for _, _, nbytes in requests) == SMALL.buffer_bytes


def test_small_streams_go_through_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = _record_pwrite(monkeypatch)
    write_stream(LocalStore(tmp_path), "a", some_bytes(1000), part_bytes=1000)
    assert requests == [(False, 0, 1000)]


@pytest.mark.parametrize("options", [SMALL, BUFFERED])
def test_an_error_while_writing_fails_the_stream_and_removes_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: FileOptions
) -> None:
    store = LocalStore(tmp_path, files=options)
    monkeypatch.setattr(os, "pwrite", _raiser(errno.EIO))
    with pytest.raises(StorageError, match=r"/a: cannot write: .*EIO.*device reports a fault") as caught:
        write_stream(store, "a", bytes(MEGABYTES), part_bytes=100_000)
    assert caught.value.errno == errno.EIO
    assert store.names() == []
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("megackpt-write")]


def test_an_error_of_the_last_background_write_is_raised_by_close(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = store.open_writer("a", 1000)
    monkeypatch.setattr(os, "pwrite", _raiser(errno.ENOSPC))
    writer.write(memoryview(bytes(1000)))
    with pytest.raises(StorageError, match=r"ckpt/a: cannot write: .*ENOSPC.*1,000 bytes were needed"):
        writer.close()
    assert store.names() == []


def test_a_writer_uses_no_more_buffers_than_allowed(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    real = rawio.mmap.mmap
    monkeypatch.setattr(
        rawio.mmap, "mmap", lambda fd, nbytes, **kind: made.append(nbytes) or real(fd, nbytes, **kind)
    )
    for name in ("a", "b"):
        write_stream(store, name, bytes(MEGABYTES), part_bytes=MEGABYTES)
    assert made == [SMALL.buffer_bytes] * SMALL.buffers


def test_a_buffered_stream_is_flushed_and_dropped_from_the_cache_as_it_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_writer, "_FLUSH_EVERY_BYTES", 1 << 20)
    dropped: list[tuple[int, int]] = []
    real = os.posix_fadvise

    def fadvise(descriptor: int, offset: int, nbytes: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_DONTNEED
        dropped.append((offset, nbytes))
        real(descriptor, offset, nbytes, advice)

    monkeypatch.setattr(os, "posix_fadvise", fadvise)
    write_stream(LocalStore(tmp_path, files=BUFFERED), "a", bytes(MEGABYTES), part_bytes=3 << 19)
    assert [offset for offset, _ in dropped] == [0, *itertools.accumulate(n for _, n in dropped)][:-1]
    assert sum(nbytes for _, nbytes in dropped) > MEGABYTES - (1 << 20)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"buffer_bytes": 5000}, "buffer_bytes is 5000; direct I/O needs a multiple of 4096"),
        ({"buffers": 0}, "buffers is 0; give an int of at least 1"),
        ({"buffers": 5}, "5 buffers of 4194304 bytes exceed the 16 MiB .* use fewer or smaller"),
    ],
)
def test_impossible_options_are_rejected(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FileOptions(**fields)


def _record_pwrite(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, int, int]]:
    """Record (direct, offset, bytes) of each request."""
    requests: list[tuple[bool, int, int]] = []
    real = os.pwrite

    def pwrite(descriptor: int, data: memoryview, offset: int) -> int:
        direct = bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
        requests.append((direct, offset, len(data)))
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    return requests


def _rejecting_direct(descriptor: int, data: memoryview, offset: int, *, real: Any = os.pwrite) -> int:
    if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    written: int = real(descriptor, data, offset)
    return written


DOES_LESS: dict[str, tuple[Any, str, Any]] = {
    "reserves no space": (rawio, "_fallocate", _fallocate_answering(errno.EOPNOTSUPP)),
    "has no direct I/O": (rawio, "_O_DIRECT", 0),
    "rejects direct writes": (os, "pwrite", _rejecting_direct),
    "writes a part": (os, "pwrite", lambda fd, data, offset, real=os.pwrite: real(fd, data[:5_000], offset)),
}


@pytest.mark.parametrize("kind", DOES_LESS)
def test_a_file_system_that_does_less_still_stores(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(*DOES_LESS[kind])
    for name, part_bytes in (("a", 100_000), ("b", 1 << 20)):
        write_stream(store, name, some_bytes(MEGABYTES), part_bytes=part_bytes)
        assert store.read(name, max_bytes=MEGABYTES) == some_bytes(MEGABYTES)


# Descriptors and durability.


def test_few_files_stay_open_however_many_are_read(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, open_files=4)
    for index in range(30):
        store.write(f"f{index}", bytes([index]))
    for index in range(30):
        assert read_range(store, f"f{index}", 0, 1) == bytes([index])
    assert 1 <= open_descriptors(tmp_path) <= 4 + 1, "those of the cache, and the root"
    store.close()
    assert open_descriptors(tmp_path) == 0


def test_an_evicted_file_stays_open_for_the_thread_that_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(tmp_path, open_files=1)
    store.write("a", b"aa")
    store.write("b", b"bb")
    real = os.preadv

    def preadv(descriptor: int, parts: list[memoryview], offset: int) -> int:
        if offset == 0:  # in the middle of reading "a": push it out of the cache
            assert read_range(store, "b", 1, 2) == b"b"
        return real(descriptor, parts, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    assert read_range(store, "a", 0, 2) == b"aa"
    store.close()


def test_failures_leak_no_descriptors(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.write("a", b"1")
    os.symlink("a", f"{store.location}/link")
    before = open_descriptors(Path(store.location))
    monkeypatch.setattr(os, "fsync", _raiser(errno.EIO))
    for use in (
        lambda: store.write("b", b""),
        lambda: store.replace("b", b""),
        lambda: write_stream(store, "b", bytes(100_000), part_bytes=100_000),
        lambda: store.read("link", max_bytes=1),
        lambda: store.read("d/none", max_bytes=1),
        lambda: store.sync(),
    ):
        with pytest.raises(StorageError):
            use()
    with pytest.raises(FormatError):
        store.read("a", max_bytes=0)
    assert open_descriptors(Path(store.location)) == before


def test_sync_flushes_every_directory_that_changed_and_only_those(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for directory in ("quiet", "busy"):
        write_stream(store, f"{directory}/a", b"1", part_bytes=1)
    store.sync()
    flushed = _record_fsync(monkeypatch)
    store.sync()
    assert flushed == []
    write_stream(store, "busy/new/b", b"1", part_bytes=1)
    store.delete(["busy/a"])
    flushed.clear()
    store.sync()
    assert sorted(os.path.relpath(path, store.location) for path in flushed) == ["busy", "busy/new"]


def test_a_file_that_is_replaced_is_durable_with_its_name(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed = _record_fsync(monkeypatch)
    store.replace("d/e/a", b"1")
    locations = [os.path.relpath(path, store.location) for path in flushed]
    assert locations[0].startswith("d/e/.a.")
    assert sorted(locations[1:]) == [".", "..", "d", "d/e"]  # the store itself is new, too


def test_the_content_of_a_small_file_is_durable_when_written_and_its_name_after_sync(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed = _record_fsync(monkeypatch)
    store.write("d/e/a", b"1")
    assert [os.path.relpath(path, store.location) for path in flushed] == ["d/e/a"]
    store.sync()
    assert sorted(os.path.relpath(path, store.location) for path in flushed[1:]) == [".", "..", "d", "d/e"]


def test_a_failed_sync_is_tried_again(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    write_stream(store, "d/a", b"1", part_bytes=1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", _raiser(errno.EIO))
        with pytest.raises(StorageError, match=r"cannot flush: .*EIO"):
            store.sync()
    flushed = _record_fsync(monkeypatch)
    store.sync()
    assert sorted(os.path.relpath(path, store.location) for path in flushed) == [".", "..", "d"]


def test_directories_that_were_made_on_the_way_to_a_store_are_flushed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(tmp_path / "runs" / "one")
    store.create()
    flushed = _record_fsync(monkeypatch)
    store.sync()
    store.sync()
    assert sorted(os.path.relpath(path, tmp_path) for path in flushed) == [".", "runs"]


def test_a_file_system_that_cannot_flush_directories_is_accepted(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_stream(store, "a", b"1", part_bytes=1)
    monkeypatch.setattr(os, "fsync", _raiser(errno.EINVAL))
    store.sync()


def _record_fsync(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    flushed: list[str] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        flushed.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return flushed


DATA = bytes(range(256)) * 5


def test_each_block_has_the_xxh3_digest_of_its_bytes() -> None:
    expected = [xxhash.xxh3_64_intdigest(DATA[start : start + 500]) for start in (0, 500, 1000)]
    for data in (DATA, np.frombuffer(DATA, np.float64).reshape(2, -1)):  # counted by bytes, not by elements
        digests = block_digests(memoryview(data), 500)
        assert (digests.dtype, digests.tolist()) == (np.uint64, expected)
    for nothing in (b"", np.empty((0, 2), np.float32)):
        assert block_digests(memoryview(nothing), 10).tolist() == []


@pytest.mark.parametrize("part_bytes", [1, 7, 499, 500, 501, 1000, 1300])
def test_parts_of_any_size_give_the_same_digests(part_bytes: int) -> None:
    digester = BlockDigester(500)
    for start in range(0, len(DATA), part_bytes):
        digester.update(memoryview(DATA)[start : start + part_bytes])
        digester.result()  # asking early must not disturb
    assert digester.result().tolist() == block_digests(memoryview(DATA), 500).tolist()


def test_a_block_has_at_least_one_byte() -> None:
    with pytest.raises(ValueError, match="block_bytes is 0; a block has at least one byte"):
        BlockDigester(0)


def test_a_file_digest_is_the_canonical_xxh3_128() -> None:
    # The empty input's value is given in the xxHash test vectors.
    assert digest_of(b"") == "99aa06d3014798d86001c324468d497f"


def test_a_write_of_no_byte_is_an_error_and_not_a_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rawio.os, "pwrite", lambda descriptor, data, offset: 0)
    with open(tmp_path / "file", "wb") as file, pytest.raises(OSError, match="wrote no byte of a request"):
        rawio.write_fully(file.fileno(), memoryview(b"some bytes"), 0)


checksums = pytest.importorskip("awscrt.checksums", reason="the extra digests is not installed")

OPTIONS = SaveOptions(array_digests=True)


def digest_of_array(array: torch.Tensor) -> int:
    """The reference: all bytes at once."""
    crc: int = checksums.crc64nvme(bytes(byte_view(as_bits(array.contiguous()))))
    return crc


@settings(max_examples=few(25, of=400), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), array=arrays(), ranks=st.integers(1, 4), validates=st.booleans())
def test_a_save_at_any_layout_stores_the_digest_of_the_array(
    data: st.DataObject, array: torch.Tensor, ranks: int, validates: bool
) -> None:
    layout = data.draw(owned_chunks(tuple(array.shape), ranks=ranks), label="layout")
    store = MemoryStore()
    save_on_ranks(
        ranks,
        lambda rank: {"shards": declared_chunks(layout, array, rank)},
        store,
        options=OPTIONS,
        validate_access_integrity=validates,
    )
    digests = open_checkpoint(store, allow_unsafe_pickle=False).array_digests
    assert digests == {"array": digest_of_array(array)}


def test_a_chunk_that_several_ranks_write_parts_of_counts_once() -> None:
    array, odd = torch.rand(6000, 1001), torch.rand(3, 5)  # cut into parts; written by one
    store = MemoryStore()

    def copies(rank: int) -> dict[str, ShardedTensor]:
        arrays = {"array": array, "odd": odd}
        return {key: sharded(key, tensor, replica_id=rank) for key, tensor in arrays.items()}

    save_on_ranks(3, copies, store, options=OPTIONS)
    contents = open_checkpoint(store, allow_unsafe_pickle=False)
    assert len(contents.chunks(["array"]).table) > 1
    assert contents.array_digests == {"array": digest_of_array(array), "odd": digest_of_array(odd)}


def test_an_array_with_gaps_has_no_digest() -> None:
    store = MemoryStore()
    whole = sharded("whole", torch.ones(3))
    part = sharded("part", torch.ones(3), (0, 1, 2))
    save({"state": [whole, part]}, store, options=OPTIONS, validate_access_integrity=False)
    assert set(open_checkpoint(store, allow_unsafe_pickle=False).array_digests) == {"whole"}


def table_of(boxes: list[tuple[Box, int, int]], shape: tuple[int, ...], itemsize: int) -> ChunkTable:
    """Chunks of one array, as flat ranges of boxes."""
    dims = max(len(shape), 1)
    extents = np.array([[*box.shape, *[1] * (dims - len(shape))] for box, _, _ in boxes])
    start = np.array([[*box.start, *[0] * (dims - len(shape))] for box, _, _ in boxes])
    low, high = (np.array([chunk[i] for chunk in boxes]) for i in (1, 2))
    dtype = {1: "uint8", 2: "bfloat16", 16: "complex128"}[itemsize]
    number = np.zeros(len(boxes), np.int64)
    return ChunkTable(
        (ArraySpec("array", dtype, shape),), number, start, extents, low, high, (high - low) * itemsize
    )


@settings(max_examples=few(50, of=1000), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    data=st.data(),
    shape=st.lists(st.sampled_from([1, 2, 3, 7, 40, 150]), max_size=3).map(tuple),
    itemsize=st.sampled_from([1, 2, 16]),
    seed=st.integers(0, 99),
)
def test_parts_of_chunks_from_anywhere_and_of_any_length_make_up_the_digest(
    data: st.DataObject, shape: tuple[int, ...], itemsize: int, seed: int
) -> None:
    array = np.random.default_rng(seed).integers(0, 256, (*shape, itemsize), dtype=np.uint8)
    chunks = []
    for box in data.draw(boxes(shape)):
        cuts = data.draw(st.lists(st.integers(0, box.numel), max_size=2))
        ends = [0, *sorted(cuts), box.numel]
        chunks += [(box, a, b) for a, b in pairwise(ends) if b > a]
    digester = ArrayDigester(table_of(chunks, shape, itemsize))
    contributions = np.zeros(len(chunks), np.uint64)
    for row, (box, low, high) in enumerate(chunks):
        of_chunk = array[box.slices()].tobytes()[low * itemsize : high * itemsize]
        ends = sorted({0, len(of_chunk), *data.draw(st.lists(st.integers(1, len(of_chunk)), max_size=3))})
        steps = data.draw(st.sampled_from([1 << 20, 1000, 129]))
        for begin, end in pairwise(ends):
            part = digester.begin(row, start=begin)
            assert part is not None
            for at in range(begin, end, steps):
                part.update(memoryview(of_chunk)[at : min(at + steps, end)])
            contributions[row] ^= np.uint64(part.result())
    whole = digester.combine(contributions, {"array"})
    assert whole == {"array": checksums.crc64nvme(array.tobytes())}


@settings(max_examples=few(40, of=400), deadline=None)
@given(data=st.data(), shape=st.lists(st.integers(1, 6), max_size=4).map(tuple))
def test_runs_are_the_positions_of_the_bytes_of_a_box(data: st.DataObject, shape: tuple[int, ...]) -> None:
    location = np.arange(math.prod(shape) * 2).reshape(*shape, 2)
    for box in data.draw(boxes(shape)):
        if box.numel:
            runs = box_ranges(box.start, box.shape, shape, itemsize=2)
            begins = [runs.begin_of(run) for run in range(runs.count)]
            positions = [begin + at for begin in begins for at in range(runs.nbytes)]
            assert positions == location[box.slices()].reshape(-1).tolist()
            assert all(extent > 1 for extent in runs.extents)


def test_the_finished_value_is_that_of_the_catalogue() -> None:
    crc, data = Crc64(), b"123456789"
    value = crc.of(memoryview(data)[4:], crc.of(memoryview(data)[:4]))
    assert crc.finished(value, len(data)) == 0xAE8B14860A799888


def test_zeros_in_front_change_nothing_and_zeros_behind_are_a_shift() -> None:
    crc, data, zeros = Crc64(), b"some bytes", bytes(1000)
    value = crc.of(memoryview(data))
    assert crc.of(memoryview(zeros + data)) == value
    assert crc.of(memoryview(data + zeros)) == crc.shifted(value, 1000)
    assert crc.of(memoryview(zeros)) == 0


@pytest.mark.parametrize("nbytes", [1, 3, 8, 24, 127, 128, 1000])
@pytest.mark.parametrize("count", [0, 1, 5, 200])
def test_many_values_are_those_of_one_by_one(nbytes: int, count: int) -> None:
    crc = Crc64()
    data = np.random.default_rng(7).integers(0, 256, count * nbytes, dtype=np.uint8)
    parts = [memoryview(data.tobytes())[at : at + nbytes] for at in range(0, len(data), nbytes)]
    values = crc.of_each(memoryview(data.tobytes()), nbytes)
    assert values.tolist() == [crc.of(part) for part in parts]
    assert crc.shift(values, 77).tolist() == [crc.shifted(value, 77) for value in values.tolist()]


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 64), (70, 3), (5, 101)])
def test_rows_fold_to_the_value_of_their_bytes(shape: tuple[int, int]) -> None:
    crc, (rows, count) = Crc64(), shape
    data = np.random.default_rng(7).integers(0, 256, (rows, count, 10), dtype=np.uint8)
    values = np.array([crc.of_each(row.tobytes(), 10) for row in data])  # type: ignore[arg-type]
    assert crc.fold(values, 10).tolist() == [crc.of(memoryview(row.tobytes())) for row in data]


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "awscrt.checksums", None)
    with pytest.raises(MissingExtraError, match=r"package awscrt, .* pip install 'megackpt\[digests\]'"):
        Crc64()
