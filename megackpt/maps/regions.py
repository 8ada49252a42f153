"""Maps between two families of arrays: which box of an array has the same elements as which box of another.

Two families name, split and order the same tensors differently. A `RegionMap` is a list of pairs. A pair is
a box of an array of the left family, the box of an array of the right family that has the same elements, and
the order of their axes. No tensor is needed to make, prove, invert or join maps. Pure; no torch, no I/O.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from megackpt.errors import MapError
from megackpt.plans.geometry import Box, Ints
from megackpt.plans.geometry.tiling import Rectangles, uncovered_regions


class MappedArray(NamedTuple):
    """The shape of an array in a family.

    Attributes:
        stored: the shape in the files of the family.
        viewed: the shape in which the pairs count: that of the files, or with some dims split in row-major
            order, so that every element has the same position in memory.
        is_padded: whether files may have more rows along dim 0, which are padding (a vocabulary).
        keeps_dtype: whether its values lose their meaning when they are rounded, so that an export or import
            to another dtype leaves it as it is.
    """

    stored: tuple[int, ...]
    viewed: tuple[int, ...]
    is_padded: bool = False
    keeps_dtype: bool = False


class Region(NamedTuple):
    """A box of the viewed array `key`."""

    key: str
    box: Box


@dataclass(frozen=True, slots=True)
class RegionPair:
    """Two boxes with the same elements. All methods are pure.

    Attributes:
        left: the box of the left family.
        right: the box of the right family.
        axes: for each dim of the right box, the dim of the left box that runs along it; -1 for a dim of
            extent 1 without a partner. Left dims that are not named have extent 1.
        added: value of a left element minus the value of the right one: 1 for a norm that the right family
            stores zero-centred and the left one does not; otherwise 0.
    """

    left: Region
    right: Region
    axes: tuple[int, ...]
    added: int = 0

    def inverse(self) -> RegionPair:
        """Return the pair with both sides exchanged."""
        return RegionPair(
            self.right, self.left, inverse_axes(self.axes, len(self.left.box.shape)), -self.added
        )

    def within_left(self, box: Box) -> RegionPair | None:
        """Return the part whose left elements lie in a box of the left array; None if there is none."""
        own = self.left.box
        low = [max(a, b) for a, b in zip(own.start, box.start, strict=True)]
        high = [min(a, b) for a, b in zip(own.stop, box.stop, strict=True)]
        if any(a >= b for a, b in zip(low, high, strict=True)):
            return None
        shift = [a - b for a, b in zip(low, own.start, strict=True)]
        shape = tuple(b - a for a, b in zip(low, high, strict=True))
        other = self.right.box
        right = Box(
            tuple(s + (shift[a] if a >= 0 else 0) for s, a in zip(other.start, self.axes, strict=True)),
            tuple(shape[a] if a >= 0 else 1 for a in self.axes),
        )
        left = Region(self.left.key, Box(tuple(low), shape))
        return RegionPair(left, Region(self.right.key, right), self.axes, self.added)


def inverse_axes(axes: tuple[int, ...], dims: int) -> tuple[int, ...]:
    """Return for each of `dims` left dims the right dim that runs along it, or -1."""
    partner = [-1] * dims
    for right, left in enumerate(axes):
        if left >= 0:
            partner[left] = right
    return tuple(partner)


class _PairTable(NamedTuple):
    """The pairs of one left array, with their left boxes in columns."""

    pairs: list[RegionPair]
    start: Ints
    stop: Ints


@dataclass(frozen=True, slots=True, eq=False)
class RegionMap:
    """A correspondence between the arrays of two families. All methods are pure.

    Attributes:
        left: arrays of the left family, by key.
        right: arrays of the right family, by key.
        pairs: boxes with the same elements.
    """

    left: Mapping[str, MappedArray]
    right: Mapping[str, MappedArray]
    pairs: tuple[RegionPair, ...]
    _tables: dict[str, _PairTable] = field(default_factory=dict, repr=False)

    def inverse(self) -> RegionMap:
        """Return the map with both sides exchanged."""
        return RegionMap(self.right, self.left, tuple(pair.inverse() for pair in self.pairs))

    def pairs_within(self, key: str, box: Box) -> Iterator[RegionPair]:
        """Yield the pairs of a box of the left array `key`; nothing for an array that is not mapped."""
        if key not in self.left:
            return
        table = self._table(key)
        is_hit = ((table.start < np.array(box.stop)) & (table.stop > np.array(box.start))).all(axis=1)
        for number in np.flatnonzero(is_hit).tolist():
            pair = table.pairs[number].within_left(box)
            if pair is not None:
                yield pair

    def joined(self, other: RegionMap) -> RegionMap:
        """Return the map from this left family to the right family of another map, through the common one.

        Elements of the common family that only one of both maps has are left out: `check` tells.
        """
        pairs = []
        for pair in self.pairs:
            for after in other.pairs_within(*pair.right):
                before = pair.inverse().within_left(after.left.box)
                assert before is not None  # a part of the pair
                inward = inverse_axes(before.axes, len(before.left.box.shape))
                axes = tuple(inward[a] if a >= 0 else -1 for a in after.axes)
                pairs.append(RegionPair(before.right, after.right, axes, pair.added + after.added))
        return RegionMap(self.left, other.right, tuple(pairs))

    def with_left_keys(self, renamed: Mapping[str, str]) -> RegionMap:
        """Return the map with other keys of left arrays; keys that are not named stay.

        Raises:
            MapError: two arrays would have one key.
        """
        left: dict[str, MappedArray] = {}
        for key, array in self.left.items():
            new = renamed.get(key, key)
            if new in left:
                raise MapError(f"Two arrays of the map would have the key {new!r}; one of them is {key!r}.")
            left[new] = array
        return RegionMap(
            left,
            self.right,
            tuple(
                replace(pair, left=Region(renamed.get(pair.left.key, pair.left.key), pair.left.box))
                for pair in self.pairs
            ),
        )

    def check(self, *, name: str) -> None:
        """Prove that the map is a bijection: every element of both families is in exactly one pair. Pure.

        Args:
            name: of the map, for the error.

        Raises:
            MapError: an element is in no pair, or in more than one, or a pair makes no sense; the text names
                array and region.
        """
        for key, array in (*self.left.items(), *self.right.items()):
            if math.prod(array.stored) != math.prod(array.viewed):
                raise MapError(
                    f"The map {name} is wrong: {key!r} of shape {array.stored} cannot be seen as "
                    f"{array.viewed}, which has another number of elements."
                )
        for pair in self.pairs:
            fault = _fault_of_pair(pair, self.left, self.right)
            if fault is not None:
                raise MapError(f"The map {name} is wrong: {fault}, in the pair {pair}.")
        for side, arrays, regions in (
            ("left", self.left, [pair.left for pair in self.pairs]),
            ("right", self.right, [pair.right for pair in self.pairs]),
        ):
            faults = _uncovered(arrays, regions)
            if faults:
                raise MapError(
                    f"The map {name} is no bijection: on the {side}, {faults[0]}"
                    f"{f' ({len(faults)} such regions)' if len(faults) > 1 else ''}. Correct its rules.",
                )

    def _table(self, key: str) -> _PairTable:
        if not self._tables:
            by_key = defaultdict(list)
            for pair in self.pairs:
                by_key[pair.left.key].append(pair)
            tables = {}
            for left, array in self.left.items():
                pairs, dims = by_key[left], len(array.viewed)
                start = np.array([p.left.box.start for p in pairs], np.int64).reshape(-1, dims)
                stop = np.array([p.left.box.stop for p in pairs], np.int64).reshape(-1, dims)
                tables[left] = _PairTable(pairs, start, stop)
            self._tables.update(tables)  # all at once: other threads may look at the same time
        return self._tables[key]


def _fault_of_pair(
    pair: RegionPair, left: Mapping[str, MappedArray], right: Mapping[str, MappedArray]
) -> str | None:
    """Return why the two boxes of a pair cannot have the same elements; None if they can."""
    for (key, box), arrays in ((pair.left, left), (pair.right, right)):
        if key not in arrays:
            return f"there is no array {key!r}"
        whole = arrays[key].viewed
        is_inside = len(box.start) == len(whole) and all(
            0 <= low <= high <= size for low, high, size in zip(box.start, box.stop, whole, strict=True)
        )
        if not is_inside:
            return f"a box is not inside of {key!r} {whole}"
    ours, theirs = pair.left.box.shape, pair.right.box.shape
    named = [axis for axis in pair.axes if axis >= 0]
    # Each dim of more than one element runs along exactly one dim of the other box, of the same extent.
    is_axes = len(pair.axes) == len(theirs) and len(named) == len(set(named))
    fits = is_axes and set(named) <= set(range(len(ours)))
    fits = fits and all(
        size == (ours[axis] if axis >= 0 else 1) for size, axis in zip(theirs, pair.axes, strict=True)
    )
    if not fits or any(size != 1 for axis, size in enumerate(ours) if axis not in named):
        return f"axes {pair.axes} do not take a box of shape {ours} to one of shape {theirs}"
    return None


def _uncovered(arrays: Mapping[str, MappedArray], regions: Iterable[Region]) -> list[str]:
    """Return a text for each region of an array that is not covered exactly once."""
    keys = list(arrays)
    number = {key: i for i, key in enumerate(keys)}
    dims = max((len(a.viewed) for a in arrays.values()), default=1) or 1
    whole = np.array([_widened(arrays[key].viewed, dims, 1) for key in keys], np.int64).reshape(-1, dims)
    rows = [(number[key], _widened(box.start, dims, 0), _widened(box.shape, dims, 1)) for key, box in regions]
    start = np.array([row[1] for row in rows], np.int64).reshape(-1, dims)
    shape = np.array([row[2] for row in rows], np.int64).reshape(-1, dims)
    array = np.array([row[0] for row in rows], np.int64)
    faults = []
    for fault in uncovered_regions(Rectangles(array, start, start + shape), whole):
        key = keys[fault.array]
        real = len(arrays[key].viewed)
        for low, high, count in zip(fault.start, fault.stop, fault.count.tolist(), strict=True):
            box = Box(tuple(low[:real].tolist()), tuple((high - low)[:real].tolist()))
            times = "in no pair" if count == 0 else "in more than one pair"
            faults.append(f"{key!r} {arrays[key].viewed} {box} is {times}")
    return faults


def _widened(extents: tuple[int, ...], dims: int, fill: int) -> tuple[int, ...]:
    return extents + (fill,) * (dims - len(extents))


# Binding a map to the keys of a model or checkpoint, whose layers are stacked or have keys of their own.
#
# Rules name each layer. A homogeneous decoder stores `decoder.layers.<name>` with an axis over its layers;
# one with unlike layers stores `decoder.layers.<number>.<name>`.

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
