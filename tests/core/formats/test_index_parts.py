"""A rank that reads parts of an index plans the same load as one that reads all of it."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megackpt.formats.index_file import read_index, write_index
from megackpt.formats.index_reader import open_index
from megackpt.formats.partial_index import PartialIndex
from megackpt.metadata import (
    ArraySpec,
    ChunkTable,
    DeclaredChunks,
    StoredChunks,
    block_counts,
    itemsizes,
    pad_shapes,
)
from megackpt.planning import plan_load
from megackpt.storage import MemoryStore

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
            whole = (0, math.prod(shape))
            chunks.append(
                (number, tuple(a for a, _ in ends), shape, *(whole if draw(st.booleans()) else flat))
            )
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
    columns = [
        c.tolist()
        for c in (t.array, t.start, t.shape, t.flat_start, t.flat_stop, t.nbytes, stored.offset_bytes)
    ]
    return list(zip(*columns, [stored.files[i] for i in stored.file], digests_of(stored), strict=True))


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
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
