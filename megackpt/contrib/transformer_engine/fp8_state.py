"""FP8 state of Transformer Engine's modules: scales and histories of largest values, as named arrays.

Only delayed scaling has such state. Each tensor that a matrix multiplication quantises has a slot: input,
weight and output forward, gradients of output and input backward.

    <module>.fp8.scale_fwd           float32 [slots]
    <module>.fp8.amax_history_fwd    float32 [length, slots]
    <module>.fp8.recipe              an object: the recipe's name and fields

Grouped linear modules have an axis over all experts first, `[experts, slots]` and `[experts, length, slots]`,
so that every expert keeps its own numbers at another ep. In memory a rank has the slots of its experts one
after the other, expert by expert (TE 2.3 and later) or slot by slot (before).

The ranks of tp, cp and dp have equal numbers: TE reduces them over these ranks in each step.

Source: TE `pytorch.module.base` (`get_extra_state`, `adjust_amax_history_length`), `pytorch.quantization`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from megackpt.contrib.transformer_engine.site import Site
from megackpt.entities import Layout, ShardedLayout, ShardedObject, ShardedStateDict
from megackpt.errors import DeclarationError

DIRECTIONS = {"fwd": "forward", "bwd": "backward"}


class DirectionState(NamedTuple):
    """The state of the forward or backward tensors of a module, in its own memory.

    Attributes:
        direction: "fwd" or "bwd".
        scale: `[slots of all experts]`.
        amax_history: `[length, slots of all experts]`.
        recipe: TE's recipe.
    """

    direction: str
    scale: Tensor
    amax_history: Tensor
    recipe: Any


def direction_states(module: nn.Module) -> Iterator[DirectionState]:
    """Yield the FP8 state that a module has; nothing for recipes without state, or before the first step."""
    operations = getattr(module, "_fp8_metas", None) or {}
    for direction, mode in DIRECTIONS.items():
        meta = operations.get(mode) or getattr(module, "fp8_meta", None) or {}
        state: Any = meta.get(f"scaling_{direction}")
        if hasattr(state, "amax_history"):
            yield DirectionState(direction, state.scale, state.amax_history, meta.get("recipe"))


def declare_fp8_state(module: nn.Module, site: Site, experts: int | None = None) -> ShardedStateDict:
    """Declare the FP8 state of a module, whose slots are those of `experts` local experts."""
    state: ShardedStateDict = {}
    for own in direction_states(module):
        for name, value in (("scale", own.scale), ("amax_history", own.amax_history)):
            key = f"fp8.{name}_{own.direction}"
            layout = Layout.of(value.shape, key=site.key(key))
            if experts is not None:
                layout = experts_first(layout, experts, is_expert_major(module))
            state[site.prefix + key] = _declare(key, value, layout, site, has_experts=experts is not None)
        state[f"{site.prefix}fp8.recipe"] = _declare_recipe(own.recipe, site, has_experts=experts is not None)
    return state


def experts_first(layout: Layout, experts: int, expert_major: bool) -> Layout:
    """Split the last axis of a layout into experts and slots, and put the experts first."""
    axes = len(next(iter(layout.views.values())).axes)
    split = layout.unflatten(axes - 1, (experts, -1) if expert_major else (-1, experts))
    axis = axes - 1 if expert_major else axes
    return split.transpose((axis, *(i for i in range(axes + 1) if i != axis)))


def is_expert_major(module: nn.Module) -> bool:
    """Return whether the slots of a grouped module are expert by expert, as TE 2.3 and later have them."""
    offsets = getattr(module, "_offsets", None)
    if offsets is None:  # a fusible operation, or one of TE 2.0 to 2.2
        return hasattr(module, "_fp8_metas")
    return bool(offsets["weight"] == 1)


def initialise_fp8_state(model: nn.Module, recipe: Any) -> None:
    """Make the FP8 state of all TE modules of a model, so that a load can fill it. Local.

    TE makes it in the first forward pass. Call this before a load, inside of TE's context with the same
    recipe:

        with te.autocast(enabled=True, recipe=recipe):
            initialise_fp8_state(model, recipe)

    State that exists stays. A recipe without state needs no call.

    Raises:
        DeclarationError: it is called outside of that context.
    """
    for name, module in model.named_modules():
        if hasattr(module, "reset_recipe_state"):
            module.reset_recipe_state(recipe=recipe)
        elif hasattr(module, "init_fp8_metadata") and _has_gemms(module, recipe):
            module.init_fp8_metadata(num_gemms=_gemms_of(module))
            if recipe.delayed() and not list(direction_states(module)):
                raise DeclarationError(
                    f"{name!r}: TE made no FP8 state. Call initialise_fp8_state() inside of "
                    f"`with te.autocast(enabled=True, recipe=recipe):`.",
                    key=name,
                )


def _has_gemms(module: Any, recipe: Any) -> bool:
    """Return whether TE keeps FP8 state for a module; attention has some only if the recipe says so."""
    return not hasattr(module, "flash_attention") or bool(getattr(recipe, "fp8_dpa", False))


def _gemms_of(module: Any) -> int:
    """Return the number of matrix multiplications that TE counts in a module."""
    if hasattr(module, "flash_attention"):
        return 3
    if hasattr(module, "fc2_weight"):
        return 2
    return int(getattr(module, "num_gemms", 1))


def _declare(key: str, value: Tensor, layout: Layout, site: Site, *, has_experts: bool) -> ShardedLayout:
    ep, groups = site.groups.ep, site.groups
    axes = (*site.stack, (len(site.stack), ep.rank, ep.size)) if has_experts else site.stack
    return ShardedLayout.of(
        site.key(key),
        value,
        layout,
        *axes,
        replica_id=(0, groups.tp.rank, groups.dp_cp.rank),
        prepend_axis_num=len(site.stack),
        # A history of another length is padded with zeros or cut, as TE does. A scale of another number of
        # slots is an error, and so is a history with it.
        allow_shape_mismatch="amax_history" in key,
    )


def _declare_recipe(recipe: Any, site: Site, *, has_experts: bool) -> ShardedObject:
    groups = site.groups
    return ShardedObject(
        key=site.key("fp8.recipe"),
        data=recipe_fields(recipe),
        global_shape=tuple(n for _, _, n in site.stack) or (1,),
        global_offset=tuple(i for _, i, _ in site.stack) or (0,),
        replica_id=(groups.ep.rank if has_experts else 0, groups.tp.rank, groups.dp_cp.rank),
    )


def recipe_fields(recipe: Any) -> dict[str, Any]:
    """Return a recipe as plain values: `name`, and those fields that are plain or members of enumerations."""
    fields: dict[str, Any] = {"name": type(recipe).__name__}
    for name, value in sorted(vars(recipe).items()):
        if isinstance(value, enum.Enum):
            fields[name] = value.name
        elif isinstance(value, bool | int | float | str):
            fields[name] = value
    return fields
