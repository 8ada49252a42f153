"""Reads the bytes of stored chunks in bounded parts that the format can check."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from megackpt.engine.data.read import read_tensors
from megackpt.entities import ShardedTensor
from megackpt.entities.describe import describe, torch_dtype
from megackpt.formats.contents import Chunks, Contents
from megackpt.options import LoadOptions
from megackpt.plans.planning import plan_load


def parts_of(
    chunks: Chunks, row: int, *, buffer_bytes: int, start: int = 0, stop: int | None = None
) -> Iterator[tuple[int, int]]:
    """Yield the parts to read of a chunk, or of its bytes `[start, stop)`, as byte ranges in order.

    Each part begins where the format can begin to read. It is at most buffer_bytes long, or one block of the
    format if that is longer.
    """
    block = chunks.block_bytes
    step = max(buffer_bytes // block, 1) * block
    nbytes = int(chunks.table.nbytes[row])
    # A digest is that of a whole block, so a read begins and ends at blocks or at the end of the chunk.
    end = nbytes if stop is None else min(-(-stop // block) * block, nbytes)
    for first in range(start // block * block, end, step):
        yield first, min(first + step, end)


class ReadBuffers:
    """Reused buffers: to allocate new memory takes longer than to read into it. Safe for many threads."""

    def __init__(self) -> None:
        self._free: list[np.ndarray[tuple[int], np.dtype[np.uint8]]] = []

    def parts(
        self, chunks: Chunks, row: int, *, start: int, stop: int, buffer_bytes: int
    ) -> Iterator[memoryview]:
        """Yield the bytes `[start, stop)` of a chunk in parts, each checked, and valid until the next one.

        Raises:
            IntegrityError, FormatError, StorageError: the bytes cannot be read, or are not those that were
                saved.
        """
        buffer = self._take(chunks, row, buffer_bytes)
        try:
            for low, high in parts_of(chunks, row, start=start, stop=stop, buffer_bytes=buffer_bytes):
                part = buffer.data[: high - low]
                chunks.read_into(row, low, part, verify=True)
                # The first and the last part may have bytes that were read for the digest of their block
                # only.
                yield part[max(start - low, 0) : min(stop, high) - low]
        finally:
            self._free.append(buffer)

    def _take(
        self, chunks: Chunks, row: int, buffer_bytes: int
    ) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        wanted = min(max(buffer_bytes, chunks.block_bytes), int(chunks.table.nbytes[row]))
        # Without a lock: `pop` and `append` of a list are atomic.
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = np.empty(0, np.uint8)
        return buffer if len(buffer) >= wanted else np.empty(wanted, np.uint8)


# Compares two stored arrays of one checkpoint, byte by byte.

_OPTIONS = LoadOptions(threads=2)
_ELEMENTS = 4 * 1024 * 1024


def have_equal_bytes(contents: Contents, first: str, second: str, *, where: str) -> bool:
    """Return whether two arrays have one dtype, one shape and equal bytes. Local.

    Args:
        contents: the checkpoint.
        first: key of an array.
        second: key of the other one.
        where: names the checkpoint in errors.

    Raises:
        IntegrityError, FormatError, StorageError: they are damaged, or cannot be read.
    """
    ours, theirs = (contents.arrays[key] for key in (first, second))
    if (ours.dtype, ours.global_shape) != (theirs.dtype, theirs.global_shape):
        return False
    dtype, shape = torch_dtype(ours.dtype), ours.global_shape
    for start in range(0, ours.numel, _ELEMENTS):
        part = slice(start, min(start + _ELEMENTS, ours.numel))
        read = []
        for key in (first, second):
            data = torch.empty(part.stop - part.start, dtype=dtype)
            start_of_box = (0,) * len(shape)
            entity = ShardedTensor(key, data, dtype, shape, shape, start_of_box, flattened_range=part)
            request = describe([entity], rank=0)
            chunks = contents.chunks_for([request.table])
            read_tensors(chunks, plan_load(request, chunks.table, where=where), [entity], _OPTIONS)
            read.append(data.view(torch.uint8).numpy())
        # As bytes: NaN is not equal to itself as a number.
        if not np.array_equal(read[0], read[1]):
            return False
    return True
