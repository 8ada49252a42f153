"""Reading: carries a read plan out, several reads at once.

Owns the buffers and threads. What is read for which tensor was decided by `planning`.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace

import numpy as np
import torch

from megackpt.engine.tensor_bytes import as_bits, byte_view, copy_block, run_in
from megackpt.formats.strategy import Chunks
from megackpt.mapping import ShardedTensor
from megackpt.mapping.describe import dtype_name
from megackpt.metadata import itemsizes
from megackpt.options import LoadOptions
from megackpt.planning import Copies, Read, plan_reads
from megackpt.planning.read_plan import READ_BYTES


def read_tensors(
    chunks: Chunks,
    copies: Copies,
    tensors: Sequence[ShardedTensor],
    options: LoadOptions,
) -> None:
    """Fill the tensors' data in place as the copies say; slots index into tensors. Local.

    Raises:
        IntegrityError: a block does not have the digest it was stored with.
        StorageError, FormatError: a file cannot be read, or ends early.
    """
    dtypes = {a.key: a.dtype for a in chunks.table.arrays}
    targets = [Target.of(t, dtypes) for t in tensors]
    placed = placed_in(copies, tensors, [t.memory for t in targets])
    reads = plan_reads(placed, chunks.table, place=chunks.place, block_bytes=chunks.block_bytes)
    reader = _Reader(chunks, targets, verify=options.verify)
    with ThreadPoolExecutor(max_workers=options.threads, thread_name_prefix="megackpt-read") as pool:
        futures = [pool.submit(reader.perform, read) for read in reads]
        done, waiting = wait(futures, return_when=FIRST_EXCEPTION)
        for future in waiting:
            future.cancel()
        for future in done:
            if not future.cancelled():
                future.result()


def read_chunk(chunks: Chunks, row: int) -> bytes:
    """Return the bytes of a whole (small) chunk, checked."""
    data = bytearray(int(chunks.table.nbytes[row]))
    chunks.read_into(row, 0, memoryview(data), verify=True)
    return bytes(data)


@dataclass(frozen=True, slots=True)
class Target:
    """Where the elements of one entity go.

    Attributes:
        memory: its tensor, seen as integers where bits are moved.
        element: dtype of the stored elements as they are to be read: that of memory, unless values are
            converted.
    """

    memory: torch.Tensor
    element: torch.dtype

    @classmethod
    def of(cls, tensor: ShardedTensor, stored_dtypes: Mapping[str, str]) -> Target:
        """Find it for a tensor, given the dtypes of stored arrays by key."""
        assert tensor.data is not None  # the load has allocated what was declared without data
        stored: torch.dtype = getattr(torch, stored_dtypes.get(tensor.key, dtype_name(tensor.dtype)))
        memory = as_bits(tensor.data) if stored == tensor.dtype else tensor.data.detach()
        return cls(memory, memory.dtype if stored == tensor.dtype else stored)

    @property
    def is_cast(self) -> bool:
        """Whether values are converted."""
        return self.element != self.memory.dtype


def placed_in(copies: Copies, tensors: Sequence[ShardedTensor], bits: Sequence[torch.Tensor]) -> Copies:
    """Replace row-major targets by real strides where a tensor is a view that is not contiguous."""
    first, stride = copies.target_first.copy(), copies.target_stride.copy()
    for slot in [i for i, b in enumerate(bits) if not b.is_contiguous()]:
        rows = np.flatnonzero(copies.slot == slot)
        if tensors[slot].flattened_range is not None:  # 1-D: positions in it are linear already
            first[rows] *= bits[slot].stride(0)
            stride[rows] *= bits[slot].stride(0)
            continue
        # Prepended axes and the padding behind have extent 1 and so no stride.
        real = np.zeros(stride.shape[1], np.int64)
        axis = tensors[slot].prepend_axis_num
        real[axis : axis + bits[slot].ndim] = bits[slot].stride()
        first[rows] = (copies.target_start[rows] * real).sum(axis=1)
        stride[rows] = real
    return replace(copies, target_first=first, target_stride=stride)


class _Reader:
    """Performs reads; each thread has one buffer, made when first needed."""

    def __init__(self, chunks: Chunks, targets: Sequence[Target], *, verify: bool) -> None:
        self._chunks = chunks
        self._targets = targets
        self._verify = verify
        table = chunks.table
        self._itemsize = itemsizes(table.arrays)[table.array] if len(table) else np.zeros(0, np.int64)
        self._local = threading.local()

    def perform(self, read: Read) -> None:
        """Read a range of a chunk, and copy out of it."""
        width = int(self._itemsize[read.stored])
        into = self._direct(read, width)
        buffer = None
        if into is None:
            buffer = self._buffer()[: read.stop - read.start]
            into = byte_view(buffer)
        self._chunks.read_into(read.stored, read.start, into, verify=self._verify)
        if buffer is not None:
            for copy in read.copies:
                target = self._targets[copy.slot]
                copy_block(buffer.view(target.element), read.start // width, target.memory, copy)

    def _direct(self, read: Read, width: int) -> memoryview | None:
        """Return the target's own memory where one contiguous copy takes the whole read."""
        copy = read.copies[0]
        whole = (copy.source * width, copy.source_stop * width) == (read.start, read.stop)
        target = self._targets[copy.slot]
        if len(read.copies) > 1 or not whole or target.is_cast:
            return None
        return run_in(target.memory, copy)

    def _buffer(self) -> torch.Tensor:
        if not hasattr(self._local, "buffer"):
            self._local.buffer = torch.empty(READ_BYTES, dtype=torch.uint8)
        buffer: torch.Tensor = self._local.buffer
        return buffer
