"""What differs between two checkpoints, of any formats and cut in any ways.

Owns the comparison as a whole: which keys, dtypes and shapes, which elements and by how much, which objects
and which places of common state. Arrays whose digests say that they are equal need not be read; of all others
both checkpoints are read once, side by side, and never held whole.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import numpy as np

from megackpt.codec import carrying_unknown, leaf_digests
from megackpt.engine.checkpoint.common_arrays import value_steps, with_tensors
from megackpt.engine.checkpoint.common_reading import read_referenced, stored_references
from megackpt.engine.checkpoint.opening import check_readable, open_checkpoint, read_common_and_references
from megackpt.engine.data.progress import Progress
from megackpt.engine.data.read import read_chunk
from megackpt.engine.data.workers import run_jobs
from megackpt.errors import CoverageError
from megackpt.formats.contents import Chunks, Contents, Part
from megackpt.maintenance.compare import Pair, pairs_of
from megackpt.maintenance.elements import ElementDifference, compare_elements
from megackpt.maintenance.leaves import leaves_of
from megackpt.metadata import OBJECT, ArraySpec
from megackpt.options import DiffOptions
from megackpt.storage import Store
from megackpt.validation import coverage_faults

_WIDEST = 16  # bytes of the widest element


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayDifference:
    """An array that both have, with other elements.

    Attributes:
        key: its name.
        dtype: of both.
        shape: of both.
        elements: how many differ in any bit.
        first: the first of them in row-major order.
        largest: the largest absolute difference of values, None where there is none to speak of: of integers
            and bools, and where one of two values is no number. Infinite where one is.
        not_numbers: how many of the elements are no number in one or both.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    elements: int
    first: tuple[int, ...]
    largest: float | None
    not_numbers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueDifference:
    """A place of an object or of common state where two checkpoints differ.

    Attributes:
        place: the object, or which part of common state, and the path in it.
        first: what the first has there, shortened; None if it has nothing.
        second: what the second has there.
    """

    place: str
    first: str | None
    second: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDifference:
    """What differs between two checkpoints.

    Attributes:
        only_first: keys that the second lacks.
        only_second: keys that the first lacks.
        declared: keys that are of another dtype or shape, with what each says.
        arrays: arrays with other elements.
        values: differing places of objects and of common state.
        compared: number of arrays and objects that both have and that were compared.
        nbytes: bytes of arrays that were read and compared, of one checkpoint.
        by_digest: number of arrays, of those compared, that are equal by their digests and were not read.
        by_digest_nbytes: bytes of these, of one checkpoint.
    """

    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    declared: Mapping[str, tuple[str, str]]
    arrays: tuple[ArrayDifference, ...]
    values: tuple[ValueDifference, ...]
    compared: int
    nbytes: int
    by_digest: int
    by_digest_nbytes: int

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs."""
        found = (self.only_first, self.only_second, self.declared, self.arrays, self.values)
        return not any(found)


@carrying_unknown()
def find_difference(
    first: Store, second: Store, options: DiffOptions, progress: Progress
) -> CheckpointDifference:
    """Compare two checkpoints bit by bit. Local; nothing is changed.

    An array of which both have a digest of the whole, the same, is equal, and is read only with
    `options.read_all`.
    Values of classes that this process does not know are compared as stand-ins: by their names and contents.
    -0.0 differs from 0.0, and so do two NaNs with different bits; how they are cut, which ranks wrote them
    and in which format does not count.

    Raises:
        NotACheckpointError, FormatError: one is none, or not one that is known here.
        IntegrityError, CoverageError: one is damaged or incomplete.
    """
    stores = (first, second)
    opened = [open_checkpoint(s, allow_unsafe_pickle=options.allow_unsafe_pickle) for s in stores]
    common = _read_common(opened, stores) if options.common else None
    inline = (frozenset[str](), frozenset[str]()) if common is None else common.inline
    arrays = [
        {key: spec for key, spec in _chosen(contents, options.keys).items() if key not in keys}
        for contents, keys in zip(opened, inline, strict=True)
    ]
    for contents, store in zip(opened, stores, strict=True):
        check_readable(_fitting(contents.unreadable, options.keys), contents.unreadable, where=store.location)
    both = sorted(set(arrays[0]) & set(arrays[1]))
    alike = [key for key in both if arrays[0][key] == arrays[1][key]]
    others = [key for key in both if arrays[0][key] != arrays[1][key]]
    objects = [key for key in alike if arrays[0][key].dtype == OBJECT]
    tensors = [key for key in alike if arrays[0][key].dtype != OBJECT]
    proved = set() if options.read_all else _equal_by_digest(opened[0], opened[1], tensors)
    unproved = [key for key in tensors if key not in proved]
    differing = _compare_arrays(opened[0], opened[1], unproved, options, progress, where=second.location)
    values = _compare_objects(opened[0], opened[1], objects)
    if common is not None:
        values += _compare_values("common state", *common.states)
        values += _compare_values("content metadata", *common.contents)
    return CheckpointDifference(
        only_first=tuple(sorted(set(arrays[0]) - set(arrays[1]))),
        only_second=tuple(sorted(set(arrays[1]) - set(arrays[0]))),
        declared={key: (_said(arrays[0][key]), _said(arrays[1][key])) for key in others},
        arrays=tuple(differing),
        values=tuple(values),
        compared=len(alike),
        nbytes=sum(arrays[0][key].nbytes for key in unproved),
        by_digest=len(proved),
        by_digest_nbytes=sum(arrays[0][key].nbytes for key in proved),
    )


def _chosen(contents: Contents, globs: Sequence[str]) -> dict[str, ArraySpec]:
    return {key: contents.arrays[key] for key in _fitting(contents.arrays, globs)}


def _fitting(keys: Iterable[str], globs: Sequence[str]) -> list[str]:
    return [key for key in keys if not globs or any(fnmatchcase(key, glob) for glob in globs)]


def _said(spec: ArraySpec) -> str:
    return f"{spec.dtype} {list(spec.global_shape)}"


def _equal_by_digest(first: Contents, second: Contents, keys: Iterable[str]) -> set[str]:
    """Return the keys of arrays, of one dtype and shape in both, whose digests are there and equal."""
    said = first.array_digests
    return {key for key in keys if key in said and said[key] == second.array_digests.get(key)}


@dataclass(slots=True)
class _Tally:
    """What was found so far of each array. Safe for many threads."""

    found: dict[str, tuple[ArraySpec, ElementDifference]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, spec: ArraySpec, differing: ElementDifference) -> None:
        with self.lock:
            before = self.found.get(spec.key)
            self.found[spec.key] = (spec, differing if before is None else before[1].joined(differing))


def _compare_arrays(
    first: Contents,
    second: Contents,
    keys: Sequence[str],
    options: DiffOptions,
    progress: Progress,
    *,
    where: str,
) -> list[ArrayDifference]:
    chunks = first.chunks(keys)
    _refuse_gaps(chunks, keys)  # what is not there would not be asked of the second, and be taken for equal
    progress.begin("comparing", int(chunks.table.nbytes.sum()))
    tally = _Tally()
    buffer_bytes = max(options.buffer_bytes // _WIDEST, 1) * _WIDEST  # whole elements

    def compare(parts: Sequence[Part]) -> None:
        for pair in pairs_of(parts, chunks, second, buffer_bytes=buffer_bytes, where=where):
            if not np.array_equal(pair.first, pair.second):
                tally.add(*_differing(pair, chunks))
            progress.advance(len(pair.first))

    jobs: Iterator[Callable[[], None]] = (partial(compare, parts) for parts in _shares(chunks, buffer_bytes))
    run_jobs(jobs, threads=options.threads, name="megackpt-diff")
    return [_array_difference(*tally.found[key]) for key in sorted(tally.found)]


def _refuse_gaps(chunks: Chunks, keys: Sequence[str]) -> None:
    faults = coverage_faults(chunks.table, set(keys))
    if faults:
        key = faults[0].spec.key
        raise CoverageError(
            f"{key!r}: the chunks of the first checkpoint do not have each element once. It is incomplete; "
            f"`megackpt verify` lists what is missing.",
            key=key,
        )


def _shares(chunks: Chunks, buffer_bytes: int) -> Iterator[list[Part]]:
    """Cut the work into shares of about two buffers, chunks in the order in which they lie."""
    share: list[Part] = []
    nbytes = 0
    for row in np.argsort(chunks.position, kind="stable").tolist():
        length = int(chunks.table.nbytes[row])
        step = max(buffer_bytes // chunks.block_bytes, 1) * chunks.block_bytes
        for start in range(0, length, step):
            share.append(Part(row, start, min(start + step, length)))
            nbytes += share[-1].stop - start
            if nbytes >= 2 * buffer_bytes:
                yield share
                share, nbytes = [], 0
    if share:
        yield share


def _differing(pair: Pair, chunks: Chunks) -> tuple[ArraySpec, ElementDifference]:
    """Say which elements of the array differ."""
    table, row = chunks.table, pair.part.row
    spec = table.arrays[int(table.array[row])]
    found = compare_elements(pair.first, pair.second, spec.dtype)
    dims = len(spec.global_shape)
    flat = int(table.flat_start[row]) + (pair.part.start + found.first_byte) // found.width
    shape = tuple(table.shape[row, :dims].tolist())
    place = np.unravel_index(flat, shape) if dims else ()
    start = table.start[row, :dims].tolist()
    at = tuple(int(a) + int(p) for a, p in zip(start, place, strict=True))
    return spec, replace(found.differing, first=at)


def _array_difference(spec: ArraySpec, found: ElementDifference) -> ArrayDifference:
    return ArrayDifference(
        key=spec.key,
        dtype=spec.dtype,
        shape=spec.global_shape,
        elements=found.elements,
        first=found.first,
        largest=found.largest,
        not_numbers=found.not_numbers,
    )


def _compare_objects(first: Contents, second: Contents, keys: Sequence[str]) -> list[ValueDifference]:
    if not keys:
        return []
    opened = [_objects(contents, keys) for contents in (first, second)]
    found: list[ValueDifference] = []
    for place in sorted({*opened[0], *opened[1]}):
        values = [one[place]() if place in one else _NOTHING for one in opened]
        key, offset = place
        found += _compare_values(f"object {key!r} {list(offset)}", values[0], values[1])
    return found


def _objects(
    contents: Contents, keys: Sequence[str]
) -> dict[tuple[str, tuple[int, ...]], Callable[[], Any]]:  # whatever the user saved
    """Return how to get at each object."""
    chunks = contents.chunks(keys)
    table = chunks.table

    def read(row: int, key: str) -> Any:
        return contents.decode_object(read_chunk(chunks, row), f"object {key!r}")

    found: dict[tuple[str, tuple[int, ...]], Callable[[], Any]] = {}
    for row, (array, start) in enumerate(zip(table.array.tolist(), table.start.tolist(), strict=True)):
        spec = table.arrays[array]
        found[spec.key, tuple(start[: len(spec.global_shape)])] = partial(read, row, spec.key)
    return found


class _Nothing:
    """Stands for a value that is not there."""


_NOTHING = _Nothing()


@dataclass(frozen=True, slots=True)
class _CommonStates:
    """The common states of two checkpoints, made comparable.

    Attributes:
        states: both, with tensors in the place of the arrays in inline.
        contents: the content metadata of both.
        inline: of each, keys of arrays that the other has as tensors of common state.
    """

    states: tuple[Any, Any]
    contents: tuple[Any, Any]
    inline: tuple[frozenset[str], frozenset[str]]


def _read_common(opened: Sequence[Contents], stores: Sequence[Store]) -> _CommonStates:
    """Read the common states.

    A tensor that one stores in common state and the other as an array is compared as common state. Where
    both have arrays, these are compared as arrays, and common state is compared without them.
    """
    pairs = [read_common_and_references(c, where=s.location) for c, s in zip(opened, stores, strict=True)]
    references = [stored_references(pair[0], c) for pair, c in zip(pairs, opened, strict=True)]
    states, inline = [], []
    for one, other in ((0, 1), (1, 0)):
        places = value_steps(pairs[other][0])
        taken = {place: key for place, key in references[one].items() if place in places}
        tensors = read_referenced(taken, opened[one], stores[one])
        states.append(with_tensors(pairs[one][0], tensors))
        inline.append(frozenset(taken.values()))
    return _CommonStates((states[0], states[1]), (pairs[0][1], pairs[1][1]), (inline[0], inline[1]))


def _compare_values(what: str, first: Any, second: Any) -> list[ValueDifference]:
    """Compare leaf by leaf, as classes and bits."""
    values = (first, second)
    digests: list[dict[str, str]] = [{} if v is _NOTHING else leaf_digests(v) for v in values]
    if digests[0] == digests[1]:
        return []
    shown: list[dict[str, str]] = [{} if v is _NOTHING else leaves_of(v) for v in values]
    paths = sorted({*digests[0], *digests[1]})
    differing = [path for path in paths if digests[0].get(path) != digests[1].get(path)]
    return [
        ValueDifference(place=f"{what}: {path}", first=shown[0].get(path), second=shown[1].get(path))
        for path in differing
    ]
