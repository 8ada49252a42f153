"""Pure integer geometry of global arrays: boxes, splits, flat ranges. No torch, no I/O.

Single boxes and views are imported when their names are first used: plans are made of columns of integers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megackpt.ground.lazy_names import lazy_names
from megackpt.plans.geometry.flat import (
    Ints,
    joined_ranges,
    lexicographic_keys,
    position_bases,
    rectangles_of,
    row_major_strides,
    split_range,
    strides_of,
)

if TYPE_CHECKING:
    from megackpt.plans.geometry.box import Box, BoxRanges, box_ranges
    from megackpt.plans.geometry.view import Axis, View
else:  # type checkers would accept any name
    __getattr__ = lazy_names(
        __name__,
        {
            "megackpt.plans.geometry.box": ("Box", "BoxRanges", "box_ranges"),
            "megackpt.plans.geometry.view": ("Axis", "View"),
        },
    )

__all__ = [
    "Axis",
    "Box",
    "BoxRanges",
    "Ints",
    "View",
    "box_ranges",
    "joined_ranges",
    "lexicographic_keys",
    "position_bases",
    "rectangles_of",
    "row_major_strides",
    "split_range",
    "strides_of",
]
