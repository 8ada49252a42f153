"""The index of a checkpoint: what is written, what parts of it give, and how damage to it is found."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import megackpt
from megackpt import LoadOptions, ShardedObject
from megackpt.errors import CheckpointError, FormatError, IntegrityError, StorageError
from megackpt.formats.index_file import WholeIndex, read_index, write_index
from megackpt.formats.index_head import StoredColumn, require
from megackpt.formats.index_layout import ROW_COLUMNS, aligned_head, bytes_of, header_of
from megackpt.formats.index_reader import open_index
from megackpt.formats.native import names
from megackpt.formats.native.save import NativeSaveStrategy
from megackpt.formats.partial_index import PartialIndex
from megackpt.formats.strategy import Json
from megackpt.plans.metadata import (
    DIGEST_BLOCK_BYTES,
    ArraySpec,
    ChunkTable,
    DeclaredChunks,
    StoredChunks,
    block_counts,
    itemsizes,
    pack_columns,
    pad_shapes,
)
from megackpt.plans.planning import plan_load, plan_save
from megackpt.storage import MemoryStore, digest_of
from megackpt.testing.faulty_store import FaultyStore
from megackpt.testing.world import SimulatedWorld
from tests.support.effort import few
from tests.support.states import ask, box, damaged, flat_range, save_on_ranks, sharded, small, stack

ATTEMPT = "0" * 16
RANKS = 150  # more than twice as many as are put in order at once
LONG, SHORT = 70_000, 16  # elements of 8 bytes: three blocks, and one


def rows_of_ranks() -> DeclaredChunks:
    """Rank r holds the rows r, r + RANKS and r + 2 RANKS of a long array, and row r of a short one."""
    arrays = (ArraySpec("long", "float64", (3 * RANKS, LONG)), ArraySpec("short", "float64", (RANKS, SHORT)))
    rank = np.repeat(np.arange(RANKS), 4)
    entity = np.tile(np.arange(4), RANKS)
    start = np.stack([rank + np.where(entity < 3, entity, 0) * RANKS, np.zeros_like(rank)], axis=1)
    width = np.where(entity < 3, LONG, SHORT)
    shape = np.stack([np.ones_like(width), width], axis=1)
    array = (entity == 3).astype(np.int64)
    table = ChunkTable(arrays, array, start, shape, np.zeros_like(width), width, 8 * width)
    return DeclaredChunks(table, np.ones(len(rank), np.bool_), np.zeros(len(rank), np.bool_), rank, entity)


def test_digests_of_many_ranks_come_to_the_rows_they_are_of() -> None:
    plan, store, receipts = plan_save(rows_of_ranks(), ranks=RANKS), MemoryStore(), []
    expected: dict[int, list[int]] = {}
    for rank in range(RANKS):
        digests: list[int] = []
        for row in plan.rows_of(rank).tolist():
            blocks = -(-int(plan.table.nbytes[row]) // DIGEST_BLOCK_BYTES)
            expected[row] = [rank << 32 | len(digests) + block for block in range(blocks)]
            digests += expected[row]
        columns = {"data_start": np.array([4096 + rank]), "digests": np.array(digests, np.uint64)}
        receipts.append([pack_columns(columns)])
        store.write(names.data_file(ATTEMPT, rank), b"")
    message = NativeSaveStrategy().write_index(store, attempt=ATTEMPT, plan=plan, receipts=receipts)
    index = read_index(store, message)
    assert index.digests is not None
    first = index.digest_start.tolist()
    assert len(first) == len(expected) == 4 * RANKS
    for row, digests in expected.items():
        assert index.digests[first[row] : first[row] + len(digests)].tolist() == digests
        assert index.files[index.file[row]] == names.data_file(ATTEMPT, int(plan.writer[row]))
        assert index.offset_bytes[row] == 4096 + plan.writer[row] + plan.offset_bytes[row]


Chunk = tuple[int, tuple[int, ...], tuple[int, ...], int, int]  # array, start, shape, flat start, flat stop


def cuts(draw: st.DrawFn, stop: int, most: int) -> list[tuple[int, int]]:
    """Cut `[0, stop)` at random places."""
    inner = draw(st.sets(st.integers(1, max(1, stop - 1)), max_size=most)) - {stop}
    return list(itertools.pairwise([0, *sorted(inner), stop]))


def table_of(arrays: list[ArraySpec], chunks: list[Chunk]) -> ChunkTable:
    """Put chunks into a table, in index order."""
    chunks = sorted(chunks, key=lambda c: (c[0], *itertools.chain(*zip(c[1], c[2], strict=True)), *c[3:]))
    dims = max((len(a.global_shape) for a in arrays), default=1) or 1
    columns = list(zip(*chunks, strict=True)) or [()] * 5
    array, low, high = (np.array(columns[i], np.int64) for i in (0, 3, 4))
    return ChunkTable(
        tuple(arrays),
        array,
        pad_shapes(columns[1], dims, fill=0),
        pad_shapes(columns[2], dims, fill=1),
        low,
        high,
        (high - low) * itemsizes(arrays)[array] if arrays else low,
    )


@st.composite
def stored_chunks(draw: st.DrawFn) -> StoredChunks:
    """Draw arrays of up to three dims, each cut into a grid, and some cells into flat ranges."""
    arrays, chunks = [], []
    for number in range(draw(st.integers(0, 6))):
        shape = tuple(draw(st.lists(st.integers(1, 400), max_size=3)))
        arrays.append(ArraySpec(f"k{number}", draw(st.sampled_from(["float64", "int8"])), shape))
        if draw(st.integers(0, 5)) == 0:
            continue  # an array of which nothing is stored
        for cell in itertools.product(*(cuts(draw, n, 5) for n in shape)):
            start, extent = tuple(a for a, _ in cell), tuple(b - a for a, b in cell)
            ranges = cuts(draw, math.prod(extent), 4) if draw(st.booleans()) else [(0, math.prod(extent))]
            chunks += [(number, start, extent, *r) for r in ranges]
    table = table_of(arrays, chunks)
    counts = block_counts(table.nbytes)
    digests = np.arange(int(counts.sum()), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return StoredChunks(
        table,
        np.arange(len(table)) % 3,
        np.cumsum(table.nbytes) - table.nbytes,  # one after the other, as in a file
        np.cumsum(counts) - counts,
        digests,
        tuple(f"data/{i}" for i in range(3)),
    )


@st.composite
def requests(draw: st.DrawFn, arrays: tuple[ArraySpec, ...]) -> DeclaredChunks:
    """Draw boxes of some arrays, and flat ranges of boxes."""
    chosen = sorted(draw(st.sets(st.sampled_from(arrays), min_size=1)), key=lambda a: a.key)
    chunks: list[Chunk] = []
    for number, spec in enumerate(chosen):
        for _ in range(draw(st.integers(0, 3))):
            ends = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in spec.global_shape]
            shape = tuple(b - a for a, b in ends)
            flat = sorted(draw(st.tuples(st.integers(0, math.prod(shape)), st.integers(0, math.prod(shape)))))
            low, high = (0, math.prod(shape)) if draw(st.booleans()) else flat
            chunks.append((number, tuple(a for a, _ in ends), shape, low, high))
    table = table_of(chosen, chunks)
    yes = np.ones(len(table), np.bool_)  # whatever is not stored may be missing
    return DeclaredChunks(table, yes, ~yes, np.zeros(len(table), np.int64), np.arange(len(table)))


def copies_of(requested: DeclaredChunks, stored: StoredChunks) -> list[object]:
    """Plan a load, and say of each copy what it copies from which file, and where to."""
    has_rows = np.bincount(stored.table.array, minlength=len(stored.table.arrays)) > 0
    known = {a.key for a, some in zip(stored.table.arrays, has_rows.tolist(), strict=True) if some}
    rows = [r for r in range(len(requested)) if requested.table.arrays[requested.table.array[r]].key in known]
    copies = plan_load(requested.take(np.array(rows, np.int64)), stored.table, where="here")
    files = np.array(stored.files)
    locations = list(zip(files[stored.file[copies.stored]], stored.offset_bytes[copies.stored], strict=True))
    rest = [getattr(copies, name).tolist() for name in copies.__slots__ if name != "stored"]
    return [locations, *rest]


def digests_of(stored: StoredChunks) -> list[list[int]]:
    """Return the digests of each chunk."""
    assert stored.digests is not None
    counts = block_counts(stored.table.nbytes)
    return [stored.digests[a : a + n].tolist() for a, n in zip(stored.digest_start, counts, strict=True)]


def rows_of(stored: StoredChunks) -> list[tuple[object, ...]]:
    """Return all that is known of each chunk."""
    t = stored.table
    named = (t.array, t.start, t.shape, t.flat_start, t.flat_stop, t.nbytes, stored.offset_bytes)
    columns = [column.tolist() for column in named]
    return list(zip(*columns, [stored.files[i] for i in stored.file], digests_of(stored), strict=True))


@settings(max_examples=few(25, of=80), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), block_rows=st.integers(1, 9), block_digests=st.integers(1, 5))
def test_parts_of_an_index_give_the_load_plan_of_the_whole(
    data: st.DataObject, block_rows: int, block_digests: int
) -> None:
    stored = data.draw(stored_chunks())
    store = MemoryStore()
    message = {"index": write_index(store, "i", stored, block_rows=block_rows, block_digests=block_digests)}
    whole = read_index(store, message)
    assert rows_of(whole) == rows_of(stored)
    index = open_index(store, message, whole_bytes=0)
    assert isinstance(index, PartialIndex)
    assert index.arrays == stored.table.arrays
    for _ in range(3 if stored.table.arrays else 0):
        asked = data.draw(st.lists(requests(stored.table.arrays), min_size=1, max_size=2))
        chunks = index.of_boxes([a.table for a in asked])
        assert set(map(repr, rows_of(chunks))) <= set(map(repr, rows_of(whole)))
        for request in asked:
            assert copies_of(request, chunks) == copies_of(request, whole)
        keys = {a.key for a in asked[0].table.arrays}
        of_keys = np.array([a.key in keys for a in whole.table.arrays], np.bool_)
        assert rows_of(index.of_keys(keys)) == rows_of(whole.take(of_keys[whole.table.array]))


def counting_store() -> FaultyStore:
    """Return a store that records what is read."""
    return FaultyStore(MemoryStore(), kinds={"read", "read_into"})


def test_a_rank_reads_a_small_part_of_a_large_index() -> None:
    stored, store = stack(8, 128, 256), counting_store()
    message = {"index": write_index(store, "index", stored)}
    nbytes = message["index"]["nbytes"]
    assert nbytes / len(stored) < 100
    assert message["index"]["head"]["nbytes"] < 0.01 * nbytes
    index = open_index(store, message)
    assert isinstance(index, PartialIndex)
    chunks = index.of_boxes([box(stored, k, (64, 0, 0), (2, 256, 300_000)) for k in (2, 3)])
    assert len(chunks) == 2 * 2 * 256
    assert {read.kind for read in store.operations} == {"read_into"}
    assert sum(read.nbytes for read in store.operations) < 0.05 * nbytes
    assert len(store.operations) < 50


def test_a_small_index_is_one_request() -> None:
    stored, store = stack(2, 4, 4), counting_store()
    message = {"index": write_index(store, "index", stored)}
    index = open_index(store, message)
    assert len(index.of_boxes([box(stored, 1, (1, 0, 0), (1, 4, 300_000))])) == 16
    assert [(read.kind, read.name) for read in store.operations] == [("read", "index")]


def test_an_index_without_a_head_is_read_whole() -> None:
    store, message, stored = small()
    del message["index"]["head"]
    index = open_index(store, message, whole_bytes=0)
    assert isinstance(index, WholeIndex)
    assert len(index.of_keys([stored.table.arrays[2].key])) == 64


def test_an_index_is_these_bytes() -> None:
    _, message, _ = small()
    head = {"nbytes": 3064, "xxh3_128": "923c2dae738e949087c81f4edd864bbb"}
    assert message["index"] == {
        "file": "index",
        "nbytes": 15352,
        "xxh3_128": "f5e8b7634cd5d501cca020db7adc2683",
        "head": {**head, "block_rows": 16, "block_digests": 8},
    }


def test_other_programs_open_an_index(tmp_path: Path) -> None:
    store, message, stored = small()
    (tmp_path / "index").write_bytes(store.read("index", max_bytes=message["index"]["nbytes"]))
    with safetensors.safe_open(tmp_path / "index", "pt") as file:
        assert torch.equal(file.get_tensor("start"), torch.from_numpy(stored.table.start.astype(np.uint32)))
        assert torch.equal(file.get_tensor("digest"), torch.from_numpy(stored.digests))


@pytest.mark.parametrize("first", [2**32 - 2, 2**32 - 1, 2**32])
def test_a_chunk_is_found_wherever_it_begins(first: int) -> None:
    column = np.array([0, first])
    ones, zeros = np.ones(2, np.int64), np.zeros(2, np.int64)
    shape = np.array([first, 1])
    table = ChunkTable(
        (ArraySpec("w", "int8", (first + 1,)),), zeros, column[:, None], shape[:, None], zeros, shape, shape
    )
    digests = np.zeros(int(block_counts(shape).sum()), np.uint64)
    stored = StoredChunks(table, zeros, column, np.array([0, len(digests) - 1]), digests, ("data/0",))
    store = MemoryStore()
    message = {"index": write_index(store, "index", stored)}
    index = open_index(store, message, whole_bytes=0)
    assert index.of_keys(["w"]).table.start[:, 0].tolist() == column.tolist()
    last = ChunkTable(
        table.arrays, zeros[:1], column[1:, None], ones[:1, None], zeros[:1], ones[:1], ones[:1]
    )
    assert first in index.of_boxes([last]).table.start


def state(rank: int, ranks: int) -> dict[str, Any]:
    """Tensors that are cut along another dim by other numbers of ranks, a flat one, and objects."""
    values = torch.arange(48 * 24, dtype=torch.int32).reshape(48, 24)
    rows, dim = (48 // ranks, 0) if ranks % 2 else (24 // ranks, 1)
    part = values.narrow(dim, rank * rows, rows).contiguous()
    numel = 48 * 24 // ranks
    return {
        "w": sharded("w", part, (dim, rank, ranks)),
        "m": flat_range("m", values, rank * numel, (rank + 1) * numel),
        "o": ShardedObject("o", {"rank": rank}, (ranks,), (rank,)),
    }


@pytest.mark.parametrize("exchange", ["direct", "all_to_all", "two_stage"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_load_by_parts_of_the_index_gives_what_was_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: Any, ranks: int
) -> None:
    save_on_ranks(3, lambda rank: state(rank, 3), tmp_path)
    opened = []

    def open_by_parts(*args: Any) -> PartialIndex:
        opened.append(open_index(*args, whole_bytes=0))
        return opened[-1]

    monkeypatch.setattr("megackpt.formats.native.load.open_index", open_by_parts)
    options = LoadOptions(exchange=exchange, rename={"m": "n"})

    def load(group: Any) -> None:
        expected, asked = state(group.rank, ranks), state(group.rank, ranks)
        asked["m"].key = "n"
        for name in ("w", "m"):
            asked[name].data = torch.zeros_like(expected[name].data)
        if ranks != 3:
            del asked["o"]
        loaded = megackpt.load(asked, tmp_path, group=group, options=options)
        assert torch.equal(loaded["w"], expected["w"].data)
        assert torch.equal(loaded["m"], expected["m"].data)
        assert ranks != 3 or loaded["o"] == {"rank": group.rank}

    SimulatedWorld(ranks).run(load)
    assert opened
    assert all(isinstance(index, PartialIndex) for index in opened)
    assert len(megackpt.load_sharded_metadata(tmp_path)) == 5


def test_damage_to_an_index_that_is_read_whole_is_found() -> None:
    store, message, _ = small()
    damaged(store, message["index"]["nbytes"] - 1)
    with pytest.raises(IntegrityError, match="the digest does not match"):
        read_index(store, message)


ROWS = (*ROW_COLUMNS, "array", "digest")


def offset_of(store: MemoryStore, name: str) -> int:
    """Say where a column begins."""
    data = store.read("index", max_bytes=2**30)
    length = int.from_bytes(data[:8], "little")
    offset: int = json.loads(data[8 : 8 + length])[name]["data_offsets"][0]
    return 8 + length + offset


WIDTHS = {**dict.fromkeys(ROW_COLUMNS, 4), "start": 12, "shape": 12}
"""Bytes of a row."""


@pytest.mark.parametrize(
    ("name", "at"),
    # The first of the rows asked for, and the digests of the last of them.
    [*((name, (64 + 16) * WIDTHS[name]) for name in ROW_COLUMNS), ("digest", (64 + 16 + 15) * 2 * 8)],
)
def test_damage_to_needed_rows_and_digests_is_found(name: str, at: int) -> None:
    store, message, stored = small()
    damaged(store, offset_of(store, name) + at)
    with pytest.raises(IntegrityError, match=r"index: the bytes \d+:\d+ are not those that were saved"):
        ask(store, message, stored)


HEAD_COLUMNS = (
    "header", "key.utf8", "array.rows", "block.xxh3", "digest.xxh3", "padding", "array.crc64nvme",
)  # fmt: skip


@pytest.mark.parametrize("name", HEAD_COLUMNS)
def test_damage_to_the_head_is_found(name: str) -> None:
    store, message, stored = forged(with_digests()) if name == "array.crc64nvme" else small()
    damaged(store, 20 if name == "header" else offset_of(store, name))
    with pytest.raises(IntegrityError, match="index: the bytes 0:"):
        ask(store, message, stored)


def test_damage_elsewhere_neither_stops_a_load_nor_is_believed() -> None:
    store, message, stored = small()
    expected = ask(store, message, stored)
    # A row between those asked for, read with them: with this flip it would seem to be one of them.
    wanted = [box(stored, 0, (0, 0, 0), (2, 8, 300_000)), box(stored, 0, (6, 0, 0), (2, 8, 300_000))]
    damaged(store, offset_of(store, "start") + 16 * 12, bit=2)
    index = open_index(store, message, whole_bytes=0)
    assert len(index.of_boxes(wanted)) == 32
    assert ask(store, message, stored).table.start.tolist() == expected.table.start.tolist()


@pytest.mark.parametrize(("change", "error"), [(-1, IntegrityError), (1, FormatError)])
def test_an_index_of_another_length_raises_an_error(change: int, error: type[CheckpointError]) -> None:
    store, message, stored = small()
    data = store.read("index", max_bytes=2**30)
    store.write("index", data[:change] if change < 0 else data + b"\0")
    with pytest.raises(error, match=f"index: the file has {len(data) + change} bytes instead of {len(data)}"):
        ask(store, message, stored)


def forged(edit: Callable[[dict[str, Any]], object]) -> tuple[MemoryStore, Json, StoredChunks]:
    """Write an index with other columns, and digests of the head that fit them."""
    store, message, stored = small()
    columns: dict[str, Any] = safetensors.numpy.load(store.read("index", max_bytes=2**30))
    del columns["padding"]
    edit(columns)
    rows = {name: columns.pop(name) for name in ROWS if name in columns}
    head = aligned_head(columns)
    header = header_of(head, {name: (c.dtype, c.shape) for name, c in rows.items()})
    in_front = b"".join([header, *map(bytes_of, head.values())])
    data = b"".join([in_front, *map(bytes_of, rows.values())])
    store.write("index", data)
    message["index"] |= {"nbytes": len(data), "xxh3_128": digest_of(data)}
    message["index"]["head"] |= {"nbytes": len(in_front), "xxh3_128": digest_of(in_front)}
    return store, message, stored


def put(name: str, at: int | tuple[int, ...], value: int) -> Callable[[dict[str, Any]], object]:
    """Set one value of a column."""

    def edit(columns: dict[str, Any]) -> None:
        columns[name] = columns[name].astype(np.int64)
        columns[name][at] = value

    return edit


def cut(name: str) -> Callable[[dict[str, Any]], object]:
    """Leave out the last row of a column."""
    return lambda columns: columns.update({name: columns[name][:-1]})


OVERFLOWING = np.array([0, 2**63 - 1, -(2**63), -1, *[384] * 9])
COUNTED_COLUMNS = (
    "array.rows",
    "array.reach",
    "block.start",
    "block.digest_start",
    "block.xxh3",
    "digest.xxh3",
)


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (put("array.rows", 0, -64), "its arrays do not have its 192 chunks"),
        (put("array.rows", 0, 2**62), "its arrays do not have its 192 chunks"),
        (put("array.rows", 0, 63), "its arrays do not have its 192 chunks"),
        (put("array.reach", 0, -1), "outside of their arrays"),
        (put("block.start", 3, -1), "outside of their arrays"),
        (put("block.start", 3, 9), "outside of their arrays"),
        (put("block.start", 2, 1), "not in their order"),
        (put("block.digest_start", 0, 1), "digests of their own"),
        (put("block.digest_start", 5, 2**62), "digests of their own"),
        (put("block.digest_start", -1, 2**40), "digests of their own"),
        (lambda columns: columns.update({"block.digest_start": OVERFLOWING}), "digests of their own"),
        (put("block.digest_start", 6, 193), "of the chunks 64:96 some have more or fewer digests"),
        (put("file_name.ends", 0, 2**40), "do not fit its text"),
        (put("global_shape", (0, 0), -8), "shape that no array can have"),
        *[(cut(name), "does not fit that of rows") for name in COUNTED_COLUMNS],
        *[(cut(name), f"column '{name}' is U32") for name in ("start", "nbytes", "offset_bytes")],
        (cut("digest"), "digests of their own"),
        (lambda columns: columns.pop("block.start"), "column 'block.start' is missing"),
        (lambda columns: columns.pop("file"), "column 'file' is missing"),
        (lambda columns: columns.update(nbytes=columns["nbytes"].astype(np.uint8)), "column 'nbytes' is U8"),
    ],
)
def test_a_head_that_lies_raises_an_error(edit: Callable[[dict[str, Any]], object], match: str) -> None:
    with pytest.raises(FormatError, match=f"index: .*{match}"):
        ask(*forged(edit))


def with_digests(**columns: Any) -> Callable[[dict[str, Any]], object]:
    """Add digests of the three arrays, and then change columns."""
    message: dict[str, Any] = {"crc64nvme": np.array([5, 0, 2**64 - 1], np.uint64)}
    message["has_crc64nvme"] = np.array([1, 0, 1], np.uint8)
    there = {f"array.{name}": column for name, column in (message | columns).items() if column is not None}
    return lambda into: into.update(there)


@pytest.mark.parametrize("whole_bytes", [0, 2**30], ids=["parts", "whole"])
def test_digests_of_arrays_are_read_with_the_head_or_the_whole_index(whole_bytes: int) -> None:
    store, message, _ = forged(with_digests())
    index = open_index(store, message, whole_bytes=whole_bytes)
    assert index.array_digests == {"layers.000": 5, "layers.002": 2**64 - 1}
    store, message, _ = small()
    assert open_index(store, message, whole_bytes=whole_bytes).array_digests == {}


@pytest.mark.parametrize("whole_bytes", [0, 2**30], ids=["parts", "whole"])
@pytest.mark.parametrize(
    "columns",
    [
        {"crc64nvme": np.zeros(2, np.uint64)},
        {"crc64nvme": np.zeros(4, np.uint64)},
        {"crc64nvme": np.zeros((3, 1), np.uint64)},
        {"crc64nvme": np.zeros(3, np.int64)},
        {"crc64nvme": None},
        {"crc64nvme": np.ones(3, np.uint64)},
        {"has_crc64nvme": np.zeros(2, np.uint8)},
        {"has_crc64nvme": np.ones(3, np.int64)},
        {"has_crc64nvme": np.array([1, 0, 2], np.uint8)},
        {"has_crc64nvme": None},
    ],
    ids=str,
)
def test_digests_of_arrays_that_do_not_fit_them_raise_an_error(columns: Any, whole_bytes: int) -> None:
    store, message, _ = forged(with_digests(**columns))
    with pytest.raises(FormatError, match=r"index: .*(array\.(has_)?crc64nvme'|digests of arrays).* damaged"):
        open_index(store, message, whole_bytes=whole_bytes)


@pytest.mark.parametrize(
    ("entry", "match"),
    [
        ({"xxh3_128": None}, "no digest of the head"),
        ({"nbytes": 7}, "are the head"),
        ({"nbytes": 2**50}, "are the head"),
        ({"nbytes": -1}, "does not say how large"),
        ({"nbytes": "9"}, "does not say how large"),
        ({"block_rows": 0}, "does not say how large"),
        ({"block_rows": 2**40}, "are the head"),
        ({"block_rows": 15}, "does not fit that of rows"),
        ({"block_digests": 7}, "does not fit that of rows"),
        ({"block_digests": 2**63}, "are the head"),
    ],
)
def test_an_entry_that_lies_raises_an_error(entry: Json, match: str) -> None:
    store, message, stored = small()
    message["index"]["head"] |= entry
    with pytest.raises(FormatError, match=f"index: .*({match})"):
        ask(store, message, stored)


def with_header(edit: Callable[[Json], object]) -> tuple[MemoryStore, Json, StoredChunks]:
    """Write an index with another header, of the same length."""
    store, message, stored = small()
    data = store.read("index", max_bytes=2**30)
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    edit(header)
    text = json.dumps(header, separators=(",", ":")).encode()
    data = len(text).to_bytes(8, "little") + text + data[8 + length :]
    store.write("index", data)
    nbytes = message["index"]["head"]["nbytes"] + len(text) - length
    message["index"] |= {"nbytes": len(data), "xxh3_128": digest_of(data)}
    message["index"]["head"] |= {"nbytes": nbytes, "xxh3_128": digest_of(data[:nbytes])}
    return store, message, stored


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (
            lambda h: h["start"].update(data_offsets=[0, 2304]),
            "'start': its bytes .* it overlaps another tensor",
        ),
        (lambda h: h["file"]["data_offsets"].reverse(), "'file': its data_offsets are not a range of bytes"),
        (
            lambda h: h["nbytes"].update(data_offsets=[2**60, 2**60 + 768]),
            "'.*': its bytes .* it leaves a gap",
        ),
        (lambda h: h["nbytes"].update(shape=[2**58]), "'nbytes': its data_offsets give it 768 bytes"),
        (lambda h: h["nbytes"].update(shape=[-192]), "'nbytes': its shape is not a list of extents"),
        (lambda h: h["array"].update(shape=[2**58]), "'array': its data_offsets give it 768 bytes"),
        (lambda h: h["block.start"].update(shape=[2**40]), "'block.start': its data_offsets give it"),
        (lambda h: h["nbytes"].update(shape=["192"]), "'nbytes': its shape is not a list of extents"),
        (lambda h: h["nbytes"].pop("dtype"), "'nbytes': it has no dtype"),
        (lambda h: h.update(nbytes=[1]), "'nbytes': it has no dtype"),
    ],
)
def test_a_header_that_lies_raises_an_error(edit: Callable[[Json], object], match: str) -> None:
    with pytest.raises(FormatError, match=f"index: {match}"):
        ask(*with_header(edit))


def test_a_column_without_elements_may_not_claim_any_extent() -> None:
    columns = {"global_shape": StoredColumn("I64", (0, 2**62), 0, 0)}  # more than numpy can count, times 0
    with pytest.raises(FormatError, match="column 'global_shape' is I64"):
        require(columns, "global_shape", ("I64",), (-1, -1), "index")


def test_a_head_without_a_header_raises_an_error() -> None:
    store, message, stored = small()
    texts = [b"[" * 10_000, b"null", b"\xff" * 50, b'{"a":1}']
    cases = [(len(text).to_bytes(8, "little") + text, "its header is not that of") for text in texts[:3]]
    cases.append((len(texts[3]).to_bytes(8, "little") + texts[3], "'a': it has no dtype"))
    for head, fault in [*cases, ((2**62).to_bytes(8, "little") + bytes(8), f"its header has {2**62} bytes")]:
        store.write("index", head)
        entry = {"nbytes": len(head), "xxh3_128": digest_of(head)}
        message["index"] |= {**entry, "head": message["index"]["head"] | entry}
        with pytest.raises(FormatError, match=f"index: {fault}"):
            ask(store, message, stored)


@pytest.mark.parametrize(
    ("name", "value", "error", "match"),
    [
        ("file", 8, FormatError, "lies in no file"),
        ("file", -1, FormatError, "lies in no file"),
        ("offset_bytes", -1, FormatError, "lies in no file"),
        ("nbytes", 299_999, FormatError, "does not lie in its array"),
        ("flat_stop", 300_001, FormatError, "does not lie in its array"),
        ("files", 0, StorageError, "is absolute"),
    ],
)
def test_rows_that_lie_raise_an_error(
    name: str, value: int, error: type[CheckpointError], match: str
) -> None:
    store, _, stored = small()
    row = 64 + 16
    if name == "files":
        lying = replace(stored, files=tuple(f"/data/{i}" for i in range(8)))
    else:
        of = stored.table if hasattr(stored.table, name) else stored
        column = getattr(of, name).copy()
        column[row] = value
        changed = replace(of, **{name: column})  # type: ignore[type-var]
        lying = replace(stored, table=changed) if isinstance(changed, ChunkTable) else changed
    message = {"index": write_index(store, "index", lying, block_rows=16, block_digests=8)}
    with pytest.raises(error, match=match):
        ask(store, message, stored)


def test_a_row_with_more_digests_than_its_block_raises_an_error() -> None:
    store, _, stored = small()
    arrays = tuple(replace(a, dtype="object") for a in stored.table.arrays)  # of any length
    ones = np.ones(len(stored), np.int64)
    table = replace(stored.table, arrays=arrays, shape=np.ones_like(stored.table.shape), flat_stop=ones)
    honest = replace(stored, table=table)
    message = {"index": write_index(store, "index", honest, block_rows=16, block_digests=8)}
    assert len(ask(store, message, honest)) == 16
    nbytes = stored.table.nbytes.copy()
    nbytes[64 + 16 : 64 + 18] = 2**61, 1_000_000 - 2**61  # together they have as many digests as before
    lying = replace(honest, table=replace(table, nbytes=nbytes))
    message = {"index": write_index(store, "index", lying, block_rows=16, block_digests=8)}
    index = open_index(store, message, whole_bytes=0)
    with pytest.raises(FormatError, match="index: of the chunks 64:96 some have more or fewer digests"):
        index.of_boxes([box(honest, 1, (2, 0, 0), (1, 1, 1))])
