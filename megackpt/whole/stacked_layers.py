"""Layers of a map as stacks. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from megackpt.maps import RegionMap, bound_to

_LAYER = re.compile(r"(?P<stack>(?:.*\.)?layers)\.(?P<number>\d+)\.(?P<name>.+)")


def with_stacked_layers_where_equal(made: RegionMap) -> RegionMap:
    """Return a map that stacks the layers of a stack, if all have the same arrays in the same shapes.

    An encoder and a decoder are a stack each. Layers for further tokens keep keys of their own, as in the
    models that have them.
    """
    stacks: dict[str, dict[str, dict[int, tuple[int, ...]]]] = {}
    for key, array in made.left.items():
        match = _LAYER.fullmatch(key)
        if match is not None and not match["stack"].endswith("mtp.layers"):
            shapes = stacks.setdefault(match["stack"], {}).setdefault(match["name"], {})
            shapes[int(match["number"])] = array.stored
    stacked = {f"{stack}.{name}" for stack, arrays in stacks.items() if _are_equal(arrays) for name in arrays}
    return bound_to(made, stacked)


def _are_equal(arrays: Mapping[str, Mapping[int, tuple[int, ...]]]) -> bool:
    """Whether all layers of a stack have the same arrays: shapes by number of the layer, by name."""
    has_all = len({frozenset(shapes) for shapes in arrays.values()}) == 1
    return has_all and all(len(set(shapes.values())) == 1 for shapes in arrays.values())
