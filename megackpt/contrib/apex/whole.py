"""Apex's optimizers that keep whole parameters.

They are FusedAdam, FusedAdagrad, FusedSGD, FusedLAMB, FusedNovoGrad and FusedMixedPrecisionLamb. Their step
is in the group; their masters, if any, are in plain attributes that no state dict has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from megackpt.entities import ShardedBase, ShardedStateDict
from megackpt.errors import DeclarationError
from megackpt.training.optim.inner_optimizer import MASTER
from megackpt.training.optim.owned_params import cuts_of
from megackpt.training.optim.remainders import is_rounded
from megackpt.training.optim.sharded_state import (
    find_param_entities,
    make_own_array,
    make_sharded_optimizer_tensor,
)
from megackpt.training.parallel.attributes import is_marked
from megackpt.training.parallel.groups import ParallelGroups

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
