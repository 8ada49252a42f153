"""`megackpt.diff`: the differences between two checkpoints of any formats, saved at any layouts.

Arrays whose stored digests are equal need not be read. All others are read once from both checkpoints, part
by part.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from megackpt.codec import keep_unknown_values, leaf_digests
from megackpt.engine.checkpoint.common_arrays import value_steps, with_tensors
from megackpt.engine.checkpoint.common_reading import read_referenced, stored_references
from megackpt.engine.checkpoint.opening import check_readable, open_checkpoint, read_common_and_references
from megackpt.engine.data.progress import Progress
from megackpt.engine.data.read import read_chunk
from megackpt.formats.contents import Contents
from megackpt.ground.arguments import check_count, check_flags
from megackpt.plans.metadata import OBJECT, ArraySpec
from megackpt.storage import Location, Store, opened_store
from megackpt.whole.arguments import checked_globs, checked_progress, matching
from megackpt.whole.diff_arrays import ArrayDifference, diff_arrays
from megackpt.whole.inspect import leaves_as_text


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueDifference:
    """A leaf of an object, of common state or of content metadata that differs.

    Attributes:
        path: the object or the part of common state, and the path of the leaf in it.
        first: the leaf in the first checkpoint, as shortened text; None if it has none there.
        second: the leaf in the second checkpoint.
    """

    path: str
    first: str | None
    second: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDifference:
    """The result of `megackpt.diff`.

    Attributes:
        only_first: keys that are only in the first checkpoint.
        only_second: keys that are only in the second checkpoint.
        declared: keys with another dtype or shape, with dtype and shape in the first and in the second.
        arrays: arrays with different elements, by key.
        values: leaves of objects, common state and content metadata that differ.
        compared: number of arrays and arrays of objects that both have, with equal dtype and shape.
        nbytes: bytes of arrays that were read and compared, in one checkpoint.
        by_digest: number of compared arrays that are equal by their digests and were not read.
        by_digest_nbytes: bytes of these arrays, in one checkpoint.
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
        return not (self.only_first or self.only_second or self.declared or self.arrays or self.values)


