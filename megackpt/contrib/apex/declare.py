"""Declares and restores any of Apex's optimizers."""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from megackpt.contrib.apex.fragments import (
    declare_fragments,
    is_distributed_fused_adam,
    restore_fragments,
)
from megackpt.contrib.group_settings import declare_settings, plain, restore_settings
from megackpt.entities import ShardedBase, ShardedStateDict, StateDict
from megackpt.errors import DeclarationError
from megackpt.training.optim.inner_optimizer import MASTER
from megackpt.training.optim.owned_params import cuts_of
from megackpt.training.optim.param_groups import WhenDifferent
from megackpt.training.optim.remainders import is_rounded
from megackpt.training.optim.sharded_state import (
    find_param_entities,
    make_own_array,
    make_sharded_optimizer_tensor,
)
from megackpt.training.parallel.attributes import is_marked
from megackpt.training.parallel.groups import ParallelGroups

# Apex's optimizers that keep whole parameters.
#
# They are FusedAdam, FusedAdagrad, FusedSGD, FusedLAMB, FusedNovoGrad and FusedMixedPrecisionLamb. Their step
# is in the group; their masters, if any, are in plain attributes that no state dict has.

NORM = "exp_avg_sq"
"""NovoGrad's name of its norms, in the group and in checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeKind:
    """What one class keeps.

    Attributes:
        name: of the class.
        states: names of the states that have the shape of the parameter.
        dtype: returns their dtype for a parameter.
        masters: attribute with the masters, in the form of `param_groups`; "" if there are none.
        starts_at_zero: whether states of zeros are those of an optimizer that took no step.
        has_norms: whether the groups have a norm for each parameter.
    """

    name: str
    states: tuple[str, ...]
    dtype: Callable[[Optimizer, Tensor], torch.dtype]
    masters: str = ""
    starts_at_zero: bool = True
    has_norms: bool = False


def _float32(optimizer: Any, param: Tensor) -> torch.dtype:
    return torch.float32


def _dtype_of_param(optimizer: Any, param: Tensor) -> torch.dtype:
    return param.dtype


def _float32_where_reduced(optimizer: Any, param: Tensor) -> torch.dtype:
    return torch.float32 if param.dtype == optimizer.reduced_precision_dtype else param.dtype


_MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS = (
    WholeKind(name="FusedAdam", states=_MOMENTS, dtype=_float32, masters="param_groups_master"),
    WholeKind(
        name="FusedMixedPrecisionLamb",
        states=_MOMENTS,
        dtype=_float32_where_reduced,
        masters="param_groups_full_precision",
    ),
    WholeKind(name="FusedAdagrad", states=("sum",), dtype=_dtype_of_param),
    WholeKind(name="FusedLAMB", states=_MOMENTS, dtype=_dtype_of_param),
    WholeKind(name="FusedSGD", states=("momentum_buffer",), dtype=_dtype_of_param, starts_at_zero=False),
    WholeKind(
        name="FusedNovoGrad", states=("exp_avg",), dtype=_dtype_of_param, starts_at_zero=False, has_norms=True
    ),
)


def whole_kind_of(optimizer: Optimizer) -> WholeKind | None:
    """Return what the optimizer keeps, or None if it is none of these. Local.

    Transformer Engine has a FusedAdam, too, which has no `param_groups_master`.
    """
    names = {cls.__name__ for cls in type(optimizer).__mro__}
    kinds = [k for k in KINDS if k.name in names and (not k.masters or hasattr(optimizer, k.masters))]
    return kinds[0] if kinds else None


def declare_whole(
    optimizer: Optimizer,
    kind: WholeKind,
    model_sharded_state_dict: ShardedStateDict,
    *,
    is_loading: bool,
    groups: ParallelGroups | None,
) -> dict[int, dict[str, ShardedBase]]:
    """Declare states, norms and masters by position of the parameter and name. Local.

    Raises:
        DeclarationError: a parameter is not declared, has no state yet, or is a slice of unknown number.
    """
    params = _params(optimizer)
    _create_state(optimizer, kind, params, is_loading=is_loading)
    entities = find_param_entities(model_sharded_state_dict, params)
    tensors = [dict(_states(optimizer, kind, param)) for param in params]
    for position, master in _masters(optimizer, kind):
        tensors[position][MASTER] = _effective_master(params[position], master)
    declared: dict[int, dict[str, ShardedBase]] = {
        position: {
            name: make_sharded_optimizer_tensor(entity, tensor, f"optimizer.state.{name}")
            for name, tensor in of_param.items()
        }
        for position, (entity, of_param) in enumerate(zip(entities, tensors, strict=True))
    }
    for position, norm in _norms(optimizer, kind):
        cuts = _cuts(params[position], entities[position].key, groups)
        declared[position][NORM] = make_own_array(
            entities[position], norm, prefix=f"optimizer.state.{NORM}", cuts=cuts
        )
    return declared


@torch.no_grad()
def restore_whole(optimizer: Optimizer, kind: WholeKind, loaded: Mapping[int, Mapping[str, Tensor]]) -> None:
    """Write what was loaded into states, norms and masters. Local; after the model was loaded."""
    params = _params(optimizer)
    for position, param in enumerate(params):
        for name, tensor in _states(optimizer, kind, param):
            _fill(tensor, loaded.get(position, {}).get(name))
    for position, norm in _norms(optimizer, kind):
        _fill(norm, loaded.get(position, {}).get(NORM))
    for position, master in _masters(optimizer, kind):
        stored = loaded.get(position, {}).get(MASTER)
        # Not the master of construction time, with which the next step would overwrite the loaded weight.
        _fill(master, params[position].detach() if stored is None else stored)


def _params(optimizer: Optimizer) -> list[Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _create_state(
    optimizer: Optimizer, kind: WholeKind, params: Sequence[Parameter], *, is_loading: bool
) -> None:
    missing = [p for p in params if not optimizer.state.get(p)]
    if missing and not (is_loading or kind.starts_at_zero):
        raise DeclarationError(
            f"{kind.name} has no state for {len(missing)} of {len(params)} parameters, and its first step is "
            f"not that of a state of zeros. Save after the first step, and leave out parameters that never "
            f"get a gradient."
        )
    for param in params:
        state = optimizer.state[param]
        for name in kind.states:
            dtype = kind.dtype(optimizer, param)
            # What torch's load_state_dict has cast to the parameter's dtype gets its own dtype again.
            if name not in state or (is_loading and state[name].dtype != dtype):
                state[name] = torch.zeros_like(param, dtype=dtype, requires_grad=False)
    if kind.has_norms:
        _create_norms(optimizer)
    if kind.name == "FusedMixedPrecisionLamb" and not getattr(optimizer, kind.masters):
        optimizer._setup_full_precision_params()  # type: ignore[attr-defined]  # otherwise in the first step


def _states(optimizer: Optimizer, kind: WholeKind, param: Parameter) -> Iterator[tuple[str, Tensor]]:
    for name in kind.states:
        yield name, optimizer.state[param][name]


def _masters(optimizer: Optimizer, kind: WholeKind) -> Iterator[tuple[int, Tensor]]:
    """Yield position and master of the parameters that have one."""
    groups = getattr(optimizer, kind.masters) if kind.masters else []
    masters = [master for group in groups for master in group["params"]]
    yield from ((position, master) for position, master in enumerate(masters) if master is not None)


def _effective_master(param: Parameter, master: Tensor) -> Tensor:
    """Return the master, or the weight itself where Apex's kernel ignores the master.

    FusedAdam's kernel updates bf16 weights without their masters, which stay as they were made (apex #1728).
    """
    weight = param.detach()
    is_used = param.dtype != torch.bfloat16 or is_rounded(weight, master)
    return master if is_used else weight.float()


def _norm_lists(group: Mapping[str, Any]) -> list[list[int]]:
    """Return the indices in a group of the float16 and of the other parameters, as NovoGrad sorts norms."""
    is_half = [param.dtype == torch.float16 for param in group["params"]]
    return [[i for i, half in enumerate(is_half) if half == wanted] for wanted in (True, False)]


def _create_norms(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        if NORM not in group and group["params"]:
            device = group["params"][0].device
            group[NORM] = [torch.zeros(len(indices), device=device) for indices in _norm_lists(group)]


def _norms(optimizer: Optimizer, kind: WholeKind) -> Iterator[tuple[int, Tensor]]:
    """Yield position and norm of each parameter; a norm is a 0-dim view into the group's list."""
    first = 0
    for group in optimizer.param_groups if kind.has_norms else ():
        for indices, norms in zip(_norm_lists(group), group.get(NORM, ()), strict=False):
            yield from ((first + index, norms[n]) for n, index in enumerate(indices))
        first += len(group["params"])


