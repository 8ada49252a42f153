"""Which arrays of a checkpoint are those of an adapter, and which weights they change.

Layers of both may be stacked along the first axis of an array, or have keys of their own. So both are found
by the keys that layers of their own have.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from megackpt.errors import DeclarationError, MapError
from megackpt.maps.requests import MASTER, OPTIMIZER, parameter_key
from megackpt.plans.metadata import ArraySpec
from megackpt.training.parallel.adapters import CHILD
from megackpt.training.parallel.lora import LoRAConfig

_B = re.compile(
    rf"(?P<stem>(?P<layer>.+)\.{CHILD}\.(?P<adapter>[^.]+)\.[^.]+)\.linear_out\.weight(?P<component>\.\w+)?"
)
_STACKED = re.compile(r"(?P<stack>(?:.*\.)?layers)(?P<name>\.\D.*)")

Index: TypeAlias = tuple[int, ...]
"""A position along the axes over layers and experts, as many as there are."""


class Matrix(NamedTuple):
    """A matrix, or a vector, of a stored array: that of a layer and expert, where it has axes over them."""

    key: str
    at: Index


class Change(NamedTuple):
    """What an adapter does to a matrix of weights; for the fields see `LowRank`."""

    scale: float
    a: Matrix
    b: Matrix
    magnitude: Matrix | None


class LowRank(NamedTuple):
    """The arrays of one adapter for the weight of one layer.

    Attributes:
        scale: what `B A` is multiplied by.
        a: key of A.
        b: key of B.
        magnitude: key of the lengths of rows; None without DoRA.
        layer: where the layer is, in arrays with an axis over layers.
    """

    scale: float
    a: str
    b: str
    magnitude: str | None
    layer: Index

    def arrays(self) -> list[str]:
        """Return the keys of A, B and magnitudes."""
        return [self.a, self.b] + ([] if self.magnitude is None else [self.magnitude])

    def of_expert(self, expert: Index) -> Change:
        """Return the matrices of an expert, or of a layer without experts."""
        index = self.layer + expert
        magnitude = None if self.magnitude is None else Matrix(self.magnitude, index)
        return Change(self.scale, Matrix(self.a, index), Matrix(self.b, index), magnitude)


class WeightLayers(NamedTuple):
    """The layers of arrays of weights, by the key that each layer has by itself.

    Attributes:
        arrays: the array that it is in.
        shapes: its shape.
    """

    arrays: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, keys: Iterable[str], specs: Mapping[str, ArraySpec]) -> WeightLayers:
        """Return those of arrays of parameters, or of their masters."""
        arrays, shapes = {}, {}
        for key in keys:
            shape = specs[key].global_shape
            for layer, index in _layers_of(parameter_key(key), shape[0] if shape else 0):
                arrays[layer], shapes[layer] = key, shape[len(index) :]
        return cls(arrays, shapes)


def changes_of(
    adapters: Mapping[str, LoRAConfig],
    specs: Mapping[str, ArraySpec],
    weights: WeightLayers,
    *,
    where: str,
    where_weights: str,
) -> dict[str, list[LowRank]]:
    """Return the arrays of adapters by the weight of a layer that they change. Pure.

    Args:
        adapters: their choices by name; those of a weight keep this order.
        specs: the arrays of the checkpoint that has them. If the weights are masters, an adapter's are taken
            as well, where it has any.
        weights: what they may change.
        where: the checkpoint of the adapters, for errors.
        where_weights: that of the weights.

    Raises:
        MapError: an adapter has no arrays, or does not fit the weights.
    """
    has_masters = any(key.startswith(MASTER) for key in weights.arrays.values())
    counts = Counter(weights.arrays.values())
    changes: dict[str, list[LowRank]] = {}
    for name, config in adapters.items():
        own = list(_low_ranks(specs, name, config, has_masters=has_masters, where=where))
        if not own:
            raise MapError(f"{where} has no arrays of the adapter {name!r}. Name another one.", path=where)
        for weight, low_rank in own:
            _check_fits(low_rank, specs, weight, weights.shapes.get(weight), where, where_weights)
            changes.setdefault(weight, []).append(low_rank)
        _check_all_layers(Counter(weights.arrays[weight] for weight, _ in own), counts, name, where)
    return changes


def stored_config(content: Any, adapter: str, where: str) -> LoRAConfig:
    """Return the config of an adapter from the content metadata of a checkpoint. Pure.

    Raises:
        DeclarationError: there is none.
    """
    configs = content.get("adapters") if isinstance(content, Mapping) else None
    if not isinstance(configs, Mapping) or adapter not in configs:
        names = ", ".join(configs) if isinstance(configs, Mapping) else ""
        raise DeclarationError(
            f"{where}: the content metadata has no adapter {adapter!r}; it has {names or 'none'}. Save with "
            f"content_metadata=adapter_metadata(model), and name one of its adapters.",
            path=where,
        )
    return LoRAConfig.from_json(configs[adapter])


def is_of_adapter(key: str) -> bool:
    """Return whether an array is one of an adapter. Pure."""
    return f".{CHILD}." in key


def layer_of(matrix: Matrix) -> tuple[str, Index]:
    """Return the key of a layer's weight without MASTER, and which expert of it a matrix is. Pure."""
    key = parameter_key(matrix.key)
    match = _STACKED.fullmatch(key)
    if match is None:
        return key, matrix.at
    return f"{match['stack']}.{matrix.at[0]}{match['name']}", matrix.at[1:]


