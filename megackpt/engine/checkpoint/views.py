"""Views of a checkpoint that give stored arrays other names or shapes; their bytes stay the same."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from megackpt.errors import DeclarationError, MismatchError
from megackpt.formats.contents import Chunks, Contents, FileRanges, RawRanges
from megackpt.plans.metadata import ChunkTable

# The stored chunks as chunks of other arrays: another table describes them, and their bytes stay the same.


class ChunksOfOtherTable(Chunks):
    """The same chunks, row by row, as chunks of other arrays.

    Args:
        chunks: the stored chunks.
        table: what they are chunks of; each row has the elements of the same row, in the same order.
    """

    def __init__(self, chunks: Chunks, table: ChunkTable) -> None:
        self._chunks = chunks
        self.table = table
        self.block_bytes, self.position = chunks.block_bytes, chunks.position

    def describe(self, row: int) -> str:
        """Return where the bytes of a chunk lie."""
        return self._chunks.describe(row)

    def read_into(self, row: int, start: int, out: memoryview, *, verify: bool) -> None:
        """Fill out with bytes of a chunk."""
        self._chunks.read_into(row, start, out, verify=verify)

    def raw_ranges(self) -> RawRanges | None:
        """Return where uncompressed chunks lie."""
        return self._chunks.raw_ranges()

    def is_cached(self) -> bool:
        """Return whether no read waits."""
        return self._chunks.is_cached()

    def file_ranges(self) -> FileRanges | None:
        """Return where the chunks lie."""
        return self._chunks.file_ranges()


# A view of a checkpoint that gives stored arrays the names of `LoadOptions.rename`.
#
# Patterns like `{"old.*": "new.*"}` give each key its new name. If two keys would get one name, a
# MismatchError is raised.


def with_renamed_keys(contents: Contents, patterns: Mapping[str, str]) -> tuple[Contents, Collection[str]]:
    """Return contents with keys renamed by the patterns of `LoadOptions.rename`, and the keys that stay.

    Raises:
        DeclarationError, MismatchError: as `rename_keys`.
    """
    if not patterns:
        return contents, contents.arrays
    new_name = rename_keys(contents.arrays, patterns)
    return with_new_names(contents, new_name), {old for old, new in new_name.items() if old == new}


def with_new_names(contents: Contents, new_name: Mapping[str, str]) -> Contents:
    """Return contents whose arrays have other keys: new_name has one for each array, all different."""
    old_name = {new: old for old, new in new_name.items()}

    def chunks(keys: Iterable[str]) -> Chunks:
        return _renamed_chunks(contents.chunks([old_name[key] for key in keys]), new_name)

    def chunks_overlapping(wanted: Sequence[ChunkTable]) -> Chunks:
        return _renamed_chunks(
            contents.chunks_for([_with_keys(table, old_name) for table in wanted]), new_name
        )

    arrays = {new_name[key]: replace(spec, key=new_name[key]) for key, spec in contents.arrays.items()}
    return replace(
        contents,
        arrays=arrays,
        chunks=chunks,
        chunks_overlapping=chunks_overlapping,
        inline={new_name[key]: tensor for key, tensor in contents.inline.items()},
        unpadded={new_name[key]: shape for key, shape in contents.unpadded.items()},
    )


def _renamed_chunks(chunks: Chunks, new_name: Mapping[str, str]) -> Chunks:
    return ChunksOfOtherTable(chunks, _with_keys(chunks.table, new_name))


def _with_keys(table: ChunkTable, new_name: Mapping[str, str]) -> ChunkTable:
    """Return the same table with the keys of its arrays replaced."""
    return replace(table, arrays=tuple(replace(a, key=new_name[a.key]) for a in table.arrays))


def rename_keys(keys: Iterable[str], patterns: Mapping[str, str]) -> dict[str, str]:
    """Return the new name of each key, by the first pattern that matches it; other keys keep their names.

    >>> rename_keys(["a.x.w", "b"], {"a.*.w": "z.*"})
    {'a.x.w': 'z.x', 'b': 'b'}

    Raises:
        DeclarationError: a pattern and its replacement have different numbers of `*`.
        MismatchError: two keys would get one name.
    """
    compiled = [(_compiled(pattern, new), new) for pattern, new in patterns.items()]
    renamed = {key: _renamed(key, compiled) for key in keys}
    first: dict[str, str] = {}
    for key, new in renamed.items():
        # Keys that keep their names count as well: a renamed key must not replace one of them.
        if first.setdefault(new, key) != key:
            raise MismatchError(
                f"rename gives the stored keys {first[new]!r} and {key!r} the same name {new!r}. Make the "
                f"patterns narrower.",
                key=new,
            )
    return renamed


def matches_rename(key: str, pattern: str) -> bool:
    """Return whether a pattern of `LoadOptions.rename` matches a key."""
    return _compiled(pattern, pattern).fullmatch(key) is not None


def _compiled(pattern: str, new: str) -> re.Pattern[str]:
    if pattern.count("*") != new.count("*"):
        raise DeclarationError(
            f"rename {{{pattern!r}: {new!r}}}: {pattern.count('*')} and {new.count('*')} stars. The text "
            f"that a star matches replaces the star at the same position, so give as many on both sides."
        )
    return re.compile("(.*)".join(re.escape(text) for text in pattern.split("*")), re.DOTALL)


def _renamed(key: str, compiled: list[tuple[re.Pattern[str], str]]) -> str:
    for pattern, new in compiled:
        match = pattern.fullmatch(key)
        if match:
            # The stars of the replacement take the texts of the pattern's in their order.
            matched = iter(match.groups())
            return "".join(next(matched) if text == "*" else text for text in re.split(r"(\*)", new))
    return key


# A view of a checkpoint whose arrays have more dims than in the files, in the same row-major order.
#
# A map may split a dim of a stored array. Example: it splits the last dim of `[experts, hidden, 2 x ffn]`
# into `[ffn, 2]`. No byte moves.

Shape = tuple[int, ...]


def with_views(contents: Contents, views: Mapping[str, Shape], *, where: str) -> Contents:
    """Return contents whose arrays have the shapes of views; arrays without a view are left out.

    `chunks` of the result raises a MismatchError for a chunk that is cut inside a group that a view splits
    off.

    Args:
        contents: an opened checkpoint.
        views: by the keys of stored arrays, their own shape, or one with dims of it split.
        where: the checkpoint, for errors.
    """
    arrays = {key: replace(contents.arrays[key], global_shape=shape) for key, shape in views.items()}
    if all(spec == contents.arrays[key] for key, spec in arrays.items()):
        return replace(contents, arrays=arrays)

    def chunks(keys: Iterable[str]) -> Chunks:
        stored = contents.chunks(keys)
        return ChunksOfOtherTable(stored, viewed_table(stored.table, views, where=where))

    # The format finds overlapping chunks by boxes of the stored shapes, and boxes of the request have those
    # of the views.
    return replace(contents, arrays=arrays, chunks=chunks, chunks_overlapping=None, unpadded={})


def viewed_table(table: ChunkTable, views: Mapping[str, Shape], *, where: str) -> ChunkTable:
    """Return the same chunks as boxes of arrays with the shapes of views. Pure.

    Raises:
        MismatchError: a chunk is cut inside a group that a view splits off, so it is no box of the view.
    """
    arrays = tuple(
        replace(spec, global_shape=views.get(spec.key, spec.global_shape)) for spec in table.arrays
    )
    dims = max([len(spec.global_shape) for spec in arrays], default=1) or 1
    start = np.zeros((len(table), dims), np.int64)
    shape = np.ones((len(table), dims), np.int64)
    for number, (stored, viewed) in enumerate(zip(table.arrays, arrays, strict=True)):
        rows = np.flatnonzero(table.array == number)
        # Along the dims of the stored array: `column` is the first dim of the view that this dim becomes.
        column = 0
        for dim, extents in enumerate(split_dims(stored.global_shape, viewed.global_shape)):
            # A box stays a box if its cuts along this dim are at multiples of the inner extents, which it
            # then has completely.
            inner = math.prod(extents[1:])
            if (table.start[rows, dim] % inner).any() or (table.shape[rows, dim] % inner).any():
                raise MismatchError(
                    f"{where}: {stored.key!r} {stored.global_shape} is stored in chunks that are cut inside "
                    f"of groups of {inner} along dim {dim}, which the map takes apart. Convert the "
                    f"checkpoint to one with whole arrays first (megackpt convert).",
                    key=stored.key,
                    path=where,
                )
            start[rows, column] = table.start[rows, dim] // inner
            shape[rows, column] = table.shape[rows, dim] // inner
            shape[rows, column + 1 : column + len(extents)] = extents[1:]
            column += len(extents)
    # Flat ranges stay: they number the elements of a box in row-major order, which a view does not change.
    return replace(table, arrays=arrays, start=start, shape=shape)


def split_dims(stored: Shape, viewed: Shape) -> list[Shape]:
    """Return for each dim of a stored array the extents that a view splits it into, outermost first.

    >>> split_dims((8, 4, 6), (8, 4, 3, 2))
    [(8,), (4,), (3, 2)]
    """
    parts, position = [], 0
    for extent in stored:
        stop = position + 1
        while math.prod(viewed[position:stop]) < extent:
            stop += 1
        parts.append(viewed[position:stop])
        position = stop
    assert position == len(viewed), f"{viewed} is no split of {stored}"
    return parts
