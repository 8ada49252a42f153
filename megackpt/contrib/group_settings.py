"""Settings of the parameter groups of other libraries' optimizers as plain data.

Where an optimizer is `capturable`, `lr` and `step` are tensors on the device; they are stored as numbers.
Groups without a name are matched with those of the checkpoint by their parameters, as in
`megackpt.training.optim`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from megackpt.entities import ShardedStateDict, StateDict
from megackpt.errors import DeclarationError, MismatchError
from megackpt.training.optim.param_groups import (
    ParamGroup,
    WhenDifferent,
    chosen_options,
    declare_group_numbers,
    match_unnamed_groups,
    need_numbers,
)

_NOT_STORED = frozenset({"params", "name", "exp_avg_sq"})
"""The last is NovoGrad's norms, which are stored by parameter."""

Settings = dict[str, dict[str, Any]]  # name of a group -> option -> number, text or tuple


def declare_settings(
    groups: Sequence[Mapping[str, Any]],
    params: Sequence[Parameter],
    model_sharded_state_dict: ShardedStateDict,
) -> ShardedStateDict:
    """Declare the settings of every group, and which group each parameter is in. Local.

    Args:
        groups: of an optimizer, or of its state dict.
        params: the parameters of all groups, in order.
        model_sharded_state_dict: of the model; its entities wrap the parameters.

    Returns:
        `param_groups` by name of the group, or its position. If one of several groups has no name, also
        `param_group_of`: the number of each parameter's group.

    Raises:
        DeclarationError: two groups have one name, or a parameter is not declared.
    """
    declared: ShardedStateDict = {"param_groups": plain_settings(groups)}
    parsed = _parsed(groups, params)
    if need_numbers(parsed):
        declared["param_group_of"] = declare_group_numbers(parsed, model_sharded_state_dict)
    return declared


def plain_settings(groups: Sequence[Mapping[str, Any]]) -> Settings:
    """Return the settings of every group by its name, or its position; tensors become numbers. Local.

    Raises:
        DeclarationError: two groups have one name.
    """
    return {
        name: {option: plain(value) for option, value in group.items() if option not in _NOT_STORED}
        for name, group in zip(group_names(groups), groups, strict=True)
    }


def restore_settings(
    groups: Sequence[dict[str, Any]],
    loaded: StateDict,
    *,
    is_capturable: bool = False,
    when_different: WhenDifferent = "checkpoint",
) -> None:
    """Write loaded settings into the groups. A tensor stays one, on its device. Local.

    Args:
        groups: of an optimizer.
        loaded: what was loaded for `declare_settings`.
        is_capturable: whether the optimizer will make a tensor of a `step` that a group does not have yet.
        when_different: whose configuration is taken where it differs; see `chosen_options`.

    Raises:
        MismatchError: the groups have other names, groups without a name were made of other parameters, or
            the configuration differs, with "error". Nothing is changed then.
    """
    stored: Settings = loaded["param_groups"]
    names = group_names(groups)
    stored_names = _stored_names(groups, loaded.get("param_group_of", {}))
    names_there = [stored_names.get(name, name) for name in names]
    if set(names_there) != set(stored):
        raise _other_groups(stored, names)
    there = dict(zip(names_there, groups, strict=True))
    chosen = chosen_options(stored, there, when_different)
    for name, group in there.items():
        for option, value in chosen[name].items():
            group[option] = _as_in(groups, group, option, value, is_capturable=is_capturable)
        if "step" not in stored[name]:  # no step was taken before the save
            group.pop("step", None)


def _other_groups(stored: Iterable[str], names: Iterable[str]) -> MismatchError:
    return MismatchError(
        f"'param_groups': the checkpoint has the groups {sorted(stored)} and this optimizer {sorted(names)}. "
        f"Make the same groups, in the same order or with the same 'name'.",
        path="param_groups",
    )


def _stored_names(all_groups: Sequence[Mapping[str, Any]], numbers: Mapping[int, Tensor]) -> dict[str, str]:
    """Return the stored name of each group without a name, by the loaded numbers of its parameters."""
    if not numbers:
        return {}
    params = [param for group in all_groups for param in group["params"]]
    groups = _parsed(all_groups, params)
    saved_in: list[set[int]] = []
    first = 0
    for group in groups:
        saved_in.append({int(numbers[first + n]) for n in range(len(group.params)) if first + n in numbers})
        first += len(group.params)
    return match_unnamed_groups(groups, saved_in)


def _parsed(groups: Sequence[Mapping[str, Any]], params: Sequence[Parameter]) -> list[ParamGroup]:
    parsed, first = [], 0
    for name, group in zip(group_names(groups), groups, strict=True):
        members = tuple(params[first : first + len(group["params"])])
        parsed.append(ParamGroup(name=name, is_named="name" in group, params=members, options={}))
        first += len(members)
    return parsed


def group_names(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the name of each group; its position where it has none. Local."""
    names = [str(group.get("name", index)) for index, group in enumerate(groups)]
    if len(set(names)) < len(names):
        raise DeclarationError(
            f"Parameter groups have the names {names}. Some are equal, so one would overwrite the "
            f"settings of another. Give each group a 'name' of its own."
        )
    return names


def plain(value: Any) -> Any:
    """Return a tensor of one element as a number, and anything else as it is."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _as_in(
    groups: Sequence[Mapping[str, Any]],
    group: Mapping[str, Any],
    option: str,
    value: Any,
    *,
    is_capturable: bool,
) -> Any:
    """Return a stored value in the form that the group has, or will have after its first step."""
    current = group.get(option)
    if isinstance(current, Tensor):
        # In place, for CUDA graphs that read it; but groups may share the tensor of the defaults.
        is_shared = sum(other.get(option) is current for other in groups) > 1
        return torch.full_like(current, value) if is_shared else current.fill_(value)
    if option == "step" and current is None and is_capturable and group["params"]:
        return torch.tensor([value], dtype=torch.int, device=group["params"][0].device)
    return value