def diff(
    first: Location,
    second: Location,
    *,
    keys: Sequence[str] = (),
    common: bool = True,
    read_all: bool = False,
    allow_unsafe_pickle: bool = False,
    threads: int = 2,
    buffer_bytes: int = 16 * 1024 * 1024,
    progress: Progress | None = None,
) -> CheckpointDifference:
    """Compare two checkpoints bit by bit. Local; nothing is changed.

    The checkpoints may have different shardings, numbers of ranks and formats. -0.0 differs from 0.0, and two
    NaNs with different bits differ. Values of classes that this process does not know are compared by the
    names of their classes and by their contents.

    Args:
        first: a path, a URL or an open store of one checkpoint (not the root of a run).
        second: the other checkpoint.
        keys: globs such as `"decoder.*"`; only arrays and objects whose key matches one of them are
            compared. All are compared if there are none.
        common: compare common state and content metadata as well.
        read_all: also read arrays that have a digest of the whole array in both checkpoints. Otherwise
            such arrays are read only if these digests differ.
        allow_unsafe_pickle: as in `megackpt.verify`.
        threads: number of concurrent comparisons.
        buffer_bytes: how many bytes of each checkpoint one comparison has in memory at a time.
        progress: as in `megackpt.verify`.

    Returns:
        The differences; `is_equal` is true if there are none.

    Raises:
        NotACheckpointError: there is no committed checkpoint at one of the locations.
        FormatError: a checkpoint has an unknown format, or the second lacks elements.
        IntegrityError, CoverageError: a checkpoint is damaged or incomplete.
        DeclarationError: an argument is invalid.

    >>> diff("run/iter_0000100", "other/iter_0000100").is_equal  # doctest: +SKIP
    True
    """
    globs = checked_globs(keys)
    check_count("threads", threads)
    check_count("buffer_bytes", buffer_bytes)
    check_flags(common=common, read_all=read_all, allow_unsafe_pickle=allow_unsafe_pickle)
    progress = checked_progress(progress)
    with opened_store(first) as first_store, opened_store(second) as second_store, keep_unknown_values():
        contents = (
            open_checkpoint(first_store, allow_unsafe_pickle=allow_unsafe_pickle),
            open_checkpoint(second_store, allow_unsafe_pickle=allow_unsafe_pickle),
        )
        states = _read_common(contents, (first_store, second_store)) if common else None
        inline = ((), ()) if states is None else states.inline
        specs = (
            _chosen(contents[0], first_store, globs, inline[0]),
            _chosen(contents[1], second_store, globs, inline[1]),
        )
        keys_of = _ComparedKeys.of(specs, contents, read_all=read_all)
        arrays = diff_arrays(
            keys_of.unproved,
            *contents,
            threads=threads,
            buffer_bytes=buffer_bytes,
            where=second_store.location,
            progress=progress,
        )
        values = _diff_objects(keys_of.objects, *contents)
    if states is not None:
        values += _diff_values("common state", *states.states)
        values += _diff_values("content metadata", *states.contents)
    return CheckpointDifference(
        only_first=tuple(sorted(specs[0].keys() - specs[1].keys())),
        only_second=tuple(sorted(specs[1].keys() - specs[0].keys())),
        declared=_diff_specs(*specs),
        arrays=tuple(arrays),
        values=tuple(values),
        compared=len(keys_of.objects) + len(keys_of.unproved) + len(keys_of.proved),
        nbytes=sum(specs[0][key].nbytes for key in keys_of.unproved),
        by_digest=len(keys_of.proved),
        by_digest_nbytes=sum(specs[0][key].nbytes for key in keys_of.proved),
    )


@dataclass(frozen=True, slots=True)
class _ComparedKeys:
    """Sorted keys that both checkpoints have, with equal dtypes and shapes.

    Attributes:
        objects: those of arrays of objects.
        proved: those of arrays that are equal by their digests, and are not read.
        unproved: those of all other arrays.
    """

    objects: list[str]
    proved: list[str]
    unproved: list[str]

    @classmethod
    def of(
        cls,
        specs: tuple[Mapping[str, ArraySpec], Mapping[str, ArraySpec]],
        contents: tuple[Contents, Contents],
        *,
        read_all: bool,
    ) -> _ComparedKeys:
        same = [key for key in sorted(specs[0]) if specs[0][key] == specs[1].get(key)]
        tensors = [key for key in same if specs[0][key].dtype != OBJECT]
        equal = set() if read_all else _equal_by_digest(tensors, *contents)
        return cls(
            objects=[key for key in same if specs[0][key].dtype == OBJECT],
            proved=[key for key in tensors if key in equal],
            unproved=[key for key in tensors if key not in equal],
        )


def _chosen(
    contents: Contents, store: Store, globs: Sequence[str], inline: Container[str]
) -> dict[str, ArraySpec]:
    """Return the arrays and objects to compare, by key, without those compared as common state.

    Raises:
        FormatError: one of them cannot be loaded.
    """
    check_readable(matching(contents.unreadable, globs), contents.unreadable, where=store.location)
    keys = matching(contents.arrays, globs)
    return {key: contents.arrays[key] for key in keys if key not in inline}


def _diff_specs(
    first: Mapping[str, ArraySpec], second: Mapping[str, ArraySpec]
) -> dict[str, tuple[str, str]]:
    """Return dtype and shape in both checkpoints, of keys where these differ."""
    keys = [key for key in sorted(first.keys() & second.keys()) if first[key] != second[key]]
    return {key: (_spec_text(first[key]), _spec_text(second[key])) for key in keys}


def _spec_text(spec: ArraySpec) -> str:
    return f"{spec.dtype} {list(spec.global_shape)}"


