"""How long it takes to prove, plan and index a save of a million chunks.

Run by hand: `python tests/benchmarks/bench_validation.py [--chunks N]`. CPU time of one core, median of 3
runs. Each run is a process of its own; its peak memory is that of the messages of all ranks and the work on
them, interpreter and numpy included.

With the index goes how a rank uses it: what it reads of the index, and the CPU time from opening it to its
load plan, the worst of the first, the middle and the last rank. Once it asks for what it has saved, and, in
the world "stacked", once for all that it would need at half the tensor and pipeline parallelism, whole.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import resource
import statistics
import tempfile
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from tests.benchmarks.measuring import Clock, in_a_process, options

REPEATS = 3
Chunk = tuple[tuple[int, ...], tuple[int, ...], int, int, bool]  # start, shape, flat start, flat stop, main
Rank = dict[str, tuple[tuple[int, ...], list[Chunk]]]  # key -> (global shape, chunks)


# --- worlds: what each rank declares, as plain tuples


def megatron_world(chunks: int) -> list[Rank]:
    """TP 8 x PP 8 x DP 8: a quarter of the arrays is replicated over DP, the others are flat over it."""
    tp = pp = dp = 8
    arrays = max(4, chunks // (tp * pp * dp))
    ranks: list[Rank] = []
    for p, t, d in np.ndindex(pp, tp, dp):
        declared: Rank = {}
        for a in range(arrays):
            box = (3, 128 + a % 7, 64)  # layers, rows, columns on one rank
            start = (p * box[0], t * box[1], 0)
            whole = (pp * box[0], tp * box[1], box[2])
            numel = math.prod(box)
            if a % 4 == 0:
                declared[f"decoder.layers.p{a:05d}"] = (whole, [(start, box, 0, numel, d == 0)])
            else:  # ranges as a distributed optimizer cuts them: not at rows
                ends = [numel * i // dp + (37 if 0 < i < dp else 0) for i in (d, d + 1)]
                declared[f"optimizer.p{a:05d}"] = (whole, [(start, box, ends[0], ends[1], True)])
        ranks.append(declared)
    return ranks


def grid_world(chunks: int) -> list[Rank]:
    """Equal fragments, each on one rank."""
    return _grids(chunks, lambda n, parts: [n * i for i in range(parts + 1)])


def irregular_world(chunks: int) -> list[Rank]:
    """Uneven fragments along two axes, each on one rank."""
    rng = np.random.default_rng(0)
    return _grids(chunks, lambda n, parts: [0, *np.cumsum(rng.integers(1, 2 * n, parts)).tolist()])


def _grids(chunks: int, edges_of: Callable[[int, int], list[int]]) -> list[Rank]:
    side, size = 22, 22 * 22
    ranks: list[Rank] = [{} for _ in range(size)]
    for a in range(max(1, chunks // side**2)):
        rows, cols = edges_of(16, side), edges_of(64, side)
        whole = (rows[-1], cols[-1])
        cells = ((r, c) for r in pairwise(rows) for c in pairwise(cols))
        for i, ((top, bottom), (left, right)) in enumerate(cells):
            shape = (bottom - top, right - left)
            chunk = ((top, left), shape, 0, math.prod(shape), True)
            ranks[(a + i) % size].setdefault(f"p{a:05d}", (whole, []))[1].append(chunk)
    return ranks


def stacked_world(chunks: int) -> list[Rank]:
    """TP 8 x PP 16 x DP 8: few arrays of 128 layers, each layer's part flat over many."""
    tp, pp, dp, layers, arrays = 8, 16, 8, 8, 12
    shares = max(dp, chunks // (arrays * tp * pp * layers))
    ranks: list[Rank] = []
    for p, t, d in np.ndindex(pp, tp, dp):
        declared: Rank = {}
        for a in range(arrays):
            box = (1, 512 + 8 * a, 256)
            numel = math.prod(box)
            owned = [
                ((p * layers + i, t * box[1], 0), box, numel * n // shares, numel * (n + 1) // shares, True)
                for i in range(layers)
                for n in range(shares * d // dp, shares * (d + 1) // dp)
            ]
            declared[f"layers.p{a:02d}"] = ((pp * layers, tp * box[1], box[2]), owned)
        ranks.append(declared)
    return ranks


WORLDS = {
    "megatron": megatron_world,
    "grid": grid_world,
    "irregular": irregular_world,
    "stacked": stacked_world,
}


# --- ours


def _messages(ranks: list[Rank]) -> list[bytes]:
    """What each rank would send to the others."""
    from megackpt.plans.metadata import ArraySpec, ChunkTable, DeclaredChunks, pack_columns

    def of(rank: int) -> bytes:
        own_state = ranks[rank]
        keys = sorted(own_state)
        rows = [(i, *chunk) for i, key in enumerate(keys) for chunk in own_state[key][1]]
        array, start, shape, low, high, main = (np.array(c) for c in zip(*rows, strict=True))
        table = ChunkTable(
            tuple(ArraySpec(key, "float32", own_state[key][0]) for key in keys),
            array, start, shape, low, high, (high - low) * 4,
        )  # fmt: skip
        none = np.zeros(len(rows), np.bool_)
        entities = np.arange(len(rows))
        return pack_columns(
            DeclaredChunks(table, main, none, np.full(len(rows), rank), entities).to_columns()
        )

    return [of(rank) for rank in range(len(ranks))]


def bench(messages: list[bytes]) -> Iterator[tuple[str, float]]:
    """Decode, merge, prove and plan what came from all ranks, index it, and plan loads by the index."""
    from megackpt.formats.native import NativeSaveStrategy
    from megackpt.plans.metadata import unpack_columns
    from megackpt.plans.metadata.merge import decode_declarations, merge_declarations
    from megackpt.plans.planning import plan_save
    from megackpt.plans.validation import check_coverage
    from megackpt.storage import LocalStore

    clock = Clock()
    declared = decode_declarations([unpack_columns(m, where="message") for m in messages])
    yield "decode", clock.lap()
    merged = merge_declarations(declared)
    yield "merge", clock.lap()
    check_coverage(merged)
    yield "coverage", clock.lap()
    plan = plan_save(merged, ranks=len(messages))
    yield "plan", clock.lap()
    attempt = "0" * 16
    with tempfile.TemporaryDirectory() as directory:
        receipts = _receipts(plan, len(messages), Path(directory), attempt)
        clock.lap()
        output = NativeSaveStrategy().write_index(
            LocalStore(directory), attempt=attempt, plan=plan, receipts=receipts
        )
        yield "index", clock.lap()
        yield "chunk_nbytes", output["index"]["nbytes"] / len(plan.table)
        table, arrays = plan.table, plan.table.arrays
        del merged, plan, receipts
        ranks = [declared[i] for i in (0, len(declared) // 2, -1)]
        loads = [[_load_plan(directory, output, r) for _ in range(3)] for r in ranks]
        yield "load_ms", max(statistics.median(ms for ms, _ in of_rank) for of_rank in loads)
        yield "load_read", max(of_rank[0][1] for of_rank in loads) / output["index"]["nbytes"]
        if len(arrays) == 12 and table.dims == 3:
            of_all = [_load_plan(directory, output, _half_as_parallel(arrays)) for _ in range(3)]
            yield "all_ms", statistics.median(ms for ms, _ in of_all)


def _receipts(plan: Any, ranks: int, directory: Path, attempt: str) -> list[list[bytes]]:
    """What ranks would tell of files that they have written, which are empty."""
    from megackpt.formats.native import names
    from megackpt.plans.metadata import block_counts, pack_columns

    counts = np.bincount(plan.writer, block_counts(plan.table.nbytes), minlength=ranks).astype(int)
    (directory / "data").mkdir()
    for rank in range(ranks):
        (directory / names.data_file(attempt, rank)).touch()
    start = np.array([4096])
    return [[pack_columns({"data_start": start, "digests": np.arange(n, dtype=np.uint64)})] for n in counts]


def _load_plan(directory: str, output: dict[str, Any], requested: Any) -> tuple[float, int]:
    """Return the time that a rank takes to its load plan, in milliseconds, and what it reads of the index."""
    from megackpt.formats.index_reader import open_index
    from megackpt.plans.planning import plan_load
    from tests.support.counting import CountingStore

    store, clock = CountingStore(directory), Clock()
    stored = open_index(store, output).of_boxes([requested.table])
    plan_load(requested, stored.table, where=directory)
    return clock.lap() * 1000, store.nbytes


def _half_as_parallel(arrays: tuple[Any, ...]) -> Any:
    """What a rank in the middle needs of the stacked world at TP 4 x PP 8: 16 layers of each array."""
    from megackpt.plans.metadata import ChunkTable, DeclaredChunks

    n = 16 * len(arrays)
    array = np.repeat(np.arange(len(arrays)), 16)
    whole = np.array([a.global_shape for a in arrays])[array]
    start = np.stack((48 + np.arange(n) % 16, whole[:, 1] // 2, 0 * array), axis=1)
    shape = np.stack((np.ones(n, np.int64), whole[:, 1] // 4, whole[:, 2]), axis=1)
    numel = shape.prod(axis=1)
    yes = np.ones(n, np.bool_)
    table = ChunkTable(arrays, array, start, shape, 0 * numel, numel, 4 * numel)
    return DeclaredChunks(table, yes, ~yes, 0 * numel, np.arange(n))


# --- measuring


def _measure(world: str, chunks: int) -> None:
    """Print the result of one run; called in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:  # its memory does not count
        rows, arrays, messages = pool.apply(_built, (world, chunks))
    laps = dict(bench(messages))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"rows": rows, "arrays": arrays, "peak_mib": peak, **laps}))


def _built(world: str, chunks: int) -> tuple[int, int, list[bytes]]:
    """Return how many rows and arrays there are, and what the ranks send."""
    ranks = WORLDS[world](chunks)
    rows = sum(len(c) for rank in ranks for _, c in rank.values())
    return rows, len({key for rank in ranks for key in rank}), _messages(ranks)


def main() -> None:
    """Print the table."""
    inner = {"nargs": 2, "metavar": ("WORLD", "CHUNKS")}
    args = options(__doc__, chunks=1_000_000, measure=inner)
    if args.measure:
        _measure(args.measure[0], int(args.measure[1]))
        return
    steps = ("decode", "merge", "coverage", "plan", "index")
    head = ("world", "chunks", "arrays", *(f"{name} s" for name in steps), "sum s", "peak MiB")
    print(("{:10} {:>9} {:>7}" + " {:>10}" * 7).format(*head), "B/chunk load ms  read %  all ms")
    for world in WORLDS:
        runs = [in_a_process(__file__, "--measure", world, args.chunks) for _ in range(REPEATS)]
        medians = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        laps = [medians[name] for name in steps]
        print(f"{world:10} {medians['rows']:9,.0f} {medians['arrays']:7,.0f}", end="")
        print("".join(f" {lap:10.2f}" for lap in (*laps, sum(laps))), end="")
        print(
            f" {medians['peak_mib']:10,.0f} {medians['chunk_nbytes']:7.1f} {medians['load_ms']:7.1f}", end=""
        )
        print(f" {100 * medians['load_read']:7.1f} {medians.get('all_ms', math.nan):7.1f}", flush=True)


if __name__ == "__main__":
    main()
