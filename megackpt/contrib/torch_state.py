"""The state of torch modules and optimizers in a host's hands, by the names of their parameters.

Names have no wrappers (DistributedDataParallel, FSDP1, FSDP2, torch.compile, activation checkpointing), so
state that was saved under one wrapper loads under another. The state of models is that of torch's own
functions, as is that of optimizers over FSDP1, whose parameters are flat. The state of other optimizers is
named here: torch's functions raise an error where a parameter has no state, lose that of frozen ones, and
have no answer for new groups.

Source: torch 2.13 `torch.distributed.checkpoint.state_dict`, whose keys these are.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from megackpt.entities import ShardedStateDict, StateDict
from megackpt.entities.sharded_tensor import KeptIfMissing
from megackpt.errors import MissingKeyError, NotACheckpointError, UnsupportedError, truncated_list
from megackpt.ground.wrappers import INNER_WRAPPERS
from megackpt.training.optim import initialise_state
from megackpt.training.optim.param_groups import ParamGroup, chosen_options, match_unnamed_groups

log = logging.getLogger(__name__)

_WITH_STATE = "params_with_state"
"""Next to `state` and `param_groups`: the names of the parameters that had state when it was saved."""


class TorchState:
    """Models and optimizers as one state dict.

    Keys begin with `model` and `optimizer`; with `model_1`, `optimizer_1` for the second ones, and so on.

    Args:
        models: wrapped or not.
        optimizers: of torch. The parameters of each are those of one of the models.

    Raises:
        UnsupportedError: an optimizer has parameters of several models, or of none of them.
    """

    def __init__(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        self._models = list(models)
        self._optimizers = [
            (optimizer, _model_of(optimizer, position, self._models))
            for position, optimizer in enumerate(optimizers)
        ]

    def sharded_state_dict(self, is_loading: bool = False) -> ShardedStateDict:
        """Declare all state, to save it or to ask for it in a load. Collective under FSDP.

        is_loading is as for `optimizers`.
        """
        return {**self.models(), **self.optimizers(is_loading)}

    def models(self) -> ShardedStateDict:
        """Declare the models' state. Collective under FSDP."""
        return {_name("model", i): get_model_state_dict(model) for i, model in enumerate(self._models)}

    def optimizers(self, is_loading: bool = False) -> ShardedStateDict:
        """Declare the optimizers' state. Collective under FSDP.

        What exists is declared, whether the parameter trains or is frozen. State that an optimizer makes in
        its first step is made here, without a change of any parameter: for an optimizer without any state,
        and with is_loading for every parameter, as the checkpoint may have state of it.
        """
        return {
            _name("optimizer", i): get_optimizer_state_dict(model, optimizer)
            if _has_flat_params(model)
            else _optimizer_state(optimizer, param_names(model), is_loading=is_loading)
            for i, (optimizer, model) in enumerate(self._optimizers)
        }

    def load_models(self, loaded: StateDict) -> None:
        """Put what a load returned into the models. Collective under FSDP.

        What the load has left out, with the error or warning that its rules ask for, stays as it is: a
        parameter that was added to the model.
        """
        options = StateDictOptions(strict=False)
        for position, model in enumerate(self._models):
            set_model_state_dict(model, loaded[_name("model", position)], options=options)

    def load_optimizers(self, loaded: StateDict) -> None:
        """Put what a load returned into the optimizers. Collective under FSDP.

        A parameter of which the checkpoint has no state has none afterwards, and a group whose parameters it
        lacks keeps its settings. State of parameters that the optimizer does not have is left out. Warnings
        name all three.

        Raises:
            MissingKeyError: the checkpoint has no optimizer.
            MismatchError: the parameters of a group were in several groups, or those of several in one.
        """
        for position, (optimizer, model) in enumerate(self._optimizers):
            key = _name("optimizer", position)
            stored = loaded[key]
            if "param_groups" not in stored:
                raise MissingKeyError(
                    f"{key!r}: the checkpoint has no state of this optimizer; only models were saved, as "
                    f"with save_weights_only of Lightning. Load the models alone, and begin with a new "
                    f"optimizer.",
                    key=key,
                )
            if _has_flat_params(model):
                set_optimizer_state_dict(model, optimizer, stored)
            else:
                _load_optimizer(optimizer, param_names(model), stored)


def param_names(model: nn.Module) -> dict[int, str]:
    """Return the name of each parameter of a model, without wrappers, by the id of the parameter. Local."""
    names: dict[int, str] = {}
    for name, param in named_params(model):
        names.setdefault(id(param), name)
    return names


