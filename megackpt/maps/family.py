"""Families of names, known by the name of the family or by the `model_type` of a Hugging Face config.

Families of other packages are known through the entry-point group `megackpt.maps`, each of whose entry points
names a `Family`.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from megackpt.errors import MapError
from megackpt.maps.regions import RegionMap
from megackpt.maps.rules import Rule, region_map
from megackpt.notices import notice

log = logging.getLogger(__name__)

ENTRY_POINTS = "megackpt.maps"


@dataclass(frozen=True, slots=True)
class FamilyRules:
    """The rules of a family for one config.

    Attributes:
        rules: one for each array of ours.
        sizes: extents of the axes in the rules, by name. Of a decoder with attention, `heads`, `groups` and
            `d` are its query heads, its key heads and the extent of one head.
    """

    rules: tuple[Rule, ...]
    sizes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Family:
    """A family of names.

    Attributes:
        name: its name, as in `--map llama`.
        model_types: the `model_type`s of Hugging Face configs that it is for.
        rules: returns its rules for a config (a parsed `config.json`).
    """

    name: str
    model_types: tuple[str, ...]
    rules: Callable[[Mapping[str, Any]], FamilyRules]

    def region_map(self, config: Mapping[str, Any]) -> RegionMap:
        """Return the proved map for a config: our arrays on the left, the family's on the right. Pure.

        Our arrays have keys for each layer; see `bound_to`.

        Raises:
            MapError: the config lacks a size or contradicts itself, or the rules are no bijection.
        """
        family = self.rules(config)
        made = region_map(family.rules, family.sizes)
        made.check(name=self.name)
        return made


_BUILT_IN = {
    "llama": "megackpt.maps.families.llama:LLAMA",
}
"""The built-in families by name, as module and attribute."""


def family(name: str) -> Family:
    """Return the family of a name.

    Raises:
        MapError: there is no such family.
    """
    known = families()
    if name not in known:
        raise MapError(f"No map is called {name!r}. Known are {', '.join(sorted(known))}.", key=name)
    return known[name]


def family_of(config: Mapping[str, Any]) -> Family:
    """Return the family of a Hugging Face config, by its `model_type`.

    Raises:
        MapError: no family is for it.
    """
    kind = config.get("model_type")
    for candidate in families().values():
        if kind in candidate.model_types:
            return candidate
    raise MapError(
        f"No map is for model_type {kind!r} of config.json. Known are {', '.join(sorted(families()))}: name "
        f"one of them, or register a family (docs/huggingface.md).",
        key="model_type",
    )


@cache
def families() -> dict[str, Family]:
    """Return all families by name. One of another package that cannot be used is left out, with a warning."""
    known = {}
    for name, path in _BUILT_IN.items():
        module, attribute = path.split(":")
        known[name] = getattr(importlib.import_module(module), attribute)
    for point in entry_points(group=ENTRY_POINTS):
        try:
            added = point.load()
        except Exception as error:  # noqa: BLE001 - another package's fault must not stop our own families
            notice(log, f"Map {point.name} ({point.value}) cannot be used: {error}")
            continue
        if not isinstance(added, Family):
            notice(log, f"Map {point.name} ({point.value}) cannot be used: it is not a megackpt.maps.Family.")
            continue
        known.setdefault(added.name, added)
    return known
