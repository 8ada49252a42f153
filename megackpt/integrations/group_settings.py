"""Settings of Apex's parameter groups as plain data.

Where an optimizer is `capturable`, `lr` and `step` are tensors on the device; they are stored as numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from megackpt.errors import DeclarationError, MismatchError

_NOT_STORED = frozenset({"params", "name", "exp_avg_sq"})
"""The last is NovoGrad's norms, which are stored by parameter."""

Settings = dict[str, dict[str, Any]]  # name of a group -> option -> number, text or tuple


def settings_of(optimizer: Optimizer) -> Settings:
    """Return the settings of every group by its name, or its position; tensors become numbers. Local.

    Raises:
        DeclarationError: two groups have one name.
    """
    return plain_settings(optimizer.param_groups)


def plain_settings(groups: Sequence[Mapping[str, Any]]) -> Settings:
    """Return the settings of groups as `settings_of` does. Local.

    Raises:
        DeclarationError: two groups have one name.
    """
    return {
        name: {option: plain(value) for option, value in group.items() if option not in _NOT_STORED}
        for name, group in zip(group_names(groups), groups, strict=True)
    }


def restore_settings(optimizer: Optimizer, stored: Mapping[str, Mapping[str, Any]]) -> None:
    """Write stored settings into the groups. A tensor stays one, on its device. Local.

    Raises:
        MismatchError: the groups have other names. Nothing is changed then.
    """
    names = group_names(optimizer.param_groups)
    if set(names) != set(stored):
        raise MismatchError(
            f"'param_groups': the checkpoint has the groups {sorted(stored)} and this optimizer "
            f"{sorted(names)}. Make the same groups, in the same order or with the same 'name'.",
            path="param_groups",
        )
    for name, group in zip(names, optimizer.param_groups, strict=True):
        for option, value in stored[name].items():
            group[option] = _as_in(optimizer, group, option, value)
        if "step" not in stored[name]:  # no step was taken before the save
            group.pop("step", None)


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


def _as_in(optimizer: Optimizer, group: Mapping[str, Any], option: str, value: Any) -> Any:
    """Return a stored value in the form that the group has, or will have after its first step."""
    current = group.get(option)
    if isinstance(current, Tensor):
        # In place, for CUDA graphs that read it; but groups may share the tensor of the defaults.
        is_shared = sum(other.get(option) is current for other in optimizer.param_groups) > 1
        return torch.full_like(current, value) if is_shared else current.fill_(value)
    if option == "step" and current is None and getattr(optimizer, "capturable", False) and group["params"]:
        return torch.tensor([value], dtype=torch.int, device=group["params"][0].device)
    return value
