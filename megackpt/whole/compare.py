"""Compares chunks of one checkpoint with the same elements of another checkpoint with other chunks.

The other checkpoint is read as in a load, with a limited number of bytes in memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from megackpt.engine.data.chunk_bytes import parts_of
from megackpt.engine.data.read import read_tensors
from megackpt.engine.data.tensor_bytes import as_bits, byte_view
from megackpt.entities import ShardedTensor
from megackpt.entities.describe import describe, torch_dtype
from megackpt.formats.contents import Chunks, Contents, Part
from megackpt.options import LoadOptions
from megackpt.plans.metadata import itemsizes
from megackpt.plans.planning import plan_load

ByteArray = npt.NDArray[np.uint8]  # [n]

PARTS_AT_A_TIME = 4096
"""Parts of small chunks that are planned as one load: to plan each alone would cost more than to read it."""

_OPTIONS = LoadOptions(threads=2)
_ALIGNMENT = 64  # bytes: a tensor of any dtype may begin there


@dataclass(frozen=True, slots=True, eq=False)
class BytePair:
    """The same elements of two checkpoints, as bytes. Valid until the next pair is made.

    Attributes:
        part: the part of a chunk of the first checkpoint.
        first: the bytes in the first checkpoint, `[n]`.
        second: the bytes in the second checkpoint, `[n]`.
    """

    part: Part
    first: ByteArray
    second: ByteArray


def byte_pairs(
    parts: Sequence[Part], chunks: Chunks, other: Contents, *, buffer_bytes: int, where: str
) -> Iterator[BytePair]:
    """Yield the bytes of these parts of arrays in both checkpoints. Local.

    Parts are cut so that at most buffer_bytes of each checkpoint are in memory at a time. where names the
    other checkpoint in error texts.

    Raises:
        IntegrityError: one of them is damaged.
        FormatError: the other checkpoint lacks elements.
    """
    # Both buffers are reused, and grow to the largest part and the largest batch.
    first_buffer, second_buffer = np.empty(0, np.uint8), torch.empty(0, dtype=torch.uint8)
    for batch in _batches(parts, chunks, buffer_bytes):
        offsets = _offsets(batch)
        if len(second_buffer) < offsets[-1]:
            second_buffer = torch.empty(offsets[-1], dtype=torch.uint8)
        entities = [
            _entity(part, chunks, second_buffer[offset : offset + part.stop - part.start])
            for part, offset in zip(batch, offsets, strict=False)
        ]
        _load(entities, other, where)
        for part, entity in zip(batch, entities, strict=True):
            nbytes = part.stop - part.start
            if len(first_buffer) < nbytes:
                first_buffer = np.empty(nbytes, np.uint8)
            chunks.read_into(part.row, part.start, first_buffer.data[:nbytes], verify=True)
            yield BytePair(part, first_buffer[:nbytes], _bytes_of(entity))


def _bytes_of(entity: ShardedTensor) -> ByteArray:
    assert entity.data is not None
    return np.frombuffer(byte_view(as_bits(entity.data)), np.uint8)


def _load(entities: Sequence[ShardedTensor], stored: Contents, where: str) -> None:
    """Read entities from a checkpoint, as a load reads a state dict."""
    request = describe(entities, rank=0)
    chunks = stored.chunks_for([request.table])
    read_tensors(chunks, plan_load(request, chunks.table, where=where), entities, _OPTIONS)


def _batches(parts: Sequence[Part], chunks: Chunks, buffer_bytes: int) -> Iterator[list[Part]]:
    batch: list[Part] = []
    nbytes = 0
    for part in parts:
        ranges = parts_of(chunks, part.row, start=part.start, stop=part.stop, buffer_bytes=buffer_bytes)
        for start, stop in ranges:
            if batch and (nbytes + stop - start > buffer_bytes or len(batch) == PARTS_AT_A_TIME):
                yield batch
                batch, nbytes = [], 0
            batch.append(Part(part.row, start, stop))
            nbytes += stop - start
    if batch:
        yield batch


def _offsets(parts: Sequence[Part]) -> list[int]:
    """Return the position of each part in one buffer, and the end of the last part."""
    rounded = [-(-(part.stop - part.start) // _ALIGNMENT) * _ALIGNMENT for part in parts]
    return [0, *itertools.accumulate(rounded)]


def _entity(part: Part, chunks: Chunks, memory: torch.Tensor) -> ShardedTensor:
    """Return a part as an entity of a load request, to be read into memory."""
    table = chunks.table
    spec = table.arrays[int(table.array[part.row])]
    width = int(itemsizes([spec])[0])
    dims = len(spec.global_shape)
    shape = tuple(table.shape[part.row, :dims].tolist())
    # The part as a flat range of elements of the chunk's box.
    first = int(table.flat_start[part.row])
    flat = slice(first + part.start // width, first + part.stop // width)
    is_whole_box = (flat.start, flat.stop) == (0, math.prod(shape))
    data = memory.view(torch_dtype(spec.dtype))
    return ShardedTensor(
        key=spec.key,
        data=data.view(shape) if is_whole_box else data,
        dtype=data.dtype,
        local_shape=shape,
        global_shape=spec.global_shape,
        global_offset=tuple(table.start[part.row, :dims].tolist()),
        flattened_range=None if is_whole_box else flat,
    )
