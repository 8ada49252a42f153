"""A map as rows, to be printed: one for each rule."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megackpt.maps.family import FamilyRules
from megackpt.maps.regions import RegionMap
from megackpt.maps.rules import Rule


@dataclass(frozen=True, slots=True)
class MapRow:
    """A rule, with the shapes of its arrays.

    Attributes:
        ours: key of our array; `{layer}` stands for a layer.
        axes: its axes, as in the rule.
        shape: its shape, without a layer axis.
        theirs: key of the array of the other family; `{word}` stands for a position along that axis.
        their_axes: its axes.
        their_shape: its shape.
        layers: the layers that have the array; empty outside of layers.
    """

    ours: str
    axes: str
    shape: tuple[int, ...]
    theirs: str
    their_axes: str
    their_shape: tuple[int, ...]
    layers: tuple[int, ...]

    def of_layers(self, count: int) -> Iterator[MapRow]:
        """Yield a row for each of the first `count` layers of the model that has the array."""
        if not self.layers:
            yield self
        for layer in self.layers:
            if layer < count:
                ours, theirs = (key.replace("{layer}", str(layer)) for key in (self.ours, self.theirs))
                yield MapRow(ours, self.axes, self.shape, theirs, self.their_axes, self.their_shape, (layer,))


def map_rows(family: FamilyRules, made: RegionMap) -> list[MapRow]:
    """Return a row for each rule. Pure.

    Args:
        family: the rules.
        made: their map.
    """
    return [_row(rule, made) for rule in family.rules]


def pair_rows(made: RegionMap, *, layers: int) -> Iterator[tuple[str, str, str, str]]:
    """Yield key and region of ours, and key and region of theirs, of each pair in the first layers. Pure.

    Args:
        made: a map with keys for each layer on the left.
        layers: number of layers; all pairs outside of layers are there.
    """
    for pair in made.pairs:
        layer = re.match(r"(?:.*\.)?layers\.(\d+)\.", pair.left.key)
        if layer is None or int(layer[1]) < layers:
            yield pair.left.key, str(pair.left.box), pair.right.key, str(pair.right.box)


def spelled_layers(layers: Sequence[int]) -> str:
    """Return layers as text, those that follow each other as ranges.

    >>> spelled_layers([0, 1, 2, 5, 7, 8])
    '0-2, 5, 7-8'
    """
    ranges: list[list[int]] = []
    for layer in layers:
        if ranges and layer == ranges[-1][1] + 1:
            ranges[-1][1] = layer
        else:
            ranges.append([layer, layer])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)


def _row(rule: Rule, made: RegionMap) -> MapRow:
    layer = str(rule.layers[0]) if rule.layers else ""
    words = set(re.findall(r"\{(\w+)\}", rule.theirs)) - {"layer"}
    # An axis that a key spells is none of the array.
    own = " ".join(axis for axis in rule.axes.split() if axis not in words)
    ours, theirs = (key.replace("{layer}", layer) for key in (rule.ours, rule.theirs))
    for word in words:
        theirs = theirs.replace(f"{{{word}}}", "0")
    shape, their_shape = made.left[ours].stored, made.right[theirs].stored
    return MapRow(
        rule.ours, rule.axes, shape, rule.theirs, rule.their_axes or own, their_shape, tuple(rule.layers)
    )