def named_params(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of a module under all of their names, without wrappers. Local."""
    for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
        yield f"{prefix}{name}", param
    for name, child in module.named_children():
        # A user's own submodule may be called `module`; in DistributedDataParallel it is what is wrapped.
        is_wrapped = name in INNER_WRAPPERS or (
            name == "module" and isinstance(module, DistributedDataParallel)
        )
        yield from named_params(child, prefix if is_wrapped else f"{prefix}{name}.")


def _has_flat_params(model: nn.Module) -> bool:
    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


def _optimizer_state(optimizer: Optimizer, names: Mapping[int, str], *, is_loading: bool) -> dict[str, Any]:
    """Return the state of an optimizer by the names of its parameters, as torch's functions have it."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    with_state = [names[id(param)] for param in params if optimizer.state.get(param)]
    # LBFGS has its state in one of its parameters, and makes it in a step with a closure only.
    if not with_state or (is_loading and not isinstance(optimizer, torch.optim.LBFGS)):
        initialise_state(optimizer, frozen=True)
    if not with_state:  # what is stored are the values that a first step begins with
        with_state = [names[id(param)] for param in params if optimizer.state.get(param)]
    state = {
        names[id(param)]: {
            key: KeptIfMissing(value) if is_loading and isinstance(value, Tensor) else value
            for key, value in optimizer.state[param].items()
        }
        for param in params
        if optimizer.state.get(param)
    }
    groups = [
        {**_settings(group), "params": [names[id(param)] for param in group["params"]]}
        for group in optimizer.param_groups
    ]
    # A request without it: a checkpoint of an older version has no such list, and then gives none.
    return {"state": state, "param_groups": groups} | ({} if is_loading else {_WITH_STATE: with_state})


def _load_optimizer(optimizer: Optimizer, names: Mapping[int, str], stored: Mapping[str, Any]) -> None:
    """Put the loaded state of an optimizer into it."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    # Checkpoints that torch's functions have named lack it.
    with_state = stored.get(_WITH_STATE)
    known = set(stored["state"] if with_state is None else with_state)
    # An optimizer may have state for some of its parameters only, or for none, as SGD without momentum.
    absent = sorted({names[id(param)] for param in params if optimizer.state.get(param)} - known)
    if absent:
        log.warning("The checkpoint has no state of the optimizer for:\n%s", truncated_list(absent))
    known_here = {names[id(param)] for param in params}
    others = {name for group in stored["param_groups"] for name in group["params"]} & known - known_here
    if others:
        log.warning(
            "The checkpoint has state of parameters that the optimizer does not have; it is left out:\n%s",
            truncated_list(sorted(others)),
        )
    state = {
        position: stored["state"][name]
        for position, param in enumerate(params)
        if (name := names[id(param)]) in known and name in stored["state"]
    }
    positions = {id(param): position for position, param in enumerate(params)}
    groups = [
        {**settings, "params": [positions[id(param)] for param in group["params"]]}
        for group, settings in zip(
            optimizer.param_groups, _stored_settings(optimizer, names, stored["param_groups"]), strict=True
        )
    ]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _stored_settings(
    optimizer: Optimizer, names: Mapping[int, str], stored: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the settings that each group continues with: those of the stored group with its parameters.

    A group that the checkpoint does not have keeps its own settings, with a warning.
    """
    group_of = {name: number for number, group in enumerate(stored) for name in group["params"]}
    groups = [
        ParamGroup(name=str(number), is_named=False, params=tuple(group["params"]), options={})
        for number, group in enumerate(optimizer.param_groups)
    ]
    saved_in = [
        {group_of[names[id(p)]] for p in group.params if names[id(p)] in group_of} for group in groups
    ]
    matched = match_unnamed_groups(groups, saved_in)
    settings = []
    for group, own in zip(groups, optimizer.param_groups, strict=True):
        number = int(matched.get(group.name, -1))
        if not 0 <= number < len(stored) or not saved_in[int(group.name)]:
            log.warning(
                "The checkpoint has no group of the optimizer with the parameters of group %s; it "
                "keeps its settings.",
                group.name,
            )
            settings.append(_settings(own))
            continue
        before = {name: value for name, value in stored[number].items() if name != "params"}
        chosen = chosen_options({group.name: before}, {group.name: own}, "checkpoint")[group.name]
        settings.append({**_settings(own), **chosen})
    return settings


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a group. Names are stored without wrappers, with the state."""
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def _name(kind: str, position: int) -> str:
    return f"{kind}_{position}" if position else kind


def _model_of(optimizer: Optimizer, position: int, models: Sequence[nn.Module]) -> nn.Module:
    params = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for model in models:
        if params <= {id(param) for param in model.parameters()}:
            return model
    raise UnsupportedError(
        f"Optimizer {position} ({type(optimizer).__name__}) has parameters that are not all of one model. "
        f"Make an optimizer for each model."
    )


def check_fsdp(path: Path, accelerator: Any) -> None:
    """Check that accelerate's own functions read a folder in this run. Local.

    The folder is one of `Accelerator.save_state`, or of a Trainer. With FSDP, files have other names, by the
    type of state dicts, and the errors of these functions do not name this cause.

    Raises:
        NotACheckpointError: they do not.
    """
    kinds = {kind for entry in path.iterdir() if (kind := _fsdp_kind(entry.name)) is not None}
    plugin = accelerator.state.fsdp_plugin if accelerator.distributed_type.name == "FSDP" else None
    now = "no FSDP" if plugin is None else f"FSDP with {plugin.state_dict_type.name}"
    before = f"FSDP with {min(kinds)}" if kinds else "no FSDP"
    if before != now:
        raise NotACheckpointError(
            f"{path} was saved with {before}, and this run has {now}. Such a folder is read with {before} "
            f"only: resume it so, and save a step with megackpt. That step loads with or without FSDP.",
            path=str(path),
        )


def _fsdp_kind(name: str) -> str | None:
    """Return the type of the state dicts of FSDP that a file has; None for a file of no model of FSDP."""
    patterns = {"SHARDED": r"_\d+", "FULL": r"(?:_\d+)?\.bin", "LOCAL": r"(?:_\d+)?_rank\d+\.bin"}
    for kind, pattern in patterns.items():
        if re.fullmatch(f"pytorch_model_fsdp{pattern}", name):
            return f"{kind}_STATE_DICT"
    return None
