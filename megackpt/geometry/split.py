"""Splitting a dim between ranks, evenly or not.

Owns the arithmetic only; which dim is split over which ranks is the layer's declaration.
"""

from __future__ import annotations

from megackpt.errors import GeometryError


def split_range(length: int, *, parts: int, index: int) -> tuple[int, int]:
    """Return part `index` of `length` elements cut into `parts`, as `(start, stop)`.

    The first `length % parts` parts are one element longer, as in `torch.tensor_split`.

    >>> [split_range(10, parts=4, index=i) for i in range(4)]
    [(0, 3), (3, 6), (6, 8), (8, 10)]

    Raises:
        GeometryError: a negative length, no parts, or an index outside of them.
    """
    if length < 0 or parts < 1 or not 0 <= index < parts:
        raise GeometryError(
            f"Cannot take part {index} of {length} elements in {parts} parts. "
            f"Give length >= 0, parts >= 1 and 0 <= index < parts."
        )
    size, longer = divmod(length, parts)
    start = index * size + min(index, longer)
    return start, start + size + (index < longer)
