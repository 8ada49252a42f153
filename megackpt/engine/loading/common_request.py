"""The part of a load request for common state: plain tensors, and arrays that common state refers to.

Common state has an `ArrayReference` in the place of each tensor, be it stored as an array or inline. A leaf
of common state answers a plain tensor of the request if it has the same steps, or the same dotted name.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch

from megackpt.codec import ArrayReference
from megackpt.codec.arrays import has_memory
from megackpt.engine.checkpoint.common_arrays import array_references, map_common
from megackpt.entities import ShardedStateDict, ShardedTensor
from megackpt.entities.describe import torch_dtype
from megackpt.entities.plain_tensors import (
    can_be_filled,
    match_common_leaves,
    plain_tensors,
)
from megackpt.entities.tree import ABSENT, Steps, add_step, dotted, iter_leaves, same_name_error
from megackpt.formats.contents import Contents
from megackpt.options import LoadOptions
from megackpt.plans.metadata import OBJECT, ArraySpec


@dataclass(frozen=True, slots=True)
class CommonRequest:
    """Stored common state, and the plain tensors of a request that it answers.

    Attributes:
        stored: common state, with an `ArrayReference` for each tensor.
        references: keys of these arrays, by steps.
        plain: plain tensors of the request, by their steps.
        answers: steps of the leaf of common state that answers a plain tensor, by the steps of that tensor.
        steps: steps of the request that are common state: those in `answers`, and those to leaves, dicts and
            lists of stored common state; empty if the request has no plain tensors.
    """

    stored: Any
    references: Mapping[Steps, str]
    plain: Mapping[Steps, torch.Tensor]
    answers: Mapping[Steps, Steps]
    steps: Set[Steps]

    @property
    def unanswered(self) -> set[str]:
        """Dotted names of the plain tensors that common state does not answer."""
        return {dotted(steps) for steps in self.plain.keys() - self.steps}

    @property
    def stored_as_other_values(self) -> dict[str, str]:
        """Dotted names of plain tensors that no stored tensor answers, with the class of the stored value."""
        answering = {steps: self.answers.get(steps, steps) for steps in self.plain.keys() & self.steps}
        return {
            dotted(steps): type(_value_at(self.stored, leaf)).__name__
            for steps, leaf in answering.items()
            if leaf not in self.references
        }

    @property
    def targets(self) -> dict[Steps, torch.Tensor]:
        """The plain tensors that are answered, by the steps of the leaf that answers them."""
        return {leaf: self.plain[steps] for steps, leaf in self.answers.items()}

    def arrays(
        self, requested: Container[str], contents: Contents, options: LoadOptions
    ) -> dict[Steps, ShardedTensor]:
        """Declare the arrays that common state refers to, by the steps of the reference.

        An array that answers a plain tensor is declared with the dtype and shape of that tensor, so that a
        difference is one as for any other entity. Another array is declared without data. It is left out if
        its key is in `requested`, and if it is inline: then its value is known already.
        """
        targets = self.targets
        return {
            steps: _whole_array(contents.arrays[key], targets.get(steps), options)
            for steps, key in self.references.items()
            if steps in targets or not (key in requested or key in contents.inline)
        }

    def inline_values(
        self, requested: Container[str], inline: Mapping[str, torch.Tensor]
    ) -> dict[Steps, torch.Tensor]:
        """Return the tensors of inline arrays that nothing asks for, by the steps of the reference."""
        targets = self.targets
        return {
            steps: inline[key]
            for steps, key in self.references.items()
            if key in inline and steps not in targets and key not in requested
        }


def match_common_state(
    state: ShardedStateDict,
    common: Any,
    stored: Mapping[str, ArraySpec],
    referable: Container[str],
) -> CommonRequest:
    """Match the plain tensors of a request with stored common state. Pure.

    Args:
        state: the request.
        common: stored common state, with references to arrays.
        stored: the stored arrays, by key.
        referable: keys to which references are valid: of arrays that were neither removed nor renamed.

    Raises:
        DeclarationError: two tensors of the request, or two leaves, have the same dotted name.
    """
    references = {
        steps: key
        for steps, key in array_references(common).items()
        if key in referable and stored[key].dtype != OBJECT
    }

    def without_lost_reference(steps: Steps, leaf: Any) -> Any:
        # The array of such a reference was removed or renamed, so nothing is loaded for it.
        return leaf if steps in references or not isinstance(leaf, ArrayReference) else ABSENT

    remaining = map_common(without_lost_reference, common)
    remaining = {} if remaining is ABSENT else remaining
    plain = plain_tensors(state)
    answers: dict[Steps, Steps] = {}
    if plain and isinstance(remaining, (dict, list)):
        leaves = (steps for steps, _ in iter_leaves(remaining, (), step=add_step))
        arrays = {key for key, spec in stored.items() if spec.dtype != OBJECT}
        answers = match_common_leaves(plain, leaves, arrays)
    _check_asked_once(plain, answers, references)
    steps = _steps_of(remaining) | answers.keys() if plain else frozenset()
    return CommonRequest(remaining, references, plain, answers, steps)


def _check_asked_once(
    plain: Iterable[Steps], answers: Mapping[Steps, Steps], references: Mapping[Steps, str]
) -> None:
    """Check that no second plain tensor has the name of an array that answers a plain tensor elsewhere.

    Raises:
        DeclarationError: one has.
    """
    asked = {references[leaf]: steps for steps, leaf in answers.items() if leaf in references}
    for steps in plain if asked else ():
        if steps not in answers and (name := dotted(steps)) in asked:
            raise same_name_error(name, [steps, asked[name]])


def _value_at(common: Any, steps: Steps) -> Any:
    for step in steps:
        common = common[step]
    return common


def _steps_of(common: Any) -> frozenset[Steps]:
    """Return the steps to the leaves of common state, and to the dicts and lists on the way."""
    every: set[Steps] = set()
    if isinstance(common, (dict, list)):
        for steps, _ in iter_leaves(common, (), step=add_step):
            # Where some steps are known, those to the containers around them are, too.
            while steps and steps not in every:
                every.add(steps)
                steps = steps[:-1]
    return frozenset(every)


def _whole_array(spec: ArraySpec, target: torch.Tensor | None, options: LoadOptions) -> ShardedTensor:
    """Declare all of an array: in the target where it can be filled in place, otherwise without data."""
    dtype = torch_dtype(spec.dtype) if target is None else target.dtype
    shape = spec.global_shape if target is None else tuple(target.shape)
    is_filled = (
        target is not None
        and can_be_filled(target, load_on_device=options.load_on_device)
        and has_memory(target)
    )
    return ShardedTensor(spec.key, target if is_filled else None, dtype, shape, shape, (0,) * len(shape))
