"""Data files: plain safetensors with one tensor per chunk.

The header is known before a byte of data is written. A chunk that is a whole array is stored under its key
alone, so that a checkpoint of one process opens as expected in any safetensors reader.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from megackpt.formats.safetensors_encoding import encode_header
from megackpt.plans.metadata import DTYPES, OBJECT, ArraySpec, ChunkTable
from megackpt.plans.metadata.chunk_table import region_text

HEADER_ALIGNMENT = 4096
"""Data begins at a multiple of this, so that it is aligned for direct I/O and memory maps."""

METADATA = {"format": "megackpt", "version": "1"}
"""Content of `__metadata__` in a header."""


def header_of(chunks: ChunkTable) -> bytes:
    """Return the first bytes of a file that holds these chunks in this order."""
    return encode_header(_named_tensors(chunks), metadata=METADATA, alignment=HEADER_ALIGNMENT)


def tensors_of(chunks: ChunkTable) -> Iterator[tuple[str, str, list[int]]]:
    """Yield name, dtype and shape of the tensor of each chunk; names that occur twice are not numbered."""
    for chunk in _chunks_of(chunks):
        yield chunk.name(), *chunk.stored_as()


@dataclass(slots=True)
class _Chunk:
    """One row of a table as Python integers, its dims without padding."""

    spec: ArraySpec
    start: list[int]
    shape: list[int]
    flat_start: int
    flat_stop: int
    nbytes: int

    @property
    def is_whole_box(self) -> bool:
        return self.flat_start == 0 and self.flat_stop == math.prod(self.shape)

    def name(self) -> str:
        """Return the name of its tensor: the key, and the region after it unless it is a whole array."""
        spec = self.spec
        is_whole_array = self.is_whole_box and not any(self.start) and tuple(self.shape) == spec.global_shape
        if is_whole_array and spec.dtype != OBJECT:
            return spec.key
        return spec.key + region_text(self.start, self.shape, self.flat_start, self.flat_stop)

    def stored_as(self) -> tuple[str, list[int]]:
        """Return the dtype and shape of its tensor."""
        if self.spec.dtype == OBJECT:
            return "U8", [self.nbytes]
        itemsize, code = DTYPES[self.spec.dtype]
        if code == "U8" and itemsize > 1:  # a dtype that safetensors lacks: raw bytes
            return code, [self.nbytes]
        return code, self.shape if self.is_whole_box else [self.nbytes // itemsize]


def _chunks_of(table: ChunkTable) -> Iterator[_Chunk]:
    columns = (table.array, table.start, table.shape, table.flat_start, table.flat_stop, table.nbytes)
    # Lists of Python's integers: JSON takes no integers of numpy, and one by one these are slow.
    for array, start, shape, *numbers in zip(*(column.tolist() for column in columns), strict=True):
        spec = table.arrays[array]
        dims = len(spec.global_shape)
        yield _Chunk(spec, start[:dims], shape[:dims], *numbers)


def _named_tensors(chunks: ChunkTable) -> Iterator[tuple[str, str, list[int], int]]:
    """Yield name, dtype, shape and size of the tensor of each chunk, each name once."""
    taken = {"__metadata__"}
    for chunk in _chunks_of(chunks):
        name = _unique(chunk.name(), taken)
        taken.add(name)
        yield name, *chunk.stored_as(), chunk.nbytes


def _unique(name: str, taken: Collection[str]) -> str:
    """Return a name, numbered if it is taken: keys are free text, so one may look like another's region."""
    candidate, number = name, 1
    while candidate in taken:
        candidate, number = f"{name}#{number}", number + 1
    return candidate
