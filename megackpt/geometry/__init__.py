"""Pure integer geometry of global arrays: boxes, splits, flat ranges. No torch, no I/O."""

from megackpt.geometry.box import Box, BoxRanges, box_ranges, row_major_strides
from megackpt.geometry.flat import Ints, rectangles_of, strides_of
from megackpt.geometry.ranges import joined_ranges, lexicographic_keys, position_bases, split_range
from megackpt.geometry.view import Axis, View

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
