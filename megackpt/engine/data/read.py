"""Reading: carries a read plan out, several reads at once.

Owns the threads, and which way the bytes of a read take. What is read for which tensor was decided by
`planning`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from megackpt.engine.data.device_copies import Uploads
from megackpt.engine.data.tensor_bytes import (
    as_bits,
    byte_view,
    contiguous_bytes,
    copy_bytes,
    copy_to_flat_bytes,
    source_block,
    target_block,
)
from megackpt.engine.data.workers import run_jobs, useful_threads
from megackpt.errors import FormatError
from megackpt.formats.contents import Borrow, Chunks, Part
from megackpt.geometry import Ints
from megackpt.mapping import ShardedTensor
from megackpt.mapping.describe import dtype_name
from megackpt.metadata import itemsizes
from megackpt.options import LoadOptions
from megackpt.planning import Copies, Reads, StridedCopy, group_reads, plan_reads
from megackpt.storage import COMMON_POOL, MAX_BORROWED_BYTES

_PROBED_BYTES = 1024 * 1024

STRAIGHT_BYTES = 256 * 1024
"""Shorter reads are worth being joined with their neighbours, even if a copy more is made of them."""


def read_tensors(
    chunks: Chunks,
    copies: Copies,
    tensors: Sequence[ShardedTensor],
    options: LoadOptions,
) -> None:
    """Fill the tensors' data in place as the copies say; entities index into tensors. Local.

    Raises:
        IntegrityError: a block does not have the digest it was stored with.
        StorageError, FormatError: a file cannot be read, or ends early.
    """
    dtypes = {a.key: a.dtype for a in chunks.table.arrays}
    targets = [Target.of(t, dtypes) for t in tensors]
    placed = placed_in(copies, tensors, [t.memory for t in targets])
    reads = plan_reads(placed, chunks.table, position=chunks.position, block_bytes=chunks.block_bytes)
    with Uploads([t.memory for t in targets]) as uploads:
        reader = _Reader(chunks, targets, uploads, verify=options.verify)
        threads = useful_threads(options.threads, waits=not chunks.is_cached())
        run_jobs(reader.jobs(reads), threads=threads, name="megackpt-read")


def probe_chunk(chunks: Chunks, row: int) -> None:
    """Refuse a long chunk whose file is shorter than its index says, before memory is taken for it.

    Raises:
        FormatError: the file ends before.
    """
    nbytes = int(chunks.table.nbytes[row])
    if nbytes > _PROBED_BYTES:
        chunks.read_into(row, nbytes - 1, memoryview(bytearray(1)), verify=False)


def read_chunk(chunks: Chunks, row: int) -> bytes:
    """Return the bytes of a whole (small) chunk, checked.

    Raises:
        FormatError: it is longer than its file, or than memory.
        IntegrityError: its bytes are not those that were saved.
    """
    nbytes = int(chunks.table.nbytes[row])
    probe_chunk(chunks, row)
    try:
        data = bytearray(nbytes)
    except MemoryError as error:
        where = chunks.describe(row)
        raise FormatError(
            f"{where}: its {nbytes:,} bytes do not fit into memory. If it was not saved so large, it is "
            f"damaged.",
            key=chunks.table.arrays[int(chunks.table.array[row])].key,
            path=where,
        ) from error
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
    for entity in [i for i, b in enumerate(bits) if not b.is_contiguous()]:
        rows = np.flatnonzero(copies.entity == entity)
        if tensors[entity].flattened_range is not None:  # 1-D: positions in it are linear already
            first[rows] *= bits[entity].stride(0)
            stride[rows] *= bits[entity].stride(0)
            continue
        # Prepended axes and the padding behind have extent 1 and so no stride.
        real = np.zeros(stride.shape[1], np.int64)
        axis = tensors[entity].prepend_axis_num
        real[axis : axis + bits[entity].ndim] = bits[entity].stride()
        first[rows] = (copies.target_start[rows] * real).sum(axis=1)
        stride[rows] = real
    return replace(copies, target_first=first, target_stride=stride)


def _is_plain(target: Target) -> bool:
    """Whether elements go as they are into memory without gaps that can be seen as bytes."""
    return target.memory.is_cpu and not target.is_cast and target.memory.is_contiguous()


class _Reader:
    """Performs reads, in three ways: straight into a tensor, several at once, or one through a buffer."""

    def __init__(self, chunks: Chunks, targets: Sequence[Target], uploads: Uploads, *, verify: bool) -> None:
        self._chunks = chunks
        self._targets = targets
        self._uploads = uploads
        self._verify = verify
        table = chunks.table
        self._itemsize = itemsizes(table.arrays)[table.array] if len(table) else np.zeros(0, np.int64)
        self._raw = chunks.raw_ranges()
        # As bytes, where they can be: to make such a view for each read would take longer than a short read.
        self._octets = [byte_view(t.memory) if _is_plain(t) else None for t in targets]

    def jobs(self, reads: Reads) -> Iterator[Callable[[], None]]:
        """Yield what is to be done for all reads, in their order as far as they are of one kind."""
        is_straight = self._are_straight(reads)
        yield from self._straight_jobs(reads, np.flatnonzero(is_straight))
        others = np.flatnonzero(~is_straight)
        raw = self._raw
        if raw is not None:
            for group in group_reads(reads, others, raw.file, raw.offset_bytes, most=MAX_BORROWED_BYTES):
                yield partial(self._read_group, raw.borrow, reads, group.tolist())
        else:
            for read in others.tolist():
                yield partial(self._read_buffered, reads, read)

    def _straight_jobs(self, reads: Reads, rows: Ints) -> Iterator[Callable[[], None]]:
        """Yield what is to be done for reads of one contiguous copy each."""
        stored, entity = reads.stored[rows], reads.all_copies.entity[reads.first[rows]]
        into = reads.all_copies.target[reads.first[rows]] * self._itemsize[stored]
        lengths = reads.stop[rows] - reads.start[rows]
        columns = (rows, entity, stored, reads.start[rows], into, into + lengths)
        for read, number, row, start, begin, end in zip(*(c.tolist() for c in columns), strict=True):
            octets = self._octets[number]
            if octets is None:
                yield partial(self._read_strided, reads, read)
            else:
                yield partial(self._chunks.read_into, row, start, octets[begin:end], verify=self._verify)

    def _are_straight(self, reads: Reads) -> npt.NDArray[np.bool_]:
        """Whether each is long and one contiguous copy, which can go where it belongs at once, `[n]`."""
        takes_bytes = np.array([not t.is_cast and t.memory.is_cpu for t in self._targets], np.bool_)
        blocks, first = reads.all_copies, reads.first[:-1]
        width = self._itemsize[reads.stored]
        begin = blocks.source * self._itemsize[blocks.stored]
        is_whole = (begin[first] == reads.start) & (
            begin[first] + blocks.source_lengths()[first] * width == reads.stop
        )
        is_one_run = (
            (np.diff(reads.first) == 1) & blocks.are_contiguous()[first] & takes_bytes[blocks.entity[first]]
        )
        is_long = reads.stop - reads.start >= (0 if self._raw is None else STRAIGHT_BYTES)
        return np.asarray(is_whole & is_one_run & is_long)

    def _read_strided(self, reads: Reads, read: int) -> None:
        """Read one contiguous copy into a tensor that is not contiguous itself."""
        ((copy,),) = reads.copies([read])
        into = contiguous_bytes(self._targets[copy.entity].memory, copy)
        assert into is not None  # by _are_straight
        self._chunks.read_into(int(reads.stored[read]), int(reads.start[read]), into, verify=self._verify)

    def _read_group(self, borrow: Borrow, reads: Reads, group: Sequence[int]) -> None:
        columns = (reads.stored[group], reads.start[group], reads.stop[group])
        parts = [Part(*part) for part in zip(*(c.tolist() for c in columns), strict=True)]
        with borrow(parts, self._verify) as lent:
            for copies, part, data in zip(reads.copies(group), parts, lent, strict=True):
                self._copy_out(copies, data, part.start)

    def _read_buffered(self, reads: Reads, read: int) -> None:
        start = int(reads.start[read])
        with COMMON_POOL.borrow() as buffer:
            data = buffer.data[: int(reads.stop[read]) - start]
            self._chunks.read_into(int(reads.stored[read]), start, data, verify=self._verify)
            (copies,) = reads.copies([read])
            self._copy_out(copies, data, start)

    def _copy_out(self, copies: Sequence[StridedCopy], data: memoryview, begins: int) -> None:
        for copy in copies:
            target = self._targets[copy.entity]
            octets = self._octets[copy.entity]
            if octets is not None:
                copy_to_flat_bytes(data, begins, target.element.itemsize, octets, copy)
            elif not target.memory.is_cuda:
                copy_bytes(data, begins, target.element, target.memory, copy)
            elif target.is_cast:  # by the host, as for tensors in its memory
                with self._uploads.beside(target.memory.device):
                    copy_bytes(data, begins, target.element, target.memory, copy)
            else:
                block = source_block(data, begins, target.element.itemsize, copy)
                self._uploads.copy(block, target_block(target.memory, copy))
