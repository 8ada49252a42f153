"""The proof of coverage against counting every element, and valid worlds that it must not reject."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megackpt import CoverageError, ShardedObject
from megackpt.geometry import Box, tiling
from megackpt.geometry.tiling import Rectangles, uncovered_regions
from megackpt.mapping import ShardedTensor
from megackpt.mapping.describe import describe
from megackpt.metadata.merge import merge_declarations
from megackpt.testing.layouts import arrays, boxes, owned_chunks
from megackpt.validation import check_coverage
from tests.support.effort import few


def counts_by_brute_force(parts: Rectangles, whole: np.ndarray) -> list[np.ndarray]:
    counts = [np.zeros(shape, int) for shape in whole.tolist()]
    for array, start, stop in zip(*(column.tolist() for column in parts), strict=True):
        counts[array][tuple(slice(a, b) for a, b in zip(start, stop, strict=True))] += 1
    return counts


def counts_by_regions(parts: Rectangles, whole: np.ndarray) -> list[np.ndarray]:
    counts = [np.ones(shape, int) for shape in whole.tolist()]
    for regions in uncovered_regions(parts, whole):
        for start, stop, count in zip(regions.start, regions.stop, regions.count, strict=True):
            region = counts[regions.array][tuple(slice(a, b) for a, b in zip(start, stop, strict=True))]
            assert region.size, "a region has elements"
            assert (region == 1).all(), "no two regions overlap"
            region[...] = count
    return counts


@st.composite
def tiled_arrays(draw: st.DrawFn) -> tuple[Rectangles, np.ndarray]:
    """Tilings of a few arrays of one number of dims, some of them spoilt."""
    dims = draw(st.integers(1, 4))
    shapes = draw(st.lists(st.tuples(*[st.integers(0, 6)] * dims), min_size=1, max_size=4))
    rows: list[tuple[int, Box]] = []
    for array, shape in enumerate(shapes):
        tiles = [box for box in draw(boxes(shape)) if box.numel]
        for _ in range(draw(st.integers(0, 3)) if tiles else 0):
            box = tiles.pop(draw(st.integers(0, len(tiles) - 1)))
            low = [draw(st.integers(0, n - 1)) for n in shape]
            moved = Box(
                tuple(low), tuple(draw(st.integers(1, n - a)) for a, n in zip(low, shape, strict=True))
            )
            tiles += draw(st.sampled_from([[], [box], [box, box], [moved], [box, moved]]))
            if not tiles:
                break
        rows += [(array, box) for box in tiles]
    order = draw(st.permutations(rows))
    empty = np.zeros((0, dims), int)
    return Rectangles(
        np.array([array for array, _ in order], int),
        np.array([box.start for _, box in order], int) if order else empty,
        np.array([box.stop for _, box in order], int) if order else empty,
    ), np.array(shapes)


@settings(max_examples=few(125, of=1000), deadline=None)
@given(tiled_arrays(), st.sampled_from([tiling.ADDRESSES, 50]))
def test_regions_are_what_counting_every_element_finds(
    world: tuple[Rectangles, np.ndarray], addresses: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiling, "ADDRESSES", addresses)  # with few, arrays are proved in several parts
        counts = counts_by_regions(*world)
    for got, expected in zip(counts, counts_by_brute_force(*world), strict=True):
        assert np.array_equal(got, expected)


def test_too_many_faults_of_one_array_are_named_by_the_box_around_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tiling, "MAX_CELLS", 30)
    squares = np.array([[i, i] for i in range(2, 10)])
    (regions,) = uncovered_regions(Rectangles(np.zeros(8, int), squares, squares + 1), np.array([[12, 12]]))
    assert (regions.start.tolist(), regions.stop.tolist(), regions.count.tolist()) == (
        [[0, 0]],
        [[12, 12]],
        [-1],
    )


@settings(max_examples=few(37, of=300), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), ranks=st.integers(1, 4), grid=st.lists(st.integers(1, 3), max_size=2))
def test_a_valid_world_never_raises_an_error(data: st.DataObject, ranks: int, grid: list[int]) -> None:
    entities: list[list[ShardedTensor | ShardedObject]] = [[] for _ in range(ranks)]
    for number, array in enumerate(data.draw(st.lists(arrays(), max_size=4))):
        for owned in data.draw(owned_chunks(tuple(array.shape), ranks=ranks)):
            entities[owned.rank].append(owned.declare(f"array{number}", array))
    for offset in np.ndindex(*grid):
        for replica, rank in enumerate(data.draw(st.permutations(range(ranks)))):
            entities[rank].append(ShardedObject("objects", None, tuple(grid), offset, replica))
    check_coverage(
        merge_declarations([describe(of_rank, rank=rank) for rank, of_rank in enumerate(entities)])
    )


@settings(max_examples=few(37, of=300), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    data=st.data(), array=arrays().filter(lambda a: a.numel() > 0), spoil=st.sampled_from(["drop", "double"])
)
def test_a_chunk_less_or_a_chunk_too_many_is_always_found(
    data: st.DataObject, array: torch.Tensor, spoil: str
) -> None:
    mains = [owned for owned in data.draw(owned_chunks(tuple(array.shape), ranks=3)) if owned.replica == 0]
    victim = data.draw(st.sampled_from([owned for owned in mains if owned.chunk[2] > owned.chunk[1]]))
    spoilt = [owned for owned in mains if owned is not victim] if spoil == "drop" else [*mains, victim]
    per_rank = [
        describe([owned.declare("array", array) for owned in spoilt if owned.rank == rank], rank=rank)
        for rank in range(3)
    ]
    if not any(len(declared) for declared in per_rank):
        return  # nobody declares the array at all: then there is no such array
    with pytest.raises(CoverageError) as caught:
        check_coverage(merge_declarations(per_rank))
    assert caught.value.key == "array"
    message = "by no rank" if spoil == "drop" else f"all of rank {victim.rank})"
    assert message in str(caught.value) or "more than one main replica (ranks" in str(caught.value)
