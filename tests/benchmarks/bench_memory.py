"""Print a table: memory that a save adds to the state at its peak, of one rank.

OMP_NUM_THREADS=1 python tests/benchmarks/bench_memory.py DIRECTORY [--mib 256 2048] [--kinds contiguous]

Each save is the first large one of a new process. An asynchronous save counts the memory of the training and
of the writer process above what they had before; the staging memory, which both map, counts once.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch

from megackpt import Checkpointer, ShardedTensor, save
from megackpt.comm import SingleProcess
from megackpt.storage.rawio import COMMON_POOL
from tests.benchmarks.measuring import MIB, in_a_process, options, scratch
from tests.benchmarks.peers.counters import peak_above, resident_bytes
from tests.support.writers import saver_of, wait_for_writers

FORMATS = ("megackpt", "torch_dist")
PARTS = 4
State = Mapping[str, ShardedTensor | list[ShardedTensor]]


def _declared(*tensors: torch.Tensor) -> State:
    return {f"w{i}": ShardedTensor.from_rank_offsets(f"w{i}", t) for i, t in enumerate(tensors)}


def _parts(nbytes: int, make: Callable[[int], torch.Tensor]) -> State:
    """Declare tensors of equal size; make is given the number of their float32 elements."""
    return _declared(*(make(nbytes // PARTS // 4) for _ in range(PARTS)))


def _flat(nbytes: int) -> State:
    """Declare ranges of a flattened array, which begin and end within rows, as a sharded optimizer has."""
    data, shape = torch.ones(nbytes // 4), (nbytes // 4096, 1024)
    ends = [0, *(len(data) * part // 7 + 13 for part in range(1, 7)), len(data)]
    ranges = [slice(a, b) for a, b in pairwise(ends)]
    parts = [ShardedTensor.from_rank_offsets_flat("w", data[r], shape, flattened_range=r) for r in ranges]
    return {"w": parts}


STATES: dict[str, Callable[[int], State]] = {
    "contiguous": lambda nbytes: _parts(nbytes, torch.ones),
    "one tensor": lambda nbytes: _declared(torch.ones(nbytes // 4)),
    "flat ranges": _flat,
    "transposed": lambda nbytes: _parts(nbytes, lambda n: torch.ones(1024, n // 1024).t()),
    "strided": lambda nbytes: _parts(nbytes, lambda n: torch.ones(2 * n)[::2]),
    "expanded": lambda nbytes: _parts(nbytes, lambda n: torch.ones(1024, 1).expand(1024, n // 1024)),
    "conjugate": lambda nbytes: _parts(nbytes, lambda n: torch.ones(n // 2, dtype=torch.complex64).conj()),
    "tensors of 4 KiB": lambda nbytes: _declared(*(torch.ones(1024) for _ in range(nbytes // 4096))),
}


def added_by_a_save(directory: Path, format_: str, kind: str, nbytes: int) -> int:
    """Return how many bytes a synchronous save adds to a state."""
    state = STATES[kind](nbytes)
    save(STATES["contiguous"](1 << 16), directory / "warm", format_)  # what is imported late is no buffer
    COMMON_POOL.clear()  # buffers that an earlier save has left
    return peak_above(partial(save, state, directory / "save", format_))


def added_by_asynchronous_saves(directory: Path, format_: str, kind: str, nbytes: int) -> list[int]:
    """Return how many bytes each of two asynchronous saves adds to a state, in both processes."""
    state = STATES[kind](nbytes)
    with Checkpointer(directory, keep_last=1, async_save=True, group=SingleProcess()) as checkpointer:
        wait_for_writers(checkpointer)

        def save_step(step: int, state: State) -> None:
            checkpointer.save(step, state, sharded_strategy=format_)
            checkpointer.wait()

        save_step(1, STATES["contiguous"](1 << 16))
        saver, added = saver_of(checkpointer), []
        for step in (2, 3):
            writer, before = saver.writer_pid, saver.staging_nbytes
            at_start = resident_bytes(writer) or 0
            training = peak_above(partial(save_step, step, state))
            # At the end of the save: its buffers are kept, and it has mapped what it has read.
            in_writer = (resident_bytes(writer) or 0) - at_start
            added.append(training + in_writer - (saver.staging_nbytes - before))
    return added


def main() -> None:
    """Measure each case in its own process, and print the rows."""
    arguments = options(
        __doc__,
        "directory",
        mib={"nargs": "*", "type": int, "default": [256]},
        kinds={"nargs": "*", "choices": list(STATES), "default": list(STATES)},
        case={"help": "one case, as JSON: what a process of its own measures"},
    )
    if arguments.case:
        way, *case = json.loads(arguments.case)
        sys.stdout.write(json.dumps(globals()[way](arguments.directory, *case)))
        return
    for mib in arguments.mib:
        for kind in arguments.kinds:
            for format_ in FORMATS:
                cells = []
                for way in (added_by_a_save, added_by_asynchronous_saves):
                    with scratch(arguments.directory, "memory") as directory:
                        case = json.dumps([way.__name__, format_, kind, mib * MIB])
                        cells.append(in_a_process(__file__, directory, "--case", case))
                once, (first, later) = cells
                row = " ".join(f"{nbytes / MIB:8.1f}" for nbytes in (once, first, later))
                sys.stdout.write(f"{mib:5} MiB {kind:17} {format_:10} save, first and second async: {row}\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
