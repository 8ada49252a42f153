"""Compares arrays of two checkpoints: how many elements differ, which is the first, and by how much.

Elements are equal if all their bits are equal. Distances are computed only for elements that differ.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from megackpt.engine.data.chunk_bytes import parts_of
from megackpt.engine.data.progress import Progress
from megackpt.engine.data.workers import run_jobs
from megackpt.entities.describe import torch_dtype
from megackpt.errors import CoverageError
from megackpt.formats.contents import Chunks, Contents
from megackpt.options import LoadOptions
from megackpt.plans.metadata import DTYPES, ChunkTable
from megackpt.plans.validation import coverage_faults
from megackpt.whole.windows import ByteArray, RowWindow, read_parts, request_of, windows_of

PARTS_AT_A_TIME = 4096
"""Parts of small chunks that are planned as one load: to plan each alone would cost more than to read it."""

_OPTIONS = LoadOptions(threads=2)
_WIDEST_ELEMENT = 16  # bytes
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayDifference:
    """An array that both checkpoints have, with different elements.

    Attributes:
        key: the key of the array.
        dtype: its dtype in both.
        shape: its global shape in both.
        elements: how many elements differ in any bit.
        first: the index of the first of them in row-major order.
        largest: the largest absolute difference of two values. Infinite if one of the values is infinite.
            None for integers and bools, and if in every pair of values at least one is NaN.
        nan_elements: how many of the elements that differ are NaN in one checkpoint or in both.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    elements: int
    first: tuple[int, ...]
    largest: float | None
    nan_elements: int


def merged(first: ArrayDifference, second: ArrayDifference) -> ArrayDifference:
    """Return the difference of an array from the differences of two parts of it."""
    known = [value for value in (first.largest, second.largest) if value is not None]
    return replace(
        first,
        elements=first.elements + second.elements,
        first=min(first.first, second.first),
        largest=max(known) if known else None,
        nan_elements=first.nan_elements + second.nan_elements,
    )


def diff_arrays(
    keys: Sequence[str],
    first: Contents,
    second: Contents,
    *,
    threads: int,
    buffer_bytes: int,
    where: str,
    progress: Progress,
) -> list[ArrayDifference]:
    """Compare arrays that both checkpoints declare equally, and return those that differ, by key.

    where names the second checkpoint in error texts.

    Raises:
        CoverageError: the first checkpoint lacks elements of one of these arrays.
        FormatError: the second checkpoint lacks elements.
        IntegrityError: one of the checkpoints is damaged.
    """
    chunks = first.chunks(keys)
    _check_coverage(chunks, keys)
    progress.begin("comparing", int(chunks.table.nbytes.sum()))
    comparison = _Comparison(chunks, second, buffer_bytes=buffer_bytes, where=where, progress=progress)
    jobs = (partial(comparison.compare, window) for window in comparison.windows())
    run_jobs(jobs, threads=threads, name="megackpt-diff")
    return [comparison.differences[key] for key in sorted(comparison.differences)]


