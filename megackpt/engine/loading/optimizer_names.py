"""State dicts of torch optimizers whose parameters have names, loaded by these names.

`optimizer.state_dict()` numbers parameters by their position. Where the optimizer was made of
`named_parameters()`, its groups also have `param_names`. If a model now registers its parameters in another
order, positions would give a parameter the moments of another one. Names that differ by wrappers of modules
(`_orig_mod`) are of the same parameter, unless both are in one optimizer.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from megackpt.codec import ArrayReference
from megackpt.engine.checkpoint.common_arrays import map_common
from megackpt.engine.checkpoint.views import with_new_names
from megackpt.entities.plain_tensors import is_plain_tensor
from megackpt.entities.tree import Steps, add_step, dotted, iter_leaves, path_of
from megackpt.errors import MismatchError, truncated_list
from megackpt.formats.contents import Contents
from megackpt.ground.notices import notice
from megackpt.ground.wrappers import without_wrappers

log = logging.getLogger(__name__)


def ordered_as_requested(
    contents: Contents, state: Mapping[Any, Any], *, where: str
) -> tuple[Contents, Mapping[str, str], set[Steps]]:
    """Return contents with the state of optimizers in the order of the request. Local.

    Args:
        contents: the checkpoint, with inline arrays; their common state is not changed.
        state: the request.
        where: location of the checkpoint, for errors.

    Returns:
        The contents; the new key of each array whose key has changed, as it has the number of a parameter;
        and the steps to leaves of the request that the checkpoint has nothing for: the state of parameters
        that the stored optimizer did not have.

    Raises:
        MismatchError: the order differs, and the state of the optimizer is not plain tensors.
    """
    described = contents.common()
    common, absent = described["state_dict"], set[Steps]()
    new_name: dict[str, str] = {}
    for steps, optimizer in _named_optimizers(state):
        before = _at(common, steps)
        if not _has_names(before):
            _notice_of_state_elsewhere(contents, steps, optimizer, where)
            continue
        if _groups_of(before) == _groups_of(optimizer):
            continue
        path, prefix = path_of(steps), f"{dotted(steps)}.state."
        name_of = _distinct_names(before, optimizer, path, where)
        reordered = _reordered(before, optimizer, name_of, path, where)
        stored, wanted = _numbers_of(before, name_of), _numbers_of(optimizer, name_of)
        # Parameters that are not asked for get their names, which no number can be.
        numbers = {str(number): str(wanted.get(name, name)) for name, number in stored.items()}
        new_name |= {
            key: _renumbered(key, prefix, numbers) for key in contents.arrays if key.startswith(prefix)
        }
        common = _with_value(common, steps, reordered)
        for name in wanted.keys() - stored.keys():
            number = wanted[name]
            of_param = optimizer["state"].get(number, {})
            absent |= {inner for inner, _ in iter_leaves(of_param, (*steps, "state", number), step=add_step)}
    if not new_name and common is described["state_dict"]:
        return contents, {}, absent

    def renamed_reference(_: Steps, leaf: Any) -> Any:
        is_renamed = isinstance(leaf, ArrayReference) and leaf.key in new_name
        return ArrayReference(new_name[leaf.key]) if is_renamed else leaf

    common = map_common(renamed_reference, common)
    names = {key: new_name.get(key, key) for key in contents.arrays}
    renamed = with_new_names(contents, names)
    return replace(renamed, common=lambda: {**described, "state_dict": common}), new_name, absent


def _renumbered(key: str, prefix: str, numbers: Mapping[str, str]) -> str:
    number, dot, rest = key.removeprefix(prefix).partition(".")
    return f"{prefix}{numbers.get(number, number)}{dot}{rest}"


def _notice_of_state_elsewhere(
    contents: Contents, steps: Steps, optimizer: Mapping[str, Any], where: str
) -> None:
    """Log a warning if arrays were renamed to an optimizer whose names the checkpoint has elsewhere."""
    if any(key.startswith(f"{dotted(steps)}.state.") for key in contents.arrays) and steps:
        notice(
            log,
            f"{where}: the checkpoint has no param_names for the optimizer {path_of(steps)!r}; its state is "
            f"loaded by the positions of the parameters. Ask for it under the path that it was saved under.",
        )


def _named_optimizers(tree: Any, steps: Steps = ()) -> Iterator[tuple[Steps, Mapping[str, Any]]]:
    """Yield the state dicts of optimizers with named parameters, by their steps."""
    if _has_names(tree):
        yield steps, tree
    elif isinstance(tree, (dict, list)):
        for key, child in tree.items() if isinstance(tree, dict) else enumerate(tree):
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


def _groups_of(optimizer: Mapping[str, Any]) -> list[tuple[Sequence[Any], Sequence[Any]]]:
    """Return the names and numbers of the parameters of each group, in order."""
    return [(group["param_names"], group["params"]) for group in optimizer["param_groups"]]


def _distinct_names(
    before: Mapping[str, Any], now: Mapping[str, Any], path: str, where: str
) -> Callable[[str], str]:
    """Return what the name of a parameter is compared by: without wrappers if these names are distinct.

    Raises:
        MismatchError: parameters of one optimizer have the same name.
    """
    names = [[name for of_group, _ in _groups_of(side) for name in of_group] for side in (before, now)]
    for name_of in (without_wrappers, str):
        if all(len(set(map(name_of, side))) == len(side) for side in names):
            return name_of
    shared = sorted({name for side in names for name, number in Counter(side).items() if number > 1})
    raise MismatchError(
        f"{where}: several parameters of the optimizer {path!r} have one name, and are not in the order of "
        f"the checkpoint, so their states cannot be told apart:\n{truncated_list(shared)}\n"
        f"Give param_names that differ, or make the optimizer as in the save. One made of parameters(), "
        f"without names, is loaded by position.",
        path=path,
    )


def _numbers_of(optimizer: Mapping[str, Any], name_of: Callable[[str], str]) -> dict[str, Any]:
    """Return the number of each parameter by its name as it is compared, in order."""
    return {
        name_of(name): number
        for names, numbers in _groups_of(optimizer)
        for name, number in zip(names, numbers, strict=True)
    }


def _reordered(
    before: Mapping[str, Any], now: Mapping[str, Any], name_of: Callable[[str], str], path: str, where: str
) -> dict[str, Any]:
    """Return a stored state dict with the numbers and groups of the request; settings stay as stored."""
    stored, wanted = _numbers_of(before, name_of), _numbers_of(now, name_of)
    others = sorted({type(leaf).__name__ for _, leaf in iter_leaves(now["state"]) if _is_declared(leaf)})
    if others and stored != wanted:
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
        _settings_for(group, before, name_of) | {name: group[name] for name in ("params", "param_names")}
        for group in now["param_groups"]
    ]
    state = {
        number: before["state"][stored[name]]
        for name, number in wanted.items()
        if name in stored and stored[name] in before["state"]
    }
    return {**before, "state": state, "param_groups": groups}


def _settings_for(
    group: Mapping[str, Any], optimizer: Mapping[str, Any], name_of: Callable[[str], str]
) -> dict[str, Any]:
    """Return the stored group that has the first of some parameters; the group itself if none has."""
    for name in map(name_of, group["param_names"]):
        for stored in optimizer["param_groups"]:
            if name in map(name_of, stored["param_names"]):
                return dict(stored)
    return dict(group)


def _is_declared(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and not is_plain_tensor(leaf)


def _at(tree: Any, steps: Steps) -> Any:
    """Return what is at some steps; None if there is nothing."""
    for step in steps:
        known = range(len(tree)) if isinstance(tree, list) else tree if isinstance(tree, dict) else ()
        if step not in known:
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
