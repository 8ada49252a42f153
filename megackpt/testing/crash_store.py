"""A store whose machine stops at a chosen moment, to test what a crash leaves of a checkpoint.

The moments are before, during and after each operation that changes anything; `cached_disk` says what is on
the disk then. All ranks share the disk. Each rank has a store of its own, because `sync` makes durable only
what was done through the same object.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from megackpt.storage import MemoryStore, Store, StreamWriter, check_name
from megackpt.storage.error_translation import storage_error
from megackpt.storage.store import SizedWriter
from megackpt.testing.cached_disk import CachedDisk, CachedFile, Loss


class Stopped(BaseException):
    """The process is no more. No error of a program: nothing may catch it, and nothing runs after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """When to stop.

    Attributes:
        rank: in an operation of which rank.
        index: how many moments of this rank come before; from 0.
        only_this_rank: only this rank dies, and others go on; else the machine stops.
    """

    rank: int
    index: int
    only_this_rank: bool = False


class CrashMachine:
    """A machine with one disk and a number of ranks, whose stores are safe for many threads.

    files are on the disk at the beginning; stop_at is when it stops, None for never.

    Attributes:
        passed: how many moments each rank has come to, `{rank: count}`.
    """

    def __init__(self, files: dict[str, bytes] | None = None, *, stop_at: Moment | None = None) -> None:
        self.passed: Counter[int] = Counter()
        self.disk = CachedDisk.holding(files or {})
        self.lock = threading.RLock()
        self._stop_at = stop_at
        self._dead_ranks: set[int] = set()
        self._reason: str | None = None

    @property
    def has_stopped(self) -> bool:
        """Whether the chosen moment has come."""
        return self._reason is not None

    def store(self, *, rank: int) -> CrashStore:
        """Return a new store of a rank."""
        return CrashStore(self, rank)

    def restarted(self, loss: Loss, *, stop_at: Moment | None = None) -> CrashMachine:
        """Return the machine as it is switched on again. This one stays as it is, and may be asked again."""
        with self.lock:
            return CrashMachine(self.disk.files_after(loss), stop_at=stop_at)

    def check_alive(self, rank: int) -> None:
        """Do nothing as long as a rank lives.

        Raises:
            Stopped: it does not.
        """
        if self._reason is not None and (rank in self._dead_ranks or not self._stops_one_rank()):
            raise Stopped(self._reason)

    def moment(self, rank: int, text: str) -> None:
        """Come to a moment of a rank, the lock held.

        Raises:
            Stopped: it is the chosen one, or came before.
        """
        self.check_alive(rank)
        index = self.passed[rank]
        self.passed[rank] += 1
        chosen = self._stop_at
        if chosen is not None and (chosen.rank, chosen.index) == (rank, index):
            self._reason = text
            self._dead_ranks.add(rank)
            raise Stopped(text)

    def _stops_one_rank(self) -> bool:
        return self._stop_at is not None and self._stop_at.only_this_rank


