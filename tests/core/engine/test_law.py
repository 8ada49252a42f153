"""The law of the library: for all layouts, any state and any exchange, load(save(x)) is x, bit by bit."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megackpt import DeclarationError, load, load_with_report, save
from megackpt.comm import Group, SingleProcess
from megackpt.contrib.megatron.config import CheckpointConfig
from megackpt.engine.data.tensor_bytes import as_bits, byte_view
from megackpt.entities import (
    ReplicaId,
    ShardedLayout,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    StateDict,
)
from megackpt.options import OTHER_NAMES_OF_ALL_TO_ALL, Exchange, LoadOptions
from megackpt.plans.metadata import DTYPES
from megackpt.storage import MemoryStore
from megackpt.testing.layouts import OwnedChunk, arrays, owned_chunks
from megackpt.testing.state_dicts import (
    GlobalState,
    blank,
    global_states,
    placements,
    state_difference,
    values_of,
)
from megackpt.testing.world import SimulatedRank, SimulatedWorld
from tests.support.effort import few, sampled
from tests.support.groups import MessagesOnly
from tests.support.states import bits, sharded
from tests.support.worlds import loading, saving


def declare(layout: list[OwnedChunk], key: str, array: torch.Tensor, rank: int) -> list[ShardedTensor]:
    return [owned.declare(key, array) for owned in layout if owned.rank == rank]


def bits_of(tensor: ShardedTensor) -> bytes:
    assert tensor.data is not None
    return bytes(byte_view(as_bits(tensor.data).contiguous()))


# Bounds on time are off: the machine that runs this may be busy. Nothing here is meant to be fast.
@settings(max_examples=few(100, of=2000), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), array=arrays(), source_ranks=st.integers(1, 4), target_ranks=st.integers(1, 4))
def test_any_layout_loads_what_any_other_saved(
    data: st.DataObject, array: torch.Tensor, source_ranks: int, target_ranks: int
) -> None:
    check_the_law("megackpt", data, array, source_ranks, target_ranks)


@settings(max_examples=few(37, of=300), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    data=st.data(),
    array=arrays(),
    source_ranks=st.integers(1, 4),
    target_ranks=st.integers(1, 4),
    has_index=st.booleans(),
)
def test_any_layout_loads_what_any_other_saved_as_torch_dist(
    data: st.DataObject, array: torch.Tensor, source_ranks: int, target_ranks: int, has_index: bool
) -> None:
    check_the_law("torch_dist", data, array, source_ranks, target_ranks, has_index=has_index)


def check_the_law(
    backend: str,
    data: st.DataObject,
    array: torch.Tensor,
    source_ranks: int,
    target_ranks: int,
    *,
    has_index: bool = True,
) -> None:
    """Save and load; without our own index a checkpoint is read as one that another library wrote."""
    shape = tuple(array.shape)
    source = data.draw(owned_chunks(shape, ranks=source_ranks), label="source")
    target = data.draw(owned_chunks(shape, ranks=target_ranks), label="target")
    store = MemoryStore()

    def load_rank(group: Group) -> list[ShardedTensor]:
        wanted = declare(target, "array", array, group.rank)
        for tensor in wanted:
            as_bits(tensor.data).fill_(1)  # something that is not the answer
        load({"shards": wanted}, store, group=group)
        return wanted

    save_rank = saving(lambda rank: {"shards": declare(source, "array", array, rank)}, store, backend)
    SimulatedWorld(source_ranks).run(save_rank)
    if not has_index:
        store.delete([name for name in store.names() if name.startswith("megackpt-")])
    for rank, loaded in enumerate(SimulatedWorld(target_ranks).run(load_rank)):
        for got, expected in zip(loaded, declare(target, "array", array, rank), strict=True):
            assert bits_of(got) == bits_of(expected)


NAMED = [name for name in DTYPES if name != "bool"]
# Quiet and signalling NaN with payloads, infinities, zeros of both signs, subnormals.
SPECIAL = {
    4: [0x7FC00001, 0x7F800001, 0xFFBFFFFF, 0x7F800000, 0xFF800000, 0, 0x80000000, 1, 0x807FFFFF],
    8: [
        0x7FF8000000000001,
        0x7FF0000000000001,
        0xFFF7FFFFFFFFFFFF,
        0x7FF0000000000000,
        0,
        1 << 63,
        1,
        0x800FFFFFFFFFFFFF,
    ],
}


def all_bits(dtype: torch.dtype) -> torch.Tensor:
    """Every bit pattern of a dtype of one or two bytes, special ones of a wider: `[rows, 8]`, rows even."""
    width = dtype.itemsize // (2 if dtype.is_complex else 1)
    raw_bytes = b"".join(p.to_bytes(width, "little") for p in SPECIAL.get(width, range(256**width)))
    raw_bytes *= -(-256 // len(raw_bytes))
    whole_rows = raw_bytes[: len(raw_bytes) // 256 * 256]
    return torch.frombuffer(bytearray(whole_rows), dtype=torch.uint8).view(dtype).reshape(-1, 8)


def declared(whole: torch.Tensor, rank: int, ranks: int, *, fill: bool) -> StateDict:
    """One rank's part of the tensor as each kind of entity: rows, rows from the other end as flat ranges."""
    rows, columns = len(whole) // ranks, whole.shape[1]
    local = whole.chunk(ranks)[rank]

    def own(part: torch.Tensor) -> torch.Tensor:
        return part.clone() if fill else torch.zeros_like(part)

    def build(key: str, data: torch.Tensor, replica_id: ReplicaId, flat: slice | None) -> ShardedTensor:
        turned = data.t().contiguous()
        return ShardedTensor.from_rank_offsets(key, turned, (1, rank, ranks), replica_id=replica_id)

    cut = local.numel() // 3 + 1
    layout = ShardedLayout.transpose("layout", local, (1, 0), (1, rank, ranks))
    return {
        "box": ShardedTensor.from_rank_offsets("box", own(local), (0, rank, ranks)),
        "flat": [
            ShardedTensor.from_rank_offsets_flat(
                "flat", own(local.reshape(-1)[r]), (rows, columns), (0, rank, ranks), flattened_range=r
            )
            for r in (slice(0, cut), slice(cut, local.numel()))
        ],
        "layout": [
            layout.retarget(key="layout", data=own(local.reshape(-1)[r]), flattened_range=r)
            for r in (slice(0, cut), slice(cut, local.numel()))
        ],
        "factory": ShardedTensorFactory("factory", own(local), build, torch.t),
        "common": own(whole),
    }


