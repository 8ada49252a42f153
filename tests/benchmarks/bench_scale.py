"""What planning a save costs each of many thousand ranks, compared with Megatron-Core's balancing.

Run by hand: `python tests/benchmarks/bench_scale.py [--tp 8 --pp 16 --dp 128] [--peer-ranks 4096]`. Llama 3
405B with a distributed optimizer, every rank in turn in one process: bf16 parameters that all data-parallel
replicas declare, fp32 master weights and two moments as flat ranges, and an object of each rank. CPU time;
the peak memory is that of the process, with the declarations and messages of all ranks in it. Nothing is
cached but where `kept plan` is said: a save of one process whose rank declares as many tensors, up to its
first write.
"""

from __future__ import annotations

import json
import math
import os
import resource
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from megackpt import ShardedObject, ShardedTensor
from megackpt.comm import Group, SingleProcess
from megackpt.engine.saving.save import plan_save
from megackpt.engine.saving.save_request import SaveRequest
from megackpt.plans.geometry import Ints
from megackpt.plans.metadata import (
    OBJECT,
    ArraySpec,
    ChunkTable,
    DeclaredChunks,
    PackedDeclarations,
    itemsizes,
    merge_packed_declarations,
    pack_declarations,
)
from megackpt.plans.planning import SavePlan, pack_rows, plan_merged_save, unpack_rows
from megackpt.plans.validation import check_coverage
from megackpt.run import PlanCache
from megackpt.storage import MemoryStore, digest_of
from tests.benchmarks.measuring import Clock, options
from tests.support.groups import shared