class _Comparison:
    """Compares chunks with the arrays of another checkpoint. Safe for several threads.

    Attributes:
        differences: the differences, by key.
    """

    def __init__(
        self, chunks: Chunks, other: Contents, *, buffer_bytes: int, where: str, progress: Progress
    ) -> None:
        self._chunks, self._other, self._where, self._progress = chunks, other, where, progress
        # A buffer has whole elements, so that a part never ends within an element.
        self._buffer_bytes = max(buffer_bytes // _WIDEST_ELEMENT, 1) * _WIDEST_ELEMENT
        self._lock = threading.Lock()
        self._free_buffers: list[npt.NDArray[np.uint8]] = []  # each with the bytes of both checkpoints
        self.differences: dict[str, ArrayDifference] = {}

    def windows(self) -> Iterator[RowWindow]:
        """Cut all chunks into windows of a buffer, in their order in files."""
        chunks, buffer_bytes = self._chunks, self._buffer_bytes
        parts = (
            (row, start, stop)
            for row in np.argsort(chunks.position, kind="stable").tolist()
            for start, stop in parts_of(chunks, row, buffer_bytes=buffer_bytes)
        )
        return windows_of(parts, buffer_bytes, most=PARTS_AT_A_TIME)

    def compare(self, window: RowWindow) -> None:
        """Compare the parts of a window."""
        chunks = self._chunks
        with self._lock:
            buffers = self._free_buffers.pop() if self._free_buffers else np.empty((2, 0), np.uint8)
        if buffers.shape[1] < window.nbytes:
            buffers = np.empty((2, window.nbytes), np.uint8)
        first, second = buffers
        requests = [request_of(chunks.table, segment, second) for segment in window.segments]
        read_parts(self._other, requests, where=self._where, options=_OPTIONS)
        for row, start, stop, at in window.segments:
            left, right = first[: stop - start], second[at : at + stop - start]
            chunks.read_into(row, start, left.data, verify=True)
            if not np.array_equal(left, right):
                difference = _part_difference(chunks.table, row, start, left, right)
                with self._lock:
                    known = self.differences.get(difference.key)
                    self.differences[difference.key] = (
                        difference if known is None else merged(known, difference)
                    )
            self._progress.advance(stop - start)
        with self._lock:
            self._free_buffers.append(buffers)


def _check_coverage(chunks: Chunks, keys: Sequence[str]) -> None:
    # Only stored elements are compared: without this check, missing ones would count as equal.
    faults = coverage_faults(chunks.table, set(keys))
    if faults:
        key = faults[0].spec.key
        raise CoverageError(
            f"{key!r}: the chunks of the first checkpoint do not have each element exactly once. It is "
            f"incomplete; `megackpt verify` lists what is missing.",
            key=key,
        )


def _part_difference(
    table: ChunkTable, row: int, start_byte: int, first_data: ByteArray, second_data: ByteArray
) -> ArrayDifference:
    """Return the differences in a part of a chunk, as a difference of its array."""
    spec = table.arrays[int(table.array[row])]
    positions = differing_elements(first_data, second_data, spec.dtype)
    largest, nan_elements = element_distance(first_data, second_data, spec.dtype, positions)
    # From the position in the part to the flat position in the box, and to the index in the array.
    dims = len(spec.global_shape)
    flat = int(table.flat_start[row]) + start_byte // DTYPES[spec.dtype].itemsize + int(positions[0])
    in_box = np.unravel_index(flat, tuple(table.shape[row, :dims].tolist())) if dims else ()
    start = table.start[row, :dims].tolist()
    return ArrayDifference(
        key=spec.key,
        dtype=spec.dtype,
        shape=spec.global_shape,
        elements=len(positions),
        first=tuple(int(a) + int(b) for a, b in zip(start, in_box, strict=True)),
        largest=largest,
        nan_elements=nan_elements,
    )


def differing_elements(first: ByteArray, second: ByteArray, dtype: str) -> npt.NDArray[np.int64]:
    """Return the positions of the elements that differ in any bit, ascending. dtype is one of `DTYPES`.

    >>> one, two = (np.array(values, np.float32).view(np.uint8) for values in ([1, 2, 3], [1, 2.5, 3]))
    >>> differing_elements(one, two, "float32").tolist()
    [1]
    """
    width = DTYPES[dtype].itemsize
    if width in _UNSIGNED:
        differs = first.view(_UNSIGNED[width]) != second.view(_UNSIGNED[width])
    else:  # 16 bytes, as two words
        differs = (first.view(np.uint64).reshape(-1, 2) != second.view(np.uint64).reshape(-1, 2)).any(axis=1)
    return np.flatnonzero(differs)


def element_distance(
    first: ByteArray, second: ByteArray, dtype: str, positions: npt.NDArray[np.int64]
) -> tuple[float | None, int]:
    """Return the largest absolute difference of the elements at some positions, and how many are NaN."""
    kind: torch.dtype = torch_dtype(dtype)
    if not (kind.is_floating_point or kind.is_complex):
        return None, 0
    width = kind.itemsize
    # Usually few elements differ, so only these are converted to a wide dtype.
    wide = torch.complex128 if kind.is_complex else torch.float64
    left, right = (
        torch.from_numpy(data.reshape(-1, width)[positions]).reshape(-1).view(kind).to(wide)
        for data in (first, second)
    )
    is_number = ~(left.isnan() | right.isnan())
    left, right = left[is_number], right[is_number]
    # The elements differ, so a NaN among the distances is inf - inf in one component of a complex number.
    distance = (left - right).abs().nan_to_num(nan=float("inf"), posinf=float("inf"))
    return (float(distance.max()) if len(distance) else None), int((~is_number).sum())
