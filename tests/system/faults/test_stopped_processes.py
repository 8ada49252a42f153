"""A process is stopped by SIGSTOP at any moment: the others raise an error that names it, and nothing hangs.

Stopped are a training process that hosts the stores of a job, another one, a writer process, and a process
that serves the rendezvous store alone, as torchrun does. A process that is stopped keeps its connections,
takes new ones, and answers nothing: a paused virtual machine and a node without power look the same.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, get_args

import torch.distributed as dist

import megackpt
from megackpt import AsyncOptions, Checkpointer, CheckpointError, LoadOptions, SaveOptions, ShardedTensor
from megackpt.comm import world_group
from megackpt.testing.ranks import RankPool
from tests.support.effort import tries_all, with_all
from tests.support.states import filled
from tests.support.writers import is_alive, saver_of, stop_process, store_process, wait_for, wait_for_writers

Work = Literal["save", "async save", "wait", "load"]
Victim = Literal[
    "rank 0",
    "last rank",
    "writer of rank 0",
    "last writer",
    "launcher",
    "node of rank 0",
    "node of last rank",
]
"""A node is a rank and its writer."""

RANKS = 2
TIMEOUT_S = 10.0
"""Short of it, the seconds count that ranks give each other to say who is missing."""
HANGS_S = 20 * TIMEOUT_S
"""Who has raised nothing by then hangs. An idle machine takes twice the time-out, for a node thrice."""
NODE_S = 10.0  # more than twice the deadline, where a rank and its writer are stopped together
DELAY_S = 1.5  # at most, from when all ranks are ready to when one is stopped
CASES = 100  # of each kind of work
LANES = 4  # that many worlds at once, as most of the time is waited


@dataclass(frozen=True, slots=True)
class Stop:
    """Which process is stopped while ranks do what, and how long after they have begun."""

    work: Work
    victim: Victim
    delay_s: float

    @property
    def named(self) -> re.Pattern[str]:
        """What the errors of other ranks say."""
        if self.victim == "launcher":
            return re.compile("the launcher")
        rank = 0 if self.victim.endswith("rank 0") else 1
        return re.compile(rf"rank(\(s\))? {rank}\b", re.IGNORECASE)


def stops(count: int, seed: int) -> list[Stop]:
    """Return so many moments of each kind of work."""
    chance = random.Random(seed)
    stopped = []
    for work in get_args(Work):
        is_async = work in ("async save", "wait")
        of_work = [
            v for v in get_args(Victim) if is_async or not v.startswith(("writer", "last writer", "node"))
        ]
        for number in range(count):
            stopped.append(Stop(work, of_work[number % len(of_work)], chance.uniform(0, DELAY_S)))
    return stopped


def part(value: float) -> ShardedTensor:
    rank, size = dist.get_rank(), dist.get_world_size()
    return filled(value, 1 << 16, rank=rank, ranks=size)


def use_store(launcher_port: int) -> None:
    """Replace the world, which met in a file, by one that meets in a TCPStore of rank 0, or of a launcher."""
    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(launcher_port > 0)
    is_host = rank == 0 and not launcher_port
    store = connected("127.0.0.1", 0, is_host=True) if is_host else None
    ports = [None if store is None else store.port]
    dist.broadcast_object_list(ports, src=0)
    dist.barrier()
    dist.destroy_process_group()
    store = store or connected("127.0.0.1", launcher_port or ports[0], is_host=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(minutes=30))


def connected(host: str, port: int, *, is_host: bool) -> Any:
    patience = timedelta(seconds=60)
    return dist.TCPStore(  # type: ignore[attr-defined]
        host, port, is_master=is_host, wait_for_workers=False, timeout=patience
    )


def work_until_stopped(work: Work, notes: Path, launcher_port: int) -> None:
    """Work until an error is raised, then let go of everything; say when each was."""
    rank = dist.get_rank()
    use_store(launcher_port)
    root = notes / "root"
    with contextlib.ExitStack() as closing:
        megackpt.save({"w": part(0.0)}, notes / "first", options=SaveOptions(timeout_s=60))
        checkpointer = None
        if work in ("async save", "wait"):
            checkpointer = Checkpointer(
                root, async_save=AsyncOptions(nice=0), timeout_s=TIMEOUT_S, keep_last=2
            )
            closing.callback(saver_of(checkpointer).abandon)
            wait_for_writers(checkpointer)
            (notes / f"writer.{rank}").write_text(str(saver_of(checkpointer).writer_pid))
        dist.barrier()
        (notes / f"ready.{rank}").touch()
        try:
            for step in range(1, 100_000):
                work_once(work, step, root, checkpointer, meets_anew=launcher_port > 0)
        except CheckpointError as error:
            (notes / f"raised.{rank}.part").write_text(
                json.dumps([time.monotonic(), f"{type(error).__name__}: {error}"])
            )
            os.replace(notes / f"raised.{rank}.part", notes / f"raised.{rank}")
        if checkpointer is not None:
            with contextlib.suppress(CheckpointError):
                checkpointer.close()
            closing.pop_all()
    (notes / f"closed.{rank}").write_text(str(time.monotonic()))


def work_once(
    work: Work, step: int, root: Path, checkpointer: Checkpointer | None, *, meets_anew: bool
) -> None:
    """Save or load once; where the rendezvous store is of interest, with connections that are made anew."""
    timeout_s = TIMEOUT_S + (step / 1000 if meets_anew else 0.0)
    if checkpointer is not None:
        if meets_anew:
            world_group(timeout_s=timeout_s)
        checkpointer.save(step, {"w": part(step)})
        if work == "wait":
            checkpointer.wait()
    elif work == "save":
        megackpt.save({"w": part(step)}, root / str(step % 2), options=SaveOptions(timeout_s=timeout_s))
    else:
        way: Any = ("direct", "all_to_all", "two_stage")[step % 3]
        options = LoadOptions(timeout_s=timeout_s, exchange=way)
        megackpt.load({"w": part(step)}, root.parent / "first", options=options)


def try_stop(pool: RankPool, stop: Stop, notes: Path) -> list[str]:
    """Stop the process at its moment; return what is wrong with what the others do then."""
    notes.mkdir()
    with contextlib.ExitStack() as stack:
        pids = pool.pids(RANKS)
        lost: int | None = {"rank 0": 0, "last rank": RANKS - 1}.get(stop.victim.removeprefix("node of "))
        launched, port = stack.enter_context(store_process()) if stop.victim == "launcher" else (0, 0)
        outcomes: list[Any] = []

        def run() -> None:
            outcomes.extend(
                pool.outcomes(work_until_stopped, RANKS, stop.work, notes, port, timeout_s=2 * HANGS_S)
            )

        running = threading.Thread(target=run)
        running.start()
        wait_for(lambda: len(list(notes.glob("ready.*"))) == RANKS or not running.is_alive())
        assert running.is_alive(), [o.trace for o in outcomes]
        time.sleep(stop.delay_s)
        victims = []
        if stop.victim == "launcher":
            victims.append(launched)
        if "writer" in stop.victim or "node" in stop.victim:
            writer = notes / f"writer.{0 if stop.victim.endswith('0') else RANKS - 1}"
            victims.append(int(writer.read_text()))
        if lost is not None:
            victims.append(pids[lost])
        others = [rank for rank in range(RANKS) if rank != lost]
        for victim in victims:
            stop_process(victim)
        limit = 2 * TIMEOUT_S + (NODE_S if "node" in stop.victim else 0.0)
        stopped = time.monotonic()
        try:
            while time.monotonic() < stopped + HANGS_S:
                if all((notes / f"closed.{rank}").exists() for rank in others):
                    break
                time.sleep(0.05)
        finally:
            for victim in victims:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
            wait_for(lambda: not any(map(is_alive, victims)))
        wrong = []
        for rank in others:
            if not (notes / f"raised.{rank}").exists():
                wrong.append(f"rank {rank} has raised nothing")
                continue
            when, text = json.loads((notes / f"raised.{rank}").read_text())
            print(f"{stop}: rank {rank} after {when - stopped:.1f} s: {text[:400]}")
            if tries_all() and when - stopped > limit:  # a busy machine may need longer
                wrong.append(f"rank {rank} raised after {when - stopped:.1f} s: {text}")
            is_victims = rank == (0 if stop.victim.endswith("0") else RANKS - 1)  # its writer is stopped
            message = text.replace(f"(seen by rank {rank})", "")
            if not stop.named.search(message) and not (is_victims and "writer" in stop.victim):
                wrong.append(f"rank {rank} names another: {text}")
            if not (notes / f"closed.{rank}").exists():
                wrong.append(f"rank {rank} could not let go")
        running.join()
        wrong += [o.trace for o in outcomes if o.error is not None and o.rank in others]
    return [f"{stop}: {text}" for text in wrong]


def try_all(cases: list[Stop], notes: Path, pool: RankPool) -> list[str]:
    wrong = []
    for number, stop in enumerate(cases):
        faults = try_stop(pool, stop, notes / str(number))
        print(f"{stop}: {faults or 'right'}", flush=True)  # so that a run that is cut short has a result
        wrong += faults
    return wrong


def test_a_process_that_is_stopped_at_any_moment_is_named_by_all_others(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    number = 0
    if not tries_all():
        cases = random.Random(number).sample(stops(7, number), 1)
        assert try_all(cases, tmp_path, rank_pool) == []
        return
    cases = stops(CASES, number)
    random.Random(number).shuffle(cases)  # so that a run that is cut short has tried all kinds
    pools = [RankPool() for _ in range(LANES)]
    try:
        with ThreadPoolExecutor(LANES) as threads:
            futures = []
            for lane, pool in enumerate(pools):
                (tmp_path / str(lane)).mkdir()
                own_cases = cases[lane::LANES]
                futures.append(threads.submit(try_all, own_cases, tmp_path / str(lane), pool))
            wrong = [text for future in futures for text in future.result()]
    finally:
        for pool in pools:
            pool.close()
    assert wrong == []


_RANK = """
import os, signal, sys
from datetime import timedelta
import torch, torch.distributed as dist
from megackpt import Checkpointer, CheckpointError, ShardedTensor
from tests.support.writers import wait_for_writers

