"""Parameter groups, and their hyperparameters as plain data.

A group with a name is matched with the stored group of that name; `match_unnamed_groups` matches the others.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from megackpt.entities import ShardedStateDict, ShardedTensor
from megackpt.errors import DeclarationError, MismatchError
from megackpt.training.optim.sharded_state import find_param_entities, make_sharded_scalar, replica_of
from megackpt.training.parallel.collectives import all_reduce
from megackpt.training.parallel.groups import Axis

ParamsOrGroups: TypeAlias = Iterable[Parameter] | Iterable[dict[str, Any]]  # as torch.optim takes them
Hyperparameters: TypeAlias = dict[
    str, dict[str, Any]
]  # group name -> option -> value, whatever the optimizer has

IMPLEMENTATION_OPTIONS = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Options that choose an implementation for this machine and do not change results; they are not stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamGroup:
    """Parameters that share hyperparameters.

    Attributes:
        name: unique among the groups; the group's position as text where the user gave none.
        is_named: whether the user gave the name.
        params: the parameters that train; frozen ones (`requires_grad=False`) and empty ones are left out.
        options: the group's own hyperparameters, as the user gave them.
    """

    name: str
    is_named: bool
    params: tuple[Parameter, ...]
    options: Mapping[str, Any]


def parse_param_groups(params_or_groups: ParamsOrGroups) -> tuple[ParamGroup, ...]:
    """Read parameters or groups of them as torch.optim does. Local, pure.

    Raises:
        DeclarationError: there are no parameters, one is not a parameter, or a parameter or a name occurs
            twice.
    """
    items = list(params_or_groups)
    if not items:
        raise DeclarationError(
            "The optimizer got no parameters. Pass model.parameters() or a list of groups."
        )
    dicts = [item for item in items if isinstance(item, dict)]
    if dicts and len(dicts) != len(items):
        raise DeclarationError("The optimizer got parameters and groups in one list. Give either, not both.")
    groups = [_parse(group, index) for index, group in enumerate(dicts or [{"params": items}])]
    _check_unique([g.name for g in groups], "Parameter group name", "Give each group its own name.")
    param_ids = [id(p) for g in groups for p in g.params]
    descriptions = {id(p): f"of shape {tuple(p.shape)} in group {g.name!r}" for g in groups for p in g.params}
    _check_unique(param_ids, "The parameter", "List each parameter once.", descriptions)
    return tuple(groups)


def hyperparameters(inner_groups: Sequence[Mapping[str, Any]]) -> Hyperparameters:
    """Return a copy of every group's options, by name, without implementation choices. Local."""
    return {
        group["name"]: {option: _copy(value) for option, value in group.items() if _is_hyperparameter(option)}
        for group in inner_groups
    }


def restore_hyperparameters(
    inner_groups: Sequence[dict[str, Any]],
    loaded: Hyperparameters,
    stored_names: Mapping[str, str] | None = None,
) -> None:
    """Overwrite the options of every group with those loaded for it. Local.

    Args:
        inner_groups: the groups of the torch optimizer.
        loaded: what `hyperparameters` returned.
        stored_names: the name in loaded of each group that has another name there.

    Raises:
        MismatchError: the names differ. Nothing is changed in that case.
    """
    renamed = {} if stored_names is None else stored_names
    _check_names({renamed.get(group["name"], group["name"]) for group in inner_groups}, set(loaded))
    for group in inner_groups:
        options = loaded[renamed.get(group["name"], group["name"])]
        group.update({option: _copy(value) for option, value in options.items()})


def _check_names(ours: set[str], theirs: set[str]) -> None:
    if ours != theirs:
        raise MismatchError(
            f"'param_groups': the checkpoint has the groups {sorted(theirs)} and this optimizer "
            f"{sorted(ours)}; only in the checkpoint: {sorted(theirs - ours)}, only here: "
            f"{sorted(ours - theirs)}. Give the groups the same 'name' as when saving, or load without "
            f"'param_groups' and set the hyperparameters yourself.",
            path="param_groups",
        )


def _parse(group: dict[str, Any], index: int) -> ParamGroup:
    if "params" not in group:
        raise DeclarationError(f"Parameter group {index} has no 'params'. Put its parameters there.")
    params = group["params"]
    members = [params] if isinstance(params, torch.Tensor) else list(params)
    for param in members:
        if not isinstance(param, Parameter):
            raise DeclarationError(
                f"Parameter group {index} has a {type(param).__name__}, which is not a torch.nn.Parameter. "
                f"Pass model.parameters(), not named_parameters() or plain tensors."
            )
    name = group.get("name", str(index))
    if not isinstance(name, str) or not name:
        raise DeclarationError(f"Parameter group {index} has the name {name!r}. Give a non-empty string.")
    trained = tuple(p for p in members if isinstance(p, Parameter) and p.requires_grad and p.numel())
    options = {option: value for option, value in group.items() if option not in ("params", "name")}
    return ParamGroup(name=name, is_named="name" in group, params=trained, options=options)


def _check_unique(
    values: Sequence[object], what: str, advice: str, descriptions: Mapping[int, str] | None = None
) -> None:
    seen: set[object] = set()
    for value in values:
        if value in seen:
            shown = descriptions[value] if descriptions and isinstance(value, int) else repr(value)
            raise DeclarationError(f"{what} {shown} occurs twice. {advice}")
        seen.add(value)


def _is_hyperparameter(option: str) -> bool:
    return option not in ("params", "name") and option not in IMPLEMENTATION_OPTIONS


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


# Parameter groups without a name, matched with those of a checkpoint by their parameters.
#
# The number of each parameter's group is stored like its number of steps, so that declaring it needs no
# communication. A position alone would say nothing: it changes when a group is added or the list is sorted
# differently, and the groups would silently swap their learning rates.

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
