# ruff: noqa: D102 - the name of a test is its claim
"""Tests that every store must pass: subclass `StoreConformance` and give it a `store` fixture.

They test what holds for all stores. What only one kind promises (durability, symbolic links, direct I/O) has
tests of its own.

    class TestMyStore(StoreConformance):
        @pytest.fixture
        def store(self) -> Store:
            return MyStore()
"""

from __future__ import annotations

import errno
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from megackpt.errors import CheckpointError, FormatError, StorageError
from megackpt.storage import MAX_BORROWED_BYTES, Store, as_store

# Not a multiple of any page, block or buffer, and larger than all staging buffers of a store under test.
_LARGE = 3 * (1 << 20) + 12_345
_BAD_NAMES = ["", "/a", "a//b", "a/", "./a", "a/.", "..", "../a", "a/../../b", "a\\b", "a\0b", "a\ud800b"]


def some_bytes(nbytes: int, *, seed: int = 0) -> bytes:
    """Return reproducible random bytes."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8).tobytes()


def write_stream(store: Store, name: str, data: bytes, *, part_bytes: int) -> None:
    """Write `data` through a writer, in several parts."""
    with store.open_writer(name, len(data)) as writer:
        for start in range(0, len(data), part_bytes):
            writer.write(memoryview(data)[start : start + part_bytes])


def read_range(store: Store, name: str, start: int, stop: int) -> bytes:
    """Read bytes `[start, stop)` through `read_into`."""
    out = bytearray(stop - start)
    store.read_into(name, start, memoryview(out))
    return bytes(out)


class StoreConformance:
    """The tests. The fixture `store` returns a new, empty store; the suite creates and closes it.

    Errors are compared by type and fields: `path`, which is `store.location` and the name, and `errno` where
    an operating system would set one. Their texts are up to the store.

    Attributes:
        has_directories: whether a name cannot be both a file and a directory. In an object store it can.
        checks_wording: whether the texts of errors must be those of megackpt's own stores.
    """

    has_directories = True
    checks_wording = False

    @contextmanager
    def raises(
        self,
        error: type[CheckpointError],
        path: str | None,
        wording: str,
        *,
        code: int | None = None,
    ) -> Iterator[None]:
        """Expect an error of a class with these fields; a `path` of None is not compared."""
        with pytest.raises(error) as caught:
            yield
        assert path is None or caught.value.path == path
        assert code is None or caught.value.errno == code  # type: ignore[attr-defined]
        if self.checks_wording:
            assert re.search(wording, str(caught.value))

    @pytest.fixture
    def store(self) -> Store:
        """Return the store under test."""
        raise NotImplementedError("A subclass of StoreConformance defines the fixture `store`.")

    @pytest.fixture(autouse=True)
    def _created(self, store: Store) -> Iterator[None]:
        store.create()
        yield
        store.close()

    def test_create_again_changes_nothing(self, store: Store) -> None:
        store.write("a", b"1")
        store.create()
        assert store.read("a", max_bytes=10) == b"1"

    def test_a_small_file_reads_as_written(self, store: Store) -> None:
        store.write("dir/sub/a.json", b"hello")
        assert store.read("dir/sub/a.json", max_bytes=5) == b"hello"
        assert store.size("dir/sub/a.json") == 5

    def test_an_empty_file_is_a_file(self, store: Store) -> None:
        store.write("a", b"")
        with store.open_writer("b", 0):
            pass
        assert store.names() == ["a", "b"]
        assert store.read("a", max_bytes=0) == b""
        assert store.size("b") == 0

    def test_write_replaces_an_older_file(self, store: Store) -> None:
        store.write("a", b"a longer one")
        assert read_range(store, "a", 0, 12) == b"a longer one"
        store.write("a", b"short")
        assert store.read("a", max_bytes=100) == b"short"
        assert read_range(store, "a", 0, 5) == b"short"

    def test_replace_gives_the_new_bytes_to_every_kind_of_read(self, store: Store) -> None:
        store.replace("d/metadata.json", b"old old")
        assert read_range(store, "d/metadata.json", 0, 7) == b"old old"
        store.replace("d/metadata.json", b"new")
        assert store.read("d/metadata.json", max_bytes=100) == b"new"
        assert read_range(store, "d/metadata.json", 0, 3) == b"new"
        assert store.size("d/metadata.json") == 3
        assert store.names() == ["d/metadata.json"]

    @pytest.mark.parametrize("part_bytes", [_LARGE, 1 << 20, 100_001, 4096])
    @pytest.mark.parametrize("nbytes", [1, 4095, 4096, 4097, 1 << 20, _LARGE])
    def test_a_stream_reads_as_written(self, store: Store, nbytes: int, part_bytes: int) -> None:
        data = some_bytes(nbytes)
        write_stream(store, "data/s", data, part_bytes=part_bytes)
        assert store.size("data/s") == nbytes
        assert store.read("data/s", max_bytes=nbytes) == data
        assert read_range(store, "data/s", nbytes // 3, nbytes) == data[nbytes // 3 :]

    def test_a_stream_takes_buffers_of_any_element_type_and_lets_them_be_reused(self, store: Store) -> None:
        numbers = np.arange(700_000, dtype=np.float32).reshape(7, 100_000)
        expected = numbers.tobytes()
        with store.open_writer("a", numbers.nbytes) as writer:
            row = np.empty(100_000, np.float32)
            for index in range(7):
                row[:] = numbers[index]
                writer.write(row.data)
                row[:] = -1
            writer.write(memoryview(b""))
        assert store.read("a", max_bytes=len(expected)) == expected

    def test_a_stream_replaces_an_older_file(self, store: Store) -> None:
        write_stream(store, "a", some_bytes(10_000), part_bytes=10_000)
        assert read_range(store, "a", 0, 1) == some_bytes(10_000)[:1]
        write_stream(store, "a", b"xyz", part_bytes=2)
        assert store.read("a", max_bytes=100) == b"xyz"
        assert read_range(store, "a", 0, 3) == b"xyz"

    def test_closing_a_writer_twice_is_harmless(self, store: Store) -> None:
        with store.open_writer("a", 1) as writer:
            writer.write(memoryview(b"1"))
            writer.close()
            writer.close()
        assert store.read("a", max_bytes=1) == b"1"

    @pytest.mark.parametrize("nbytes", [10, _LARGE])
    def test_an_exception_removes_the_partial_file(self, store: Store, nbytes: int) -> None:
        with pytest.raises(KeyError), store.open_writer("d/a", nbytes) as writer:  # noqa: PT012
            writer.write(memoryview(bytes(nbytes - 1)))
            raise KeyError("stop")
        assert not store.exists("d/a")

    @pytest.mark.parametrize("nbytes", [10, _LARGE])
    def test_an_incomplete_stream_is_an_error_and_is_removed(self, store: Store, nbytes: int) -> None:
        wording = rf"/a: closed after {nbytes - 1:,} of {nbytes:,} bytes.*Write all of it"
        path = f"{store.location}/a"
        with self.raises(StorageError, path, wording), store.open_writer("a", nbytes) as writer:
            writer.write(memoryview(bytes(nbytes - 1)))
        assert store.names() == []

    def test_more_bytes_than_the_size_of_the_file_are_an_error(self, store: Store) -> None:
        wording = r"/a: 2 more bytes after 2 exceed the 3 .*Open the writer with the size of everything"
        path = f"{store.location}/a"
        with self.raises(StorageError, path, wording), store.open_writer("a", 3) as writer:
            writer.write(memoryview(b"12"))
            writer.write(memoryview(b"34"))
        assert not store.exists("a")

    def test_a_write_after_closing_is_an_error(self, store: Store) -> None:
        with store.open_writer("a", 1) as writer:
            writer.write(memoryview(b"1"))
        wording = r"/a: this writer is closed. Open a new one"
        with self.raises(StorageError, f"{store.location}/a", wording):
            writer.write(memoryview(b""))

    def test_read_of_a_file_larger_than_allowed_is_an_error(self, store: Store) -> None:
        store.write("index", b"123456")
        wording = r"/index: the file has 6 bytes, more than the 5 .*restore it"
        with self.raises(FormatError, f"{store.location}/index", wording):
            store.read("index", max_bytes=5)

    def test_read_into_beyond_the_end_is_an_error(self, store: Store) -> None:
        store.write("d/a", b"123456")
        wording = r"d/a: the file ends at byte 6, but bytes \[4:7\) are needed.*restore it"
        with self.raises(FormatError, f"{store.location}/d/a", wording):
            read_range(store, "d/a", 4, 7)

    def test_read_into_fills_arrays_in_place(self, store: Store) -> None:
        numbers = np.arange(10, dtype=np.int64)
        store.write("a", numbers.tobytes())
        out = np.zeros((2, 3), np.int64)
        store.read_into("a", 8, out.data)
        assert out.tolist() == [[1, 2, 3], [4, 5, 6]]
        store.read_into("a", 80, np.empty((0, 3), np.int64).data)

    def test_a_missing_file_is_named(self, store: Store) -> None:
        for action in (
            lambda: store.read("no/file", max_bytes=1),
            lambda: store.size("no/file"),
            lambda: read_range(store, "no/file", 0, 1),
            lambda: read_range(store, "no/file", 0, 0),
        ):
            wording = r"no/file: cannot .*ENOENT.*does not exist: check"
            with self.raises(StorageError, f"{store.location}/no/file", wording, code=errno.ENOENT):
                action()

    def test_exists_is_about_files_and_not_directories_of_others(self, store: Store) -> None:
        store.write("d/a", b"")
        assert store.exists("d/a")
        assert not store.exists("d/b")
        assert not store.exists("e/a")

    def test_names_are_sorted_and_filtered_by_prefix(self, store: Store) -> None:
        for name in ("data/b", "data/a", "data/sub/c", "database", "metadata.json"):
            store.write(name, b"")
        assert store.names() == ["data/a", "data/b", "data/sub/c", "database", "metadata.json"]
        assert store.names("data/") == ["data/a", "data/b", "data/sub/c"]
        assert store.names("data") == ["data/a", "data/b", "data/sub/c", "database"]
        assert store.names("data/s") == ["data/sub/c"]
        assert store.names("x") == []

    def test_delete_ignores_what_is_missing(self, store: Store) -> None:
        store.write("d/a", b"1")
        assert read_range(store, "d/a", 0, 1) == b"1"
        store.delete(["d/a", "d/a", "d/b", "x/y/z"])
        store.sync()
        assert store.names() == []
        with self.raises(StorageError, f"{store.location}/d/a", "d/a: cannot", code=errno.ENOENT):
            read_range(store, "d/a", 0, 1)

    def test_a_name_cannot_be_a_file_and_a_directory(self, store: Store) -> None:
        if not self.has_directories:
            pytest.skip("names of this store are flat")
        store.write("a", b"")
        wording = r"/a/b: cannot create: .*ENOTDIR.*a file where a directory"
        with self.raises(StorageError, f"{store.location}/a/b", wording, code=errno.ENOTDIR):
            store.write("a/b", b"")
        store.write("d/a", b"")
        wording = r"/d: cannot create: .*EISDIR.*directory where a file"
        with self.raises(StorageError, f"{store.location}/d", wording, code=errno.EISDIR):
            store.write("d", b"")

    # What few stores define themselves; `as_store` adds the defaults to a store without them.

    @pytest.mark.parametrize(("offset", "nbytes"), [(0, 0), (0, 10), (5, 70_000), (1 << 20, 1 << 20)])
    def test_a_borrowed_range_has_the_bytes_of_the_file(self, store: Store, offset: int, nbytes: int) -> None:
        write_stream(store, "d/a", some_bytes(_LARGE), part_bytes=1 << 20)
        with as_store(store).borrow("d/a", offset, nbytes) as data:
            assert bytes(data) == some_bytes(_LARGE)[offset : offset + nbytes]

    def test_borrowing_beyond_the_end_is_an_error(self, store: Store) -> None:
        store.write("d/a", b"123456")
        wording = r"d/a: the file ends at byte 6, but bytes \[4:7\) are needed"
        with (
            self.raises(FormatError, f"{store.location}/d/a", wording),
            as_store(store).borrow("d/a", 4, 3),
        ):
            pass
        for offset, nbytes in ((0, MAX_BORROWED_BYTES + 1), (-1, 2), (0, -1)):
            with pytest.raises(ValueError), as_store(store).borrow("d/a", offset, nbytes):  # noqa: PT011
                pass

    def test_a_streaming_read_fills_the_buffer_from_front_to_back(self, store: Store) -> None:
        data = some_bytes(_LARGE)
        write_stream(store, "d/a", data, part_bytes=1 << 20)
        out = bytearray(_LARGE - 7)
        count = 0
        for count in as_store(store).stream_into("d/a", 7, memoryview(out)):
            assert out[:count] == data[7 : 7 + count]
        assert count == len(out)

    def test_a_moved_file_has_its_new_name_only(self, store: Store) -> None:
        write_stream(store, "d/old", some_bytes(_LARGE), part_bytes=1 << 20)
        store.write("e/new", b"an older file")
        as_store(store).move("d/old", "e/new")
        store.sync()
        assert store.names() == ["e/new"]
        assert store.read("e/new", max_bytes=_LARGE) == some_bytes(_LARGE)
        assert read_range(store, "e/new", 3, 9) == some_bytes(_LARGE)[3:9]

    def test_a_file_moved_to_its_own_name_stays(self, store: Store) -> None:
        store.write("d/a", b"content")
        as_store(store).move("d/a", "d/a")
        store.sync()
        assert store.read("d/a", max_bytes=10) == b"content"

    def test_asking_what_is_cached_and_removing_directories_changes_no_file(self, store: Store) -> None:
        store.write("d/a", b"1")
        assert as_store(store).is_cached("d/a") in (True, False)
        as_store(store).remove_empty_directories()
        assert store.names() == ["d/a"]

    @pytest.mark.parametrize("name", _BAD_NAMES)
    def test_a_name_that_could_lead_outside_is_an_error(self, store: Store, name: str) -> None:
        uses: list[Any] = [
            lambda: store.open_writer(name, 1),
            lambda: store.write(name, b""),
            lambda: store.replace(name, b""),
            lambda: store.read(name, max_bytes=1),
            lambda: read_range(store, name, 0, 1),
            lambda: store.size(name),
            lambda: store.exists(name),
            lambda: store.delete([name]),
        ]
        for use in uses:
            with self.raises(StorageError, None, r"the file name .* so it is not allowed.*relative"):
                use()

    def test_negative_numbers_are_errors(self, store: Store) -> None:
        store.write("a", b"1")
        wordings = ("a: nbytes is -1; a file has at least 0", "a: offset_bytes is -1; it cannot be negative")
        with pytest.raises(ValueError, match=wordings[0] if self.checks_wording else None):
            store.open_writer("a", -1)
        with pytest.raises(ValueError, match=wordings[1] if self.checks_wording else None):
            store.read_into("a", -1, memoryview(bytearray(1)))

    def test_many_threads_may_write_and_read_at_once(self, store: Store) -> None:
        failures: list[BaseException] = []

        def work(index: int) -> None:
            try:
                data = some_bytes(300_000 + index, seed=index)
                write_stream(store, f"t/{index}", data, part_bytes=70_000)
                for start in range(0, len(data), 50_000):
                    stop = min(start + 50_000, len(data))
                    assert read_range(store, f"t/{index}", start, stop) == data[start:stop]
                store.sync()
            except BaseException as error:  # noqa: BLE001 - handed over to the main thread
                failures.append(error)

        threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert len(store.names("t/")) == 8

    def test_a_closed_store_can_be_used_again(self, store: Store) -> None:
        write_stream(store, "a", some_bytes(_LARGE), part_bytes=1 << 20)
        store.close()
        assert read_range(store, "a", 5, 10) == some_bytes(_LARGE)[5:10]
        write_stream(store, "a", b"1", part_bytes=1)
