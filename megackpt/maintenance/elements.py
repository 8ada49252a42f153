"""Elements of two arrays, given as bytes: how many differ, and by how much.

Owns what counts as a difference: other bits. Values are looked at only of elements that differ.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from megackpt.metadata import DTYPES

Octets = npt.NDArray[np.uint8]  # [n]

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True, slots=True)
class ElementDifference:
    """How much of an array differs.

    Attributes:
        elements: number of elements with other bits.
        first: place in the array of the first of them, in row-major order.
        largest: largest absolute difference; None for integers and bools, and where no two values have one.
        not_numbers: elements that are NaN in one or both.
    """

    elements: int
    first: tuple[int, ...]
    largest: float | None
    not_numbers: int

    def joined(self, other: ElementDifference) -> ElementDifference:
        """Return the same of both parts of an array."""
        known = [n for n in (self.largest, other.largest) if n is not None]
        return ElementDifference(
            self.elements + other.elements,
            min(self.first, other.first),
            max(known) if known else None,
            self.not_numbers + other.not_numbers,
        )


@dataclass(frozen=True, slots=True)
class PartDifference:
    """What differs in a run of elements.

    Attributes:
        differing: how much; its place is not known here.
        first_byte: where the first element that differs begins in the run.
        width: bytes of an element.
    """

    differing: ElementDifference
    first_byte: int
    width: int


def compare_elements(first: Octets, second: Octets, dtype: str) -> PartDifference:
    """Compare runs of elements of a dtype of `DTYPES`, which differ somewhere.

    >>> one, two = (np.array(values, np.float32).view(np.uint8) for values in ([1, 2, 3], [1, 2.5, 3]))
    >>> differing_elements(one, two, "float32").differing.largest
    0.5
    """
    width = DTYPES[dtype].itemsize
    if width in _UNSIGNED:
        differs = first.view(_UNSIGNED[width]) != second.view(_UNSIGNED[width])
    else:
        differs = (first.view(np.uint64).reshape(-1, 2) != second.view(np.uint64).reshape(-1, 2)).any(axis=1)
    at = np.flatnonzero(differs)
    largest, not_numbers = _distance(first, second, dtype, at)
    return PartDifference(ElementDifference(len(at), (), largest, not_numbers), int(at[0]) * width, width)


def _distance(
    first: Octets, second: Octets, dtype: str, at: npt.NDArray[np.int64]
) -> tuple[float | None, int]:
    """Return the largest absolute difference of the elements at these places, and how many are no numbers."""
    kind: torch.dtype = getattr(torch, dtype)
    if not (kind.is_floating_point or kind.is_complex):
        return None, 0
    width = kind.itemsize
    # Few elements differ as a rule, and only they are converted.
    one, two = (
        torch.from_numpy(octets.reshape(-1, width)[at]).reshape(-1).view(kind) for octets in (first, second)
    )
    wide = torch.complex128 if kind.is_complex else torch.float64
    one, two = one.to(wide), two.to(wide)
    is_number = ~(one.isnan() | two.isnan())
    one, two = one[is_number], two[is_number]
    # inf - inf is no number: the same infinity twice cannot be, as elements differ, but parts of it can.
    distance = (one - two).abs().nan_to_num(nan=float("inf"), posinf=float("inf"))
    return (float(distance.max()) if len(distance) else None), int((~is_number).sum())
