"""Whether a checkpoint has the elements that another has, at whatever chunks.

Owns the comparison of bytes: chunks of one checkpoint are asked for from the other, as a load would, and
compared in parts of bounded size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from megackpt.engine.data.chunk_bytes import parts_of
from megackpt.engine.data.read import read_tensors
from megackpt.engine.data.tensor_bytes import as_bits, byte_view
from megackpt.errors import IntegrityError
from megackpt.formats.contents import Chunks, Contents, Part
from megackpt.mapping import ShardedTensor
from megackpt.mapping.describe import describe
from megackpt.metadata import itemsizes
from megackpt.options import LoadOptions
from megackpt.planning import plan_load

Octets = npt.NDArray[np.uint8]  # [n]

PARTS_AT_A_TIME = 4096
"""Small chunks compared in one go: enough that planning costs little, few enough to stay small themselves."""

_OPTIONS = LoadOptions(threads=2)
_ALIGNMENT = 64  # bytes: tensors of any dtype may begin there


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """The same bytes of two checkpoints, valid until the next pair is taken.

    Attributes:
        part: which they are, in the chunks of the first one.
        first: as the first checkpoint has them, `[n]`.
        second: as the second one has them, `[n]`.
    """

    part: Part
    first: Octets
    second: Octets


def compare_chunks(
    compared: Sequence[Part],
    chunks: Chunks,
    other: Contents,
    *,
    buffer_bytes: int,
    where: str,
    progress: Callable[[int], None],
) -> None:
    """Check that another checkpoint has the elements of these parts, none of them objects. Local.

    where is what the other is called in messages; progress is told of bytes compared.

    Raises:
        IntegrityError: it has other bits, or damaged ones.
        FormatError: it lacks elements.
    """
    for pair in pairs_of(compared, chunks, other, buffer_bytes=buffer_bytes, where=where):
        _refuse_difference(pair, chunks, where)
        progress(len(pair.first))


def pairs_of(
    compared: Sequence[Part], chunks: Chunks, other: Contents, *, buffer_bytes: int, where: str
) -> Iterator[Pair]:
    """Yield what two checkpoints have at these parts, none of them objects. Local.

    Parts are those of chunks, cut so that buffer_bytes of each checkpoint are held at a time; where is what
    the other is called in messages.

    Raises:
        IntegrityError: either is damaged.
        FormatError: the other lacks elements.
    """
    source, memory = np.empty(0, np.uint8), torch.empty(0, dtype=torch.uint8)
    for parts in _batches(compared, chunks, buffer_bytes):
        places = _places(parts)
        if len(memory) < places[-1]:
            memory = torch.empty(places[-1], dtype=torch.uint8)
        entities = [
            _entity(part, chunks, memory[at : at + part.stop - part.start])
            for part, at in zip(parts, places, strict=False)
        ]
        requested = describe(entities, rank=0)
        found = other.chunks_for([requested.table])
        read_tensors(found, plan_load(requested, found.table, where=where), entities, _OPTIONS)
        for part, entity in zip(parts, entities, strict=True):
            nbytes = part.stop - part.start
            if len(source) < nbytes:
                source = np.empty(nbytes, np.uint8)
            chunks.read_into(part.row, part.start, source.data[:nbytes], verify=True)
            assert entity.data is not None
            yield Pair(part, source[:nbytes], np.frombuffer(byte_view(as_bits(entity.data)), np.uint8))


def _batches(compared: Sequence[Part], chunks: Chunks, buffer_bytes: int) -> Iterator[list[Part]]:
    batch: list[Part] = []
    nbytes = 0
    for of in compared:
        for start, stop in parts_of(chunks, of.row, start=of.start, stop=of.stop, buffer_bytes=buffer_bytes):
            if batch and (nbytes + stop - start > buffer_bytes or len(batch) == PARTS_AT_A_TIME):
                yield batch
                batch, nbytes = [], 0
            batch.append(Part(of.row, start, stop))
            nbytes += stop - start
    if batch:
        yield batch


def _places(parts: Sequence[Part]) -> list[int]:
    """Return where each part begins in memory, and where the last one ends."""
    rounded = [-(-(part.stop - part.start) // _ALIGNMENT) * _ALIGNMENT for part in parts]
    return [0, *itertools.accumulate(rounded)]


def _entity(part: Part, chunks: Chunks, memory: torch.Tensor) -> ShardedTensor:
    """Declare a part as a load asks for it, to be read into memory."""
    table = chunks.table
    spec = table.arrays[int(table.array[part.row])]
    width = int(itemsizes([spec])[0])
    dims = len(spec.global_shape)
    shape = tuple(table.shape[part.row, :dims].tolist())
    first = int(table.flat_start[part.row])
    flat = slice(first + part.start // width, first + part.stop // width)
    data = memory.view(getattr(torch, spec.dtype))
    whole = (flat.start, flat.stop) == (0, math.prod(shape))
    return ShardedTensor(
        key=spec.key,
        data=data.view(shape) if whole else data,
        dtype=data.dtype,
        local_shape=shape,
        global_shape=spec.global_shape,
        global_offset=tuple(table.start[part.row, :dims].tolist()),
        flattened_range=None if whole else flat,
    )


def _refuse_difference(pair: Pair, chunks: Chunks, where: str) -> None:
    if np.array_equal(pair.first, pair.second):
        return
    part = pair.part
    first = part.start + int(np.flatnonzero(pair.first != pair.second)[0])
    key = chunks.table.arrays[int(chunks.table.array[part.row])].key
    raise IntegrityError(
        f"{key!r} {chunks.table.describe(part.row)}: {where} differs from byte {first} of the chunk on. It "
        f"is not what was written: suspect the storage.",
        key=key,
        path=where,
    )
