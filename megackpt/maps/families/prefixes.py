"""Folders of a model without its output layer: their keys lack what those of the whole model begin with."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import wraps
from typing import TypeAlias

from megackpt.maps.families.sizes import Config
from megackpt.maps.family import FamilyRules

RulesFunction: TypeAlias = Callable[[Config, Collection[str]], FamilyRules]


def prefix_is_optional(prefix: str) -> Callable[[RulesFunction], RulesFunction]:
    """Return a decorator for rules of keys with a prefix: a folder may have none of them.

    Such a folder is that of `GPT2Model` instead of `GPT2LMHeadModel`, whose keys begin with `transformer.`.
    """

    def decorator(rules: RulesFunction) -> RulesFunction:
        @wraps(rules)
        def rules_of_folder(config: Config, keys: Collection[str]) -> FamilyRules:
            made = rules(config, keys)
            if not keys or any(key.startswith(prefix) for key in keys):
                return made
            shorter = tuple(replace(rule, theirs=rule.theirs.removeprefix(prefix)) for rule in made.rules)
            return replace(made, rules=shorter)

        return rules_of_folder

    return decorator
