"""Saves, loads and conversions need little memory beyond the state; declaring a save moves nothing large."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import megackpt
from megackpt import Checkpointer, LoadOptions, ShardedTensor
from megackpt.engine.data import device_copies
from megackpt.engine.saving import local_state
from megackpt.formats.native import NativeSaveStrategy
from megackpt.run import PlanCache
from megackpt.storage.rawio import COMMON_POOL
from megackpt.testing.ranks import RankPool
from megackpt.training.optim import DistributedOptimizer
from megackpt.training.parallel import ParallelGroups, ParallelLayout
from models import GPT, GPTConfig
from tests.benchmarks import bench_memory
from tests.benchmarks.peers.collectives import COLLECTIVE_METHODS, MESSAGE_METHODS, observed
from tests.benchmarks.peers.counters import peak_above, resident_bytes
from tests.support.effort import sampled
from tests.support.states import OnDevice, filled
from tests.support.zarr_v1 import copy_as_zarr_v1

MIB = 1 << 20
STATE_BYTES = 1024 * MIB
TENSORS = 16
ALLOWED_BYTES = 64 * MIB


def warm_up(directory: Path, options: LoadOptions | None = None) -> None:
    """Save and load, so that what is imported lazily is not the state's memory."""
    small = {"warm": ShardedTensor.from_rank_offsets("warm", torch.zeros(10), replica_id=dist.get_rank())}
    megackpt.save(small, directory)
    megackpt.load(small, directory, options=options)


def peak_beyond_the_state(directory: Path, loading: bool) -> tuple[int, int]:
    """Return by how much save (or load) raised resident memory at its peak, and the size of the state."""
    numel = STATE_BYTES // TENSORS // 4
    tensors = [torch.full((numel,), float(i)) for i in range(TENSORS)]
    state = {str(i): ShardedTensor.from_rank_offsets(f"t{i}", t) for i, t in enumerate(tensors)}
    warm_up(directory.with_name("warm"))
    for tensor in tensors if loading else ():
        tensor.zero_()
    extra = peak_above(partial(megackpt.load if loading else megackpt.save, state, directory))
    assert all(bool((t == float(i)).all()) for i, t in enumerate(tensors))  # itself needs memory
    return extra, sum(t.nbytes for t in tensors)


