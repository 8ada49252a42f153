"""The map of an export or import: which array of a checkpoint is which tensor of a folder."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from megackpt.maps import MapChoice, RegionMap, bound_to, checkpoint_map, has_megatron_keys
from megackpt.maps.family import check_number_of_arrays, chosen_family, map_of_family, proved
from megackpt.plans.metadata import ArraySpec

# Layers of a map as stacks. Pure.

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


@dataclass(frozen=True, slots=True)
class ChosenMap:
    """The map that a user has chosen.

    Attributes:
        map: the name of a family, `"auto"` for that of a config, a family, or a map.
        prefix: what the keys of the model begin with in the checkpoint.
        norm_added: of a checkpoint of Megatron-Core, what to add to the weights of norms to get ours.
    """

    map: MapChoice
    prefix: str
    norm_added: int = 0

    def name(self, config: Mapping[str, Any]) -> str:
        """Return the name of the map, for reports."""
        return "given" if isinstance(self.map, RegionMap) else chosen_family(self.map, config).name

    def of_checkpoint(self, config: Mapping[str, Any], stored: Mapping[str, ArraySpec]) -> RegionMap:
        """Return the map from a checkpoint with these arrays, ours or Megatron-Core's, to a folder. Pure.

        Raises:
            MapError: there is no such map, or the config contradicts itself.
            DeclarationError: the choice is of another class.
        """
        keys = list(stored)
        if not isinstance(self.map, RegionMap):
            family = chosen_family(self.map, config)
            # An array may have axes over layers and experts: each position is an array of the folder.
            most = sum(math.prod(spec.global_shape[:2]) for spec in stored.values())
            check_number_of_arrays(family.rules(config, ()), most, name=family.name)
        if not isinstance(self.map, RegionMap) and has_megatron_keys(keys):
            return checkpoint_map(
                chosen_family(self.map, config), config, keys, prefix=self.prefix, norm_added=self.norm_added
            )
        ours = [key.removeprefix(self.prefix) for key in keys]
        if isinstance(self.map, RegionMap):
            made = bound_to(proved(self.map), ours)
        else:
            made = checkpoint_map(chosen_family(self.map, config), config, ours)
        return made.with_left_keys({key: self.prefix + key for key in made.left})

    def of_folder(self, config: Mapping[str, Any], keys: Collection[str]) -> RegionMap:
        """Return the map from our arrays, with keys for each layer, to a folder with these keys. Pure.

        Raises:
            MapError, DeclarationError: as `of_checkpoint`.
        """
        if isinstance(self.map, RegionMap):
            return proved(self.map)
        return map_of_family(chosen_family(self.map, config), config, keys)