@pytest.mark.parametrize("name", NAMED)
def test_every_entity_keeps_the_bits_of(name: str) -> None:
    if not hasattr(torch, name):
        pytest.skip(f"this torch has no {name}")
    whole = all_bits(
        DTYPES[name].torch_dtype if hasattr(DTYPES[name], "torch_dtype") else getattr(torch, name)
    )
    store = MemoryStore()
    SimulatedWorld(2).run(saving(lambda rank: declared(whole, rank, 2, fill=True), store))
    loaded = load(declared(whole, 0, 1, fill=False), store)
    results = {
        "box": loaded["box"],
        "flat": torch.cat([t.view(torch.uint8) for t in loaded["flat"]]),
        "layout": torch.cat([t.view(torch.uint8) for t in loaded["layout"]]),
        "factory": loaded["factory"],
        "common": loaded["common"],
    }
    assert loaded["common"].dtype == whole.dtype
    assert {kind: bits(tensor) == bits(whole) for kind, tensor in results.items()} == dict.fromkeys(
        results, True
    )


@settings(max_examples=few(25, of=500), deadline=None, suppress_health_check=list(HealthCheck))
@given(state=global_states(), source_ranks=st.integers(1, 3), target_ranks=st.integers(1, 3), data=st.data())
def test_any_world_loads_what_any_other_saved_of_all_entities(
    state: GlobalState, source_ranks: int, target_ranks: int, data: st.DataObject
) -> None:
    source = data.draw(placements(state, ranks=source_ranks), label="source")
    target = data.draw(placements(state, ranks=target_ranks), label="target")
    store = MemoryStore()
    SimulatedWorld(source_ranks).run(saving(source.declare, store))
    load_rank = loading(lambda rank: blank(target.declare(rank)), store)
    for rank, loaded in enumerate(SimulatedWorld(target_ranks).run(load_rank)):
        assert state_difference(loaded, values_of(target.declare(rank))) is None


WAYS = ("all_to_all", "two_stage")


