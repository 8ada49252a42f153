"""Parameter groups without a name, matched with those of a checkpoint by their parameters.

The number of each parameter's group is stored like its number of steps, so that declaring it needs no
communication. A position alone would say nothing: it changes when a group is added or the list is sorted
differently, and the groups would silently swap their learning rates.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from megackpt.entities import ShardedStateDict, ShardedTensor
from megackpt.errors import MismatchError
from megackpt.training.optim.param_groups import Hyperparameters, ParamGroup
from megackpt.training.optim.sharded_state import find_param_entities, make_sharded_scalar, replica_of
from megackpt.training.parallel.collectives import all_reduce
from megackpt.training.parallel.groups import Axis

PREFIX = "optimizer.param_group"
_NAMED = -1  # the number of every group with a name


def need_numbers(groups: Sequence[ParamGroup]) -> bool:
    """Return whether groups can be mistaken for each other: several, and some have no name. Pure."""
    return len(groups) > 1 and not all(group.is_named for group in groups)


def declare_group_numbers(
    groups: Sequence[ParamGroup], model_sharded_state_dict: ShardedStateDict
) -> dict[int, ShardedTensor]:
    """Declare the number of each parameter's group, 0-dim int64, by position of the parameter. Local.

    The keys are `optimizer.param_group.<model key>`. A load keeps the numbers of this optimizer if the
    checkpoint has none, as those of older versions.
    """
    params = [param for group in groups for param in group.params]
    entities = find_param_entities(model_sharded_state_dict, params)
    numbers = [_NAMED if group.is_named else n for n, group in enumerate(groups) for _ in group.params]
    declared = {}
    for position, (entity, number) in enumerate(zip(entities, numbers, strict=True)):
        scalar = make_sharded_scalar(entity, torch.tensor(number), prefix=PREFIX, replica=replica_of(entity))
        declared[position] = replace(scalar, if_missing="keep")
    return declared


def stored_group_names(
    groups: Sequence[ParamGroup],
    numbers: Mapping[int, Tensor],
    stored: Hyperparameters,
    *,
    pp: Axis,
    device: torch.device,
) -> dict[str, str]:
    """Return the stored name of each group without a name, by its own name. Collective over pp.

    Args:
        groups: the groups of this optimizer, in order.
        numbers: what was loaded for the declared numbers.
        stored: the stored hyperparameters.
        pp: the stages, each of which has some of the parameters; without a process group, those of this rank
            are taken for all.
        device: where the numbers are exchanged.

    Raises:
        MismatchError: see `match_unnamed_groups`.
    """
    group_of = [index for index, group in enumerate(groups) for _ in group.params]
    # Which groups (rows) have parameters that were saved in which (columns); the last stands for _NAMED.
    columns = max(len(groups), len(stored)) + 1
    was_in = torch.zeros(len(groups), columns, dtype=torch.int32)
    for position, number in numbers.items():
        was_in[group_of[position], int(number)] = 1
    if pp.group is not None:
        was_in = all_reduce(was_in.to(device), pp, dist.ReduceOp.MAX).cpu()
    saved_in = [{_NAMED if n == columns - 1 else n for n in row.nonzero().ravel().tolist()} for row in was_in]
    return match_unnamed_groups(groups, saved_in)


def match_unnamed_groups(groups: Sequence[ParamGroup], saved_in: Sequence[Collection[int]]) -> dict[str, str]:
    """Return the stored name of each group without a name, by its own name. Pure.

    A group without parameters, on any rank, takes the stored group of its own number, if that is left.

    Args:
        groups: the groups of this optimizer, in order.
        saved_in: for each of them, the numbers of the stored groups without a name that its parameters were
            saved in; -1 stands for all stored groups with a name.

    Raises:
        MismatchError: the parameters of a group were saved in several groups or in one with a name, or those
            of several groups were saved in one.
    """
    unnamed = [(g, numbers) for g, numbers in zip(groups, saved_in, strict=True) if not g.is_named]
    matched = _matched_by_params(unnamed)
    for group, numbers in unnamed:
        if not numbers and int(group.name) not in matched:
            matched[int(group.name)] = group.name
    return {name: str(number) for number, name in matched.items()}


def _matched_by_params(unnamed: Sequence[tuple[ParamGroup, Collection[int]]]) -> dict[int, str]:
    """Return the name of the group that has the parameters of a stored group, by the number of that one."""
    matched: dict[int, str] = {}
    for group, numbers in unnamed:
        if len(numbers) > 1 or -1 in numbers:
            saved = ["a named group" if n == -1 else f"group {n}" for n in sorted(numbers)]
            raise _ambiguous(f"the parameters of group {group.name} were saved in {' and '.join(saved)}")
        for number in numbers:
            if number in matched:
                raise _ambiguous(
                    f"the parameters of groups {matched[number]} and {group.name} were saved in one group, "
                    f"{number}"
                )
            matched[number] = group.name
    return matched


def _ambiguous(what: str) -> MismatchError:
    return MismatchError(
        f"'param_groups': {what}, and the groups have no names, so it is not known whose learning rate and "
        f"other hyperparameters they continue with. Make the groups of the same parameters as when saving, "
        f"give every group a 'name' when saving and loading, or load without 'param_groups' and set the "
        f"hyperparameters yourself.",
        path="param_groups",
    )
