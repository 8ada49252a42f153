"""Reading: carries a read plan out, several reads at once.

Owns the threads, and which way the bytes of a read take. What is read for which tensor was decided by
`planning`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress

import numpy as np
import torch

from megackpt.engine.tensor_bytes import as_bits, copy_bytes, run_in
from megackpt.engine.workers import do_all
from megackpt.formats.strategy import Chunks, LiesInFiles, Part
from megackpt.mapping import ShardedTensor
from megackpt.mapping.describe import dtype_name
from megackpt.metadata import itemsizes
from megackpt.options import LoadOptions
from megackpt.planning import Copies, Read, group_reads, plan_reads
from megackpt.storage import COMMON_POOL, LENT_BYTES

STRAIGHT_BYTES = 256 * 1024
"""Shorter reads are worth being joined with their neighbours, even if a copy more is made of them."""


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
    do_all(reader.jobs(reads), threads=options.threads, name="megackpt-read")


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
    """Performs reads, in three ways: straight into a tensor, several at once, or one through a buffer."""

    def __init__(self, chunks: Chunks, targets: Sequence[Target], *, verify: bool) -> None:
        self._chunks = chunks
        self._targets = targets
        self._verify = verify
        table = chunks.table
        self._itemsize = itemsizes(table.arrays)[table.array] if len(table) else np.zeros(0, np.int64)
        self._in_files = chunks if isinstance(chunks, LiesInFiles) else None

    def jobs(self, reads: Sequence[Read]) -> Iterator[Callable[[], None]]:
        """Yield what is to be done for all reads, in their order as far as they are of one kind."""
        straight = [self._is_straight(read) for read in reads]
        for read in compress(reads, straight):
            yield partial(self._read_straight, read)
        others = [read for read, is_straight in zip(reads, straight, strict=True) if not is_straight]
        chunks = self._in_files
        if chunks is not None:
            for group in group_reads(others, chunks.file, chunks.offset_bytes, most=LENT_BYTES):
                yield partial(self._read_group, chunks, group)
        else:
            for read in others:
                yield partial(self._read_buffered, read)

    def _is_straight(self, read: Read) -> bool:
        """Whether a long read is one contiguous copy, which can go where it belongs at once."""
        copy = read.copies[0]
        width = int(self._itemsize[read.stored])
        whole = (copy.source * width, copy.source_stop * width) == (read.start, read.stop)
        target = self._targets[copy.slot]
        is_simple = len(read.copies) == 1 and whole and copy.is_run and not target.is_cast
        is_long = self._in_files is None or read.stop - read.start >= STRAIGHT_BYTES
        return is_simple and is_long and target.memory.device.type == "cpu"

    def _read_straight(self, read: Read) -> None:
        copy = read.copies[0]
        into = run_in(self._targets[copy.slot].memory, copy)
        assert into is not None  # by _is_straight
        self._chunks.read_into(read.stored, read.start, into, verify=self._verify)

    def _read_group(self, chunks: LiesInFiles, group: Sequence[Read]) -> None:
        parts = [Part(read.stored, read.start, read.stop) for read in group]
        with chunks.lend(parts, verify=self._verify) as lent:
            for read, data in zip(group, lent, strict=True):
                self._copy_out(read, data)

    def _read_buffered(self, read: Read) -> None:
        with COMMON_POOL.lend() as buffer:
            data = buffer.data[: read.stop - read.start]
            self._chunks.read_into(read.stored, read.start, data, verify=self._verify)
            self._copy_out(read, data)

    def _copy_out(self, read: Read, data: memoryview) -> None:
        for copy in read.copies:
            target = self._targets[copy.slot]
            copy_bytes(data, read.start, target.element, target.memory, copy)