def peak_of_a_resharded_load(directory: Path, kind: str) -> int:
    """Return by how much loading a 1 GiB array in other chunks than stored raised resident memory."""
    rows, columns = 16384, STATE_BYTES // 4 // 16384
    array = torch.arange(rows * columns, dtype=torch.int32).reshape(rows, columns)
    if not directory.exists():
        megackpt.save({"w": ShardedTensor.from_rank_offsets("w", array)}, directory)
    target = torch.zeros_like(array)
    if kind == "columns":
        halves = [target[:, : columns // 2], target[:, columns // 2 :]]
        asked = [ShardedTensor.from_rank_offsets("w", h, (1, i, 2)) for i, h in enumerate(halves)]
    else:
        parts = target.view(-1).split(array.numel() // 7)  # flat ranges that begin and end within rows
        starts = [i * (array.numel() // 7) for i in range(len(parts))]
        asked = [
            ShardedTensor.from_rank_offsets_flat(
                "w", p, (rows, columns), flattened_range=slice(s, s + p.numel())
            )
            for s, p in zip(starts, parts, strict=True)
        ]
    extra = peak_above(partial(megackpt.load, {"w": asked}, directory))
    assert all(torch.equal(a, b) for a, b in zip(target.split(512), array.split(512), strict=True))
    return extra


@pytest.mark.parametrize("kind", ["columns", "flat"])
def test_a_resharded_load_of_1_gib_adds_at_most_64_mib(
    rank_pool: RankPool, tmp_path: Path, kind: str
) -> None:
    (extra,) = rank_pool.run(peak_of_a_resharded_load, 1, tmp_path / "c", kind)
    print(f"load as {kind}: peak beyond the state {extra / MIB:.1f} MiB")
    assert extra <= ALLOWED_BYTES


def test_save_and_load_add_at_most_64_mib_to_a_state_of_1_gib(rank_pool: RankPool, tmp_path: Path) -> None:
    for loading in (False, True):
        ((extra, state),) = rank_pool.run(peak_beyond_the_state, 1, tmp_path / "c", loading)
        print(
            f"{'load' if loading else 'save'}: state {state // MIB} MiB, peak beyond it {extra / MIB:.1f} MiB"
        )
        assert state == STATE_BYTES
        assert extra <= ALLOWED_BYTES


SAVED_BYTES = 192 * MIB
WRITTEN_AT_ONCE = {"megackpt": 1, "torch_dist": 2}  # files, by format
OF_A_TENSOR_BYTES = {
    "megackpt": 2048,
    "torch_dist": 6144,
}  # declarations and plan; of torch_dist .metadata, too
ON_A_DEVICE = "on a device"


def staged_bytes(format_: str, kind: str) -> int:
    """Return what docs/performance.md promises, and 4 MiB for stacks and heaps of threads."""
    tensors = SAVED_BYTES // 4096 if kind == "tensors of 4 KiB" else 16
    return WRITTEN_AT_ONCE[format_] * 28 * MIB + tensors * OF_A_TENSOR_BYTES[format_] + 4 * MIB


def added_on_a_device(directory: Path, format_: str) -> int:
    """Return how many bytes a save of tensors adds that go through the buffers of devices."""
    with patch.object(local_state, "follow"), patch.object(device_copies, "follow"):
        for name, nbytes in (("small", 1 << 16), ("large", SAVED_BYTES)):
            # Contiguous: what a device makes contiguous in its own memory would be memory of the host here.
            state = bench_memory.STATES["contiguous"](nbytes)
            for tensor in state.values():
                tensor.data = tensor.data.as_subclass(OnDevice)
            COMMON_POOL.clear()
            device_copies.COMMON_BUFFERS._idle.clear()
            added = peak_above(partial(megackpt.save, state, directory / name, format_))
    return added


@pytest.mark.parametrize("kind", [*bench_memory.STATES, ON_A_DEVICE])
@pytest.mark.parametrize("format_", WRITTEN_AT_ONCE)
def test_a_save_stages_no_more_than_its_buffers(
    rank_pool: RankPool, tmp_path: Path, format_: str, kind: str
) -> None:
    if kind == ON_A_DEVICE:
        (added,) = rank_pool.run(added_on_a_device, 1, tmp_path, format_)
    else:
        (added,) = rank_pool.run(bench_memory.added_by_a_save, 1, tmp_path, format_, kind, SAVED_BYTES)
    print(f"{kind}, {format_}: {added / MIB:.1f} MiB")
    assert added <= staged_bytes(format_, kind)


@pytest.mark.parametrize("kind", ["contiguous", "transposed"])
@pytest.mark.parametrize("format_", WRITTEN_AT_ONCE)
def test_an_asynchronous_save_adds_the_share_of_the_rank_once(
    rank_pool: RankPool, tmp_path: Path, format_: str, kind: str
) -> None:
    ((first, later),) = rank_pool.run(
        bench_memory.added_by_asynchronous_saves, 1, tmp_path, format_, kind, SAVED_BYTES
    )
    print(f"{kind}, {format_}: {first / MIB:.1f} MiB, then {later / MIB:.1f} MiB")
    assert first <= SAVED_BYTES + staged_bytes(format_, kind)
    assert later <= staged_bytes(format_, kind)


ROUNDS, SETTLED = 60, 20  # saves and loads; the first ones allocate what later ones use again


def what_is_held_after_rounds(directory: Path) -> list[tuple[int, int, int]]:
    """Return resident bytes, descriptors and threads after each save and load of 48 MiB."""
    held = []
    tensors = [torch.full((4 * MIB,), float(i)) for i in range(3)]
    state = {str(i): ShardedTensor.from_rank_offsets(f"t{i}", t) for i, t in enumerate(tensors)}
    with (
        Checkpointer(directory / "sync", keep_last=1) as synchronous,
        Checkpointer(directory / "async", keep_last=1, async_save=True) as asynchronous,
    ):
        for step in range(ROUNDS):
            checkpointer = (synchronous, asynchronous)[step % 2]
            checkpointer.save(step, state)
            checkpointer.wait()
            tensors[0].zero_()
            checkpointer.load(state)
            threads, descriptors = (len(os.listdir(f"/proc/self/{name}")) for name in ("task", "fd"))
            held.append((resident_bytes() or 0, descriptors, threads))
    return held


def test_60_saves_and_loads_leave_no_memory_no_descriptor_and_no_thread(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    (held,) = rank_pool.run(what_is_held_after_rounds, 1, tmp_path)
    memory, descriptors, threads = zip(*held[SETTLED:], strict=True)
    # The least of ten rounds: a thread that ends, or memory that is freed late, counts for some rounds only.
    left = [min(values[-10:]) - min(values[:10]) for values in (memory, descriptors, threads)]
    print(f"{left[0] / MIB:.1f} MiB, {left[1]} descriptors, {left[2]} threads")
    assert left[0] <= 2 * MIB  # heaps of threads; a single lost buffer has 4 MiB
    assert left[1:] == [0, 0]


EXCHANGED_BYTES = 32 * MIB  # of a tensor


def peak_of_an_exchange(directory: Path, way: Any, exchange_bytes: int) -> int:
    """Return by how much loading six tensors that all ranks hold raised resident memory on this rank."""
    data = [torch.full((EXCHANGED_BYTES // 4,), float(i)) for i in range(6)]
    state = {
        str(i): ShardedTensor.from_rank_offsets(f"t{i}", t, replica_id=dist.get_rank())
        for i, t in enumerate(data)
    }
    options = LoadOptions(exchange=way, exchange_bytes=exchange_bytes)
    megackpt.save(state, directory)
    warm_up(directory.with_name("warm"), options)
    for tensor in data:
        tensor.zero_()
    extra = peak_above(partial(megackpt.load, state, directory, options=options))
    assert all(bool((t == float(i)).all()) for i, t in enumerate(data))
    return extra


@pytest.mark.parametrize(
    ("way", "exchange_bytes", "most"),
    [
        ("two_stage", 1024 * MIB, 2 * EXCHANGED_BYTES),  # two of the largest tensors
        ("all_to_all", 16 * MIB, 16 * MIB),  # its buffers
    ],
)
def test_an_exchange_keeps_within_its_buffers(
    rank_pool: RankPool, tmp_path: Path, way: str, exchange_bytes: int, most: int
) -> None:
    extra = rank_pool.run(peak_of_an_exchange, 3, tmp_path / "c", way, exchange_bytes)
    print(f"{way}: peaks beyond the state {[round(e / MIB, 1) for e in extra]} MiB")
    assert max(extra) <= most + 8 * MIB  # messages, threads, plans


CHUNK_BYTES = int(os.environ.get("MEGACKPT_TEST_CHUNK_MIB", "192")) * MIB
CHUNKS = 2
ALLOWED_TO_CONVERT_BYTES = 100 * MIB
NATIVE = ("megackpt", 1)
OTHERS = [("zarr", 3), ("zarr", 1), ("torch_dist", 1)]


def save_long_chunks(directory: Path) -> None:
    rows = CHUNK_BYTES // (4 * 1024)
    parts = [torch.arange(rows * 1024, dtype=torch.int32).reshape(rows, 1024) + i for i in range(CHUNKS)]
    state = [ShardedTensor.from_rank_offsets("w", half, (0, i, CHUNKS)) for i, half in enumerate(parts)]
    megackpt.save({"w": state, "step": 1}, directory)


def peak_of_a_conversion(source: Path, target: Path, strategy: tuple[str, int]) -> int:
    """Return by how much converting, verification included, raised resident memory at its peak."""
    warm = source.with_name(f"warm-{target.name}")  # what is imported lazily is no memory of the conversion
    megackpt.save({"w": ShardedTensor.from_rank_offsets("w", torch.zeros(10))}, warm, strategy)
    megackpt.convert(warm, warm.with_name(f"{warm.name}-again"), NATIVE)
    return peak_above(partial(megackpt.convert, source, target, strategy))


@sampled(6)
@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_converting_long_chunks_adds_at_most_100_mib(
    rank_pool: RankPool, tmp_path: Path, other: tuple[str, int]
) -> None:
    rank_pool.run(save_long_chunks, 1, tmp_path / "native")
    there = 0
    if other == ("zarr", 1):  # which is only read
        rank_pool.run(copy_as_zarr_v1, 1, tmp_path / "native", tmp_path / "other")
    else:
        (there,) = rank_pool.run(peak_of_a_conversion, 1, tmp_path / "native", tmp_path / "other", other)
    (back,) = rank_pool.run(peak_of_a_conversion, 1, tmp_path / "other", tmp_path / "back", NATIVE)
    total = CHUNKS * CHUNK_BYTES // MIB
    print(f"{total} MiB in {CHUNKS} chunks: to {other} {there / MIB:.1f} MiB, back {back / MIB:.1f} MiB")
    assert there <= ALLOWED_TO_CONVERT_BYTES
    assert back <= ALLOWED_TO_CONVERT_BYTES


class Traffic:
    """The calls of a process group, and the bytes of the tensors that they are given."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.nbytes = 0

    def note(self, name: str, args: tuple[Any, ...]) -> None:
        self.calls.append(name)
        self.nbytes += _tensor_bytes(args)


@contextmanager
def counted_traffic() -> Iterator[Traffic]:
    """Count the calls of this process while the block runs."""
    traffic = Traffic()
    with observed(COLLECTIVE_METHODS + MESSAGE_METHODS, traffic.note):
        yield traffic


def _tensor_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, (list, tuple)):
        return sum(_tensor_bytes(v) for v in value)
    return 0


class StopAfterPlanning(NativeSaveStrategy):
    """Notes the traffic at the moment the first byte would be written."""

    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic
        self.at_end_of_planning: tuple[list[str], int] | None = None

    def write_chunks(self, *args: Any, **kwargs: Any) -> bytes:
        self.at_end_of_planning = (list(self.traffic.calls), self.traffic.nbytes)
        return super().write_chunks(*args, **kwargs)


def traffic_of_a_save(hidden_size: int, directory: Path) -> tuple[int, list[str], list[str], int]:
    """Return bytes of state, collectives while declaring, collectives and bytes until the end of planning."""
    groups = ParallelGroups.create(ParallelLayout(tp=2, dp=2))
    config = GPTConfig(
        vocab_size=64,
        hidden_size=hidden_size,
        num_layers=2,
        num_heads=4,
        seq_length=8,
        params_dtype=torch.bfloat16,
    )
    torch.manual_seed(0)  # replicas are equal
    model = GPT(config, groups)
    optimizer = DistributedOptimizer(model.parameters(), lambda g: torch.optim.AdamW(g), groups)
    megackpt.save({}, directory)  # makes the process group, once
    with counted_traffic() as traffic:
        sharded = model.sharded_state_dict()
        state = {"model": sharded, "optimizer": optimizer.sharded_state_dict(sharded)}
        declaring = list(traffic.calls)
        strategy = StopAfterPlanning(traffic)
        megackpt.save(state, directory, strategy)
    assert strategy.at_end_of_planning is not None
    state_bytes = sum(p.numel() for p in model.parameters()) * (2 + 12 // groups.dp.size)
    return (state_bytes, declaring, *strategy.at_end_of_planning)


PLANNING = [
    "alltoall_base",  # settings, digests, plans that are kept
    *("alltoall_base", "allgather"),  # digests of lists
    *("alltoall_base", "gather"),  # declarations
    *("alltoall_base", "scatter"),  # each rank's rows
]
"""Each begins with what it is and how long, in a message from each rank to each; what is short is in it."""


def calls_of_four_saves(directory: Path) -> list[tuple[list[str], list[str]]]:
    """Return collectives until the end of planning and after it, for saves of two structures in turn."""
    plans, counts = PlanCache(), []
    megackpt.save({}, directory)  # makes the process group, once
    for number in range(4):
        rows = 2 + number % 2
        shard = filled(float(number), rows, rank=dist.get_rank(), ranks=dist.get_world_size())
        noted = megackpt.ShardedObject("o", "x" * number, (1,), (0,), replica_id=dist.get_rank())
        with counted_traffic() as traffic:
            strategy = StopAfterPlanning(traffic)
            megackpt.save({"w": shard, "o": noted, "step": number}, directory, strategy, plans=plans)
        assert strategy.at_end_of_planning is not None
        planning = strategy.at_end_of_planning[0]
        counts.append((planning, traffic.calls[len(planning) :]))
    return counts


def test_planning_with_a_plan_that_is_kept_is_one_collective(rank_pool: RankPool, tmp_path: Path) -> None:
    short = [name for name in PLANNING if name != "gather"]
    once = ["alltoall_base"]
    writing = [*once, *once]  # all have written, and said what; rank 0 has committed
    for calls in rank_pool.run(calls_of_four_saves, 4, tmp_path / "c"):
        assert calls == [(short, writing), (short, writing), (once, writing), (once, writing)]


def test_declaring_and_planning_flat_state_moves_nothing_proportional_to_it(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    small = rank_pool.run(traffic_of_a_save, 4, 32, tmp_path / "c")
    large = rank_pool.run(traffic_of_a_save, 4, 512, tmp_path / "c")
    for (bytes_small, declaring, calls, moved_small), (bytes_large, _, calls_large, moved_large) in zip(
        small, large, strict=True
    ):
        print(f"state {bytes_small} B: {calls} {moved_small} B; state {bytes_large} B: {moved_large} B")
        assert declaring == []
        assert calls == calls_large == PLANNING
        assert bytes_large > 100 * bytes_small
        # Equal numbers of chunks give equally long tables, but for how parameters fall into shards.
        assert moved_large <= 1.2 * moved_small
        assert moved_large < bytes_large / 20
