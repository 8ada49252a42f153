"""Families of names, known by the name of the family or by the `model_type` of a Hugging Face config.

Families of other packages are known through the entry-point group `megackpt.maps`, each of whose entry points
names a `Family`.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

from megackpt.errors import DeclarationError, MapError
from megackpt.ground.arguments import did_you_mean
from megackpt.ground.entry_points import loaded_entry_points
from megackpt.maps.regions import RegionMap
from megackpt.maps.rules import Rule, region_map

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
        rules: returns its rules for a config (a parsed `config.json`) and the keys of a folder, which tell
            how the folder spells what a family spells in several ways. For a folder to be written there are
            no keys, and the rules are those of what transformers writes.
    """

    name: str
    model_types: tuple[str, ...]
    rules: Callable[[Mapping[str, Any], Collection[str]], FamilyRules]

    def region_map(self, config: Mapping[str, Any], keys: Collection[str] = ()) -> RegionMap:
        """Return the proved map for a config: our arrays on the left, the family's on the right. Pure.

        Our arrays have keys for each layer; see `bound_to`.

        Args:
            config: the parsed `config.json`.
            keys: of the folder that is read; none for a folder to be written.

        Raises:
            MapError: the config lacks a size or contradicts itself, the weights are quantised, or the rules
                are no bijection.
        """
        family = self.rules(config, keys)
        if keys:
            check_number_of_arrays(family, len(keys), name=self.name)
        made = region_map(family.rules, family.sizes)
        made.check(name=self.name)
        return made


_SPARE_ARRAYS, _SPARE_FACTOR = 1000, 4


def check_number_of_arrays(family: FamilyRules, stored: int, *, name: str) -> None:
    """Check that rules name about as many arrays as are stored, before a map is made of them. Pure.

    A map has a pair for each array, so a few bytes of a config could cost any time and memory. Where the
    numbers differ less, the map is made, and the error lists the arrays.

    Args:
        family: the rules for a config.
        stored: how many arrays there are.
        name: of the family, for the error.

    Raises:
        MapError: they name far more.
    """
    counts: dict[str, int] = {}
    for rule in family.rules:
        counts[rule.theirs] = max(counts.get(rule.theirs, 0), rule.count_of_theirs(family.sizes))
    named = sum(counts.values())
    if named > _SPARE_FACTOR * stored + _SPARE_ARRAYS:
        most = max(counts, key=lambda key: counts[key])
        raise MapError(
            f"By config.json and the map {name}, the model has {named:,} arrays, as {counts[most]:,} "
            f"{most!r:.200}, and {stored:,} are stored. Give the config.json of the model that was saved.",
            key=most,
        )


_BUILT_IN = {
    "bert": "megackpt.maps.families.encoders:BERT",
    "deepseek_v3": "megackpt.maps.families.experts:DEEPSEEK_V3",
    "deepseek_v3_mtp": "megackpt.maps.families.experts:DEEPSEEK_V3_MTP",
    "gemma": "megackpt.maps.families.decoder:GEMMA",
    "gemma2": "megackpt.maps.families.decoder:GEMMA2",
    "gemma3": "megackpt.maps.families.decoder:GEMMA3",
    "gpt2": "megackpt.maps.families.gpt2:GPT2",
    "gpt_oss": "megackpt.maps.families.decoder:GPT_OSS",
    "llama": "megackpt.maps.families.decoder:LLAMA",
    "mamba2": "megackpt.maps.families.hybrids:MAMBA2",
    "mistral": "megackpt.maps.families.decoder:MISTRAL",
    "mixtral": "megackpt.maps.families.experts:MIXTRAL",
    "mt5": "megackpt.maps.families.encoders:MT5",
    "nemotron_h": "megackpt.maps.families.hybrids:NEMOTRON_H",
    "phi3": "megackpt.maps.families.decoder:PHI3",
    "qwen2": "megackpt.maps.families.decoder:QWEN2",
    "qwen2_moe": "megackpt.maps.families.experts:QWEN2_MOE",
    "qwen3": "megackpt.maps.families.decoder:QWEN3",
    "qwen3_moe": "megackpt.maps.families.experts:QWEN3_MOE",
    "qwen3_next": "megackpt.maps.families.hybrids:QWEN3_NEXT",
    "qwen3_next_mtp": "megackpt.maps.families.hybrids:QWEN3_NEXT_MTP",
    "t5": "megackpt.maps.families.encoders:T5",
}
"""The built-in families by name, as module and attribute."""


def family(name: str) -> Family:
    """Return the family of a name. Local.

    Raises:
        MapError: there is no such family.
    """
    known = known_families()
    if name not in known:
        meant = did_you_mean(name, known)
        raise MapError(f"No map is called {name!r}. Known are {', '.join(sorted(known))}.{meant}", key=name)
    return known[name]


