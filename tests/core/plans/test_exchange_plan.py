"""Which stored bytes fill which requested elements, who reads them for whom, and when; without any rank."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from megackpt import FormatError, ShardedTensor, load, save
from megackpt.engine.data.read import with_target_strides
from megackpt.entities.describe import describe
from megackpt.errors import GeometryError
from megackpt.plans.geometry import Box, Ints, rectangles_of, row_major_strides, split_range, strides_of
from megackpt.plans.metadata import (
    DIGEST_BLOCK_BYTES,
    ArraySpec,
    ChunkTable,
    DeclaredChunks,
    StoredChunks,
    block_counts,
)
from megackpt.plans.metadata.merge import merge_declarations
from megackpt.plans.planning import (
    StridedCopy,
    completeness,
    exchange,
    plan_load,
    plan_main_replicas,
    plan_reads,
)
from megackpt.plans.planning.copies import MAX_BLOCK_BYTES, READ_BYTES
from megackpt.plans.planning.exchange import PART_BYTES, plan_exchange
from megackpt.plans.planning.exchange_plan import ExchangePlan, Readers, aligned, needed_ranges
from megackpt.plans.planning.load_plan import overlapping_chunks
from megackpt.testing.layouts import arrays, owned_chunks
from tests.support.effort import few
from tests.support.tables import Row, declared_rows

MIB = 1 << 20


def meta(key: str, shape: tuple[int, ...], *offsets: Any, replica: int = 0) -> ShardedTensor:
    data = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    return ShardedTensor.from_rank_offsets(key, data, *offsets, replica_id=replica)


def stored(entities: list[ShardedTensor]) -> ChunkTable:
    return plan_main_replicas(merge_declarations([describe(entities, rank=0)])).table


def plan(
    requested: list[DeclaredChunks],
    table: ChunkTable,
    *,
    has_one_reader: bool = False,
    buffer_bytes: int = 64 * MIB,
    readers: Readers | None = None,
) -> ExchangePlan:
    return plan_exchange(
        requested,
        table,
        position=np.arange(len(table)),
        block_bytes=DIGEST_BLOCK_BYTES,
        has_one_reader=has_one_reader,
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
def test_every_byte_is_read_once_and_each_rank_reads_its_share(ranks: int) -> None:
    requested, table = replicated(ranks)
    made = plan(requested, table)
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


# Of 48 MiB, a quarter is for what a rank sends, and half for what it receives from the others.
@pytest.mark.parametrize(
    ("has_one_reader", "ranks", "mib"),
    [(False, 2, 4), (False, 7, 4), (False, 9, 3), (False, 13, 2), (True, 9, 4)],
)
def test_parts_are_as_long_as_the_buffers_have_room_for_one_of_each_rank(
    has_one_reader: bool, ranks: int, mib: int
) -> None:
    entities = [meta("w", (32768, 32768))]
    requested = [describe(entities, rank=rank) for rank in range(ranks)]
    made = plan(requested, stored(entities), has_one_reader=has_one_reader, buffer_bytes=48 * MIB)
    assert made.parts.nbytes.max() == mib * MIB


def test_two_stages_hold_at_most_two_of_the_largest_tensors() -> None:
    entities = [meta(f"t{i}", (1024, 1024)) for i in range(20)]
    requested = [describe(entities, rank=rank) for rank in range(4)]
    made = plan(requested, stored(entities), has_one_reader=True, buffer_bytes=1024 * MIB)
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
@given(data=st.data(), array=arrays(max_extent=9), ranks=st.integers(1, 5), has_one_reader=st.booleans())
def test_deliveries_hold_every_element_that_a_rank_asks_for_once(
    data: st.DataObject, array: torch.Tensor, ranks: int, has_one_reader: bool
) -> None:
    source = data.draw(owned_chunks(tuple(array.shape), ranks=1))
    target = data.draw(owned_chunks(tuple(array.shape), ranks=ranks))
    table = stored([h.declare("a", array) for h in source if not h.replica])
    asked = [[h.declare("a", array) for h in target if h.rank == rank] for rank in range(ranks)]
    requested = [describe(entities, rank=rank) for rank, entities in enumerate(asked)]
    buffer_bytes = data.draw(st.sampled_from([1, 1 << 20]))
    made = plan(requested, table, has_one_reader=has_one_reader, buffer_bytes=buffer_bytes)
    counts = np.diff(made.deliveries.first)
    rank = np.repeat(made.deliveries.rank, counts)
    assert np.array_equal(np.repeat(made.deliveries.part, counts), made.copies.stored)
    for number, entities in enumerate(asked):
        is_own = rank == number
        for number, entity in enumerate(entities):
            numel = made.copies.shape[is_own & (made.copies.entity == number)].prod(axis=1).sum()
            assert numel == (0 if entity.data is None else entity.data.numel())
    again = plan(requested, table, has_one_reader=has_one_reader, buffer_bytes=buffer_bytes)
    assert again.fingerprint() == made.fingerprint()
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
    has_one_reader=st.booleans(),
)
def test_planning_equal_requests_once_gives_the_plan_of_planning_each(
    data: st.DataObject, array: torch.Tensor, kinds: int, ranks: int, has_one_reader: bool
) -> None:
    source = data.draw(owned_chunks(tuple(array.shape), ranks=1))
    target = data.draw(owned_chunks(tuple(array.shape), ranks=kinds))
    table = stored([h.declare("a", array) for h in source if not h.replica])
    asked = [[h.declare("a", array) for h in target if h.rank == kind] for kind in range(kinds)]
    requested = [describe(asked[data.draw(st.integers(0, kinds - 1))], rank=r) for r in range(ranks)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(exchange, "equal_requests", lambda of: [[rank] for rank in range(len(of))])
        one_by_one = plan(requested, table, has_one_reader=has_one_reader)
    combined = plan(requested, table, has_one_reader=has_one_reader)
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


def test_arrays_that_are_together_longer_than_64_bits_are_distinguished() -> None:
    length, arrays = 2**59, 40
    shapes = {f"k{i:02d}": (length,) for i in range(arrays)}
    half = length // 2
    rows: list[Row] = [(key, (start,), (half,), None) for key in shapes for start in (0, half)]
    stored = declared_rows(shapes, *rows).table
    asked = dict.fromkeys(list(shapes)[1::2], (length,))
    wanted = declared_rows(asked, *[(key, (half + 5,), (7,), None) for key in asked])
    copies = plan_load(wanted, stored, where="here")
    assert copies.stored.tolist() == [4 * i + 3 for i in range(arrays // 2)]
    assert copies.source_first.tolist() == [5] * (arrays // 2)


def boxes(start: Ints, extent: Ints, whole: tuple[int, ...]) -> ChunkTable:
    """Chunks of one array that are whole boxes, in index order."""
    order = np.lexsort((*extent.T[::-1], *start.T[::-1]))
    start, extent = start[order], extent[order]
    numel = extent.prod(axis=1)
    return ChunkTable((ArraySpec("w", "int8", whole),), 0 * numel, start, extent, 0 * numel, numel, numel)


def all_of(whole: tuple[int, ...]) -> DeclaredChunks:
    return declared_rows({"w": whole}, ("w", (0,) * len(whole), whole, None))


def test_equal_chunks_are_one_whatever_their_number() -> None:
    many = boxes(np.zeros((1000, 1), np.int64), np.full((1000, 1), 1000), (1000,))
    copies = plan_load(all_of((1000,)), many, where="here")
    assert (copies.stored.tolist(), copies.shape.tolist()) == ([999], [[1000]])


def test_chunks_with_many_times_the_elements_of_their_array_raise_an_error() -> None:
    begin = np.arange(1000)[:, None]
    nested = boxes(begin, 2000 - 2 * begin, (2000,))
    with pytest.raises(FormatError, match=r"'w' overlap: .* more than 64 times the 2,000 elements") as raised:
        plan_load(all_of((2000,)), nested, where="here")
    assert raised.value.key == "w"


def test_overlaps_that_are_too_many_raise_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = np.arange(10)[:, None] * 9
    crossing = boxes(begin, np.full((10, 1), 10), (91,))
    assert plan_load(all_of((91,)), crossing, where="here").shape[:, 0].tolist() == [9] * 9 + [10]
    monkeypatch.setattr(completeness, "MAX_CELLS", 27)
    with pytest.raises(FormatError, match="'w' overlap in more than 27 places"):
        plan_load(all_of((91,)), crossing, where="here")


def test_many_chunks_that_overlap_and_tile_are_planned_in_time() -> None:
    side = 300
    row, column = np.divmod(np.arange(side * side), side)
    start = np.stack((row, column), axis=1) * 4
    extent = np.minimum(start + 5, 4 * side) - start  # each reaches into its neighbours
    began = time.process_time()
    copies = plan_load(all_of((4 * side, 4 * side)), boxes(start, extent, (4 * side, 4 * side)), where="here")
    assert time.process_time() - began < 5
    assert int(copies.shape.prod(axis=1).sum()) == 16 * side * side
    longer = boxes(start, extent, (4 * side + 1, 4 * side))
    message = rf"no stored chunk has \[{4 * side}:{4 * side + 1}, 0:{4 * side}\]"
    with pytest.raises(FormatError, match=message):
        plan_load(all_of((4 * side + 1, 4 * side)), longer, where="here")


def test_rows_of_another_array_are_not_taken_where_an_index_is_not_sorted() -> None:
    whole: list[Row] = [("b", (0,), (4,), None), ("a", (0,), (4,), None)]
    stored = declared_rows({"a": (4,), "b": (4,)}, *whole).table
    for number, key in enumerate("ab"):
        try:
            copies = plan_load(declared_rows({key: (4,)}, (key, (0,), (4,), None)), stored, where="here")
        except FormatError:
            continue
        assert stored.array[copies.stored].tolist() == [number]


def stored_as(shape: tuple[int, ...], dtype: torch.dtype) -> StoredChunks:
    """One chunk that is a whole array, without its data."""
    meta = ShardedTensor.from_rank_offsets("w", torch.empty(shape, dtype=dtype, device="meta"))
    plan = plan_main_replicas(merge_declarations([describe([meta], rank=0)]))
    start = plan.offset_bytes
    digests = torch.zeros(int(block_counts(plan.table.nbytes).sum()), dtype=torch.uint64).numpy()
    return StoredChunks(plan.table, plan.writer, start + 4096, start, digests, ("file",))


@settings(max_examples=few(30, of=300), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_read_is_whole_blocks_within_bounds_and_holds_its_copies(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 3000)), data.draw(st.integers(1, 3000))
    dtype = data.draw(st.sampled_from([torch.int8, torch.float32, torch.float64]))
    stored = stored_as((rows, columns), dtype)
    asked = []
    for _ in range(data.draw(st.integers(1, 4))):
        top, left = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
        shape = (data.draw(st.integers(1, rows - top)), data.draw(st.integers(1, columns - left)))
        target = torch.empty(shape, dtype=dtype, device="meta")
        asked.append(ShardedTensor("w", target, dtype, shape, (rows, columns), (top, left)))
    copies = plan_load(describe(asked, rank=0), stored.table, where="here")
    placed = with_target_strides(copies, asked, [t.data for t in asked if t.data is not None])
    reads = plan_reads(placed, stored.table, position=np.arange(len(stored)), block_bytes=DIGEST_BLOCK_BYTES)
    nbytes = int(stored.table.nbytes[0])
    copied = 0
    for read, (start, stop) in enumerate(zip(reads.start.tolist(), reads.stop.tolist(), strict=True)):
        assert 0 < stop - start <= READ_BYTES
        assert start % DIGEST_BLOCK_BYTES == 0
        assert stop % DIGEST_BLOCK_BYTES == 0 or stop == nbytes
        for copy in reads.copies([read])[0]:
            assert start <= copy.source * dtype.itemsize
            last = copy.source + sum((n - 1) * s for n, s in zip(copy.shape, copy.source_stride, strict=True))
            assert (last + 1) * dtype.itemsize <= stop
            copied += copy.numel
    assert copied == sum(t.data.numel() for t in asked if t.data is not None)


@pytest.mark.parametrize("parts", [2, 4])
def test_a_large_array_loads_as_several_columns_of_one_rank_and_twice(tmp_path: Path, parts: int) -> None:
    array = torch.randint(0, 2**31, (3000, 1024), dtype=torch.int32)  # 12 MiB, more than one read
    save({"w": ShardedTensor.from_rank_offsets("w", array)}, tmp_path / "c")
    columns = [torch.zeros(3000, 1024 // parts, dtype=torch.int32) for _ in range(parts)]
    asked = [ShardedTensor.from_rank_offsets("w", c, (1, i, parts)) for i, c in enumerate(columns)]
    whole = [torch.zeros_like(array), torch.zeros_like(array)]
    load(
        {"columns": asked, "twice": [ShardedTensor.from_rank_offsets("w", w) for w in whole]}, tmp_path / "c"
    )
    assert torch.equal(torch.cat(columns, dim=1), array)
    assert torch.equal(whole[0], array)
    assert torch.equal(whole[1], array)


def test_blocks_that_are_longer_than_a_read_raise_an_error() -> None:
    stored = stored_as((4, 4), torch.float32)
    whole = ShardedTensor.from_rank_offsets("w", torch.empty((4, 4)))
    copies = plan_load(describe([whole], rank=0), stored.table, where="here")
    for block_bytes in (0, MAX_BLOCK_BYTES + 1):
        with pytest.raises(ValueError, match=r"block_bytes is .*; a format gives 1 to"):
            plan_reads(copies, stored.table, position=np.zeros(1, np.int64), block_bytes=block_bytes)


EXTENTS = (5, 4)
ARRAYS = tuple(ArraySpec(key, "int8", EXTENTS) for key in ("a", "b", "c"))
Range = tuple[int, tuple[int, int], tuple[int, int], int, int]  # array, start, stop, flat range


@st.composite
def chunks(draw: st.DrawFn) -> Range:
    """Any flat range of any box, also an empty one; few boxes, so that many are equal."""
    ends = [sorted(draw(st.tuples(*[st.integers(0, n)] * 2))) for n in EXTENTS]
    if draw(st.booleans()):
        ends = [[0, 4], [1, 4]]
    numel = (ends[0][1] - ends[0][0]) * (ends[1][1] - ends[1][0])
    low, high = sorted(draw(st.tuples(*[st.integers(0, numel)] * 2)))
    if draw(st.booleans()):
        low, high = 0, numel
    (a, b), (c, d) = ends
    return draw(st.integers(0, len(ARRAYS) - 1)), (a, c), (b, d), low, high


def table_of(rows: list[Range]) -> ChunkTable:
    """The rows in the order of an index."""
    ordered = sorted(rows, key=lambda row: (row[0], row[1], row[3], row[4]))
    columns = [np.array([row[i] for row in ordered], np.int64) for i in range(5)]
    array, start, stop, low, high = columns
    start, stop = start.reshape(-1, 2), stop.reshape(-1, 2)
    return ChunkTable(ARRAYS, array, start, stop - start, low, high, high - low)


def elements(table: ChunkTable, row: int) -> set[tuple[int, int]]:
    """Array and place of each element, the slow way."""
    locations = np.arange(EXTENTS[0] * EXTENTS[1]).reshape(EXTENTS)
    (a, c), (n, m) = table.start[row].tolist(), table.shape[row].tolist()
    low, high = int(table.flat_start[row]), int(table.flat_stop[row])
    inside = locations[a : a + n, c : c + m].reshape(-1)[low:high]
    return {(int(table.array[row]), location) for location in inside.tolist()}


@settings(deadline=None, max_examples=few(40, of=400))
@given(wanted=st.lists(chunks(), max_size=5), stored=st.lists(chunks(), max_size=12))
@example(  # a range that ends later stands before one that ends sooner
    wanted=[(0, (0, 0), (5, 4), 15, 17)],
    stored=[(0, (0, 0), (5, 4), 0, 18), (0, (0, 0), (5, 4), 2, 4), (0, (0, 0), (5, 4), 17, 20)],
)
def test_pairs_that_share_an_element_are_found(wanted: list[Range], stored: list[Range]) -> None:
    want, have = table_of(wanted), table_of(stored)
    asked, candidates = overlapping_chunks(want, have)
    pairs = list(zip(asked.tolist(), candidates.tolist(), strict=True))
    assert pairs == sorted(set(pairs))
    for a in range(len(want)):
        for b in range(len(have)):
            asked_for, there = elements(want, a), elements(have, b)
            shares = bool(asked_for & there)
            assert not shares or (a, b) in pairs
            same_box = (want.start[a] == have.start[b]).all() and (want.shape[a] == have.shape[b]).all()
            if want.array[a] == have.array[b] and same_box and asked_for and there:
                assert shares or (a, b) not in pairs
    assert all(want.array[a] == have.array[b] for a, b in pairs)


@given(rows=st.integers(0, 64), parts=st.integers(1, 8))
def test_fragments_tile_the_dim_without_gap_or_overlap(rows: int, parts: int) -> None:
    shares = [split_range(rows, parts=parts, index=i) for i in range(parts)]
    assert [e for start, stop in shares for e in range(start, stop)] == list(range(rows))


def test_split_range_rejects_a_part_that_does_not_exist() -> None:
    with pytest.raises(GeometryError, match=r"part 4 of 10 elements in 4 parts.*0 <= index < parts"):
        split_range(10, parts=4, index=4)


@st.composite
def flat_ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=4)))
    ends = sorted(draw(st.tuples(*[st.integers(0, math.prod(shape))] * 2)))
    return shape, ends[0], ends[1]


@settings(max_examples=few(100, of=1000))
@given(ranges=st.lists(flat_ranges(), min_size=1, max_size=4))
def test_rectangles_of_a_flat_range_are_its_elements_in_order(
    ranges: list[tuple[tuple[int, ...], int, int]],
) -> None:
    dims = max(len(shape) for shape, _, _ in ranges)
    shapes = np.array([shape + (1,) * (dims - len(shape)) for shape, _, _ in ranges], np.int64)
    starts, stops = (np.array([r[i] for r in ranges], np.int64) for i in (1, 2))
    got = rectangles_of(shapes, starts, stops)
    for row, (shape, start, stop) in enumerate(ranges):
        elements = np.arange(math.prod(shape)).reshape(shapes[row])
        rows = np.flatnonzero(got.row == row)
        assert len(rows) <= 2 * dims - 1
        flat: list[int] = []
        for i in rows:
            index = tuple(slice(a, a + n) for a, n in zip(got.start[i], got.shape[i], strict=True))
            flat += elements[index].ravel().tolist()
        assert flat == list(range(start, stop))


@given(shape=st.lists(st.integers(0, 6), min_size=1, max_size=4))
def test_strides_are_those_of_numpy(shape: list[int]) -> None:
    reference = tuple(s // 8 for s in np.zeros([max(n, 1) for n in shape], np.int64).strides)
    assert row_major_strides([max(n, 1) for n in shape]) == reference
    assert tuple(strides_of(np.array([[max(n, 1) for n in shape]]))[0]) == reference


def test_box_names_what_is_wrong_with_it() -> None:
    with pytest.raises(GeometryError, match=r"has 1 dims but shape \(2, 3\) has 2"):
        Box((0,), (2, 3))
    with pytest.raises(GeometryError, match="negative"):
        Box((-1,), (2,))


SIDE = 2100


def test_two_thousand_chunks_that_overlap_in_four_million_cells_are_rejected() -> None:
    """The whole array, then squares along its diagonal: all their edges cross."""
    corner = np.arange(SIDE - 1)
    start = np.concatenate(([[0, 0]], np.stack((corner, corner), axis=1)))
    shape = np.concatenate(([[SIDE, SIDE]], np.full((SIDE - 1, 2), 2)))
    stored = boxes(start, shape, (SIDE, SIDE))
    with pytest.raises(FormatError, match=r"'w' overlap in more than 4,194,304 places.* damaged or forged"):
        plan_load(all_of((SIDE, SIDE)), stored, where="here")
