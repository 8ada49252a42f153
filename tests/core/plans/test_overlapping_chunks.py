"""Pairs of chunks that may share an element: none is missing, and of ranges of equal boxes none too many."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megackpt.metadata import ArraySpec, ChunkTable
from megackpt.planning.overlaps import overlapping_chunks

EXTENTS = (5, 4)
ARRAYS = tuple(ArraySpec(key, "int8", EXTENTS) for key in ("a", "b", "c"))
Row = tuple[int, tuple[int, int], tuple[int, int], int, int]  # array, start, stop, flat range


@st.composite
def chunks(draw: st.DrawFn) -> Row:
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


def table_of(rows: list[Row]) -> ChunkTable:
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


@settings(deadline=None, max_examples=100)
@given(wanted=st.lists(chunks(), max_size=5), stored=st.lists(chunks(), max_size=12))
@example(  # a range that ends later stands before one that ends sooner
    wanted=[(0, (0, 0), (5, 4), 15, 17)],
    stored=[(0, (0, 0), (5, 4), 0, 18), (0, (0, 0), (5, 4), 2, 4), (0, (0, 0), (5, 4), 17, 20)],
)
def test_pairs_that_share_an_element_are_found(wanted: list[Row], stored: list[Row]) -> None:
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
