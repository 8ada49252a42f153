"""Maps between families of names: ours, those of Hugging Face, and those of Megatron-Core.

A map says which box of an array of one family has the same elements as which box of another. It is made of
rules for a model's config, proved a bijection, and used on the index of a checkpoint: no model is built.
"""

from megackpt.maps.family import Family, FamilyRules, MapChoice, chosen_map, family, family_of, known_families
from megackpt.maps.megatron import checkpoint_map, has_megatron_keys, megatron_map
from megackpt.maps.regions import MappedArray, Region, RegionMap, RegionPair, bound_to
from megackpt.maps.requests import weights_of
from megackpt.maps.rules import Rule, region_map

__all__ = [
    "Family",
    "FamilyRules",
    "MapChoice",
    "MappedArray",
    "Region",
    "RegionMap",
    "RegionPair",
    "Rule",
    "bound_to",
    "checkpoint_map",
    "chosen_map",
    "family",
    "family_of",
    "has_megatron_keys",
    "known_families",
    "megatron_map",
    "region_map",
    "weights_of",
]