class CrashStore(Store):
    """One rank's way to the disk of a CrashMachine; a `Store`, see there for what each method does.

    It makes durable what the protocol promises and nothing more, as late as the protocol allows.
    """

    location = "crash:"
    moves_atomically = True

    def __init__(self, machine: CrashMachine, rank: int) -> None:
        self._machine = machine
        self._rank = rank
        self._unsynced: dict[str, None] = {}  # names, in the order in which they changed

    def create(self) -> None:
        """Make the directory."""
        with self._machine.lock:
            self.moment("before create")
            self.moment("after create")

    def open_writer(self, name: str, nbytes: int) -> StreamWriter:
        """Start a new file; it is visible at once."""
        with self._machine.lock:
            self.moment(f"before opening {name!r}")
            file = self._new(name)
            self.moment(f"after opening {name!r}")
            return CrashWriter(self, name, file, nbytes)

    def write(self, name: str, data: bytes) -> None:
        """Write a small file."""
        with self._machine.lock:
            self.moment(f"before write of {name!r}")
            file = self._new(name)
            self._fill(name, file, data)
            self.moment(f"after write of {name!r}")

    def replace(self, name: str, data: bytes) -> None:
        """Write a temporary file, then rename it over the old one."""
        disk = self._machine.disk
        head, slash, leaf = name.rpartition("/")
        temporary = f"{head}{slash}.{leaf}.{0:016x}.tmp"
        with self._machine.lock:
            self.moment(f"before replace of {name!r}")
            file = self._new(temporary)
            self._fill(temporary, file, data)
            disk.seen[name] = disk.seen.pop(temporary)
            self._note(name)
            self.moment(f"after rename to {name!r}")
            disk.flush_names([temporary, name])
            self.moment(f"after replace of {name!r}")

    def read(self, name: str, *, max_bytes: int) -> bytes:
        """Return a whole small file."""
        return self._reading().read(name, max_bytes=max_bytes)

    def read_into(self, name: str, offset_bytes: int, out: memoryview) -> None:
        """Fill `out`."""
        self._reading().read_into(name, offset_bytes, out)

    def size(self, name: str) -> int:
        """Return the size in bytes."""
        return self._reading().size(name)

    def exists(self, name: str) -> bool:
        """Tell whether there is such a file."""
        return self._reading().exists(name)

    def names(self, prefix: str = "") -> list[str]:
        """Return the names that begin with `prefix`."""
        return self._reading().names(prefix)

    def delete(self, names: Iterable[str]) -> None:
        """Remove files one by one."""
        for name in names:
            check_name(name, location=self.location)
            with self._machine.lock:
                self.moment(f"before removal of {name!r}")
                self._machine.disk.seen.pop(name, None)
                self._note(name)
                self.moment(f"after removal of {name!r}")

    def move(self, name: str, target: str) -> None:
        """Give a file another name."""
        check_name(target, location=self.location)
        disk = self._machine.disk
        with self._machine.lock:
            self.moment(f"before move of {name!r}")
            if name not in disk.seen:
                raise storage_error(
                    OSError(errno.ENOENT, os.strerror(errno.ENOENT)),
                    action="move",
                    path=f"{self.location}/{name}",
                )
            disk.seen[target] = disk.seen.pop(name)
            disk.moves[target] = name
            self._note(target)
            self._note(name)
            self.moment(f"after move of {name!r}")

    def sync(self) -> None:
        """Make names durable, one after the other."""
        with self._machine.lock:
            self.moment("before sync")
            names, self._unsynced = list(self._unsynced), {}
            for name in names:
                self._machine.disk.flush_names([name])
                self.moment(f"in sync, after {name!r}")

    def close(self) -> None:
        """Nothing is held."""

    def moment(self, text: str) -> None:
        """Come to a moment of this rank, the lock held."""
        self._machine.moment(self._rank, text)

    def append(self, name: str, file: CachedFile, data: bytes) -> None:
        """Put bytes at the end of a file that is being written, in two parts."""
        with self._machine.lock:
            self.moment(f"before writing to {name!r}")
            half = len(data) // 2
            file.content += data[:half]
            self.moment(f"half of what is written to {name!r}")
            file.content += data[half:]

    def flush(self, name: str, file: CachedFile) -> None:
        """Make the content of a file durable."""
        with self._machine.lock:
            self.moment(f"before flush of {name!r}")
            file.flush()
            self.moment(f"after flush of {name!r}")

    def check_alive(self) -> None:
        """Do nothing as long as this rank lives.

        Raises:
            Stopped: it does not.
        """
        with self._machine.lock:
            self._machine.check_alive(self._rank)

    def _fill(self, name: str, file: CachedFile, data: bytes) -> None:
        self.append(name, file, data)
        self.flush(name, file)

    def _new(self, name: str) -> CachedFile:
        check_name(name, location=self.location)
        file = self._machine.disk.seen[name] = CachedFile()
        self._note(name)
        return file

    def _note(self, name: str) -> None:
        self._unsynced.pop(name, None)
        self._unsynced[name] = None

    def _reading(self) -> MemoryStore:
        """Return what is to be seen now as a store that is only read."""
        with self._machine.lock:
            self.check_alive()
            return MemoryStore(self.location, files=self._machine.disk.files_after(Loss.NOTHING))


class CrashWriter(SizedWriter):
    """A `StreamWriter` of a CrashStore."""

    def __init__(self, store: CrashStore, name: str, file: CachedFile, nbytes: int) -> None:
        super().__init__(f"{store.location}/{name}", nbytes)
        self._store = store
        self._name = name
        self._file = file

    def write(self, data: memoryview) -> None:
        """Append `data`."""
        nbytes = memoryview(data).nbytes
        self._check_room(nbytes)
        self._store.append(self._name, self._file, bytes(data))
        self._written += nbytes

    def _complete(self) -> None:
        self._open = False
        self._store.flush(self._name, self._file)

    def _abandon(self) -> None:
        self._open = False
        self._store.delete([self._name])
