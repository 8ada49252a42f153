"""FP8 state in the bytes that Transformer Engine puts into state dicts as `_extra_state`.

    TE before 1.14   io.BytesIO of torch.save
    TE 1.14 to 2.17  uint8 tensor of pickle.dumps; from 2.0 with the recipe, before it always delayed scaling
    TE 2.18 on       the same, and an empty tensor for recipes without state

The pickles are read with lists of allowed classes, and no code of them runs. TE from 2.18 on does not read
its own, unless an environment variable lets it run what they contain.

Source: TE `pytorch.module.base`, `pytorch.ops.op` (`get_extra_state`), `pytorch._extra_state`.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from megackpt.contrib.transformer_engine.fp8_state import (
    DIRECTIONS,
    direction_states,
    is_expert_major,
    recipe_fields,
)
from megackpt.errors import DeclarationError, FormatError
from megackpt.formats.safe_pickle import load_value
from megackpt.formats.tensor_pickle import Name, PickledInstance, load_tensor_pickle

_RECIPES = "transformer_engine.common.recipe"
CLASSES: frozenset[Name] = frozenset(
    {
        *((_RECIPES, name) for name in (
            "DelayedScaling", "Float8CurrentScaling", "MXFP8BlockScaling", "Float8BlockScaling",
            "NVFP4BlockScaling", "Format", "_FormatHelper", "MMParams", "QParams", "_OverrideLinearPrecision",
        )),
        ("megatron.core.extensions.transformer_engine", "TEDelayedScaling"),
    }
)  # fmt: skip
"""Classes that the bytes may name: recipes and their fields."""

_FORMATS = {(448, 448): "E4M3", (57344, 57344): "E5M2", (448, 57344): "HYBRID", (6, 6): "E2M1"}
_EXPERT_MAJOR = (2, 3)  # the first version of TE whose grouped modules keep slots expert by expert


@dataclass(frozen=True)
class Fp8State:
    """The state of one module, with the slots of a grouped one expert by expert.

    Attributes:
        tensors: `scale_fwd` and `scale_bwd`, `[experts * slots]`, `amax_history_fwd` and `amax_history_bwd`,
            `[length, experts * slots]`, float32.
        recipe: its name and plain fields, as `fp8.recipe` in checkpoints.
        experts: number of local experts; 1 for other modules.
    """

    tensors: Mapping[str, Tensor]
    recipe: Mapping[str, Any]
    experts: int = 1


def read_extra_state(
    data: Tensor | io.BytesIO | bytes | None,
    *,
    where: str = "_extra_state",
    experts: int = 1,
    te_version: str | None = None,
) -> Fp8State | None:
    """Return the FP8 state in what TE has put into a state dict; None if there is none. Local.

    Args:
        data: the value of `_extra_state`.
        where: for errors: the file and key.
        experts: number of local experts of a grouped module that wrote it.
        te_version: the version of TE that wrote it, for a grouped module. None for 2.3 or later, or before
            2.0 if the bytes have no recipe.

    Raises:
        UnknownClassError: the bytes name a class that is no recipe. Nothing was run.
        FormatError: they are damaged, or have other contents.
    """
    value = _unpickled(data, where)
    if not value:
        return None
    recipe = _recipe(value)
    merged = {**value, **value.get("forward", {}), **value.get("backward", {})}  # of fusible operations
    tensors = {name: merged[name] for name in _names() if name in merged}
    if not tensors:
        return None
    if not all(isinstance(t, Tensor) and t.shape[-1] % experts == 0 for t in tensors.values()):
        raise FormatError(
            f"{where}: the slots are not those of {experts} experts. Give the number of experts of the rank "
            f"that wrote it.",
            path=where,
        )
    state = Fp8State(tensors, recipe, experts)
    by_slot = _version(te_version) < _EXPERT_MAJOR if te_version else recipe.keys() == {"name"}
    return _reordered(state, to_experts=True) if by_slot else state


def fill_fp8_state(module: nn.Module, state: Fp8State) -> None:
    """Copy a state into a module's own FP8 tensors, which must exist (`initialise_fp8_state`). Local.

    A history of another length is padded with zeros or cut. Fill it before parameters are copied into a
    module with FP8 parameters: TE quantises them with these scales.

    Raises:
        DeclarationError: the module has no FP8 state, or other slots.
    """
    if not is_expert_major(module) and state.experts > 1:
        state = _reordered(state, to_experts=False)
    own = list(direction_states(module))
    if not own:
        raise DeclarationError("the module has no FP8 state. Call initialise_fp8_state() first.")
    for target in own:
        scale = state.tensors[f"scale_{target.direction}"]
        if scale.shape != target.scale.shape:
            raise DeclarationError(
                f"the state has {tuple(scale.shape)} slots {target.direction} and the "
                f"{type(module).__name__} has {tuple(target.scale.shape)}. Give the state of a module of the "
                f"same class and number of experts."
            )
        history = state.tensors[f"amax_history_{target.direction}"]
        rows = min(len(history), len(target.amax_history))
        target.scale.copy_(scale)
        target.amax_history.zero_()
        target.amax_history[:rows].copy_(history[:rows])


def fp8_state_of(module: nn.Module, experts: int = 1) -> Fp8State | None:
    """Return a copy of a module's FP8 state; None if it has none. Local."""
    tensors: dict[str, Tensor] = {}
    recipe: Any = None
    for own in direction_states(module):
        tensors[f"scale_{own.direction}"] = own.scale.detach().to("cpu", copy=True)
        tensors[f"amax_history_{own.direction}"] = own.amax_history.detach().to("cpu", copy=True)
        recipe = own.recipe
    if not tensors:
        return None
    state = Fp8State(tensors, recipe_fields(recipe), experts)
    return state if is_expert_major(module) or experts == 1 else _reordered(state, to_experts=True)


