"""Rules: how one tensor of ours appears in another family, in one line.

A rule names an array on both sides and the axes of both. Axes are words; their extents are the sizes of a
model. Dims are separated by spaces:

    q                 an axis
    0/3               position 0 of an axis of extent 3
    gate@i/2i         rows i to i + gate of an axis of extent 2i (offset and extent: numbers, sizes or sums)
    (group head)      several axes, one inside the other, in one dim
    [i 0/2]           the same where the innermost is a position: the dim is viewed as two dims

`{layer}` in keys stands for a layer, and `{word}` in a key of theirs for a position along the axis `word`.

An example: our fused array has for each of two heads a row of Q, of K and of V, and theirs has Q alone.

    ours: qkv, [6, 4]             theirs: q, [2, 4]
    row 0    Q of head 0    is    row 0    head 0
    row 1    K of head 0
    row 2    V of head 0
    row 3    Q of head 1    is    row 1    head 1
    row 4    K of head 1
    row 5    V of head 1

>>> rule = Rule(ours="qkv", theirs="q", axes="(head 0/3) width", their_axes="head width")
>>> pairs = region_map([rule], {"head": 2, "width": 4}).pairs
>>> [(pair.left.box.start, pair.right.box.start) for pair in pairs]
[((0, 0), (0, 0)), ((3, 0), (1, 0))]
>>> pairs[1].left.box.shape, pairs[1].right.box.shape  # so qkv[3, 2] is q[1, 2]
((1, 4), (1, 4))
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megackpt.errors import MapError
from megackpt.maps.regions import MappedArray, Region, RegionMap, RegionPair
from megackpt.plans.geometry import Box

_DIM = re.compile(r"\([^()]*\)|\[[^\[\]]*\]|\S+")
_MOST_PAIRS = 10_000_000
_PLACEHOLDER = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One array of ours in another family.

    Attributes:
        ours: key of our array, without a layer axis; `{layer}` stands for each of `layers`.
        theirs: key in the other family.
        axes: the axes of our array.
        their_axes: the axes of theirs; empty if they are the same.
        layers: the layers that have this array; empty if it is outside of layers.
        is_padded: whether our array may have more rows along dim 0, which are padding.
        added: what to add to their value to get ours; 1 for a zero-centred norm that we do not store so.
        keeps_dtype: whether the array stays in its dtype when others are converted. So do those that
            transformers keeps in float32 in every model (`_keep_in_fp32_modules_strict`).
    """

    ours: str
    theirs: str
    axes: str
    their_axes: str = ""
    layers: Sequence[int] = ()
    is_padded: bool = False
    added: int = 0
    keeps_dtype: bool = False

    def __str__(self) -> str:
        """Return names and axes, for errors: layers may be thousands."""
        their_axes = self.their_axes or self.axes
        return f"the rule {self.ours!r:.200} [{self.axes:.200}] as {self.theirs!r:.200} [{their_axes:.200}]"

    def count_of_theirs(self, sizes: Mapping[str, int]) -> int:
        """Return how many arrays of theirs the rule names, in all layers and positions. Pure."""
        words = set(_PLACEHOLDER.findall(self.theirs)) - {"layer"}
        return max(len(self.layers), 1) * math.prod(sizes.get(word, 1) for word in words)


class _Token(NamedTuple):
    """One axis of a dim: `size` positions from `offset` on, of `extent`; of a fixed position if no name."""

    name: str
    offset: int
    size: int
    extent: int


class _Dim(NamedTuple):
    """The axes of one dim, outermost first; `is_viewed` if each is a dim of its own in the viewed array."""

    tokens: tuple[_Token, ...]
    is_viewed: bool


class _Boxes(NamedTuple):
    """A box of ours and one of theirs with the same elements.

    Attributes:
        at: positions along the axes of which each position has boxes of its own.
        ours: the box of our array.
        theirs: the box of theirs.
        axes: as in RegionPair.
    """

    at: Mapping[str, int]
    ours: Box
    theirs: Box
    axes: tuple[int, ...]


def region_map(rules: Sequence[Rule], sizes: Mapping[str, int]) -> RegionMap:
    """Return the map of some rules: ours on the left, without layer axes, theirs on the right. Pure.

    Args:
        rules: the rules.
        sizes: extents of axes, by name.

    Raises:
        MapError: a rule is malformed, names an axis without a size, two rules disagree about a shape, or
            there are more pairs than any model needs.
    """
    left: dict[str, MappedArray] = {}
    right: dict[str, MappedArray] = {}
    pairs: list[RegionPair] = []
    total = 0
    for rule in rules:
        compiled = _CompiledRule.of(rule, sizes)
        ours = compiled.array(compiled.ours, is_padded=rule.is_padded)
        theirs = compiled.array(compiled.theirs, is_padded=False)
        total += math.prod(compiled.iterated.values()) * max(len(rule.layers), 1)
        if total > _MOST_PAIRS:
            raise MapError(f"{rule}: the map has more than {_MOST_PAIRS} pairs. Correct the sizes.")
        boxes = list(compiled.boxes())  # the same in all layers
        for layer in rule.layers or (None,):
            for pair in compiled.pairs(boxes, layer):
                _add(left, pair.left.key, ours, rule)
                _add(right, pair.right.key, theirs, rule)
                pairs.append(pair)
    return RegionMap(left, right, tuple(pairs))


def _add(arrays: dict[str, MappedArray], key: str, array: MappedArray, rule: Rule) -> None:
    known = arrays.setdefault(key, array)
    if known != array:
        raise MapError(
            f"{rule}: {key!r} has the shape {array.viewed} here and {known.viewed} in another rule. Correct "
            f"the axes of one of them.",
            key=key,
        )


