"""Asynchronous saves of small states, and strategies and stores that spoil them in writer processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megackpt import AsyncOptions, Checkpointer, SaveOptions, ShardedTensor
from megackpt.comm import SingleProcess, collectives
from megackpt.engine.background.saver import AsyncSaver
from megackpt.engine.verification import verify
from megackpt.errors import StorageError
from megackpt.formats.native import NativeSaveStrategy
from megackpt.formats.strategy import ChunkParts
from megackpt.run.checkpointer.async_saving import AsyncSaving
from megackpt.storage import LocalStore, Store
from megackpt.testing.faulty_store import FaultyStore, Operation
from tests.support.states import filled

LIMIT_S = 60.0


def wait_for(claim: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    """Return when a claim holds."""
    deadline = time.monotonic() + limit_s
    while not claim():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def rejecting(store: Store) -> Store:
    """A hook of a writer process."""
    raise StorageError(f"{os.path.basename(store.location)} is rejected by the hook")


class GatedStrategy(NativeSaveStrategy):
    """Touches `begun.RANK` in a directory when it is to write, and waits for a file `go` there."""

    def __init__(self, gate: Path) -> None:
        self.gate = gate

    def write_chunks(self, *args: Any, **kwargs: Any) -> bytes:
        (self.gate / f"begun.{kwargs['rank']}").touch()
        wait_for((self.gate / "go").exists)
        return super().write_chunks(*args, **kwargs)


class TroubledStrategy(NativeSaveStrategy):
    """Gets into trouble on one rank, before it writes."""

    def __init__(self, rank: int = 1) -> None:
        self.troubled = rank

    def trouble(self) -> None:
        """What happens."""
        raise NotImplementedError

    def write_chunks(self, *args: Any, **kwargs: Any) -> bytes:
        if kwargs["rank"] == self.troubled:
            self.trouble()
        return super().write_chunks(*args, **kwargs)


class FullDiskStrategy(TroubledStrategy):
    def trouble(self) -> None:
        raise StorageError("the disk of rank 1 is full")


class MistakenStrategy(TroubledStrategy):
    """Raises what is none of ours."""

    def trouble(self) -> None:
        raise OwnMistakeError("something of one's own")


class KilledStrategy(TroubledStrategy):
    def trouble(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class LeavingStrategy(NativeSaveStrategy):
    """Ends its thread, and nothing else."""

    def write_chunks(self, *args: Any, **kwargs: Any) -> bytes:
        raise SystemExit


class TakenParts(ChunkParts):
    """The bytes of rows that were taken before."""

    def __init__(self, parts: dict[int, list[bytes]]) -> None:
        self._parts = parts

    def __call__(self, row: int) -> Iterator[memoryview]:
        return map(memoryview, self._parts[row])


class SlowStrategy(NativeSaveStrategy):
    """Pauses before each of its rows, and then takes its bytes, or writes other bytes elsewhere."""

    def __init__(self, pause_s: float, *, takes_rows: bool) -> None:
        self.pause_s, self.takes_rows = pause_s, takes_rows

    def write_chunks(self, *args: Any, **kwargs: Any) -> bytes:
        rows, parts = kwargs["rows"], kwargs["parts"]
        taken: dict[int, list[bytes]] = {}
        with open(os.devnull, "wb", buffering=0) as out:
            for row in rows.tolist():
                time.sleep(self.pause_s)
                if self.takes_rows:
                    taken[row] = [bytes(part) for part in parts(row)]
                else:
                    out.write(bytes(1))
        if self.takes_rows:
            kwargs["parts"] = TakenParts(taken)
        return super().write_chunks(*args, **kwargs)


class Damaging(LocalStore):
    """Damages the last data file when it is committed."""

    def replace(self, name: str, data: bytes) -> None:
        super().replace(name, data)
        if name == "metadata.json":
            file = max((Path(self.location) / "data").iterdir())
            content = bytearray(file.read_bytes())
            content[-1] ^= 1
            file.write_bytes(content)


def damaging_step_2(store: Store) -> Store:
    """A hook that damages step 2, and notes next to the root which shares this process verifies."""
    find_damages = verify.find_damages

    def recording(store: Store, options: Any, progress: Any, share: tuple[int, int]) -> verify.Findings:
        (Path(store.location).parent.parent / f"share-{share[0]}-of-{share[1]}").touch()
        return find_damages(store, options, progress, share)

    verify.find_damages = recording
    return Damaging(store.location) if store.location.endswith("iter_0000002") else store


ORDER = "trouble.json"
"""Next to a root: in which of its steps which writer process gets into trouble, as JSON of an `Order`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What is to happen in a writer process."""

    trainer: int  # process id of the rank whose writer it is
    before: int  # how many collectives of a save, or operations of its store, come before
    how: str  # `raises`, `dies` or `sleeps`

    def give(self, root: Path) -> None:
        """Let it happen in the next save below a root."""
        new = root.parent / f"{ORDER}.new"
        new.write_text(json.dumps({"trainer": self.trainer, "before": self.before, "how": self.how}))
        new.replace(root.parent / ORDER)

    def obey(self, begun: int) -> None:
        """Get into trouble in this process if it is the time to."""
        if begun != self.before or os.getppid() != self.trainer:
            return
        if self.how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "sleeps":
            time.sleep(LIMIT_S)
        raise OwnMistakeError("something of one's own")


class OwnMistakeError(Exception):
    """What goes wrong in a writer process."""


def order_for(store: Store) -> Order | None:
    """Return what is to happen in the save of a step, if anything is."""
    file = Path(store.location).parent.parent / ORDER
    return Order(**json.loads(file.read_text())) if file.exists() else None


def in_trouble(store: Store) -> Store:
    """A hook that gets into trouble before this process takes part in a collective: number 0 is this one."""
    order = order_for(store)
    begun = 0

    def begin_step(doing: str) -> None:
        nonlocal begun
        begun += 1
        if order is not None and order_for(store) == order:  # it is of this save, not of the one before
            order.obey(begun)

    collectives.begin_step = begin_step
    if order is not None:
        order.obey(0)
    return store


def at_an_operation(store: Store) -> Store:
    """A hook that gets into trouble before (0, 2, ...) or after (1, 3, ...) an operation on the store."""
    order = order_for(store)
    if order is None:
        return store
    index, after = divmod(order.before, 2)
    return FaultyStore(store, fail_at=index, after=bool(after), hook=lambda _: order.obey(order.before))


TIER_ORDER = "trouble-in-a-tier.json"
"""Next to the root and the directories of nodes: what happens in a tier, as JSON of a `TierOrder`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierOrder:
    """What is to happen where a step goes into a tier."""

    node: str  # directory of the node
    kind: str  # of an operation on its store, before which it happens
    name: str = ""  # a part of the name of the file concerned
    how: str  # `full`, `dies`, `sleeps`, or `held` until there is a file `go`, after one `begun`

    def give(self, base: Path) -> None:
        """Let it happen from now on."""
        messages = {"node": self.node, "kind": self.kind, "name": self.name, "how": self.how}
        (base / TIER_ORDER).write_text(json.dumps(messages))