def write_extra_state(
    state: Fp8State,
    recipe: Any,
    *,
    gemms: int = 1,
    is_operation: bool = False,
    te_version: str | None = None,
) -> Tensor:
    """Return the bytes that `set_extra_state` of a module of TE 2 accepts. Local.

    TE 2.18 and later read them only with NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE=1. `fill_fp8_state` needs no
    bytes and no variable.

    Args:
        state: the state.
        recipe: TE's recipe, which becomes that of the module.
        gemms: number of matrix multiplications: 2 for `LayerNormMLP`, that of the experts for a grouped
            module.
        is_operation: whether the module is a fusible operation (`te.pytorch.ops`).
        te_version: the version of TE that reads them, for a grouped module; None for 2.3 or later.
    """
    if te_version and _version(te_version) < _EXPERT_MAJOR and state.experts > 1:
        state = _reordered(state, to_experts=False)
    tensors = {name: tensor.clone() for name, tensor in state.tensors.items()}
    value: dict[str, Any]
    if is_operation:
        value = {
            mode: {"recipe": recipe, "extra_fp8_variables": {}}
            | {name: tensor for name, tensor in tensors.items() if name.endswith(direction)}
            for direction, mode in DIRECTIONS.items()
        }
    else:
        extra = {"fp8_checkpoint": True, "num_gemms": gemms}
        value = {"recipe": recipe, **tensors, "extra_fp8_variables": extra}
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def join_megatron_experts(
    states: Sequence[Fp8State], local_experts: int, *, te_version: str | None = None
) -> list[Fp8State]:
    """Return the state of each expert from those that Megatron-Core has stored one by one. Local.

    Megatron-Core splits the slots of a rank's experts as TE before 2.3 had them. With a later TE, the state
    that it stores for an expert has numbers of others. They are put back in place here.

    Args:
        states: of all experts, in order, as `read_extra_state` returns each.
        local_experts: number of experts of each rank that saved.
        te_version: the version of TE that saved; None for 2.3 or later.

    Raises:
        DeclarationError: the experts are not a multiple of `local_experts`.
    """
    if local_experts < 1 or len(states) % local_experts:
        raise DeclarationError(
            f"{len(states)} experts are not those of ranks with {local_experts} each. Give the number of "
            f"experts of each rank that saved."
        )
    if te_version and _version(te_version) < _EXPERT_MAJOR:
        return list(states)
    starts = range(0, len(states), local_experts)
    return [own for start in starts for own in _experts_of_rank(states[start : start + local_experts])]


def _experts_of_rank(states: Sequence[Fp8State]) -> Iterator[Fp8State]:
    """Yield the state of each expert of a rank, from those that Megatron-Core has stored for them."""
    # Megatron-Core took element [slot, expert] of the rank's vector as if its rows were slots.
    first = states[0]
    vectors = {n: torch.stack([s.tensors[n] for s in states], dim=-1).flatten(-2) for n in first.tensors}
    for expert in range(len(states)):
        own = {n: _split(v, (len(states), -1)).select(-2, expert) for n, v in vectors.items()}
        yield replace(first, tensors=own)


def _names() -> list[str]:
    return [f"{name}_{direction}" for direction in DIRECTIONS for name in ("scale", "amax_history")]


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(".")[:2])


def _unpickled(data: Tensor | io.BytesIO | bytes | None, where: str) -> dict[str, Any]:
    if data is None:
        return {}
    if isinstance(data, io.BytesIO):
        value = load_value(data.getvalue(), where=where)
    else:
        content = data if isinstance(data, bytes) else data.detach().cpu().numpy().tobytes()
        value = load_tensor_pickle(content, CLASSES, where=where) if content else None
    if value is not None and not isinstance(value, dict):
        raise FormatError(f"{where}: it has a {type(value).__name__}, and no FP8 state.", path=where)
    return value or {}


def _recipe(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recipe's name and plain fields; TE 1 has delayed scaling only, and names none."""
    inner = value.get("forward") or value.get("backward") or value
    recipe = inner.get("recipe")
    if not isinstance(recipe, PickledInstance):
        return {"name": "DelayedScaling"}
    fields: dict[str, Any] = {"name": recipe.of[1]}
    for name, field in sorted(recipe.state.items()):
        if isinstance(field, bool | int | float | str):
            fields[name] = field
        elif isinstance(field, PickledInstance) and field.of[1] == "Format":
            fields[name] = _format_name(field)
    return fields


def _format_name(member: PickledInstance) -> str:
    """Return the name of one of TE's formats. It is pickled by its largest values forward and backward.

    Python 3.11.0 to 3.11.3 pickles its name.
    """
    (helper,) = member.args
    value = helper.args if isinstance(helper, PickledInstance) else helper
    return str(value) if value in _FORMATS.values() else _FORMATS.get(value, "unknown")


def _reordered(state: Fp8State, *, to_experts: bool) -> Fp8State:
    """Change slots of all experts after each other into experts one after the other, or back."""
    sizes = (-1, state.experts) if to_experts else (state.experts, -1)
    changed = {
        name: _split(tensor, sizes).transpose(-1, -2).flatten(-2) for name, tensor in state.tensors.items()
    }
    return replace(state, tensors=changed)


def _split(tensor: Tensor, sizes: tuple[int, int]) -> Tensor:
    """Split the last axis into two."""
    return tensor.reshape(*tensor.shape[:-1], *sizes)
