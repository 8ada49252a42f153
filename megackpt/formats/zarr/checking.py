"""Finds what is wrong with the files of a zarr checkpoint, apart from the bytes of its chunks.

The list that a save has written shows which files are missing, and the document of an array which chunks are.
Documents have no digest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import product

from megackpt.errors import CheckpointError
from megackpt.formats.damage import Damage, damage_of
from megackpt.formats.zarr.array_documents import ZarrArray
from megackpt.storage import Store

_MAX_CELLS = 1 << 24  # of one array: a document may claim any number


def missing_files(expected: Iterable[str], listed: Collection[str], *, list_name: str) -> Iterator[Damage]:
    """Yield the files that a save has listed, in the file list_name, and that are missing."""
    for name in sorted(set(expected) - set(listed)):
        yield Damage(file=name, what=f"it is missing, and {list_name} names it")


def missing_chunks(arrays: Iterable[ZarrArray], listed: Collection[str]) -> Iterator[Damage]:
    """Yield the missing chunk files of arrays."""
    files = set(listed)
    for array in arrays:
        cells = math.prod(array.file_extents)
        if not cells:
            continue
        # A damaged document may name any shape; to list the cells of a forged one would not end.
        if cells > _MAX_CELLS:
            what = f"it is of {cells:,} files, which no array has. Its document is damaged"
            yield Damage(file=array.path, key=array.spec.key, what=what)
            continue
        for cell in product(*map(range, array.file_extents)):
            name = array.path + array.leaf(cell)
            if name not in files:
                region = ", ".join(f"{r.start}:{r.stop}" for r in array.region(cell))
                yield Damage(file=name, key=array.spec.key, box=f"[{region}]", what="it is missing")


def changed_documents(
    store: Store, arrays: Iterable[ZarrArray], written: Callable[[ZarrArray], ZarrArray]
) -> Iterator[Damage]:
    """Yield the documents that differ from those that megackpt writes for the array, which `written` returns.

    This replaces a digest: only dtype, shape and chunks in a document depend on the array.
    """
    for array in arrays:
        for name, data in written(array).documents().items():
            try:
                is_same = store.read(name, max_bytes=max(store.size(name), 1)) == data
            except CheckpointError as error:
                yield damage_of(error, location=store.location, file=name)
                continue
            if not is_same:
                yield Damage(
                    file=name, key=array.spec.key, what="it is not what a save writes of such an array"
                )
