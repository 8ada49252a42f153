"""Copies from stored chunks into requested ones. Pure, over columns."""

from __future__ import annotations

from dataclasses import dataclass

from megackpt.geometry import Ints


@dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """Strided block copies, one a row; all numbers in elements.

    Attributes:
        stored: row of the stored chunk, `[m]`.
        entity: the requester's entity, `[m]`.
        shape: extents of the block, `[m, dims]`.
        source_first: its first element in the stored chunk, `[m]`.
        source_stride: strides there, `[m, dims]`.
        target_start: first element relative to the requested box, `[m, dims]`.
        target_first: first element in the requested chunk if that is contiguous, `[m]`.
        target_stride: strides there, `[m, dims]`.
    """

    stored: Ints
    entity: Ints
    shape: Ints
    source_first: Ints
    source_stride: Ints
    target_start: Ints
    target_first: Ints
    target_stride: Ints

    def __len__(self) -> int:
        return len(self.stored)

    def take(self, rows: Ints) -> Copies:
        """Return the chosen copies."""
        return Copies(*(getattr(self, name)[rows] for name in Copies.__slots__))
