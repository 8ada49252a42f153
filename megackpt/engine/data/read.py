"""Reads a load plan into tensors, with several reads at the same time.

`plans.planning` decides which bytes are read for which tensor. This module decides how: a long contiguous
read goes straight into its tensor, short reads that are neighbours in a file are joined, and other reads go
through a buffer.
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
from megackpt.entities import ShardedTensor
from megackpt.entities.describe import dtype_name, torch_dtype
from megackpt.errors import FormatError
from megackpt.formats.contents import Borrow, Chunks, Part
from megackpt.options import LoadOptions
from megackpt.plans.geometry import Ints
from megackpt.plans.planning import Copies, Reads, StridedCopy, group_reads, plan_reads
from megackpt.storage import COMMON_POOL, MAX_BORROWED_BYTES

_PROBED_BYTES = 1024 * 1024

STRAIGHT_BYTES = 256 * 1024
"""Shorter reads are joined with their neighbours in the file: one more copy, but fewer requests."""


def read_tensors(
    chunks: Chunks,
    copies: Copies,
    tensors: Sequence[ShardedTensor],
    options: LoadOptions,
) -> None:
    """Fill the data of tensors in place. Local.

    Args:
        chunks: the stored chunks.
        copies: copies from chunks into tensors; entity i is tensor i.
        tensors: tensors with data.
        options: `verify` and `threads`.

    Raises:
        IntegrityError: a block does not have the digest it was stored with.
        StorageError, FormatError: a file cannot be read, or ends early.
    """
    dtypes = {a.key: a.dtype for a in chunks.table.arrays}
    targets = [Target.of(t, dtypes) for t in tensors]
    placed = with_target_strides(copies, tensors, [t.memory for t in targets])
    reads = plan_reads(placed, chunks.table, position=chunks.position, block_bytes=chunks.block_bytes)
    with Uploads([t.memory for t in targets]) as uploads:
        reader = _Reader(chunks, targets, uploads, verify=options.verify)
        threads = useful_threads(options.threads, waits=not chunks.is_cached())
        run_jobs(reader.jobs(reads), threads=threads, name="megackpt-read")


def probe_chunk(chunks: Chunks, row: int) -> None:
    """Check that a long chunk does not end beyond its file, before memory is allocated for it.

    Raises:
        FormatError: the file ends before the chunk does.
    """
    nbytes = int(chunks.table.nbytes[row])
    if nbytes > _PROBED_BYTES:
        chunks.read_into(row, nbytes - 1, memoryview(bytearray(1)), verify=False)


def read_chunk(chunks: Chunks, row: int) -> bytes:
    """Return all bytes of a chunk, checked against its digests. For small chunks, such as objects.

    Raises:
        FormatError: the chunk is longer than its file, or does not fit into memory.
        IntegrityError: the bytes are not those that were saved.
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
    """The memory of one entity that is read into.

    Attributes:
        memory: its tensor, viewed as integers if bits are moved and no values are converted.
        element: dtype in which stored elements are read: that of memory, unless values are converted.
    """

    memory: torch.Tensor
    element: torch.dtype

    @classmethod
    def of(cls, tensor: ShardedTensor, stored_dtypes: Mapping[str, str]) -> Target:
        """Return the target of a tensor with data, given the dtypes of the stored arrays by key."""
        assert tensor.data is not None  # the load has allocated tensors that were declared without data
        stored: torch.dtype = torch_dtype(stored_dtypes.get(tensor.key, dtype_name(tensor.dtype)))
        memory = as_bits(tensor.data) if stored == tensor.dtype else tensor.data.detach()
        return cls(memory, memory.dtype if stored == tensor.dtype else stored)

    @property
    def is_cast(self) -> bool:
        """Whether values are converted."""
        return self.element != self.memory.dtype


def with_target_strides(
    copies: Copies, tensors: Sequence[ShardedTensor], bits: Sequence[torch.Tensor]
) -> Copies:
    """Return copies with the strides of the targets. Planning assumes contiguous targets.

    Args:
        copies: from chunks into tensors.
        tensors: by entity.
        bits: the memory of the tensors as `as_bits` views it, by entity.
    """
    first, stride = copies.target_first.copy(), copies.target_stride.copy()
    # Only targets that are not contiguous have other strides than planning has computed.
    for entity in [i for i, b in enumerate(bits) if not b.is_contiguous()]:
        rows = np.flatnonzero(copies.entity == entity)
        if tensors[entity].flattened_range is not None:  # the target is 1-D, and positions in it are linear
            first[rows] *= bits[entity].stride(0)
            stride[rows] *= bits[entity].stride(0)
            continue
        # Prepended axes, and the columns that pad to the widest array, have extent 1: their stride is never
        # used.
        real = np.zeros(stride.shape[1], np.int64)
        axis = tensors[entity].prepend_axis_num
        real[axis : axis + bits[entity].ndim] = bits[entity].stride()
        first[rows] = (copies.target_start[rows] * real).sum(axis=1)
        stride[rows] = real
    return replace(copies, target_first=first, target_stride=stride)


