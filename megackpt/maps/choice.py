"""The map that a user chooses: by name, by the config of the checkpoint, or ready-made."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

from megackpt.errors import DeclarationError, MapError
from megackpt.maps.family import Family, family, family_of
from megackpt.maps.regions import RegionMap

MapChoice: TypeAlias = str | Family | RegionMap
"""The name of a family, `"auto"` for that of the config, a family, or a map."""


def chosen_map(
    choice: MapChoice, config: Mapping[str, Any] | None, keys: Collection[str], *, where: str
) -> RegionMap:
    """Return the map that a choice means: our arrays on the left, the other family's on the right. Pure.

    Args:
        choice: the map, or what it is made by.
        config: the parsed `config.json` of the other model; None if there is none. A map needs none.
        keys: of the checkpoint, which tell how it spells what a family spells in several ways.
        where: the checkpoint, for errors.

    Raises:
        DeclarationError: the choice or the config is of another class.
        MapError: there is no such family, no config to make its map of, or the config makes no sense; or the
            map that is given is no bijection.
    """
    if isinstance(choice, RegionMap):
        return proved(choice)
    _check_choice(choice)
    if config is None:
        raise MapError(
            f"{where} has no config.json, and the map {_name_of(choice)} depends on the sizes of the model. "
            f"Give config=, the parsed config.json.",
            path=where,
        )
    if not isinstance(config, Mapping):
        raise DeclarationError(f"config is a {type(config).__name__}. Give the parsed config.json as a dict.")
    return chosen_family(choice, config).region_map(config, keys)


def proved(made: RegionMap) -> RegionMap:
    """Return a map that a user has made, if it is a bijection. Pure.

    Raises:
        MapError: it is none, with the region that is in no pair, or in several.
    """
    made.check(name="that is given")
    return made


def chosen_family(choice: str | Family, config: Mapping[str, Any]) -> Family:
    """Return the family that a choice means for a config. Pure.

    Raises:
        DeclarationError: the choice is of another class.
        MapError: there is no such family, or none is for the config.
    """
    _check_choice(choice)
    if choice == "auto":
        return family_of(config)
    return family(choice) if isinstance(choice, str) else choice


def _check_choice(choice: str | Family) -> None:
    if not isinstance(choice, (str, Family)):
        raise DeclarationError(
            f"The map is a {type(choice).__name__}. Give the name of a family, 'auto', a Family or a "
            f"RegionMap."
        )


def _name_of(choice: str | Family) -> str:
    return repr(choice if isinstance(choice, str) else choice.name)