class CountingStore(MemoryStore):
    """Counts how often each byte of a data file is read, by group of readers."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[tuple[str, int, int]] = []
        self._counting = threading.Lock()

    def read_into(self, name: str, offset_bytes: int, out: memoryview) -> None:
        with self._counting:
            self.reads.append((name, offset_bytes, offset_bytes + out.nbytes))
        super().read_into(name, offset_bytes, out)


def groups_of(ranks: int, parts: int) -> list[list[int]]:
    return [list(range(part, ranks, parts)) for part in range(parts)]


# Bounds on time are off: the machine that runs this may be busy. Nothing here is meant to be fast.
@settings(max_examples=few(20, of=200), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    data=st.data(),
    both=st.tuples(arrays(), arrays(max_extent=40)),
    source_ranks=st.integers(1, 4),
    target_ranks=st.integers(1, 5),
    parts=st.integers(1, 3),
    way=st.sampled_from(WAYS),
    exchange_bytes=st.sampled_from([1, 4096, 1 << 20]),
)
def test_any_way_loads_what_direct_reading_loads(
    data: st.DataObject,
    both: tuple[torch.Tensor, torch.Tensor],
    source_ranks: int,
    target_ranks: int,
    parts: int,
    way: Any,
    exchange_bytes: int,
) -> None:
    parts = min(parts, target_ranks)
    keys = ("first", "second")
    source = [data.draw(owned_chunks(tuple(a.shape), ranks=source_ranks)) for a in both]
    target = [data.draw(owned_chunks(tuple(a.shape), ranks=target_ranks)) for a in both]
    store = CountingStore()

    def state_of(rank: int) -> StateDict:
        state = {k: declare(s, k, a, rank) for k, s, a in zip(keys, source, both, strict=True)}
        return {**state, "object": ShardedObject("object", {"rank": rank}, (source_ranks,), (rank,))}

    def load_rank(group: SimulatedRank) -> list[ShardedTensor]:
        wanted = {k: declare(t, k, a, group.rank) for k, t, a in zip(keys, target, both, strict=True)}
        for tensors in wanted.values():
            for tensor in tensors:
                as_bits(tensor.data).fill_(1)  # something that is not the answer
        thing = ShardedObject("object", None, (source_ranks,), (group.rank % source_ranks,))
        (own_ranks,) = [ranks for ranks in groups_of(target_ranks, parts) if group.rank in ranks]
        loaded = load(
            {**wanted, "object": thing},
            store,
            options=LoadOptions(exchange=way, exchange_bytes=exchange_bytes),
            group=group,
            exchange_group=group.subgroup(own_ranks),
        )
        assert loaded["object"] == {"rank": group.rank % source_ranks}
        return [tensor for tensors in wanted.values() for tensor in tensors]

    SimulatedWorld(source_ranks).run(saving(state_of, store))
    store.reads.clear()
    for rank, loaded in enumerate(SimulatedWorld(target_ranks).run(load_rank)):
        expected = [t for k, s, a in zip(keys, target, both, strict=True) for t in declare(s, k, a, rank)]
        for got, true in zip(loaded, expected, strict=True):
            assert bits_of(got) == bits_of(true)
    times = Counter((name, at) for name, low, high in store.reads for at in range(low, high))
    assert max(times.values(), default=0) <= parts


STORED = torch.arange(256 * 640, dtype=torch.int32).view(256, 640)


def load_by_name(name: Exchange, **options: Any) -> tuple[list[Any], list[tuple[int, int]]]:
    """Return what 4 ranks load, in rank order, and the sorted ranges that they read of the one data file."""
    store = CountingStore()
    half = STORED.to(torch.bfloat16)
    thing = ShardedObject("thing", {"seen": 3}, (1,), (0,))
    save({"w": sharded("w", STORED), "half": sharded("half", half), "thing": thing}, store)
    store.reads.clear()

    def load_rank(group: SimulatedRank) -> Any:
        column = torch.zeros(256, 320, dtype=torch.int32)
        row = torch.zeros(64, 640, dtype=torch.bfloat16)
        wanted = {
            "w": ShardedTensor.from_rank_offsets(
                "w", column, (1, group.rank % 2, 2), replica_id=group.rank // 2
            ),
            "half": ShardedTensor.from_rank_offsets("half", row, (0, group.rank, 4)),
            "whole": ShardedTensor.from_rank_offsets("w", torch.zeros_like(STORED), replica_id=group.rank),
            "thing": ShardedObject("thing", None, (1,), (0,), group.rank),
        }
        # Buffers are short, so bytes are exchanged in several rounds.
        how = LoadOptions(exchange=name, exchange_bytes=1 << 18, **options)
        return load(wanted, store, options=how, group=group)

    loaded = SimulatedWorld(4).run(load_rank)
    return loaded, sorted((low, high) for name, low, high in store.reads if name.startswith("data/"))


@pytest.mark.parametrize("name", get_args(Exchange))
def test_every_name_of_an_exchange_loads_the_same_bits(name: Exchange) -> None:
    loaded, _ = load_by_name(name)
    half = STORED.to(torch.bfloat16)
    for rank, state in enumerate(loaded):
        assert torch.equal(state["w"], STORED.chunk(2, dim=1)[rank % 2])
        assert bits(state["half"]) == bits(half.chunk(4)[rank])
        assert torch.equal(state["whole"], STORED)
        assert state["thing"] == {"seen": 3}


@pytest.mark.parametrize("name", OTHER_NAMES_OF_ALL_TO_ALL)
def test_other_names_mean_all_to_all(name: Exchange) -> None:
    assert LoadOptions(exchange=name) == LoadOptions(exchange="all_to_all")
    knobs = CheckpointConfig(dist_ckpt_parallel_load=True, dist_ckpt_exchange_algo=name)
    assert knobs.load_options().exchange == "all_to_all"
    assert load_by_name(name)[1] == load_by_name("all_to_all")[1]


def test_a_broadcast_that_should_not_go_through_the_host_is_all_to_all_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="cpu_transfer=False has no effect.*two_stage") as warned:
        options = LoadOptions(exchange="broadcast", cpu_transfer=False)
    assert [warning.filename for warning in warned] == [__file__]
    assert options == replace(options, timeout_s=options.timeout_s) == LoadOptions(exchange="all_to_all")


def test_a_reader_leaves_out_what_lies_between_the_blocks_that_ranks_need() -> None:
    # A row is a block of 256 KiB. A part is the 20th of what a rank reads: 4 blocks.
    rows = torch.arange(160 << 16, dtype=torch.int32).view(160, -1)
    needed = [slice(8, 9), slice(11, 12)]
    store = CountingStore()
    save({"w": ShardedTensor.from_rank_offsets("w", rows)}, store)
    store.reads.clear()

    def load_rank(group: SimulatedRank) -> torch.Tensor:
        own = needed[group.rank]
        data = torch.zeros(own.stop - own.start, rows.shape[1], dtype=torch.int32)
        target = ShardedTensor("w", data, data.dtype, tuple(data.shape), (160, 1 << 16), (own.start, 0))
        load({"w": target}, store, options=LoadOptions(exchange="all_to_all"), group=group)
        return data

    for own, data in zip(needed, SimulatedWorld(2).run(load_rank), strict=True):
        assert torch.equal(data, rows[own])
    assert sum(high - low for name, low, high in store.reads if name.startswith("data/")) == 2 << 18


@sampled(3)
@pytest.mark.parametrize("exchange_bytes", [1 << 17, 1 << 24])
@pytest.mark.parametrize("only_key", [None, "flat", "columns"])
@pytest.mark.parametrize("backend", ["megackpt", "torch_dist", "zarr"])
@pytest.mark.parametrize("way", WAYS)
def test_parts_that_begin_within_a_unit_and_have_gaps_arrive_right(
    backend: str, way: Any, only_key: str | None, exchange_bytes: int
) -> None:
    big = torch.arange(700 * 512, dtype=torch.int32).reshape(700, 512)
    small = torch.arange(64 * 96, dtype=torch.int16).reshape(64, 96)
    store = CountingStore()
    save(
        {k: ShardedTensor.from_rank_offsets(k, t) for k, t in (("big", big), ("small", small))},
        store,
        backend,
    )

    def wanted(rank: int, fill: bool) -> dict[str, ShardedTensor]:
        def box(array: torch.Tensor, start: tuple[int, int], shape: tuple[int, int]) -> ShardedTensor:
            part = array[start[0] : start[0] + shape[0], start[1] : start[1] + shape[1]]
            room = torch.zeros(shape[0], 2 * shape[1], dtype=array.dtype)
            view = room[:, ::2] if rank % 2 else room[:, : shape[1]].contiguous()
            if fill:
                view.copy_(part)
            key = "big" if array is big else "small"
            return ShardedTensor(key, view, array.dtype, shape, tuple(array.shape), start, replica_id=rank)

        def flat(array: torch.Tensor, start: int, stop: int) -> ShardedTensor:
            data = (
                array.reshape(-1)[start:stop].clone()
                if fill
                else torch.zeros(stop - start, dtype=array.dtype)
            )
            key, shape = ("big" if array is big else "small"), tuple(array.shape)
            return ShardedTensor.from_rank_offsets_flat(
                key, data, shape, replica_id=rank, flattened_range=slice(start, stop)
            )

        return {
            "rows": box(big, (100 + rank, 0), (500, 512)),
            "columns": box(big, (3, 17 * rank), (600, 300)),
            "flat": flat(big, 30_001 * (rank + 1), 200_000),
            "small rows": box(small, (rank, 0), (50, 96)),
            "small columns": box(small, (0, 5 * rank), (64, 40)),
            "small flat": flat(small, 700 * rank + 3, 6000),
        }

    def load_rank(group: SimulatedRank) -> dict[str, ShardedTensor]:
        state = wanted(group.rank, fill=False)
        if only_key is not None:
            state = {only_key: state[only_key]}
        load(state, store, options=LoadOptions(exchange=way, exchange_bytes=exchange_bytes), group=group)
        return state

    store.reads.clear()
    for rank, loaded in enumerate(SimulatedWorld(4).run(load_rank)):
        true = wanted(rank, fill=True)
        for name, got in loaded.items():
            assert torch.equal(got.data, true[name].data), (rank, name)  # type: ignore[arg-type]
    if backend != "zarr":  # whose library reads files by itself
        assert sum(high - low for _, low, high in store.reads) <= big.nbytes + small.nbytes


def state(replica: int = 0) -> dict[str, ShardedTensor]:
    return {"w": ShardedTensor.from_rank_offsets("w", torch.arange(1000.0), replica_id=replica)}


def test_groups_that_make_no_sense_raise_an_error() -> None:
    store = MemoryStore()
    save(state(), store)
    message = r"exchange_group is given, but with LoadOptions\.exchange='auto' every rank"
    with pytest.raises(DeclarationError, match=message):
        load(state(), store, exchange_group=SingleProcess())
    with pytest.raises(DeclarationError, match=r"which is not a megackpt\.comm\.Group"):
        load(state(), store, options=LoadOptions(exchange="all_to_all"), group=object())  # type: ignore[call-overload]
    with pytest.raises(DeclarationError, match="cpu_transfer=False broadcasts between devices"):
        load(state(), store, options=LoadOptions(exchange="two_stage", cpu_transfer=False))


@pytest.mark.parametrize("exchange", WAYS)
def test_a_group_of_a_user_needs_two_methods_to_exchange(exchange: str) -> None:
    store = MemoryStore()

    def run(group: SimulatedRank) -> list[float]:
        save(state(group.rank), store, group=group)
        wanted = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(1000), replica_id=group.rank)}
        load(wanted, store, options=LoadOptions(exchange=exchange), group=MessagesOnly(group))  # type: ignore[arg-type]
        return wanted["w"].data.tolist()  # type: ignore[union-attr]

    assert SimulatedWorld(3).run(run) == [torch.arange(1000.0).tolist()] * 3


def test_one_process_alone_exchanges_with_nobody() -> None:
    store = MemoryStore()
    save(state(), store)
    wanted = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(1000))}
    load(wanted, store, options=LoadOptions(exchange="two_stage"))
    assert torch.equal(wanted["w"].data, torch.arange(1000.0))  # type: ignore[arg-type]


def test_a_report_has_the_times_of_all_ranks() -> None:
    store = MemoryStore()

    def run(group: SimulatedRank) -> Any:
        save(state(group.rank), store, group=group)
        _, report = load_with_report(
            state(group.rank), store, options=LoadOptions(exchange="two_stage"), group=group
        )
        return report.times

    times = SimulatedWorld(3).run(run)
    assert times[0] == times[1] == times[2]
    assert times[0].read.min == 0.0
    assert 0.0 < times[0].read.mean < times[0].read.max
    assert times[0].exchange.min > 0.0
    assert str(times[0]).startswith("read: min 0.000 s, mean ")