def _cuts(param: Parameter, key: str, groups: ParallelGroups | None) -> list[tuple[int, int]]:
    if groups is not None:
        return cuts_of(param, groups)
    if is_marked(param, "tensor_model_parallel") or is_marked(param, "stacked_experts"):
        raise DeclarationError(
            f"{key!r}: the parameter is a slice, and each slice has a norm of its own. Pass the "
            f"ParallelGroups of the model as `groups`, from which the slice's number is known.",
            key=key,
        )
    return []


def _fill(tensor: Tensor, loaded: Tensor | None) -> None:
    if loaded is not None and loaded.data_ptr() != tensor.data_ptr():
        tensor.copy_(loaded)


# Which package of the name `apex` is installed: NVIDIA's, or the other project on the package index.


def installed_apex() -> Literal["nvidia", "other"] | None:
    """Return whose `apex` an import would find; nothing is imported. Local.

    The package of that name on the package index is another project, without optimizers. NVIDIA's is built
    from its repository.
    """
    spec = importlib.machinery.PathFinder.find_spec("apex", sys.path)
    if spec is None:
        return None
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    is_nvidias = any((folder / "multi_tensor_apply").is_dir() for folder in folders)
    return "nvidia" if is_nvidias else "other"


def installation_note() -> str:
    """Return a sentence for errors if the installed `apex` is another project, else an empty text. Local."""
    if installed_apex() != "other":
        return ""
    return (
        " The package 'apex' that is installed is not NVIDIA's but another project of that name on the "
        "package index: uninstall it, and build NVIDIA's from https://github.com/NVIDIA/apex."
    )


