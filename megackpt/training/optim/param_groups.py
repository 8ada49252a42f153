"""Parameter groups, and their hyperparameters as plain data.

A group with a name is matched with the stored group of that name; `match_unnamed_groups` matches the others.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from megackpt.entities import ShardedStateDict, ShardedTensor
from megackpt.errors import DeclarationError, MismatchError, truncated_list
from megackpt.training.optim.sharded_state import find_param_entities, make_sharded_scalar, replica_of
from megackpt.training.parallel.collectives import all_reduce
from megackpt.training.parallel.groups import Axis

log = logging.getLogger(__name__)

ParamsOrGroups: TypeAlias = Iterable[Parameter] | Iterable[dict[str, Any]]  # as torch.optim takes them
Hyperparameters: TypeAlias = dict[
    str, dict[str, Any]
]  # group name -> option -> value, whatever the optimizer has

WhenDifferent: TypeAlias = Literal["error", "checkpoint", "given"]
"""Whose configuration a run goes on with where that of the checkpoint is not the one given."""

SCHEDULE_OPTIONS = frozenset(
    {"max_lr", "min_lr", "initial_lr", "base_momentum", "max_momentum", "start_wd", "end_wd", "swa_lr"}
)
"""Options of groups from which schedulers of torch and Megatron-Core compute the others at each step."""

CONFIGURED_OPTIONS = SCHEDULE_OPTIONS | {
    *("weight_decay", "decoupled_weight_decay", "betas", "eps", "momentum", "dampening", "nesterov"),
    *("amsgrad", "maximize", "alpha", "centered", "rho", "lambd", "t0", "lr_decay", "etas", "step_sizes"),
    *("momentum_decay", "lr_mult", "wd_mult", "bias_correction", "adam_w_mode", "grad_averaging"),
}
"""Options that a user configures. All others are state, such as `step`, `lr` and the counters of optimizers
without schedules: they continue as stored.

Source: torch 2.13 `torch.optim`; Megatron-Core 0.16.1 `optimizer`; Transformer Engine and Apex.
"""

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
    *,
    when_different: WhenDifferent = "checkpoint",
) -> None:
    """Overwrite the options of every group with those loaded for it. Local.

    Args:
        inner_groups: the groups of the torch optimizer.
        loaded: what `hyperparameters` returned.
        stored_names: the name in loaded of each group that has another name there.
        when_different: as for `chosen_options`.

    Raises:
        MismatchError: the names differ, or `chosen_options` raises it. Nothing is changed in that case.
    """
    renamed = {} if stored_names is None else stored_names
    names = [renamed.get(group["name"], group["name"]) for group in inner_groups]
    _check_names(set(names), set(loaded))
    stored = {group["name"]: loaded[name] for group, name in zip(inner_groups, names, strict=True)}
    present = {group["name"]: group for group in inner_groups}
    chosen = chosen_options(stored, present, when_different)
    for group in inner_groups:
        group.update({option: _copy(value) for option, value in chosen[group["name"]].items()})


def chosen_options(
    stored: Mapping[str, Mapping[str, Any]],
    present: Mapping[str, Mapping[str, Any]],
    when_different: WhenDifferent,
) -> dict[str, dict[str, Any]]:
    """Return the options that each group goes on with, by name of the group. Local.

    State is that of the checkpoint. Of the configuration that differs, `when_different` says whose is taken:
    `checkpoint` and `given` log a warning with both values, on rank 0.

    Raises:
        MismatchError: the configuration differs, and `when_different` is "error".
        DeclarationError: `when_different` is none of the three.
    """
    if when_different not in ("error", "checkpoint", "given"):
        raise DeclarationError(
            f"when_different={when_different!r} is not known. Give 'error', 'checkpoint' or 'given'."
        )
    chosen = {name: dict(options) for name, options in stored.items()}
    differing: list[str] = []
    for name, options in stored.items():
        for option, value in options.items():
            now = present[name].get(option, _UNSET)
            if now is _UNSET or not _is_configured(option, present[name]) or _are_equal(value, now):
                continue
            differing.append(f"group {name!r}: {option} {value!r} stored, {now!r} given")
            if when_different == "given":
                chosen[name][option] = now
    if not differing:
        return chosen
    text = truncated_list(differing)
    if when_different == "error":
        raise MismatchError(
            f"The optimizer of the checkpoint is configured otherwise than this one:\n{text}\n"
            f'Give the values it was trained with, or choose: when_different="checkpoint" goes on as stored, '
            f'"given" as given.',
            path="param_groups",
        )
    if not dist.is_available() or not dist.is_initialized() or dist.get_rank() == 0:
        whose = "the given values are" if when_different == "given" else "those of the checkpoint are"
        log.warning("The optimizer was configured otherwise when it was saved; %s used:\n%s", whose, text)
    return chosen


_UNSET = object()


def _is_configured(option: str, group: Mapping[str, Any]) -> bool:
    """Return whether a user configures an option of a group, and no schedule changes it at each step."""
    if option == "weight_decay" and "wd_mult" in group:  # by the scheduler of Megatron-Core
        return False
    if option in ("betas", "momentum") and "max_momentum" in group:  # by OneCycleLR and CyclicLR
        return False
    return option in CONFIGURED_OPTIONS


def _are_equal(a: Any, b: Any) -> bool:
    """Return whether two options are equal, whether they are numbers or tensors of one element."""
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(map(_are_equal, a, b))
    a, b = (v.item() if isinstance(v, Tensor) and v.numel() == 1 else v for v in (a, b))
    return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else bool(a == b)


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