def _equal_by_digest(keys: Iterable[str], first: Contents, second: Contents) -> set[str]:
    """Return the keys of arrays with the same stored digest in both checkpoints."""
    digests, others = first.array_digests, second.array_digests
    return {key for key in keys if key in digests and digests[key] == others.get(key)}


_ObjectId: TypeAlias = "tuple[str, tuple[int, ...]]"  # key and offset in the array of objects


def _diff_objects(keys: Sequence[str], first: Contents, second: Contents) -> list[ValueDifference]:
    if not keys:
        return []
    readers = [_object_readers(contents, keys) for contents in (first, second)]
    differences: list[ValueDifference] = []
    for object_id in sorted({*readers[0], *readers[1]}):
        values = [reader[object_id]() if object_id in reader else _ABSENT for reader in readers]
        key, offset = object_id
        differences += _diff_values(f"object {key!r} {list(offset)}", values[0], values[1])
    return differences


def _object_readers(
    contents: Contents, keys: Sequence[str]
) -> dict[_ObjectId, Callable[[], Any]]:  # whatever the user saved
    """Return a function that reads and decodes an object, for each object."""
    chunks = contents.chunks(keys)
    table = chunks.table

    def read(row: int, key: str) -> Any:
        return contents.decode_object(read_chunk(chunks, row), f"object {key!r}")

    readers: dict[_ObjectId, Callable[[], Any]] = {}
    for row, (array, start) in enumerate(zip(table.array.tolist(), table.start.tolist(), strict=True)):
        spec = table.arrays[array]
        readers[spec.key, tuple(start[: len(spec.global_shape)])] = partial(read, row, spec.key)
    return readers


_ABSENT = object()
"""The value of an object that a checkpoint does not have."""


@dataclass(frozen=True, slots=True)
class _CommonStates:
    """The common states of two checkpoints, made comparable.

    Attributes:
        states: both common states, with tensors instead of the arrays in inline.
        contents: the content metadata of both.
        inline: for each checkpoint, keys of arrays that the other one stores as tensors of common state.
    """

    states: tuple[Any, Any]
    contents: tuple[Any, Any]
    inline: tuple[frozenset[str], frozenset[str]]


def _read_common(contents: Sequence[Contents], stores: Sequence[Store]) -> _CommonStates:
    """Read the common states.

    A tensor that one checkpoint stores in common state and the other as an array is compared as common
    state. If both store it as an array, it is compared as an array.
    """
    pairs = [read_common_and_references(c, where=s.location) for c, s in zip(contents, stores, strict=True)]
    references = [stored_references(pair[0], c) for pair, c in zip(pairs, contents, strict=True)]
    states, inline = [], []
    for this, other in ((0, 1), (1, 0)):
        paths = value_steps(pairs[other][0])
        inlined = {path: key for path, key in references[this].items() if path in paths}
        tensors = read_referenced(inlined, contents[this], stores[this])
        states.append(with_tensors(pairs[this][0], tensors))
        inline.append(frozenset(inlined.values()))
    return _CommonStates((states[0], states[1]), (pairs[0][1], pairs[1][1]), (inline[0], inline[1]))


def _diff_values(what: str, first: Any, second: Any) -> list[ValueDifference]:
    """Compare two values leaf by leaf, by class and bits."""
    values = (first, second)
    digests: list[dict[str, str]] = [{} if v is _ABSENT else leaf_digests(v) for v in values]
    if digests[0] == digests[1]:
        return []
    texts: list[dict[str, str]] = [{} if v is _ABSENT else leaves_as_text(v) for v in values]
    paths = sorted({*digests[0], *digests[1]})
    return [
        ValueDifference(path=f"{what}: {path}", first=texts[0].get(path), second=texts[1].get(path))
        for path in paths
        if digests[0].get(path) != digests[1].get(path)
    ]