def in_a_tier(store: Store) -> Store:
    """A hook that gets into trouble, or only waits, in the tier of one node."""
    node = Path(store.location).parent
    file = node.parent / TIER_ORDER
    order = TierOrder(**json.loads(file.read_text())) if file.exists() else None
    if order is None or node.name != order.node:
        return store

    def obey(operation: Operation) -> None:
        if order.how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if order.how == "sleeps":
            time.sleep(LIMIT_S)
        if order.how == "held":
            (node.parent / "begun").touch()
            wait_for((node.parent / "go").exists)

    def is_there(operation: Operation) -> bool:
        return operation.kind == order.kind and order.name in operation.name

    return FaultyStore(store, fail_at=is_there, hook=None if order.how == "full" else obey)


OPTIONS = SaveOptions(timeout_s=20)


def part(value: float, rows: int = 1000) -> ShardedTensor:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return filled(value + rank, rows, 10, rank=rank, ranks=ranks)


def saver_of(checkpointer: Checkpointer) -> AsyncSaver:
    saver = open_saver_of(checkpointer)
    assert saver is not None
    return saver


def open_saver_of(checkpointer: Checkpointer) -> AsyncSaver | None:
    """Return what stages and writes its saves; None if it saves synchronously, or after `close`."""
    saving = checkpointer._saving
    return saving.saver if isinstance(saving, AsyncSaving) else None


