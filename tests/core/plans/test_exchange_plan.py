"""Who reads what for whom, and when: properties of the exchange plan over many ranks, without any."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megackpt import ShardedTensor
from megackpt.mapping.describe import describe
from megackpt.metadata import DIGEST_BLOCK_BYTES, ChunkTable, DeclaredChunks
from megackpt.metadata.merge import merge_declarations
from megackpt.planning import StridedCopy, exchange, plan_main_replicas
from megackpt.planning.exchange import PART_BYTES, plan_exchange
from megackpt.planning.exchange_plan import ExchangePlan, aligned
from megackpt.planning.part_reading import Readers, needed_ranges
from megackpt.testing.layouts import arrays, owned_chunks
from tests.support.effort import few

MIB = 1 << 20
WAYS = ("all_to_all", "broadcast", "gather_rounds", "gather_object", "two_stage")


def meta(key: str, shape: tuple[int, ...], *offsets: Any, replica: int = 0) -> ShardedTensor:
    data = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    return ShardedTensor.from_rank_offsets(key, data, *offsets, replica_id=replica)


def stored(entities: list[ShardedTensor]) -> ChunkTable:
    return plan_main_replicas(merge_declarations([describe(entities, rank=0)])).table


def plan(
    requested: list[DeclaredChunks],
    table: ChunkTable,
    mode: Any = "all_to_all",
    buffer_bytes: int = 64 * MIB,
    *,
    readers: Readers | None = None,
) -> ExchangePlan:
    return plan_exchange(
        requested,
        table,
        position=np.arange(len(table)),
        block_bytes=DIGEST_BLOCK_BYTES,
        mode=mode,
        buffer_bytes=buffer_bytes,
        where="here",
        readers=readers,
    )


def buffered_bytes(plan: ExchangePlan) -> np.ndarray:
    """Bytes that each rank holds at most, `[size]`: of two rounds that it gives, and one that it takes."""
    parts, deliveries = plan.parts, plan.deliveries
    sent_bytes = np.zeros((plan.rounds + 1, plan.size), np.int64)
    taken = np.zeros((plan.rounds + 1, plan.size), np.int64)
    np.add.at(sent_bytes, (parts.round, parts.reader), aligned(parts.nbytes))
    source = parts.reader[deliveries.part]
    sent = deliveries.rank != source
    packed = np.where(sent & deliveries.is_batched, aligned(deliveries.nbytes), 0)
    np.add.at(sent_bytes, (parts.round[deliveries.part], source), packed)
    np.add.at(
        taken, (parts.round[deliveries.part], deliveries.rank), np.where(sent, aligned(deliveries.nbytes), 0)
    )
    return (sent_bytes[:-1] + sent_bytes[1:]).max(axis=0, initial=0) + taken.max(axis=0)


def replicated(ranks: int) -> tuple[list[DeclaredChunks], ChunkTable]:
    shapes = [(4096, 1024 + 8 * i) for i in range(6)] + [(100,)] * 50 + [(50304, 512)]
    entities = [meta(f"t{i}", shape) for i, shape in enumerate(shapes)]
    return [describe(entities, rank=rank) for rank in range(ranks)], stored(entities)


@pytest.mark.parametrize("ranks", [2, 8, 16])
@pytest.mark.parametrize("mode", ["all_to_all", "broadcast", "gather_rounds", "gather_object"])
def test_every_byte_is_read_once_and_each_rank_reads_its_share(ranks: int, mode: str) -> None:
    requested, table = replicated(ranks)
    made = plan(requested, table, mode)
    by_chunk = np.bincount(made.parts.chunk, made.parts.nbytes, minlength=len(table))
    assert by_chunk.tolist() == table.nbytes.tolist()
    order = np.lexsort((made.parts.start, made.parts.chunk))
    same = np.diff(made.parts.chunk[order]) == 0
    assert np.array_equal(made.parts.stop[order][:-1][same], made.parts.start[order][1:][same])
    share = made.read_nbytes()
    assert share.max() <= 1.05 * share.mean()
    assert made.parts.nbytes.max() <= PART_BYTES
    assert len(made.deliveries) == ranks * len(made.parts)


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_no_rank_holds_more_than_its_buffers(ranks: int) -> None:
    requested, table = replicated(ranks)
    for buffer_bytes in (4 * MIB, 16 * MIB, 64 * MIB):
        made = plan(requested, table, buffer_bytes=buffer_bytes)
        # A block is the least that can be read: one that is given, one that is read, and one from a peer.
        assert buffered_bytes(made).max() <= max(buffer_bytes, 4 * DIGEST_BLOCK_BYTES)


def test_two_stages_hold_at_most_two_of_the_largest_tensors() -> None:
    entities = [meta(f"t{i}", (1024, 1024)) for i in range(20)]
    requested = [describe(entities, rank=rank) for rank in range(4)]
    made = plan(requested, stored(entities), "two_stage", 1024 * MIB)
    assert made.parts.reader.max() == 0
    assert buffered_bytes(made).max() <= 2 * (2 * MIB)
    assert made.rounds == 20


def test_a_rank_is_sent_what_it_needs_and_no_more() -> None:
    whole = meta("w", (2048, 4096))
    columns = [describe([meta("w", (2048, 1024), (1, tp, 4))], rank=tp) for tp in range(4)]
    made = plan(columns, stored([whole]))
    received = np.bincount(made.deliveries.rank, made.deliveries.nbytes)
    assert received.tolist() == [2048 * 1024 * 2] * 4
    assert made.read_nbytes().sum() == 2048 * 4096 * 2


def test_what_nobody_of_the_group_needs_is_not_read() -> None:
    whole = meta("w", (4096, 1024))
    other = meta("other", (1024, 1024))
    rows = [describe([meta("w", (1024, 1024), (0, 2, 4))], rank=rank) for rank in range(2)]
    made = plan(rows, stored([other, whole]))
    assert made.read_nbytes().sum() == 1024 * 1024 * 2
    assert made.parts.start.min() == 2 * 1024 * 1024 * 2


def test_a_chunk_goes_to_a_rank_that_needs_it() -> None:
    entities = [meta(f"t{i}", (1024, 1024)) for i in range(8)]
    requested = [describe(entities[2 * rank : 2 * rank + 2], rank=rank) for rank in range(4)]
    made = plan(requested, stored(entities))
    assert np.array_equal(made.parts.reader[made.deliveries.part], made.deliveries.rank), "nothing is sent"


@settings(max_examples=few(40, of=400), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), array=arrays(max_extent=9), ranks=st.integers(1, 5), mode=st.sampled_from(WAYS))
def test_deliveries_hold_every_element_that_a_rank_asks_for_once(
    data: st.DataObject, array: torch.Tensor, ranks: int, mode: Any
) -> None:
    source = data.draw(owned_chunks(tuple(array.shape), ranks=1))
    target = data.draw(owned_chunks(tuple(array.shape), ranks=ranks))
    table = stored([h.declare("a", array) for h in source if not h.replica])
    asked = [[h.declare("a", array) for h in target if h.rank == rank] for rank in range(ranks)]
    requested = [describe(entities, rank=rank) for rank, entities in enumerate(asked)]
    made = plan(requested, table, mode, data.draw(st.sampled_from([1, 1 << 20])))
    counts = np.diff(made.deliveries.first)
    rank = np.repeat(made.deliveries.rank, counts)
    assert np.array_equal(np.repeat(made.deliveries.part, counts), made.copies.stored)
    for number, entities in enumerate(asked):
        is_own = rank == number
        for number, entity in enumerate(entities):
            numel = made.copies.shape[is_own & (made.copies.entity == number)].prod(axis=1).sum()
            assert numel == (0 if entity.data is None else entity.data.numel())
    again = plan(requested, table, mode, 1 << 20)
    assert again.fingerprint() == plan(requested, table, mode, 1 << 20).fingerprint()
    assert (np.diff(made.parts.round) >= 0).all()


@settings(max_examples=few(40, of=400), deadline=None)
@given(data=st.data(), ranks=st.integers(1, 6), chunks=st.integers(1, 6))
def test_a_chunk_is_read_by_a_rank_that_can_reach_it_and_that_needs_it_where_one_does(
    data: st.DataObject, ranks: int, chunks: int
) -> None:
    some = st.lists(st.integers(0, ranks - 1), min_size=1, unique=True).map(sorted)
    entities = [meta(f"t{i}", (64, 8)) for i in range(chunks)]
    needing, holding = [data.draw(some) for _ in entities], [data.draw(some) for _ in range(chunks + 1)]
    requested = [
        describe([e for e, of in zip(entities, needing, strict=True) if rank in of], rank=rank)
        for rank in range(ranks)
    ]
    file = data.draw(st.lists(st.integers(0, chunks), min_size=chunks, max_size=chunks))
    readers = Readers(
        of=np.array(file),
        first=np.cumsum([0, *map(len, holding)]),
        ranks=np.array([rank for of in holding for rank in of]),
    )
    made = plan(requested, stored(entities), readers=readers)
    assert np.unique(made.parts.chunk).tolist() == list(range(chunks))
    for chunk, reader in zip(made.parts.chunk.tolist(), made.parts.reader.tolist(), strict=True):
        near = set(needing[chunk]) & set(holding[file[chunk]])
        assert reader in (near or holding[file[chunk]])


def test_gaps_of_whole_blocks_are_not_read() -> None:
    def columns(width: int, pitch: int) -> StridedCopy:
        return StridedCopy(0, (4, width), 0, (pitch, 1), 0, (width, 1))

    block = DIGEST_BLOCK_BYTES
    far = needed_ranges([columns(10, block)], width=4, nbytes=16 * block, block_bytes=block)
    assert far == [(0, block), (4 * block, 5 * block), (8 * block, 9 * block), (12 * block, 13 * block)]
    both = [columns(10, block), StridedCopy(0, (10,), 5, (1,), 0, (1,))]
    assert needed_ranges(both, width=4, nbytes=16 * block, block_bytes=block) == far, "no block twice"
    near = needed_ranges([columns(10, 100)], width=4, nbytes=1300, block_bytes=block)
    assert near == [(0, 1300)]
    anywhere = needed_ranges([columns(10, block)], width=4, nbytes=13 * block, block_bytes=1)
    assert sum(b - a for a, b in anywhere) == 4 * 64 * 1024


@settings(max_examples=few(25, of=200), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    data=st.data(),
    array=arrays(max_extent=9),
    kinds=st.integers(1, 3),
    ranks=st.integers(1, 6),
    mode=st.sampled_from(WAYS),
)
def test_planning_equal_requests_once_gives_the_plan_of_planning_each(
    data: st.DataObject, array: torch.Tensor, kinds: int, ranks: int, mode: Any
) -> None:
    source = data.draw(owned_chunks(tuple(array.shape), ranks=1))
    target = data.draw(owned_chunks(tuple(array.shape), ranks=kinds))
    table = stored([h.declare("a", array) for h in source if not h.replica])
    asked = [[h.declare("a", array) for h in target if h.rank == kind] for kind in range(kinds)]
    requested = [describe(asked[data.draw(st.integers(0, kinds - 1))], rank=r) for r in range(ranks)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(exchange, "equal_requests", lambda of: [[rank] for rank in range(len(of))])
        one_by_one = plan(requested, table, mode)
    combined = plan(requested, table, mode)
    for field in ("parts", "deliveries", "copies"):
        for name in type(getattr(combined, field)).__slots__:
            actual, expected = (getattr(getattr(p, field), name) for p in (combined, one_by_one))
            assert np.array_equal(actual, expected), (field, name)


def test_ranks_that_ask_for_the_same_are_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    entities = [meta(f"t{i}", (64, 64)) for i in range(8)]
    requested = [describe(entities[rank % 2 :: 2], rank=rank) for rank in range(64)]
    planned: list[int] = []
    plan_load = exchange.plan_load

    def watched(requested: DeclaredChunks, *args: Any, **kwargs: Any) -> Any:
        planned.append(len(requested))
        return plan_load(requested, *args, **kwargs)

    monkeypatch.setattr(exchange, "plan_load", watched)
    plan(requested, stored(entities))
    assert planned == [8]
