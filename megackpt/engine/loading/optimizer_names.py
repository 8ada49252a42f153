"""State dicts of torch optimizers whose parameters have names, loaded by these names.

`optimizer.state_dict()` numbers parameters by their position. Where the optimizer was made of
`named_parameters()`, its groups also have `param_names`. If a model now registers its parameters in another
order, positions would give a parameter the moments of another one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from megackpt.entities.plain_tensors import is_plain_tensor
from megackpt.entities.tree import Steps, add_step, iter_leaves, path_of
from megackpt.errors import MismatchError, truncated_list
from megackpt.ground.notices import notice

log = logging.getLogger(__name__)


def ordered_as_requested(stored: Any, state: Mapping[Any, Any], *, where: str) -> tuple[Any, set[Steps]]:
    """Return stored common state with the state of optimizers in the order of the request. Local.

    Args:
        stored: common state of the checkpoint, which is not changed.
        state: the request.
        where: location of the checkpoint, for errors.

    Returns:
        Common state, and the steps to leaves of the request that it has nothing for: the state of parameters
        that the stored optimizer did not have.

    Raises:
        MismatchError: the order differs, and the state of the optimizer is not plain tensors.
    """
    absent: set[Steps] = set()
    for steps, optimizer in _named_optimizers(state):
        before = _at(stored, steps)
        if not _has_names(before) or _names_of(before) == _names_of(optimizer):
            continue
        stored = _with_value(stored, steps, _reordered(before, optimizer, path_of(steps), where))
        known = _names_of(before)
        for name, number in _names_of(optimizer).items():
            of_param = optimizer["state"].get(number, {}) if name not in known else {}
            absent |= {inner for inner, _ in iter_leaves(of_param, (*steps, "state", number), step=add_step)}
    return stored, absent


def _named_optimizers(tree: Any, steps: Steps = ()) -> Iterator[tuple[Steps, Mapping[str, Any]]]:
    """Yield the state dicts of optimizers with named parameters, by their steps."""
    if not isinstance(tree, dict):
        return
    if _has_names(tree):
        yield steps, tree
        return
    for key, child in tree.items():
        yield from _named_optimizers(child, (*steps, key))


def _has_names(value: Any) -> bool:
    groups = value.get("param_groups") if isinstance(value, dict) else None
    return (
        isinstance(groups, list)
        and bool(groups)
        and isinstance(value.get("state"), dict)
        and all(
            isinstance(group, dict)
            and isinstance(group.get("params"), list)
            and isinstance(group.get("param_names"), list)
            and len(group["params"]) == len(group["param_names"])
            for group in groups
        )
    )


def _names_of(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the number of each parameter by its name, in order."""
    return {
        name: number
        for group in optimizer["param_groups"]
        for name, number in zip(group["param_names"], group["params"], strict=True)
    }


def _reordered(before: Mapping[str, Any], now: Mapping[str, Any], path: str, where: str) -> dict[str, Any]:
    """Return a stored state dict with the numbers and groups of the request; settings stay as stored."""
    stored, wanted = _names_of(before), _names_of(now)
    others = sorted({type(leaf).__name__ for _, leaf in iter_leaves(now["state"]) if _is_declared(leaf)})
    if others:
        raise MismatchError(
            f"{where}: the parameters of the optimizer {path!r} are not in the order of the checkpoint, and "
            f"its state has the type {others[0]}, which is loaded by position. Register the parameters in "
            f"the order that they were saved in, or declare the state under the names of the parameters "
            f"(megackpt.contrib.torch_state).",
            path=path,
        )
    about = {
        "has no state of": wanted.keys() - stored.keys(),
        "has state of parameters that are not asked for": stored.keys() - wanted.keys(),
    }
    for what, names in about.items():
        if names:
            notice(log, f"{where}: the optimizer {path!r} {what}:\n{truncated_list(sorted(names))}")
    groups = [
        {
            **_settings_of(before, group["param_names"]),
            "params": group["params"],
            "param_names": group["param_names"],
        }
        for group in now["param_groups"]
    ]
    state = {
        number: before["state"][stored[name]]
        for name, number in wanted.items()
        if name in stored and stored[name] in before["state"]
    }
    return {**before, "state": state, "param_groups": groups}


def _settings_of(optimizer: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """Return the group that has the first of some parameters; empty if none has."""
    for name in names:
        for group in optimizer["param_groups"]:
            if name in group["param_names"]:
                return dict(group)
    return {}


def _is_declared(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and not is_plain_tensor(leaf)


def _at(tree: Any, steps: Steps) -> Any:
    for step in steps:
        if not isinstance(tree, dict) or step not in tree:
            return None
        tree = tree[step]
    return tree


def _with_value(tree: Any, steps: Steps, value: Any) -> Any:
    """Return the tree with another value at some steps; the containers on the way are copied."""
    if not steps:
        return value
    copied = tree.copy()
    copied[steps[0]] = _with_value(tree[steps[0]], steps[1:], value)
    return copied
