"""Going on with a run of Megatron-LM in an optimizer of ours: its parameter groups, steps and progress.

Tensors are loaded as boxes of Megatron-Core's arrays (`models.megatron.megatron_state`). Everything else is
in its common state, which this module reads.

Source: Megatron-Core 0.16.1 `optimizer.param_group_identifier_keys`, `state_dict` of its optimizers, and
Megatron-LM `training.checkpointing.generate_state_dict`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from megackpt.contrib.group_settings import group_names, plain, restore_settings
from megackpt.entities import ShardedStateDict, StateDict
from megackpt.errors import MismatchError, truncated_list
from megackpt.training.optim.master_optimizer import MasterOptimizer
from megackpt.training.optim.param_groups import WhenDifferent

log = logging.getLogger(__name__)

_STEP = "step"
_IDENTIFIERS = ("wd_mult", "lr_mult", "is_decoupled_lr", "is_expert_parallel")
_COMPUTED_WITH = ("lr", "weight_decay", "betas", "eps")
_OF_SCHEDULE = ("wd_mult", "lr_mult", "max_lr", "min_lr")
"""Options that Megatron-Core's schedule reads from each group; a group that lacks them gets them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronProgress:
    """How far a run of Megatron-LM has come.

    Attributes:
        iteration: the number of iterations; None if the checkpoint does not say.
        consumed_samples: the number of samples trained on; None if the checkpoint has no arguments.
        schedule: the state of its `OptimizerParamScheduler`; empty if the checkpoint has none.
    """

    iteration: int | None
    consumed_samples: int | None
    schedule: Mapping[str, Any]


def resume_from_megatron(
    optimizer: MasterOptimizer | Optimizer,
    declared: ShardedStateDict,
    common: StateDict,
    *,
    when_different: WhenDifferent = "checkpoint",
) -> MegatronProgress:
    """Restore steps and parameter groups of an optimizer from Megatron-Core's. Call it after the load.

    Local, unless an optimizer of `megackpt.training.optim` has several groups without names: then it is
    collective over pp.

    A group continues as the stored group with its `wd_mult`, `lr_mult`, `is_decoupled_lr` and
    `is_expert_parallel`. What a group of ours does not say is taken from the other options: `wd_mult` is 0 if
    `weight_decay` is 0 and otherwise 1, `lr_mult` is 1, and the rate is not decoupled.

    Args:
        optimizer: an optimizer of `megackpt.training.optim`, or of torch.
        declared: what was given to `megatron_state`, with loaded tensors.
        common: the common state of the checkpoint, as `load_common_state_dict` returns it.
        when_different: as for `MasterOptimizer.load_sharded_state_dict`.

    Raises:
        MismatchError: no stored group is that of a group here, or several with different options are; or as
            `MasterOptimizer.load_sharded_state_dict`.
    """
    stored = list(_stored_groups(common.get("optimizer")))
    if not stored:
        raise MismatchError(
            "The common state of the checkpoint has no parameter groups of an optimizer. Load one that "
            "Megatron-Core saved with --dist-ckpt-optim-fully-reshardable, and without --no-save-optim.",
            path="optimizer",
        )
    inner = optimizer.inner if isinstance(optimizer, MasterOptimizer) else optimizer
    groups = dict(zip(group_names(inner.param_groups), inner.param_groups, strict=True))
    chosen = {name: _continued(name, group, stored) for name, group in groups.items()}
    _warn_of_others(stored, list(chosen.values()))
    # The step of each parameter, in the order of the groups, which is that of positions, too.
    steps = [chosen[name][_STEP] for name, group in groups.items() for _ in group["params"]]
    if not inner.state or any(_STEP in state for state in inner.state.values()):
        for options in chosen.values():  # torch counts for each parameter, fused optimizers for each group
            del options[_STEP]
    if isinstance(optimizer, MasterOptimizer):
        for (_, states), step in zip(sorted(declared["state"].items()), steps, strict=True):
            states[_STEP].data.fill_(step)
        loaded = {i: {n: entity.data for n, entity in s.items()} for i, s in declared["state"].items()}
        optimizer.load_sharded_state_dict(
            {"state": loaded, "param_groups": chosen}, when_different=when_different
        )
    else:
        restore_settings(inner.param_groups, {"param_groups": chosen}, when_different=when_different)
        for param, step in zip((p for g in groups.values() for p in g["params"]), steps, strict=True):
            _set_step(inner.state.get(param, {}), step)
    args = common.get("args")
    return MegatronProgress(
        iteration=common.get("iteration"),
        consumed_samples=getattr(args, "consumed_train_samples", None),
        schedule=common.get("opt_param_scheduler") or {},
    )


