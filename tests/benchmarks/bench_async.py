"""How long training waits for asynchronous saves, how much they slow it, and what they keep.

Run by hand: `python tests/benchmarks/bench_async.py CASE --dir DIR [--ranks 2] [--mib 2048] [--saves 6]
[--vs dcp mcore] [--json FILE]`. Cases:

* stall: time in `save` over the time of a warm copy of the same bytes (all ranks at once, the slowest counts,
  measured before each save), for the first save and the median of the later ones. The goal is at most 1.2,
  with as many processors as ranks: 2 ranks on 2 processors. Peers in their best mode:
  DCP with a process and shared staging memory that it keeps, Megatron-Core's queue with a persistent process
  (without CUDA that does not start: it forks then).
* interference: steps of a CPU-bound loop while a save drains, compared with the same steps while a process
  per rank, as nice as a writer, burns as much processor time as the writer used, without input or output. One
  after the other for each save; the ratio is the median of the saves.
* tiers: time in `save` into a tier, each rank a node with a copy on another, synchronous and asynchronous in
  turn, over that of a warm copy. Give a directory in memory.
* memory: resident memory of training and writer processes, descriptors, the store's keys and /dev/shm, after
  each of many saves.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.elastic.utils.distributed import get_free_port

from megackpt import AsyncOptions, Checkpointer, MemoryTier, Tiers
from megackpt.cli.benchmark.contenders import Ours
from megackpt.cli.benchmark.measure import timed
from megackpt.cli.benchmark.state import GridLayout, RankState, as_bytes, make_model, make_state
from tests.benchmarks.measuring import MIB, options, scratch
from tests.benchmarks.peers.contenders import Peer
from tests.benchmarks.peers.dcp import TorchDistributed
from tests.benchmarks.peers.states import invert
from tests.support.writers import saver_of

Row = dict[str, Any]  # plain JSON


class BackgroundSaver:
    """megackpt's Checkpointer, warmed up before the first save."""

    name = "megackpt"

    def __init__(self, root: Path, state: RankState) -> None:
        self.declare = Ours("megackpt").declare
        self.checkpointer = Checkpointer(root / self.name, keep_last=1, async_save=True)
        self.checkpointer.warm_up(self.declare(state))
        self.saver = saver_of(self.checkpointer)
        self._step = 0

    def save(self, declared: Any) -> None:
        self._step += 1
        self.checkpointer.save(self._step, declared)

    def wait(self) -> None:
        self.checkpointer.wait()

    def close(self) -> None:
        self.checkpointer.close()


class PeerSaver:
    """Another library; its checkpoints are removed once they are complete."""

    def __init__(self, directory: Path, peer: Peer, close: Callable[[], object]) -> None:
        self.declare, self.close = peer.declare, close
        self._directory, self._peer, self._number = directory, peer, 0
        self._finish: Callable[[], Path] | None = None

    def save(self, declared: Any) -> None:
        self._number += 1
        directory = self._directory / str(self._number)
        directory.mkdir(parents=True, exist_ok=True)
        self._finish = self._peer.save_async(declared, directory)

    def wait(self) -> None:
        assert self._finish is not None
        directory = self._finish()
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(directory)


