"""Pure integer geometry of global arrays: boxes, splits, flat ranges. No torch, no I/O."""

from megackpt.geometry.box import Box, row_major_strides
from megackpt.geometry.flat import Ints, Rectangles, rectangles_of, strides_of
from megackpt.geometry.mesh import MeshBox, MeshCut, mesh_boxes
from megackpt.geometry.ranges import joined_ranges
from megackpt.geometry.runs import Runs, runs_of
from megackpt.geometry.split import split_range
from megackpt.geometry.view import Axis, View

__all__ = [
    "Axis",
    "Box",
    "Ints",
    "MeshBox",
    "MeshCut",
    "Rectangles",
    "Runs",
    "View",
    "joined_ranges",
    "mesh_boxes",
    "rectangles_of",
    "row_major_strides",
    "runs_of",
    "split_range",
    "strides_of",
]