def _stored_groups(optimizer: Any) -> Iterator[dict[str, Any]]:
    """Yield the groups of one optimizer of Megatron-Core, or of all in a chain, each with its step."""
    if isinstance(optimizer, Mapping) and "param_groups" in optimizer:
        state = optimizer.get("state")
        common_step = state.get("common_step") if isinstance(state, Mapping) else None
        for group in optimizer["param_groups"]:
            # NeMo has `pre_wd_mult` for `wd_mult`.
            options = {option.removeprefix("pre_"): plain(value) for option, value in group.items()}
            yield {_STEP: plain(common_step), **options}
    elif isinstance(optimizer, Mapping):
        for part in optimizer.values():
            yield from _stored_groups(part)
    elif isinstance(optimizer, Sequence) and not isinstance(optimizer, str):
        for part in optimizer:
            yield from _stored_groups(part)


def _continued(name: str, group: Mapping[str, Any], stored: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the step of the stored group that a group continues, and its options that have a meaning here.

    That are those that the group has, and those that a schedule of Megatron-Core reads.
    """
    fitting = [s for s in stored if all(_are_equal(s.get(i), group[i]) for i in _IDENTIFIERS if i in group)]
    if not fitting:
        raise _no_match(name, group, stored, "no stored group has")
    decays = float(bool(plain(group.get("weight_decay", 0))))
    for option, value in {"wd_mult": decays, "lr_mult": 1.0, "is_decoupled_lr": False}.items():
        if option not in group:
            fitting = [s for s in fitting if _are_equal(s.get(option, value), value)] or fitting
    taken = (group.keys() | set(_OF_SCHEDULE)) - {"params", "name", _STEP}
    options = {option: value for option, value in fitting[0].items() if option in taken}
    # Megatron-Core has one number of steps for all groups, and may leave it out of one without parameters.
    steps = {s[_STEP] for s in fitting} - {None} or {s[_STEP] for s in stored} - {None}
    is_one = all(_are_equal(s.get(option), value) for s in fitting for option, value in options.items())
    if not is_one or len(steps) != 1:
        raise _no_match(name, group, fitting, "not one, but several different stored groups may be that of")
    return {**options, _STEP: steps.pop()}


def _warn_of_others(stored: Sequence[Mapping[str, Any]], chosen: Sequence[Mapping[str, Any]]) -> None:
    """Warn of stored groups with which no group goes on: their parameters go on as others do."""
    others = [
        s
        for s in stored
        if not any(all(_are_equal(s.get(o), c[o]) for o in _COMPUTED_WITH if o in c) for c in chosen)
    ]
    if others and (not dist.is_initialized() or dist.get_rank() == 0):
        log.warning(
            "No parameter group goes on as these of the checkpoint, so that their parameters have the "
            "options of others:\n%s\nMake a group of those parameters, with its wd_mult and lr_mult.",
            truncated_list(_shown(others)),
        )


def _are_equal(a: Any, b: Any) -> bool:
    if isinstance(a, Sequence) and isinstance(b, Sequence):
        return tuple(a) == tuple(b)
    return bool(a == plain(b))


def _no_match(
    name: str, group: Mapping[str, Any], stored: Sequence[Mapping[str, Any]], what: str
) -> MismatchError:
    (ours,) = _shown([group])
    return MismatchError(
        f"The parameter group {name!r}: {what} {ours}. Stored are:\n{truncated_list(_shown(stored))}\nGive "
        f"it the wd_mult, lr_mult, is_decoupled_lr and is_expert_parallel of the one that it continues.",
        path="param_groups",
    )


def _shown(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what distinguishes groups, as text."""
    options = (*_IDENTIFIERS, "weight_decay", "lr", _STEP)
    return [
        ", ".join(f"{option} {plain(group[option])!r}" for option in options if option in group)
        for group in groups
    ]


def _set_step(state: dict[str, Any], step: float) -> None:
    current = state.get(_STEP)
    if isinstance(current, torch.Tensor):
        current.fill_(step)
    elif current is not None:
        state[_STEP] = type(current)(step)
