"""A family of names of a third party: what a package brings to be found by `megackpt maps`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from megackpt.maps import Family, FamilyRules, Rule


def nano_rules(config: Mapping[str, Any], keys: Collection[str]) -> FamilyRules:
    """Return the rules of a model of an embedding and one matrix, stored transposed."""
    rules = (
        Rule(ours="embedding.word_embeddings.weight", theirs="embed", axes="v h", is_padded=True),
        Rule(ours="output_layer.weight", theirs="head", axes="v h", their_axes="h v"),
    )
    return FamilyRules(rules, {"v": config["vocab"], "h": config["width"]})


NANO = Family("nano", ("nano",), nano_rules)
LLAMA = Family("llama", ("llama", "llama-of-nano"), nano_rules)
NO_FAMILY = "nano"