class DcpInAProcess(TorchDistributed):
    """`dcp.async_save` with a process, and shared memory for staging that is kept."""

    def _async_options(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        return {**super()._async_options(), "async_checkpointer_type": AsyncCheckpointerType.PROCESS}


def dcp_saver(root: Path, state: RankState) -> PeerSaver:
    peer = DcpInAProcess(shared_memory=True)
    return PeerSaver(root / "dcp", peer, peer.close)


def megatron_saver(root: Path, state: RankState) -> PeerSaver:
    """Megatron-Core's `AsyncCallsQueue`: with a persistent process, which needs CUDA; else it forks."""
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    from tests.benchmarks.mcore_on_cpu import MegatronCoreOnCpu

    peer = MegatronCoreOnCpu()
    peer._queue = AsyncCallsQueue(persistent=torch.cuda.is_available())
    return PeerSaver(root / "mcore", peer, peer._queue.close)


CONTENDERS: dict[str, Callable[[Path, RankState], BackgroundSaver | PeerSaver]] = {
    BackgroundSaver.name: BackgroundSaver,
    "dcp": dcp_saver,
    "mcore": megatron_saver,
}


def made(mib: int) -> RankState:
    """Return this rank's state: parameters and optimizer state of a transformer, split by TP."""
    ranks = dist.get_world_size()
    model = make_model(mib * MIB, ranks=ranks, dtype=torch.bfloat16)
    return make_state(model, GridLayout(tp=ranks), dist.get_rank(), torch.bfloat16)


def warm_copy_of(state: RankState) -> Callable[[], float]:
    """Return what measures a copy of the bytes of a state to memory that has been touched. Collective."""
    sources = [as_bytes(part.data).numpy() for part in state.shards]
    warm = [np.zeros_like(source) for source in sources]

    def copy() -> None:
        for target, source in zip(warm, sources, strict=True):
            np.copyto(target, source)

    return lambda: statistics.median(timed(copy) for _ in range(3))


def stall(root: Path, mib: int, saves: int, name: str) -> Row:
    """Measure one library on one rank; the same row on all."""
    state = made(mib)
    time_copy = warm_copy_of(state)
    contender = CONTENDERS[name](root, state)
    copies, stalls, drains = [], [], []
    for _ in range(saves):
        save = partial(contender.save, contender.declare(state))
        copies.append(time_copy())
        stalls.append(timed(save))
        invert(state)  # training goes on
        drains.append(timed(contender.wait))
    contender.close()
    ratios = [s / c for s, c in zip(stalls, copies, strict=True)]
    return {
        "library": name,
        "copy_s": statistics.median(copies),
        "first_save_s": stalls[0],
        "later_saves_s": statistics.median(stalls[1:]),
        "drain_s": statistics.median(drains[1:]),
        "first_ratio": ratios[0],
        "later_ratio": statistics.median(ratios[1:]),
        "ratios": ratios,
    }


def tiers(root: Path, mib: int, saves: int) -> Row:
    """Measure saves into a tier; every other one is synchronous. The same row on all ranks."""
    state = made(mib)
    declare, time_copy = Ours("megackpt").declare, warm_copy_of(state)

    def checkpointer_of(name: str, is_async: bool) -> Checkpointer:
        tier = MemoryTier(root / name / "node-{node}")
        return Checkpointer(
            root / name / "root",
            tiers=Tiers([tier], root_every=10**9, node=dist.get_rank()),
            async_save=is_async,
        )

    copies: list[float] = []
    stalls: dict[str, list[float]] = {"sync": [], "async": []}
    drains: list[float] = []
    both = {"sync": checkpointer_of("sync", False), "async": checkpointer_of("async", True)}
    both["async"].warm_up(declare(state))
    for step in range(1, saves + 1):
        copies.append(time_copy())
        for name, checkpointer in both.items():
            save = partial(checkpointer.save, step, declare(state))
            stalls[name].append(timed(save))
            drained = timed(checkpointer.wait)
            if name == "async":
                drains.append(drained)
        invert(state)
    for checkpointer in both.values():
        checkpointer.close()
    later = {name: statistics.median(times[1:]) for name, times in stalls.items()}
    ratios = [s / a for s, a in zip(stalls["sync"][1:], stalls["async"][1:], strict=True)]
    return {
        "copy_s": statistics.median(copies),
        "sync_save_s": later["sync"],
        "async_save_s": later["async"],
        "async_drain_s": statistics.median(drains[1:]),
        "first_async_save_s": stalls["async"][0],
        "sync_over_copy": later["sync"] / statistics.median(copies),
        "async_over_copy": later["async"] / statistics.median(copies),
        "sync_over_async": statistics.median(ratios),
        "ratios": ratios,
    }


BURN = """
import os, sys, time
os.nice(int(sys.argv[1])); share = float(sys.argv[2])
parent = os.getppid()
while os.getppid() == parent:
    began = time.process_time(); wall = time.perf_counter()
    while time.process_time() - began < 0.01 * share: pass
    time.sleep(max(0.0, 0.01 - (time.perf_counter() - wall)))
"""


def interference(root: Path, mib: int, saves: int) -> Row:
    """Measure steps alone, while saves drain, and while processes burn as much processor time."""
    state = made(mib)
    matrix = torch.randn(256, 256)

    def step() -> float:
        began = time.perf_counter()
        for _ in range(20):
            torch.mm(matrix, matrix)
        dist.all_reduce(torch.ones(16))
        return time.perf_counter() - began

    contender = BackgroundSaver(root, state)
    saver = contender.saver
    separately, draining, burning, ratios, shares, burnt = [step() for _ in range(200)], [], [], [], [], []
    mean = statistics.mean
    for _ in range(saves):
        contender.save(contender.declare(state))
        cpu, began = cpu_s(saver.writer_pid), time.perf_counter()
        during_save, is_any = [], True
        while is_any:
            during_save.append(step())
            busy = torch.tensor([int(contender.checkpointer.is_saving)])
            dist.all_reduce(busy)
            is_any = bool(busy.item())
        shares.append((cpu_s(saver.writer_pid) - cpu) / (time.perf_counter() - began))
        contender.wait()
        # At once, as machines that others use as well change their speed.
        burner = subprocess.Popen([sys.executable, "-c", BURN, str(AsyncOptions().nice), str(shares[-1])])
        time.sleep(0.5)
        cpu, began = cpu_s(burner.pid), time.perf_counter()
        during_burner = [step() for _ in range(max(50, len(during_save)))]
        burnt.append((cpu_s(burner.pid) - cpu) / (time.perf_counter() - began))
        burner.kill()
        burner.wait()
        draining += during_save
        burning += during_burner
        ratios.append(mean(during_save) / mean(during_burner))
    contender.close()
    return {
        "step_alone_s": mean(separately),
        "step_draining_s": mean(draining),
        "step_burning_s": mean(burning),
        "steps_draining": len(draining),
        "writer_cpu_share": mean(shares),
        "burner_cpu_share": mean(burnt),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
    }


def memory(root: Path, mib: int, saves: int) -> Row:
    """Save many times; return the growth from the tenth save to the last."""
    state = made(mib)
    contender = BackgroundSaver(root, state)
    saver = contender.saver
    rows: list[Row] = []
    for _ in range(saves):
        contender.save(contender.declare(state))
        invert(state)
        contender.wait()
        dist.barrier()
        rows.append(
            {
                "training_mib": resident(os.getpid()),
                "writer_mib": resident(saver.writer_pid),
                "descriptors": len(os.listdir("/proc/self/fd")),
                "writer_descriptors": len(os.listdir(f"/proc/{saver.writer_pid}/fd")),
                "store_keys": saver.store.key_count() if saver.store else 0,
                "mapped_from_dev_shm": Path("/proc/self/maps").read_text().count("/dev/shm/"),
            }
        )
    contender.close()
    early = min(10, len(rows)) - 1
    return {"saves": saves} | {
        name: {"after_10": round(rows[early][name], 1), "after_all": round(rows[-1][name], 1)}
        for name in rows[0]
    }


def cpu_s(process: int) -> float:
    """Return the processor time that a process has used."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident(process: int) -> float:
    """Return the private and shared memory that a process has in RAM, without files, in MiB."""
    status = Path(f"/proc/{process}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem")) / 1024


CASES: dict[str, Callable[..., Row]] = {
    "stall": stall,
    "interference": interference,
    "tiers": tiers,
    "memory": memory,
}


def run_rank(rank: int, arguments: argparse.Namespace, root: Path, name: str, port: int) -> None:
    """Measure on one rank; rank 0 writes the row."""
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(arguments.ranks)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=30))
    named = (name,) if arguments.case == "stall" else ()
    row = CASES[arguments.case](root, arguments.mib, arguments.saves, *named)
    dist.barrier()
    if rank == 0:
        (root / "row.json").write_text(json.dumps(row))
    dist.destroy_process_group()


def main() -> None:
    """Measure, and print the rows."""
    peers = sorted(set(CONTENDERS) - {BackgroundSaver.name})
    arguments = options(
        __doc__,
        ("case", CASES),
        dir=Path,
        ranks=2,  # no more than there are processors
        mib=2048,  # of all ranks together
        saves=6,
        vs={"nargs": "*", "default": [], "choices": peers},
        json={},
    )
    rows: list[Row] = []
    names = [BackgroundSaver.name, *(arguments.vs if arguments.case == "stall" else [])]
    with scratch(arguments.dir, "async") as root:
        for name in names:
            mp.spawn(run_rank, (arguments, root, name, get_free_port()), nprocs=arguments.ranks)
            rows.append(json.loads((root / "row.json").read_text()))
            for key, value in rows[-1].items():
                shown = f"{value:.4g}" if isinstance(value, float) else value
                print(f"{name:10} {key:20} {shown}")
    if arguments.json:
        document = {"case": vars(arguments), "load": os.getloadavg(), "rows": rows}
        Path(arguments.json).write_text(json.dumps(document, indent=1, default=str))


if __name__ == "__main__":
    main()
