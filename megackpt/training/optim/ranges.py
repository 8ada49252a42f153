"""Where parameters are in a flat buffer, and which elements of each a rank owns.

Pure integers: no tensors, no communication. Every rank computes the layout of all ranks from the sizes of
the parameters alone, which is why sharded optimizer state can be declared without communication.

Parameters are packed in reverse order of registration: gradients become ready roughly in that order, so
buckets complete one after the other during the backward pass. A bucket is cut into `dp` equal slices. Of the
ranks that have the parameters (dp x cp for dense ones, edp for those of experts), rank r owns the r-th slice
of every bucket. Slices cross parameter borders at arbitrary elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megackpt.errors import GeometryError

ALIGNMENT = 64
"""Elements. 64 two-byte elements are 128 bytes: a cache line of a GPU, and enough for its widest loads."""


@dataclass(frozen=True, slots=True)
class FlatRange:
    """A half-open range `[start, stop)` of elements."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    def as_slice(self) -> slice:
        """Return the range as an index."""
        return slice(self.start, self.stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferLayout:
    """How parameters are packed into one flat buffer that `dp` ranks share.

    Attributes:
        dp: number of ranks with equal parameters (dp x cp, or edp for experts).
        params: where each parameter lies in the buffer, in order of registration.
        bucket_of_param: index of the bucket that each parameter lies in.
        buckets: consecutive ranges that cover the whole buffer. Each length is a multiple of `dp`, and no
            parameter crosses from one bucket into another.
    """

    dp: int
    params: tuple[FlatRange, ...]
    bucket_of_param: tuple[int, ...]
    buckets: tuple[FlatRange, ...]

    @property
    def numel(self) -> int:
        """Length of the buffer in elements, padding included."""
        return self.buckets[-1].stop if self.buckets else 0

    def owned_slices(self, rank: int) -> tuple[FlatRange, ...]:
        """Return the range of the buffer that `rank` of these ranks owns in each bucket."""
        lengths = [bucket.numel // self.dp for bucket in self.buckets]
        return tuple(
            FlatRange(bucket.start + rank * length, bucket.start + (rank + 1) * length)
            for bucket, length in zip(self.buckets, lengths, strict=True)
        )

    def owned_ranges(self, rank: int) -> tuple[FlatRange, ...]:
        """Return, for each parameter, the range of its own flattening that `rank` owns.

        An empty range is always `FlatRange(0, 0)`. Over all ranks, the ranges of a parameter tile it exactly
        once.
        """
        slices = self.owned_slices(rank)
        ranges = []
        for param, bucket in zip(self.params, self.bucket_of_param, strict=True):
            if not param.numel:  # it may be in no bucket
                ranges.append(FlatRange(0, 0))
                continue
            start, stop = max(param.start, slices[bucket].start), min(param.stop, slices[bucket].stop)
            empty = start >= stop
            ranges.append(FlatRange(0, 0) if empty else FlatRange(start - param.start, stop - param.start))
        return tuple(ranges)


def plan_buffer(
    numels: Sequence[int], *, dp: int, bucket_size: int, alignment: int = ALIGNMENT
) -> BufferLayout:
    """Pack parameters into buckets of about `bucket_size` elements.

    A bucket ends before it would exceed bucket_size; a parameter larger than that has a bucket of its own.
    Parameters start at multiples of alignment, and buckets are padded to a multiple of `dp * alignment`, so
    that slices are aligned, too.

    Args:
        numels: size of each parameter in elements, in order of registration.
        dp: number of ranks with equal parameters (dp x cp, or edp for experts).
        bucket_size: in elements.
        alignment: in elements.

    >>> layout = plan_buffer([3, 5], dp=2, bucket_size=100, alignment=1)
    >>> layout.params, layout.buckets
    ((FlatRange(start=5, stop=8), FlatRange(start=0, stop=5)), (FlatRange(start=0, stop=8),))
    >>> layout.owned_ranges(0)
    (FlatRange(start=0, stop=0), FlatRange(start=0, stop=4))
    >>> layout.owned_ranges(1)
    (FlatRange(start=0, stop=3), FlatRange(start=4, stop=5))

    Raises:
        GeometryError: a negative size, or dp, bucket_size or alignment below 1.
    """
    if min(numels, default=0) < 0 or min(dp, bucket_size, alignment) < 1:
        raise GeometryError(
            f"Cannot pack parameters of sizes {list(numels)} for dp={dp}, bucket_size={bucket_size}, "
            f"alignment={alignment}. Give sizes >= 0 and the others >= 1."
        )
    params, bucket_of_param = [FlatRange(0, 0)] * len(numels), [0] * len(numels)
    buckets: list[FlatRange] = []
    start = stop = 0  # the open bucket
    for index in reversed(range(len(numels))):
        at = _round_up(stop, alignment)
        if stop > start and at + numels[index] - start > bucket_size:
            buckets.append(FlatRange(start, start + _round_up(stop - start, dp * alignment)))
            start = at = buckets[-1].stop
        stop = at + numels[index]
        params[index], bucket_of_param[index] = FlatRange(at, stop), len(buckets)
    if stop > start:
        buckets.append(FlatRange(start, start + _round_up(stop - start, dp * alignment)))
    return BufferLayout(
        dp=dp, params=tuple(params), bucket_of_param=tuple(bucket_of_param), buckets=tuple(buckets)
    )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
