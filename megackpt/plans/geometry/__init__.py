"""Pure integer geometry of global arrays: boxes, splits, flat ranges. No torch, no I/O.

Single boxes and views are imported when their names are first used: plans are made of columns of integers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

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

_LAZY_IMPORTS = {
    "Axis": "view",
    "Box": "box",
    "BoxRanges": "box",
    "View": "view",
    "box_ranges": "box",
}


def __getattr__(name: str) -> Any:
    """Import a class or function at its first use."""
    if name not in _LAZY_IMPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY_IMPORTS[name]}"), name)
