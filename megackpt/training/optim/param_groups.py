"""Parameter groups, and their hyperparameters as plain data.

A group with a name is matched with the stored group of that name; `group_numbers` matches the others.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.nn import Parameter

from megackpt.errors import DeclarationError, MismatchError

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
