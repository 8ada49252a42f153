"""How fast a state on a CUDA device is saved and loaded, compared with the link to the host and with DCP.

Run by hand: `python tests/benchmarks/bench_gpu.py --dir DIR [--size-gib 8] [--repeats 5] [--json FILE]`. One
process. The limit of the link is that of copies of 256 MiB to and from one pinned buffer. `copies to the
host` are those that a save makes, through its buffers, with nothing done to the bytes there; `save` is
durable. DCP writes one file, flushed, with 1 and 4 threads, of which the better counts. Libraries take turns;
medians. `--device cpu` only shows that the script works.
"""

from __future__ import annotations

import json
import shutil
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from megackpt import Checkpointer, ShardedTensor, load, save
from megackpt.engine.data.device_copies import parts_in_buffers, to_host
from tests.benchmarks.measuring import GIB, MIB, medians, options, scratch

LINK_BYTES = 256 * MIB

State = dict[str, torch.Tensor]


def made(nbytes: int, device: torch.device) -> State:
    """Return tensors of a transformer's sizes, bfloat16 and float32, of nbytes together."""
    state: State = {}
    left = nbytes
    sizes = [64 << 20, 192 << 20, 16 << 10, 48 << 20]
    while left > 0:
        size = min(sizes[len(state) % len(sizes)], left)
        dtype = torch.float32 if len(state) % 3 else torch.bfloat16
        numel = -(-size // dtype.itemsize)
        state[f"tensor{len(state)}"] = torch.randn(numel, device=device).to(dtype)
        left -= numel * dtype.itemsize
    return state


def finish(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(act: Callable[[], Any], device: torch.device) -> float:
    """Time something, until the device has done it."""
    finish(device)
    began = time.perf_counter()
    act()
    finish(device)
    return time.perf_counter() - began


def link(device: torch.device, *, to_device: bool) -> Callable[[], None]:
    """Return what copies LINK_BYTES ten times between pinned memory and the device."""
    pinned = torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.empty(LINK_BYTES, dtype=torch.uint8, device=device)

    def copy() -> None:
        for _ in range(10):
            if to_device:
                there.copy_(pinned, non_blocking=True)
            else:
                pinned.copy_(there, non_blocking=True)

    return copy


def copies_to_host(state: State) -> None:
    """Copy all of a state as a save does."""
    parts = ((key, part) for key, tensor in state.items() for part in parts_in_buffers(tensor, 4 << 20))
    for _ in to_host(parts):
        pass


def declared(state: State) -> dict[str, Any]:
    """Return the state as megackpt is given it."""
    return {key: ShardedTensor.from_rank_offsets(key, tensor) for key, tensor in state.items()}


def dcp_save(state: State, directory: Path, threads: int) -> None:
    """Save with DCP."""
    writer = dcp.FileSystemWriter(directory, single_file_per_rank=True, sync_files=True, thread_count=threads)
    dcp.save(dict(state), storage_writer=writer, no_dist=True)


def rounds(acts: dict[str, Callable[[], Any]], repeats: int, device: torch.device) -> dict[str, float]:
    """Return the median time of each; they take turns, after one round that does not count."""

    def clock() -> float:
        finish(device)
        return time.perf_counter()

    return medians(acts, repeats, clock=clock)


def measure(root: Path, nbytes: int, repeats: int, device: torch.device) -> dict[str, float]:
    """Return GB/s of everything, also of the stalls of asynchronous saves."""
    state = made(nbytes, device)
    total = sum(t.numel() * t.element_size() for t in state.values())
    speeds = {}
    for name, to_device in (("link to the host", False), ("link to the device", True)):
        spent = rounds({name: link(device, to_device=to_device)}, repeats, device)[name]
        speeds[name] = 10 * LINK_BYTES / spent / 1e9
    spent = rounds({"": lambda: copies_to_host(state)}, repeats, device)[""]
    speeds["copies to the host"] = total / spent / 1e9

    saves = {"save": lambda: save(declared(state), root / "ours")} | {
        f"save, DCP, {n} threads": lambda n=n: dcp_save(state, root / f"dcp{n}", n) for n in (1, 4)
    }
    loads = {
        "load": lambda: load(declared(state), root / "ours"),
        "load, DCP": lambda: dcp.load(dict(state), checkpoint_id=root / "dcp1", no_dist=True),
    }
    for acts in (saves, loads):
        speeds |= {name: total / s / 1e9 for name, s in rounds(acts, repeats, device).items()}

    stalls: dict[str, list[float]] = {"first": [], "later": []}  # the first one allocates staging memory
    for _ in range(repeats):
        with Checkpointer(root / "async", async_save=True, keep_last=1) as checkpointer:
            for step in range(repeats + 1):
                spent = seconds(lambda step=step: checkpointer.save(step, declared(state)), device)
                stalls["later" if step else "first"].append(spent)
                checkpointer.wait()
        shutil.rmtree(root / "async")
    for which, spent in stalls.items():
        speeds[f"stall of a {which} asynchronous save"] = total / statistics.median(spent) / 1e9
    return speeds


def main() -> None:
    """Measure, and print a table."""
    device = torch.device("cuda")
    arguments = options(__doc__, dir=Path, size_gib=8.0, repeats=5, device=device, json={"type": Path})
    warnings.filterwarnings("ignore", module="torch.distributed")
    name = (
        torch.cuda.get_device_name(arguments.device)
        if arguments.device.type == "cuda"
        else "no device: the host"
    )
    with scratch(arguments.dir, "gpu") as root:
        speeds = measure(root, int(arguments.size_gib * GIB), arguments.repeats, arguments.device)
    print(
        f"{name}, torch {torch.__version__}, {arguments.size_gib} GiB, medians of {arguments.repeats}, "
        f"{arguments.dir}"
    )
    for what, speed in speeds.items():
        print(f"{what:36} {speed:8.2f} GB/s")
    of_link = speeds["copies to the host"] / speeds["link to the host"]
    of_dcp = speeds["save"] / max(speed for what, speed in speeds.items() if what.startswith("save, DCP"))
    print(f"copies to the host are {of_link:.2f} of the link (goal: 0.9)")
    print(f"a save is {of_dcp:.1f} x, a load {speeds['load'] / speeds['load, DCP']:.1f} x as fast as DCP's")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"device": name, "GB/s": speeds}, indent=1))


if __name__ == "__main__":
    main()