@dataclass(frozen=True, slots=True)
class _CompiledRule:
    """A rule whose axes are parsed."""

    rule: Rule
    ours: tuple[_Dim, ...]
    theirs: tuple[_Dim, ...]
    iterated: Mapping[str, int]

    @classmethod
    def of(cls, rule: Rule, sizes: Mapping[str, int]) -> _CompiledRule:
        ours = tuple(_parsed_dim(text, sizes, rule) for text in _DIM.findall(rule.axes))
        theirs = tuple(_parsed_dim(text, sizes, rule) for text in _DIM.findall(rule.their_axes or rule.axes))
        # Pairs are boxes, so an axis inside a dim that is not the innermost one is taken position by
        # position; and so is an axis that is spelled in a key.
        outer = {t.name for dim in (*ours, *theirs) if not dim.is_viewed for t in dim.tokens[:-1] if t.name}
        spelled = set(_PLACEHOLDER.findall(rule.theirs)) - {"layer"}
        iterated = {}
        for name in sorted(outer | spelled):
            if name not in sizes:
                raise MapError(f"{rule}: the axis {name!r} has no size. Known are {sorted(sizes)}.")
            iterated[name] = sizes[name]
        # An axis that a key spells is no axis of theirs, and one that is the same on both sides may be.
        theirs = theirs if rule.their_axes else tuple(d for d in theirs if not _is_only(d, spelled))
        return cls(rule, ours, theirs, iterated)

    def array(self, dims: tuple[_Dim, ...], *, is_padded: bool) -> MappedArray:
        """Return the shape of the array with these dims."""
        stored = tuple(math.prod(t.extent for t in dim.tokens) for dim in dims)
        viewed = tuple(extent for dim in dims for extent in _extents(dim))
        return MappedArray(stored, viewed, is_padded, self.rule.keeps_dtype)

    def boxes(self) -> Iterator[_Boxes]:
        """Yield the boxes of a layer, or of an array outside of layers."""
        names = list(self.iterated)
        for values in itertools.product(*(range(self.iterated[name]) for name in names)):
            at = dict(zip(names, values, strict=True))
            ours, our_axes = _box(self.ours, at)
            theirs, their_axes = _box(self.theirs, at)
            yield _Boxes(at, ours, theirs, self._partners(our_axes, their_axes))

    def pairs(self, boxes: Sequence[_Boxes], layer: int | None) -> Iterator[RegionPair]:
        """Yield the pairs of one layer, or of an array outside of layers."""
        for at, ours, theirs, axes in boxes:
            spelled = at if layer is None else {**at, "layer": layer}
            left = Region(_spelled(self.rule.ours, spelled), ours)
            right = Region(_spelled(self.rule.theirs, spelled), theirs)
            yield RegionPair(left, right, axes, self.rule.added)

    def _partners(self, ours: list[str], theirs: list[str]) -> tuple[int, ...]:
        if sorted(filter(None, ours)) != sorted(filter(None, theirs)):
            raise MapError(
                f"{self.rule}: the axes {sorted(filter(None, ours))} of ours are not the axes "
                f"{sorted(filter(None, theirs))} of theirs. Each axis stands once on both sides."
            )
        return tuple(ours.index(name) if name else -1 for name in theirs)


def _box(dims: tuple[_Dim, ...], at: Mapping[str, int]) -> tuple[Box, list[str]]:
    """Return a box of the viewed array, and the name of the axis along each of its dims, or ''."""
    start, shape, names = [], [], []
    for dim in dims:
        groups = [(token,) for token in dim.tokens] if dim.is_viewed else [dim.tokens]
        for tokens in groups:
            first, extent, name = 0, 1, ""
            for token in tokens:
                first *= token.extent
                if not token.name:
                    first += token.offset
                elif token.name in at:
                    first += token.offset + at[token.name]
                else:  # the innermost one
                    first, extent, name = first + token.offset, token.size, token.name
            start.append(first)
            shape.append(extent)
            names.append(name)
    return Box(tuple(start), tuple(shape)), names


def _extents(dim: _Dim) -> list[int]:
    extents = [token.extent for token in dim.tokens]
    return extents if dim.is_viewed else [math.prod(extents)]


def _is_only(dim: _Dim, names: set[str]) -> bool:
    return len(dim.tokens) == 1 and dim.tokens[0].name in names


def _spelled(key: str, at: Mapping[str, int]) -> str:
    return _PLACEHOLDER.sub(lambda match: str(at[match[1]]), key)


def _parsed_dim(text: str, sizes: Mapping[str, int], rule: Rule) -> _Dim:
    inner = text[1:-1] if text[0] in "([" else text
    return _Dim(tuple(_parsed(word, sizes, rule) for word in inner.split()), text[0] == "[")


def _parsed(word: str, sizes: Mapping[str, int], rule: Rule) -> _Token:
    if "/" not in word:
        size = _number(word, sizes, rule)
        return _Token(word, 0, size, size)
    first, extent = word.split("/")
    whole = _number(extent, sizes, rule)
    if "@" not in first:
        return _Token("", _number(first, sizes, rule), 1, whole)
    name, offset = first.split("@")
    return _Token(name, _number(offset, sizes, rule), _number(name, sizes, rule), whole)


def _number(text: str, sizes: Mapping[str, int], rule: Rule) -> int:
    """Return the value of a sum of numbers, sizes, and sizes with a factor (`2i`)."""
    total = 0
    for term in text.split("+"):
        factor, name = re.fullmatch(r"(\d*)(\w*)", term).groups()  # type: ignore[union-attr]
        if name and name not in sizes:
            raise MapError(f"{rule}: the axis {name!r} has no size. Known are {sorted(sizes)}.")
        total += int(factor or 1) * (sizes[name] if name else 1)
    return total