def _low_ranks(
    arrays: Mapping[str, ArraySpec], name: str, config: LoRAConfig, *, has_masters: bool, where: str
) -> Iterator[tuple[str, LowRank]]:
    """Yield the arrays of an adapter for each layer, with the key of the weight.

    Raises:
        MapError: some are missing.
    """
    for key in arrays:
        match = _B.fullmatch(key)
        if match is None or match["adapter"] != name or key.startswith(OPTIMIZER):
            continue
        component = match["component"] or ""
        keys = [f"{match['stem']}.linear_in.weight", key]
        keys += [f"{match['stem']}.magnitude{component}"] if config.dora else []
        _check_all_stored(arrays, keys, key, name, where)
        masters = {own: MASTER + own for own in keys if has_masters and MASTER + own in arrays}
        a, b, *magnitude = (masters.get(own, own) for own in keys)
        weight = f"{match['layer']}.weight{component}"
        for layer, index in _layers_of(weight, arrays[key].global_shape[0]):
            yield layer, LowRank(config.scale, a, b, magnitude[0] if magnitude else None, index)


def _check_all_stored(
    arrays: Mapping[str, ArraySpec], keys: Sequence[str], key: str, name: str, where: str
) -> None:
    missing = [own for own in keys if own not in arrays]
    if missing:
        raise MapError(
            f"{where}: the adapter {name!r} has {key!r} and not {missing[0]!r}. Save all of the adapter.",
            key=missing[0],
            path=where,
        )


def _check_fits(
    low_rank: LowRank,
    arrays: Mapping[str, ArraySpec],
    weight: str,
    shape: tuple[int, ...] | None,
    where: str,
    where_weights: str,
) -> None:
    """Check that A and B have the extents of a weight with this shape.

    Raises:
        MapError: they do not, or there is no such weight.
    """
    a, b = (arrays[key].global_shape[len(low_rank.layer) :] for key in (low_rank.a, low_rank.b))
    if shape is not None and (*b[:-1], a[-1]) == shape and (*a[:-2], a[-2]) == (*b[:-2], b[-1]):
        return
    raise MapError(
        f"{where}: {low_rank.b!r} {b} and {low_rank.a!r} {a} do not fit the weight {weight!r} "
        f"{shape or 'that is not there'} of {where_weights}. Give the checkpoint of their base, in our "
        f"names.",
        key=weight,
        path=where,
    )


def _check_all_layers(changed: Mapping[str, int], layers: Mapping[str, int], name: str, where: str) -> None:
    """Check that all layers of each changed array of weights have an adapter; both are counts by key.

    Raises:
        MapError: some have none.
    """
    for key, count in changed.items():
        if count < layers[key]:
            raise MapError(
                f"{where}: the adapter {name!r} changes {count} of the {layers[key]} layers of {key!r}. Give "
                f"the checkpoint of its base.",
                key=key,
                path=where,
            )


def _layers_of(key: str, count: int) -> Iterator[tuple[str, Index]]:
    """Yield the key and the position of each layer of an array, or its own key. Pure.

    Args:
        key: of the array, without MASTER.
        count: its first extent.
    """
    match = _STACKED.fullmatch(key)
    if match is None:
        yield key, ()
    else:
        yield from ((f"{match['stack']}.{n}{match['name']}", (n,)) for n in range(count))
