"""A load plan finds the chunks of a request, and of no other array."""

from __future__ import annotations

import time

import numpy as np
import pytest

from megackpt import FormatError
from megackpt.geometry import Ints
from megackpt.metadata import ArraySpec, ChunkTable, DeclaredChunks
from megackpt.planning import completeness, plan_load


def test_arrays_that_are_together_longer_than_64_bits_are_distinguished() -> None:
    length, arrays = 2**59, 40
    specs = tuple(ArraySpec(f"k{i:02d}", "int8", (length,)) for i in range(arrays))
    array = np.repeat(np.arange(arrays), 2)
    start = np.tile([0, length // 2], arrays)[:, None]
    half = np.full(2 * arrays, length // 2)
    stored = ChunkTable(specs, array, start, half[:, None], 0 * half, half, half)
    wanted = ChunkTable(
        specs[1::2],
        np.arange(arrays // 2),
        np.full((arrays // 2, 1), length // 2 + 5),
        np.full((arrays // 2, 1), 7),
        np.zeros(arrays // 2, np.int64),
        np.full(arrays // 2, 7),
        np.full(arrays // 2, 7),
    )
    no = np.zeros(arrays // 2, np.bool_)
    entities = np.arange(arrays // 2)
    copies = plan_load(DeclaredChunks(wanted, ~no, no, 0 * entities, entities), stored, where="here")
    assert copies.stored.tolist() == [4 * i + 3 for i in range(arrays // 2)]
    assert copies.source_first.tolist() == [5] * (arrays // 2)


def boxes(start: Ints, extent: Ints, whole: tuple[int, ...]) -> ChunkTable:
    """Chunks of one array that are whole boxes, in index order."""
    order = np.lexsort((*extent.T[::-1], *start.T[::-1]))
    start, extent = start[order], extent[order]
    numel = extent.prod(axis=1)
    return ChunkTable((ArraySpec("w", "int8", whole),), 0 * numel, start, extent, 0 * numel, numel, numel)


def all_of(whole: tuple[int, ...]) -> DeclaredChunks:
    table = boxes(np.zeros((1, len(whole)), np.int64), np.array([whole]), whole)
    yes = np.ones(1, np.bool_)
    return DeclaredChunks(table, yes, ~yes, np.zeros(1, np.int64), np.zeros(1, np.int64))


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
    with pytest.raises(
        FormatError, match=rf"no stored chunk has \[{4 * side}:{4 * side + 1}, 0:{4 * side}\]"
    ):
        plan_load(all_of((4 * side + 1, 4 * side)), longer, where="here")


def test_rows_of_another_array_are_not_taken_where_an_index_is_not_sorted() -> None:
    specs = tuple(ArraySpec(key, "int8", (4,)) for key in "ab")
    column = np.zeros((2, 1), np.int64)
    four = np.full(2, 4)
    stored = ChunkTable(specs, np.array([1, 0]), column, four[:, None], 0 * four, four, four)
    for number, spec in enumerate(specs):
        ones = np.ones(1, np.int64)
        wanted = ChunkTable((spec,), 0 * ones, column[:1], four[:1, None], 0 * ones, 4 * ones, 4 * ones)
        requested = DeclaredChunks(wanted, ones > 0, ones < 0, 0 * ones, 0 * ones)
        try:
            copies = plan_load(requested, stored, where="here")
        except FormatError:
            continue
        assert stored.array[copies.stored].tolist() == [number]
