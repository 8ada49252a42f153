"""Loads that share reads: for any layouts and any exchange, what is loaded is what was saved."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megackpt import DeclarationError, load, load_with_report, save
from megackpt.comm import Group, SingleProcess
from megackpt.engine.data.tensor_bytes import as_bits, byte_view
from megackpt.mapping import ShardedObject, ShardedTensor
from megackpt.options import LoadOptions
from megackpt.storage import MemoryStore
from megackpt.testing.layouts import OwnedChunk, arrays, owned_chunks
from megackpt.testing.world import SimulatedRank, SimulatedWorld
from tests.support.effort import few, sampled

WAYS = ("all_to_all", "broadcast", "gather_rounds", "gather_object", "two_stage")


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


def declare(layout: list[OwnedChunk], key: str, array: torch.Tensor, rank: int) -> list[ShardedTensor]:
    return [owned.declare(key, array) for owned in layout if owned.rank == rank]


def bits_of(tensor: ShardedTensor) -> bytes:
    assert tensor.data is not None
    return bytes(byte_view(as_bits(tensor.data).contiguous()))


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

    def save_rank(group: Group) -> None:
        state = {k: declare(s, k, a, group.rank) for k, s, a in zip(keys, source, both, strict=True)}
        thing = ShardedObject("object", {"rank": group.rank}, (source_ranks,), (group.rank,))
        save({**state, "object": thing}, store, group=group)

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

    SimulatedWorld(source_ranks).run(save_rank)
    store.reads.clear()
    for rank, loaded in enumerate(SimulatedWorld(target_ranks).run(load_rank)):
        expected = [t for k, s, a in zip(keys, target, both, strict=True) for t in declare(s, k, a, rank)]
        for got, true in zip(loaded, expected, strict=True):
            assert bits_of(got) == bits_of(true)
    times = Counter((name, at) for name, low, high in store.reads for at in range(low, high))
    assert max(times.values(), default=0) <= parts


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


class MessagesOnly(Group):
    """A group of a user, with only the two methods that a group must implement."""

    def __init__(self, group: Group) -> None:
        self.rank, self.size, self._group = group.rank, group.size, group

    def all_gather(self, data: bytes) -> list[bytes]:
        return self._group.all_gather(data)

    def gather(self, data: bytes) -> list[bytes]:
        return self._group.gather(data)


def state(replica: int = 0) -> dict[str, ShardedTensor]:
    return {"w": ShardedTensor.from_rank_offsets("w", torch.arange(1000.0), replica_id=replica)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exchange": "pigeons"}, "exchange='pigeons' is not known. Give one of auto, direct, all_to_all"),
        ({"exchange_bytes": 0}, "exchange_bytes is 0"),
        ({"cpu_transfer": False}, "cpu_transfer=False has no meaning with exchange='auto'"),
        ({"cpu_transfer": False, "exchange": "all_to_all"}, "only 'broadcast' and 'two_stage'"),
    ],
)
def test_options_that_make_no_sense_raise_an_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        LoadOptions(**options)


def test_groups_that_make_no_sense_raise_an_error() -> None:
    store = MemoryStore()
    save(state(), store)
    with pytest.raises(
        DeclarationError, match=r"exchange_group is given, but with LoadOptions\.exchange='auto' every rank"
    ):
        load(state(), store, exchange_group=SingleProcess())
    with pytest.raises(DeclarationError, match=r"which is not a megackpt\.comm\.Group"):
        load(state(), store, options=LoadOptions(exchange="all_to_all"), group=object())  # type: ignore[call-overload]
    with pytest.raises(DeclarationError, match="cpu_transfer=False broadcasts between devices"):
        load(state(), store, options=LoadOptions(exchange="broadcast", cpu_transfer=False))


@pytest.mark.parametrize("exchange", ["all_to_all", "broadcast", "gather_rounds", "gather_object"])
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
