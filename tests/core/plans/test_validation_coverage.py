"""Declarations in columns, and the proof over them, where worlds of real tensors do not lead."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest

from megackpt import CoverageError, FormatError, MismatchError
from megackpt.errors import rank_list
from megackpt.metadata import ArraySpec, ChunkTable, DeclaredChunks, pack_columns, unpack_columns
from megackpt.metadata.merge import decode_declarations, merge_declarations
from megackpt.validation import check_coverage
from megackpt.validation.common import check_common_equal

Row = tuple[str, tuple[int, ...], tuple[int, ...], slice | None]  # key, start, shape, flat range


def declared(shapes: dict[str, tuple[int, ...]], *rows: Row, rank: int = 0) -> DeclaredChunks:
    """Main replicas on one rank."""
    keys = sorted(shapes)
    dims = max(map(len, shapes.values()))

    def padded(values: tuple[int, ...], fill: int) -> list[int]:
        return [*values, *[fill] * (dims - len(values))]

    flats = [(f.start, f.stop) if f else (0, int(np.prod(shape, dtype=int))) for _, _, shape, f in rows]
    low, high = np.array(flats, int).reshape(-1, 2).T
    table = ChunkTable(
        tuple(ArraySpec(key, "uint8", shapes[key]) for key in keys),
        np.array([keys.index(key) for key, *_ in rows], int),
        np.array([padded(start, 0) for _, start, _, _ in rows], int).reshape(-1, dims),
        np.array([padded(shape, 1) for _, _, shape, _ in rows], int).reshape(-1, dims),
        low,
        high,
        high - low,
    )
    return DeclaredChunks(
        table,
        np.ones(len(rows), np.bool_),
        np.zeros(len(rows), np.bool_),
        np.full(len(rows), rank),
        np.arange(len(rows)),
    )


def sent(chunks: DeclaredChunks) -> dict[str, np.ndarray]:
    return unpack_columns(pack_columns(chunks.to_columns()), where="a test")


def test_flat_ranges_of_different_boxes_are_not_joined_although_their_numbers_follow_one_another() -> None:
    upper: list[Row] = [("w", (0, 0), (2, 4), slice(0, 3)), ("w", (0, 0), (4, 2), slice(3, 8))]
    lower: list[Row] = [("w", (2, 0), (2, 4), None)]
    for rows in permutations(upper):
        with pytest.raises(CoverageError, match=r"\[2:4, 0:2\] are saved by more than one"):
            check_coverage(declared({"w": (4, 4)}, *rows, *lower))


@pytest.mark.parametrize(
    "rows",
    [
        [("w", (0, 0), (4, 4), slice(8, 16)), ("w", (0, 0), (2, 4), None)],
        [("w", (0, 0), (2, 4), slice(0, 5)), ("w", (0, 0), (4, 4), slice(5, 16))],
        [("w", (0, 0), (4, 4), slice(0, 7)), ("w", (1, 0), (3, 4), slice(3, 12))],
        [("w", (0, 0), (4, 4), None), ("w", (0, 0), (4, 4), slice(0, 0)), ("w", (4, 4), (0, 0), None)],
    ],
)
def test_flat_ranges_and_boxes_of_different_shapes_may_share_an_array(rows: list[Row]) -> None:
    check_coverage(declared({"w": (4, 4)}, *rows))
    with pytest.raises(CoverageError):
        check_coverage(declared({"w": (4, 4)}, *rows[1:]))


@pytest.mark.parametrize("is_flat", [True, False])
def test_copies_neither_cover_anything_nor_cover_it_twice(is_flat: bool) -> None:
    cuts: list[Row] = [("w", (0, 0), (4, 4), slice(0, 7)), ("w", (0, 0), (4, 4), slice(7, 16))]
    boxes: list[Row] = [("w", (0, 0), (1, 4), None), ("w", (1, 0), (3, 4), None)]
    rows = cuts if is_flat else boxes
    twice = declared({"w": (4, 4)}, *rows, *rows)
    for saved in ([0, 1], [2, 3], [0, 3]):
        check_coverage(replace(twice, main=np.isin(np.arange(4), saved)))
    for saved in ([0], [1], [0, 2], []):
        with pytest.raises(CoverageError, match=r"saved by no rank.*declare replicas"):
            check_coverage(replace(twice, main=np.isin(np.arange(4), saved)))


def test_arrays_of_very_many_elements_are_proved_too() -> None:
    half = 2**29
    shapes = {f"w{i:02d}": (2 * half, 2 * half) for i in range(20)}
    rows: list[Row] = [(k, (a, b), (half, half), None) for k in shapes for a in (0, half) for b in (0, half)]
    check_coverage(declared(shapes, *rows))
    with pytest.raises(CoverageError) as caught:
        check_coverage(declared(shapes, *[row for i, row in enumerate(rows) if i % 4 != 0]))
    for i in range(10):
        assert f"'w{i:02d}': elements [0:{half}, 0:{half}] are saved by no rank" in str(caught.value)
    assert "(20 in all)" in str(caught.value)
    with pytest.raises(CoverageError) as caught:
        check_coverage(declared(shapes, *rows[:70], *rows[71:]))
    assert f"'w17': elements [{half}:{2 * half}, 0:{half}] are saved by no rank" in str(caught.value)
    assert caught.value.key == "w17"


def test_positions_sort_like_array_and_start_even_where_they_do_not_fit_into_64_bits() -> None:
    rng = np.random.default_rng(0)
    for large in (5, 2**30):
        shapes = {f"w{i}": (large, large, 4) for i in range(9)}
        keys = rng.choice(sorted(shapes), 300).tolist()
        starts = rng.integers(0, 4, (300, 3)).tolist()
        table = declared(
            shapes, *[(k, tuple(s), (1, 1, 1), None) for k, s in zip(keys, starts, strict=True)]
        ).table
        locations = table.start_keys()
        order = np.lexsort((*table.start.T[::-1], table.array))
        assert (locations[order][1:] >= locations[order][:-1]).all()
        same = (np.diff(table.array[order]) == 0) & (np.diff(table.start[order], axis=0) == 0).all(axis=1)
        assert np.array_equal(np.diff(locations[order]) == 0, same)


def test_ranks_that_list_the_same_arrays_share_the_list_they_decoded() -> None:
    shapes = {"v": (2,), "w": (4, 4)}
    left = declared(shapes, ("v", (0,), (2,), None), ("w", (0, 0), (2, 4), None), rank=0)
    right = declared(shapes, ("w", (2, 0), (2, 4), None), rank=1)
    other = declared({"u": (3,)}, ("u", (0,), (3,), None), rank=2)
    decoded = decode_declarations([sent(chunks) for chunks in (left, right, other)])
    assert decoded[0].table.arrays is decoded[1].table.arrays
    merged = merge_declarations(decoded)
    assert [spec.key for spec in merged.table.arrays] == ["u", "v", "w"]
    assert merged.table.array.tolist() == [1, 2, 2, 0]
    assert merged.rank.tolist() == [0, 0, 1, 2]
    check_coverage(merged)


def test_a_list_of_equal_bytes_but_other_extents_is_not_taken_for_a_known_one() -> None:
    wide = sent(declared({"a": (2, 3), "b": (4, 5)}, ("a", (0, 0), (2, 3), None)))
    narrow = {**wide, "global_shape": wide["global_shape"].reshape(4, 1)}
    with pytest.raises(FormatError, match="declarations of rank 1: "):
        decode_declarations([wide, narrow])


@pytest.mark.parametrize(
    ("shape", "ndim"), [((-1, -4), 2), ((2**31, 2**31), 2), ((2**61, 0), 2), ((2, 2), 1)]
)
def test_a_shape_that_no_array_can_have_raises_an_error(shape: tuple[int, int], ndim: int) -> None:
    columns = sent(declared({"a": (2, 2), "b": (1, 1)}))
    columns["global_shape"] = np.array([(2, 2), shape])
    columns["ndim"] = np.array([2, ndim], np.uint8)
    with pytest.raises(
        FormatError, match=r"rank 0: 'b' has a shape that no array can have.*damaged"
    ) as caught:
        decode_declarations([columns])
    assert caught.value.key == "b"


def test_conflicts_name_all_versions_with_their_ranks_and_stay_readable_for_many_ranks() -> None:
    per_rank = [declared({"w": (3 if rank == 17 else 2,)}, rank=rank) for rank in range(20)]
    with pytest.raises(MismatchError) as caught:
        merge_declarations(per_rank)
    message = "'w': uint8 (2,) on ranks 0-16, 18-19 (19 in all); uint8 (3,) on ranks 17\n"
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        (range(8), "0, 1, 2, 3, 4, 5, 6, 7"),
        (range(1, 10), "1-9 (9 in all)"),
        (range(0, 16, 2), "0, 2, 4, 6, 8, 10, 12, 14"),
        (range(0, 18, 2), "0, 2, 4, 6, 8, 10, 12, 14, ... (9 in all)"),
        ([9, *range(5), *range(12, 30), 12], "0-4, 9, 12-29 (24 in all)"),
        ([], ""),
    ],
)
def test_a_list_of_ranks_is_short_and_shows_which_are_missing(ranks: Iterable[int], text: str) -> None:
    assert rank_list(ranks) == text


def test_common_state_is_compared_by_path_and_each_difference_is_of_one_kind() -> None:
    first = {"a": "0", "b": "1", "c": "2"}
    check_common_equal([first, dict(first)])
    with pytest.raises(MismatchError) as caught:
        check_common_equal([first, {"a": "9", "c": "2"}, {**first, "d": "3"}, {**first, "a": "8"}])
    for line in (
        "'a' on rank(s) 1, 3\n",
        "'b' on rank(s) 1 (missing there)\n",
        "'d' on rank(s) 2 (missing on rank 0)\n",
    ):
        assert line in str(caught.value)
    assert (caught.value.path, caught.value.rank) == ("a", 1)