root, rank, port = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
patience = timedelta(seconds=60)
store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=patience)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
part = ShardedTensor.from_rank_offsets("w", torch.ones(1000), (0, rank, 2))
checkpointer = Checkpointer(root, async_save=True, timeout_s=60)
checkpointer.save(1, {"w": part})
checkpointer.wait()
checkpointer = Checkpointer(root, async_save=True, timeout_s=6)
wait_for_writers(checkpointer)
dist.barrier()
checkpointer.save(2, {"w": part})
dist.barrier()
if rank == 0:
    print("stopped", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
checkpointer.save(3, {"w": part})
"""


@with_all("the other tests stop ranks at random moments")
def test_the_interpreter_of_a_rank_ends_although_another_is_stopped(tmp_path: Path) -> None:
    with store_process() as (_, port):
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", _RANK, str(tmp_path / "root"), str(rank), str(port)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for rank in (0, 1)
        ]
        try:
            assert ranks[0].stdout is not None
            assert ranks[0].stdout.readline() == "stopped\n"
            _, message = ranks[1].communicate(timeout=HANGS_S)
        finally:
            for process in ranks:
                process.kill()
            ranks[0].communicate()
    assert ranks[1].returncode == 1, message
    assert re.search(r"(RankFailed|WriterFailed)Error: .*([Rr]ank 0|rank\(s\) 0)", message), message
    assert "terminate called" not in message
    assert "Exception ignored" not in message
