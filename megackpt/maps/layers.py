"""Binding a map to the keys of a model or checkpoint, whose layers are stacked or have keys of their own.

Rules name each layer. A homogeneous decoder stores `decoder.layers.<name>` with an axis over its layers; one
with unlike layers stores `decoder.layers.<number>.<name>`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace

from megackpt.errors import MapError
from megackpt.maps.regions import MappedArray, Region, RegionMap, RegionPair
from megackpt.plans.geometry import Box

_LAYER = re.compile(r"(?P<stack>(?:.*\.)?layers)\.(?P<number>\d+)\.(?P<name>.+)")


def bound_to(made: RegionMap, keys: Collection[str]) -> RegionMap:
    """Return a map whose left arrays have the keys of a model or checkpoint. Pure.

    Args:
        made: a map with keys for each layer on the left.
        keys: keys of a model or checkpoint; those that the map does not know are of no consequence.
    """
    present = set(keys)
    stacked = {}
    for key in made.left:
        match = _LAYER.fullmatch(key)
        if match is not None and f"{match['stack']}.{match['name']}" in present:
            stacked[key] = (f"{match['stack']}.{match['name']}", int(match["number"]))
    return with_stacked_layers(made, stacked)


def with_stacked_layers(made: RegionMap, stacked: Mapping[str, tuple[str, int]]) -> RegionMap:
    """Return a map whose left arrays are layers of stacked arrays. Pure.

    Args:
        made: the map.
        stacked: key of the stacked array, and position along its new first axis, by the key of the layer.

    Raises:
        MapError: the layers of one array have different shapes, or are not numbered from 0 without a gap.
    """
    pairs = tuple(_stack_pair(pair, stacked) for pair in made.pairs)
    return RegionMap(_stack_arrays(made.left, stacked), made.right, pairs)


def _stack_arrays(
    arrays: Mapping[str, MappedArray], stacked: Mapping[str, tuple[str, int]]
) -> dict[str, MappedArray]:
    left: dict[str, MappedArray] = {}
    layers: dict[str, list[int]] = {}
    for key, array in arrays.items():
        if key not in stacked:
            left[key] = array
            continue
        whole, position = stacked[key]
        layers.setdefault(whole, []).append(position)
        if left.setdefault(whole, array) != array:
            raise MapError(
                f"{whole!r}: layer {position} has the shape {array.viewed}, and another one "
                f"{left[whole].viewed}. They cannot be stacked: give each layer a key of its own.",
                key=whole,
            )
    for whole, positions in layers.items():
        if sorted(positions) != list(range(len(positions))):
            raise MapError(f"{whole!r}: the map has its layers {sorted(positions)}, with gaps.", key=whole)
        array, count = left[whole], len(positions)
        left[whole] = array._replace(stored=(count, *array.stored), viewed=(count, *array.viewed))
    return left


def _stack_pair(pair: RegionPair, stacked: Mapping[str, tuple[str, int]]) -> RegionPair:
    """Return a pair whose left region is in the stacked array, one position along its first axis."""
    if pair.left.key not in stacked:
        return pair
    whole, position = stacked[pair.left.key]
    box = pair.left.box
    region = Region(whole, Box((position, *box.start), (1, *box.shape)))
    return replace(pair, left=region, axes=tuple(axis + 1 if axis >= 0 else -1 for axis in pair.axes))