def _is_plain(target: Target) -> bool:
    """Return whether stored bytes can be copied as they are into contiguous host memory."""
    return target.memory.is_cpu and not target.is_cast and target.memory.is_contiguous()


class _Reader:
    """Performs reads: straight into a tensor, several neighbours at once, or through a buffer."""

    def __init__(self, chunks: Chunks, targets: Sequence[Target], uploads: Uploads, *, verify: bool) -> None:
        self._chunks = chunks
        self._targets = targets
        self._uploads = uploads
        self._verify = verify
        self._itemsize = chunks.table.widths()
        self._raw = chunks.raw_ranges()
        # Views as bytes are made once: making one for each read would take longer than a short read.
        self._flat_bytes = [byte_view(t.memory) if _is_plain(t) else None for t in targets]

    def jobs(self, reads: Reads) -> Iterator[Callable[[], None]]:
        """Yield one job for each read or group of reads; straight reads come first."""
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
        """Yield one job for each read that is a single contiguous copy."""
        # A straight read has one copy, the one at reads.first. Its bytes are [into, into + lengths) of the
        # target.
        stored, entity = reads.stored[rows], reads.all_copies.entity[reads.first[rows]]
        into = reads.all_copies.target[reads.first[rows]] * self._itemsize[stored]
        lengths = reads.stop[rows] - reads.start[rows]
        columns = (rows, entity, stored, reads.start[rows], into, into + lengths)
        for read, number, row, start, begin, end in zip(*(c.tolist() for c in columns), strict=True):
            flat_bytes = self._flat_bytes[number]
            if flat_bytes is None:
                yield partial(self._read_strided, reads, read)
            else:
                yield partial(self._chunks.read_into, row, start, flat_bytes[begin:end], verify=self._verify)

    def _are_straight(self, reads: Reads) -> npt.NDArray[np.bool_]:
        """Return which reads are long and one contiguous copy, so that they need no buffer, `[n]`."""
        takes_bytes = np.array([not t.is_cast and t.memory.is_cpu for t in self._targets], np.bool_)
        # Read r has all_copies[reads.first[r] : reads.first[r + 1]], at least one copy.
        blocks, first = reads.all_copies, reads.first[:-1]
        width = self._itemsize[reads.stored]
        # begin[c] is the byte of its chunk at which copy c begins.
        begin = blocks.source * self._itemsize[blocks.stored]
        # The first copy takes all bytes of the read.
        is_whole = (begin[first] == reads.start) & (
            begin[first] + blocks.source_lengths()[first] * width == reads.stop
        )
        # The target of the single copy is one stretch of host memory of the same dtype.
        is_one_stretch = (
            (np.diff(reads.first) == 1) & blocks.are_contiguous()[first] & takes_bytes[blocks.entity[first]]
        )
        # Without raw ranges no reads are joined, so a buffer would be of no use to a short one.
        is_long = reads.stop - reads.start >= (0 if self._raw is None else STRAIGHT_BYTES)
        return np.asarray(is_whole & is_one_stretch & is_long)

    def _read_strided(self, reads: Reads, read: int) -> None:
        """Read one contiguous copy into a tensor that as a whole is not contiguous."""
        ((copy,),) = reads.copies([read])
        into = contiguous_bytes(self._targets[copy.entity].memory, copy)
        assert into is not None  # see _are_straight
        self._chunks.read_into(int(reads.stored[read]), int(reads.start[read]), into, verify=self._verify)

    def _read_group(self, borrow: Borrow, reads: Reads, group: Sequence[int]) -> None:
        columns = (reads.stored[group], reads.start[group], reads.stop[group])
        parts = [Part(*part) for part in zip(*(c.tolist() for c in columns), strict=True)]
        with borrow(parts, self._verify) as buffers:
            for copies, part, data in zip(reads.copies(group), parts, buffers, strict=True):
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
            flat_bytes = self._flat_bytes[copy.entity]
            if flat_bytes is not None:
                copy_to_flat_bytes(data, begins, target.element.itemsize, flat_bytes, copy)
            elif not target.memory.is_cuda:
                copy_bytes(data, begins, target.element, target.memory, copy)
            elif target.is_cast:  # the host converts, as for tensors in its memory
                with self._uploads.ordered_with_copies(target.memory.device):
                    copy_bytes(data, begins, target.element, target.memory, copy)
            else:
                block = source_block(data, begins, target.element.itemsize, copy)
                self._uploads.copy(block, target_block(target.memory, copy))