def wait_for_writers(checkpointer: Checkpointer) -> None:
    """Return when the writer process of this rank is there: how long it takes to start is not tested."""
    saver_of(checkpointer)._session.running().wait_ready()


def single_process_checkpointer(
    root: Path | Store, *, async_save: bool | AsyncOptions = True, **arguments: Any
) -> Checkpointer:
    return Checkpointer(root, async_save=async_save, group=SingleProcess(), **arguments)


def ones() -> dict[str, ShardedTensor]:
    return {"w": ShardedTensor.from_rank_offsets("w", torch.ones(4))}


def is_alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # gone before it was opened, or while it was read
        return False
    return state != "Z"


def made(directory: Path) -> Path:
    directory.mkdir()
    return directory


class NamedStore(LocalStore):
    """A directory under a name, which a pickle carries."""

    def __init__(self, directory: str | os.PathLike[str], name: str) -> None:
        super().__init__(directory)
        self.name = name

    def __reduce__(self) -> tuple[type[NamedStore], tuple[str, str]]:
        return NamedStore, (super().location, self.name)

    @property
    def location(self) -> str:
        """What messages call it."""
        return f"named:{self.name}"


class KeepsNothing(LocalStore):
    """A store whose copy in another process writes to another directory, as a store in memory would."""

    def __reduce__(self) -> tuple[type[LocalStore], tuple[str]]:
        return LocalStore, (f"{self.location}-elsewhere",)


class RequiredMethodsOnly:
    """A store that does not derive from `Store` and has its abstract methods, and nothing else."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        files = LocalStore(directory)
        for name in Store.__abstractmethods__:
            setattr(self, name, getattr(files, name))


_MOST_S = 30.0


def stop_process(pid: int) -> None:
    """Send SIGSTOP to process `pid`, and wait until each of its threads has stopped.

    The kernel lets a thread run on until the thread that takes the signal is scheduled. On a busy machine
    another thread of the process can answer several requests before.

    Raises:
        TimeoutError: A thread still runs after 30 s.
    """
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + _MOST_S
    while not _has_stopped(pid):
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {pid} still runs {_MOST_S:g} s after SIGSTOP")
        time.sleep(0.001)


def _has_stopped(pid: int) -> bool:
    states = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        try:
            text = (thread / "stat").read_text()
        except (FileNotFoundError, ProcessLookupError):  # the thread has ended
            continue
        # The state follows the name, which is in parentheses and may hold any character.
        states.append(text.rpartition(")")[2].split()[0])
    return all(state in ("T", "Z") for state in states)


_STORE = """
import sys, time
from datetime import timedelta
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
print(store.port, flush=True)
time.sleep(3600)
"""


@contextmanager
def store_process() -> Iterator[tuple[int, int]]:
    """Within the block a process serves a store, as torchrun does; yields its id and port."""
    process = subprocess.Popen([sys.executable, "-c", _STORE], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.pid, int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


class SlowCommit(NativeSaveStrategy):
    """Has written all chunks when `is_written` is set, and goes on to the commit when `goes_on` is."""

    def __init__(self) -> None:
        self.is_written, self.goes_on = threading.Event(), threading.Event()

    def write_index(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Wait, then write the index."""
        self.is_written.set()
        assert self.goes_on.wait(60)
        return super().write_index(*args, **kwargs)