def family_of(config: Mapping[str, Any]) -> Family:
    """Return the family of a Hugging Face config, by its `model_type`. Local.

    Raises:
        MapError: no family is for it.
    """
    kind, inner = config.get("model_type"), config.get("text_config")
    for candidate in known_families().values():
        if kind in candidate.model_types:
            return candidate
    if isinstance(inner, Mapping):
        raise MapError(
            f"No map is for model_type {kind!r} of config.json, but there may be one for its text model, "
            f"model_type {inner.get('model_type')!r}. Import that alone and start from it: "
            f"import_huggingface(..., text_only=True), or megackpt convert --from huggingface --text-only.",
            key="model_type",
        )
    raise MapError(
        f"No map is for model_type {kind!r} of config.json. Known are {', '.join(sorted(known_families()))}: "
        f"name one of them, or register a family (docs/huggingface.md).",
        key="model_type",
    )


@cache
def known_families() -> dict[str, Family]:
    """Return all families by name. One of another package that cannot be used is left out, with a warning."""
    known = {}
    for name, path in _BUILT_IN.items():
        module, attribute = path.split(":")
        known[name] = getattr(importlib.import_module(module), attribute)
    for added in loaded_entry_points(ENTRY_POINTS, Family, what="Map", log=log):
        known.setdefault(added.name, added)
    return known


# The map that a user chooses: by name, by the config of the checkpoint, or ready-made.

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
    return map_of_family(chosen_family(choice, config), config, keys)


def map_of_family(family: Family, config: Mapping[str, Any], keys: Collection[str] = ()) -> RegionMap:
    """Return the proved map of a family for a config. Pure.

    Raises:
        MapError: as `Family.region_map`, also where a subclass of a user makes the map in another way.
    """
    made = family.region_map(config, keys)
    return made if type(family) is Family else proved(made)


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


# The text model inside of a multimodal one: its config, and the arrays of a folder that are its own.
#
# Source: transformers 4.57 and 5.23, `conversion_mapping` and `models/*/configuration_*.py` of Gemma 3,
# Mistral 3 and Qwen2.5-VL: `text_config`, and names that begin with `language_model.`,
# `model.language_model.` or `model.`.

OUTPUT = "lm_head.weight"
"""Key of the weight of the output layer in a folder of a model of text."""

_SPELLINGS = (
    {"language_model.model.": "model.", "language_model.lm_head.": "lm_head."},
    {"model.language_model.": "model.", "lm_head.": "lm_head."},
    {name: name for name in ("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head.")},
)
"""Spellings: what keys of the text model begin with in a folder, and in one of the text model alone.

A folder has the first spelling whose first entry one of its keys begins with.
"""


@dataclass(frozen=True, slots=True)
class TextPart:
    """The text model inside of a multimodal one.

    Attributes:
        config: its `config.json`, as if it stood alone.
        stored: the key of each of its arrays in the folder, by its key in a folder of the text model alone.
        tied: key in the folder of an output layer that the config ties to the embedding; "" if there is none.
    """

    config: Mapping[str, Any]
    stored: Mapping[str, str]
    tied: str = ""

    @classmethod
    def of(cls, config: Mapping[str, Any], keys: Collection[str]) -> TextPart:
        """Return the text model of a folder. Pure.

        Args:
            config: the parsed `config.json` of the whole model.
            keys: of the folder.

        Raises:
            MapError: the config has no `text_config`.
        """
        inner = config.get("text_config")
        if not isinstance(inner, Mapping):
            raise MapError(
                "config.json has no text_config, so the folder has no text model inside of another one. "
                "Import all of it: leave text_only out.",
                key="text_config",
            )
        stored = _own_keys(keys)
        # transformers looks at these fields of the whole model, and ignores those of the text model.
        outer = {
            name: config[name] for name in ("tie_word_embeddings", "quantization_config") if name in config
        }
        text = {"tie_word_embeddings": OUTPUT not in stored, **inner, **outer}
        # Whoever leaves it out compares it with the embedding.
        tied = stored.pop(OUTPUT, "") if text["tie_word_embeddings"] else ""
        return cls(text, stored, tied)


def _own_keys(keys: Collection[str]) -> dict[str, str]:
    """Return the keys of the text model, by those in a folder of the text model alone."""
    fitting = (s for s in _SPELLINGS if any(key.startswith(next(iter(s))) for key in keys))
    spelling = next(fitting, _SPELLINGS[0])
    return {
        own + key.removeprefix(begin): key
        for begin, own in spelling.items()
        for key in keys
        if key.startswith(begin)
    }
