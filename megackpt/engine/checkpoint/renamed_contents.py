"""A view of a checkpoint that gives stored arrays the names of `LoadOptions.rename`.

Patterns like `{"old.*": "new.*"}` decide the new name of each key, so that no two keys get one name.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace

from megackpt.engine.checkpoint.other_table import ChunksOfOtherTable
from megackpt.errors import DeclarationError, MismatchError
from megackpt.formats.contents import Chunks, Contents
from megackpt.plans.metadata import ChunkTable


def with_renamed_keys(contents: Contents, patterns: Mapping[str, str]) -> tuple[Contents, Container[str]]:
    """Return contents with keys renamed by the patterns of `LoadOptions.rename`, and the keys that stay.

    Raises:
        DeclarationError, MismatchError: as `rename_keys`.
    """
    new_name = rename_keys(contents.arrays, patterns)
    # No two keys have the same new name, so each new name has one old name.
    old_name = {new: old for old, new in new_name.items()}

    def chunks(keys: Iterable[str]) -> Chunks:
        return _renamed_chunks(contents.chunks([old_name[key] for key in keys]), new_name)

    def chunks_overlapping(wanted: Sequence[ChunkTable]) -> Chunks:
        return _renamed_chunks(
            contents.chunks_for([_with_keys(table, old_name) for table in wanted]), new_name
        )

    arrays = {new_name[key]: replace(spec, key=new_name[key]) for key, spec in contents.arrays.items()}
    renamed = replace(
        contents,
        arrays=arrays,
        chunks=chunks,
        chunks_overlapping=chunks_overlapping,
        inline={new_name[key]: tensor for key, tensor in contents.inline.items()},
    )
    return renamed, {old for old, new in new_name.items() if old == new}


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