def sharded_state_dict(
    optimizer: Optimizer,
    model_sharded_state_dict: ShardedStateDict,
    is_loading: bool = False,
    *,
    groups: ParallelGroups | None = None,
) -> ShardedStateDict:
    """Declare the state of an optimizer of Apex: moments, masters, norms, and the settings of its groups.

    Local; for DistributedFusedAdam see `declare_fragments`. The keys are those of `megackpt.training.optim`,
    so that its optimizers load the same checkpoints.

    Args:
        optimizer: FusedAdam, FusedAdagrad, FusedSGD, FusedLAMB, FusedNovoGrad, FusedMixedPrecisionLamb or
            DistributedFusedAdam.
        model_sharded_state_dict: of the model; its entities wrap the parameters.
        is_loading: whether to create state that a new optimizer does not have yet, with moments in their own
            dtype.
        groups: the ranks around this one; FusedNovoGrad needs them if the parameters are slices.

    Returns:
        `state` by position of the parameter and name; `param_groups` by name of the group, with the number of
        each parameter's group in `param_group_of` where groups have no names; for DistributedFusedAdam also
        `step`.

    Raises:
        DeclarationError: the optimizer is none of these, keeps masters in `amp`, or has a parameter that is
            not declared.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    settings = declare_settings(optimizer.param_groups, params, model_sharded_state_dict)
    if is_distributed_fused_adam(optimizer):
        state = declare_fragments(optimizer, model_sharded_state_dict)
        step = plain(optimizer.state["step"])  # type: ignore[index]  # its own key among the parameters
        return {"state": state, **settings, "step": step}
    kind = _whole_kind(optimizer)
    state = declare_whole(optimizer, kind, model_sharded_state_dict, is_loading=is_loading, groups=groups)
    return {"state": state, **settings}


@torch.no_grad()
def load_sharded_state_dict(
    optimizer: Optimizer, loaded: StateDict, *, when_different: WhenDifferent = "checkpoint"
) -> None:
    """Restore what a load of `sharded_state_dict(..., is_loading=True)` returned. Local.

    Load the model before. Of DistributedFusedAdam with remainders, the weights of this rank's fragments are
    written, too (see `megackpt.training.optim.remainders`); other ranks get them with the next step's
    parameters. when_different is as for the optimizers of `megackpt.training.optim`.

    Raises:
        MismatchError: the parameter groups have other names, other parameters, or are configured otherwise.
        DeclarationError: the optimizer is none of Apex's.
    """
    is_capturable = getattr(optimizer, "capturable", False)
    restore_settings(
        optimizer.param_groups, loaded, is_capturable=is_capturable, when_different=when_different
    )
    if not is_distributed_fused_adam(optimizer):
        restore_whole(optimizer, _whole_kind(optimizer), loaded["state"])
        return
    restore_fragments(optimizer, loaded["state"])
    state: dict[str, Any] = optimizer.state  # type: ignore[assignment]
    if isinstance(state["step"], Tensor):
        state["step"].fill_(loaded["step"])
    else:
        state["step"] = loaded["step"]


def _whole_kind(optimizer: Optimizer) -> WholeKind:
    if "DistributedFusedLAMB" in {cls.__name__ for cls in type(optimizer).__mro__}:
        raise DeclarationError(
            "DistributedFusedLAMB is not supported: it orders parameters in its flat buffers (fp32_p, "
            "fp32_m, fp32_v) by the gradients of its first backward pass, so a new one does not know yet "
            "which elements it has, and a load could not fill it. Its own state dict has these buffers of "
            "one rank, without the order. Use FusedLAMB or FusedMixedPrecisionLamb, or "
            "megackpt.training.optim."
        )
    kind = whole_kind_of(optimizer)
    if kind is None:
        known = ", ".join([*(k.name for k in KINDS), "DistributedFusedAdam"])
        raise DeclarationError(
            f"{type(optimizer).__module__}.{type(optimizer).__name__} is none of the optimizers of Apex that "
            f"are known here: {known}. For others use megackpt.training.optim.{installation_note()}"
        )
    if getattr(getattr(optimizer, "_amp_stash", None), "fp32_from_fp16_groups", None):
        raise DeclarationError(
            f"{kind.name}: apex.amp keeps its master weights in `_amp_stash`, from where they cannot be "
            f"declared. Use the optimizer without amp (FusedAdam with master_weights, or "
            f"megackpt.training.optim)."
        )
    return kind