LAYERS, HIDDEN, FFN, QKV, VOCAB = 126, 16384, 53248, 18432, 128256
STATES = ("master", "exp_avg", "exp_avg_sq")
OBJECT_BYTES = 5000


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter on a tensor-parallel rank: its box; `whole` if all of these ranks hold the same."""

    key: str
    global_shape: tuple[int, ...]
    start: tuple[int, ...]
    shape: tuple[int, ...]
    whole: bool


@dataclass(frozen=True, slots=True)
class Layout:
    """How the job is cut; ranks count tensor-, then data-, then pipeline-parallel."""

    tp: int
    pp: int
    dp: int

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp

    def rank(self, p: int, d: int, t: int) -> int:
        return (p * self.dp + d) * self.tp + t


def params_of(layout: Layout, p: int, t: int) -> Iterator[Param]:
    """Yield the parameters of a pipeline stage; the embedding and the head count as a layer each."""

    def cut(key: str, rows: int, cols: int, dim: int) -> Param:
        shape = [rows, cols]
        shape[dim] //= layout.tp
        start = [0, 0]
        start[dim] = t * shape[dim]
        return Param(key, (rows, cols), tuple(start), tuple(shape), False)

    def vector(key: str) -> Param:
        return Param(key, (HIDDEN,), (0,), (HIDDEN,), True)

    first, last = ((LAYERS + 2) * i // layout.pp - 1 for i in (p, p + 1))
    if p == 0:
        yield cut("embedding.word_embeddings.weight", VOCAB, HIDDEN, 0)
    for layer in range(max(first, 0), min(last, LAYERS)):
        name = f"decoder.layers.{layer}"
        yield vector(f"{name}.self_attention.linear_qkv.layer_norm_weight")
        yield cut(f"{name}.self_attention.linear_qkv.weight", QKV, HIDDEN, 0)
        yield cut(f"{name}.self_attention.linear_proj.weight", HIDDEN, HIDDEN, 1)
        yield vector(f"{name}.mlp.linear_fc1.layer_norm_weight")
        yield cut(f"{name}.mlp.linear_fc1.gate", FFN, HIDDEN, 0)
        yield cut(f"{name}.mlp.linear_fc1.up", FFN, HIDDEN, 0)
        yield cut(f"{name}.mlp.linear_fc2.weight", HIDDEN, FFN, 1)
    if p == layout.pp - 1:
        yield vector("decoder.final_layernorm.weight")
        yield cut("output_layer.weight", VOCAB, HIDDEN, 0)


def declare(layout: Layout, p: int, t: int) -> Iterator[tuple[int, DeclaredChunks]]:
    """Yield the ranks of a data-parallel group and what each declares."""
    params = sorted(params_of(layout, p, t), key=lambda x: x.key)
    ends = np.cumsum([0, *(math.prod(x.shape) for x in params)])
    for d in range(layout.dp):
        low, high = (int(ends[-1]) * i // layout.dp for i in (d, d + 1))
        rows = [
            (x.key, "bfloat16", x, 0, math.prod(x.shape), d == 0 and (t == 0 or not x.whole)) for x in params
        ]
        for i in range(int(np.searchsorted(ends, low, side="right")) - 1, len(params)):
            x, begin = params[i], int(ends[i])
            if begin >= high:
                break
            part = (max(low - begin, 0), min(high, int(ends[i + 1])) - begin)
            rows += [(f"optimizer.{s}.{x.key}", "float32", x, *part, t == 0 or not x.whole) for s in STATES]
        rank = layout.rank(p, d, t)
        yield rank, _described(rows, rank, layout.ranks)


def _described(rows: list[tuple[str, str, Param, int, int, bool]], rank: int, ranks: int) -> DeclaredChunks:
    keys = sorted({key for key, *_ in rows})
    number = {key: i for i, key in enumerate([*keys, "rng"])}
    specs = {key: ArraySpec(key, dtype, x.global_shape) for key, dtype, x, *_ in rows}
    arrays = (*(specs[key] for key in keys), ArraySpec("rng", OBJECT, (ranks,)))
    array = np.array([*(number[r[0]] for r in rows), len(keys)])
    start = np.array([*(_two(r[2].start, 0) for r in rows), (rank, 0)])
    shape = np.array([*(_two(r[2].shape, 1) for r in rows), (1, 1)])
    low, high = np.array([*((r[3], r[4]) for r in rows), (0, 1)]).T
    nbytes = (high - low) * itemsizes(arrays)[array]
    nbytes[-1] = OBJECT_BYTES
    main = np.array([*(r[5] for r in rows), True])
    none, entities = np.zeros(len(array), np.bool_), np.arange(len(array))
    table = ChunkTable(arrays, array, start, shape, low, high, nbytes)
    order = np.argsort(array, kind="stable") if arrays[-1].key < arrays[-2].key else entities
    return DeclaredChunks(table.take(order), main[order], none, np.full(len(array), rank), entities)


def _two(values: tuple[int, ...], fill: int) -> tuple[int, int]:
    return (values[0], values[1] if len(values) > 1 else fill)


def bench_ours(layout: Layout) -> dict[str, float]:
    """Return seconds, bytes and balance of a save that is planned anew."""
    ranks, clock = layout.ranks, Clock()
    declared: list[DeclaredChunks] = [None] * ranks  # type: ignore[list-item]
    for p, t in np.ndindex(layout.pp, layout.tp):
        for rank, of_rank in declare(layout, p, t):
            declared[rank] = of_rank
    measured = {"declared rows": sum(map(len, declared)), "build inputs s": clock.lap()}
    lists: list[PackedDeclarations] = []
    digests: list[str] = []
    own_s = np.zeros(ranks)
    for rank in range(ranks):
        clock.lap()
        lists.append(pack_declarations(declared[rank], replicated=frozenset(), on_some_ranks=frozenset()))
        digests.append(digest_of(lists[rank].replica_rows))
        own_s[rank] = clock.lap()
    first: dict[str, int] = {}
    for rank, digest in enumerate(digests):
        first.setdefault(digest, rank)
    sent = np.array([len(of.main_rows) for of in lists])
    sent[list(first.values())] += [len(lists[rank].replica_rows) for rank in first.values()]
    plan, rows, laps = _coordinate(lists, digests, first)
    measured |= laps
    for rank in range(ranks):
        clock.lap()
        own = unpack_rows(rows[rank], declared[rank], lists[rank].entities, rank=rank)
        own_s[rank] += clock.lap()
        assert len(own.table) == np.count_nonzero(plan.writer == rank) or rank % 97
    written = np.bincount(plan.writer, plan.table.nbytes, minlength=ranks)
    measured |= {
        "coordinator s": sum(laps.values()),
        "rank median ms": float(np.median(own_s)) * 1e3,
        "rank max ms": float(own_s.max()) * 1e3,
        "sent by a rank, median B": float(np.median(sent)),
        "sent by a rank, max B": float(sent.max()),
        "received by a rank, max B": max(map(len, rows)) + 24 * ranks,
        "received by rank 0 MB": float(sent.sum()) / 1e6,
        "planned rows": len(plan.table),
        "written by a rank, mean MB": float(written.mean()) / 1e6,
        "largest / mean": float(written.max() / written.mean()),
        "smallest / mean": float(written.min() / written.mean()),
        "rows of a rank, max": int(np.bincount(plan.writer).max()),
    }
    return measured


def _coordinate(
    lists: list[PackedDeclarations], digests: list[str], first: dict[str, int]
) -> tuple[SavePlan, list[bytes], dict[str, float]]:
    clock, laps = Clock(), {}
    kinds, kind = np.unique(np.array(digests), return_inverse=True)
    owner_groups: list[Ints] = np.split(np.argsort(kind, kind="stable"), np.cumsum(np.bincount(kind))[:-1])
    owned, _ = merge_packed_declarations(
        [of.main_rows for of in lists], [lists[first[str(k)]].replica_rows for k in kinds], owner_groups
    )
    laps["merge s"] = clock.lap()
    check_coverage(owned.declared)
    laps["prove s"] = clock.lap()
    plan = plan_merged_save(owned)
    laps["plan s"] = clock.lap()
    rows = pack_rows(plan, ranks=len(lists))
    laps["pack s"] = clock.lap()
    return plan, rows, laps


class _Everyone(Group):
    """A group in which all ranks say the same."""

    def __init__(self, ranks: int) -> None:
        self.rank, self.size = 0, ranks

    def all_gather(self, data: bytes) -> list[bytes]:
        return [data] * self.size

    def gather(self, data: bytes) -> list[bytes]:
        return [data] * self.size


def bench_collective(ranks: int) -> float:
    """Return the seconds that a rank takes to look through the digests of all."""
    clock = Clock()
    message = shared(_Everyone(ranks), bytes(24), doing="comparing declarations")
    assert next(i for i, other in enumerate(message) if other[:16] == message[-1][:16]) == 0
    return clock.lap()


def bench_kept_plan(tensors: int) -> float:
    """Return the median seconds of planning with a plan that is kept: everything before the first write."""
    plans, laps = PlanCache(), []
    data = torch.zeros(16, 16)
    state = {f"t{i}": ShardedTensor.from_rank_offsets(f"t{i}", data) for i in range(tensors)}
    common = {"args": {f"arg{i}": i for i in range(100)}}
    request = SaveRequest(
        state={**state, "rng": ShardedObject("rng", bytes(OBJECT_BYTES), (1,), (0,)), **common},
        plans=plans,
    )
    for _ in range(21):
        clock = Clock()
        plan_save(request, MemoryStore(), SingleProcess())
        laps.append(clock.lap())
    assert plans.hits == 20
    return statistics.median(laps[1:])


def bench_megatron(ranks: int) -> dict[str, float]:
    """`distribute_shards_to_ranks` over the parameters of so many ranks: each of them does all of it."""
    from megatron.core.dist_checkpointing.exchange_utils import distribute_shards_to_ranks

    layout = Layout(8, 16, ranks // 128)
    owners: dict[str, list[int]] = {}
    sizes: dict[str, int] = {}
    for p, t in np.ndindex(layout.pp, layout.tp):
        for x in params_of(layout, p, t):
            shard = f"{x.key} {x.start}"
            owners.setdefault(shard, []).extend(layout.rank(p, d, t) for d in range(layout.dp))
            sizes[shard] = math.prod(x.shape) * 2
    clock = Clock()
    chosen = distribute_shards_to_ranks(owners, sizes, ranks, set())
    seconds = clock.lap()
    written = np.zeros(ranks)
    for shard, rank in chosen.items():
        written[rank] += sizes[shard]
    return {"shards": len(sizes), "each rank s": seconds, "largest / mean": written.max() / written.mean()}


def main() -> None:
    """Print what was found, as JSON."""
    args = options(__doc__, tp=8, pp=16, dp=128, peer_ranks=0)
    if args.peer_ranks:
        print(json.dumps({"Megatron-Core": args.peer_ranks} | bench_megatron(args.peer_ranks), indent=1))
        return
    measured = bench_ours(Layout(args.tp, args.pp, args.dp))
    measured["rank: digests of all ms"] = bench_collective(args.tp * args.pp * args.dp) * 1e3
    measured["rank: kept plan ms"] = bench_kept_plan(80) * 1e3
    measured["peak MiB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps(measured, indent=1))


if __name__ == "__main__":
    main()
