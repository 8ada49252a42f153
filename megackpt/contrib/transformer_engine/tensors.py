"""The tensors of one module of Transformer Engine, declared; those of its children are not."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megackpt.contrib.transformer_engine.fp8_state import declare_fp8_state
from megackpt.contrib.transformer_engine.names import canonical_key
from megackpt.contrib.transformer_engine.quantised import without_codes
from megackpt.contrib.transformer_engine.site import OwnTensor, Site, own_tensors
from megackpt.entities import (
    LayoutComponent,
    RankOffset,
    ShardedBase,
    ShardedLayout,
    ShardedStateDict,
    ShardedTensor,
)
from megackpt.errors import MismatchError, truncated_list
from megackpt.plans.geometry import View

# Norms that are zero-centred (`zero_centered_gamma`): their weight is added to 1.
#
# Nothing in a weight says so. A checkpoint has an array next to it, `input_layernorm.weight.zero_centred`,
# for each zero-centred norm of Transformer Engine. Those of older versions and of other layers have none.

_RECORD = ".zero_centred"
_WEIGHTS = ("layer_norm_weight", "weight")  # in a layer that begins with a norm, and alone


def declare_zero_centred(module: Any, site: Site, tensors: Collection[OwnTensor]) -> ShardedStateDict:
    """Declare that the norm of a module is zero-centred, if it is; `tensors` are those of the module."""
    if site.names != "canonical" or not getattr(module, "zero_centered_gamma", False):
        return {}
    named = {tensor.name: tensor for tensor in tensors}
    weight = next((named[name] for name in _WEIGHTS if name in named), None)
    if weight is None:
        return {}
    record = ShardedTensor.from_rank_offsets(
        site.key(weight.key) + _RECORD,
        torch.ones(1, dtype=torch.int8),
        *site.stack,
        replica_id=(0, site.groups.tp.rank, site.groups.dp_cp.rank),
        prepend_axis_num=len(site.stack),
    )
    return {site.prefix + weight.name + _RECORD: replace(record, if_missing="keep")}


def check_zero_centred(state: ShardedStateDict, stored: Collection[str]) -> None:
    """Check that the norms to load are zero-centred if the stored ones are, and only then. Local.

    Only for checkpoints that were saved from Transformer Engine's layers by a version that records it. In
    others, zero-centred norms look like plain ones.

    Args:
        state: from `sharded_state_dict` of the model to load into.
        stored: keys of the checkpoint, as `load_sharded_metadata` returns them.

    Raises:
        MismatchError: the norms differ. Nothing was loaded.
    """
    asked = {entity.key for entity in state.values()}
    ours = {key.removesuffix(_RECORD) for key in asked if key.endswith(_RECORD)}
    theirs = {key.removesuffix(_RECORD) for key in stored if key.endswith(_RECORD)}
    # Each norm by the name that it has on its own, whichever of its names the checkpoint has.
    weights = {canonical_key(key) for key in asked} & {canonical_key(key) for key in stored}
    wrong = sorted(weights & (ours ^ theirs))
    if wrong:
        raise _mismatch(wrong, ours)


def _mismatch(keys: Sequence[str], ours: Collection[str]) -> MismatchError:
    lines = [f"{key!r}: zero-centred in the {'model' if key in ours else 'checkpoint'} only" for key in keys]
    return MismatchError(
        f"{len(keys)} norms are not what the checkpoint has:\n{truncated_list(lines)}\nBuild the model with "
        f"the zero_centered_gamma of the checkpoint, or load through a map that adds 1, such as "
        f"megatron_map(norm_added=1).",
        key=keys[0],
    )


# Rows of several arrays that alternate in one tensor.
#
# Queries, keys and values follow each other group by group, gate and up block by block. Each becomes an array
# of its own, whose rows are in the order of the heads or features: what our layers and Hugging Face store.


def declare_alternating(
    name: str,
    value: Tensor,
    pattern: Mapping[str, int],
    site: Site,
    *,
    is_cut: bool,
    axes: tuple[RankOffset, ...] | None = None,
) -> ShardedBase:
    """Declare a tensor along whose dim 0 a pattern of rows repeats. Local.

    Args:
        name: of the tensor; its component `q` is stored as `name.q`.
        value: the local tensor.
        pattern: the number of rows of each component in one repetition, in order.
        site: where the module is.
        is_cut: whether tp cuts the repetitions; otherwise all ranks of tp have all of them.
        axes: `(axis, index, fragments)` of the leading axes that the tensor lacks; None for those of `site`.

    >>> from megackpt.training.parallel import ParallelGroups, ParallelLayout
    >>> import torch
    >>> site = Site(ParallelGroups.offline(ParallelLayout(), 0), "", (), None)
    >>> rows = declare_alternating("w", torch.arange(6), {"q": 2, "k": 1}, site, is_cut=False)
    >>> [(t.key, t.data.tolist(), t.global_offset) for t in rows.tensors()]
    [('w.q', [0, 1], (0,)), ('w.k', [2], (0,)), ('w.q', [3, 4], (2,)), ('w.k', [5], (1,))]
    """
    axes = site.stack if axes is None else axes
    tp, width = site.groups.tp, sum(pattern.values())
    repeats = value.shape[0] // width
    first, total = (tp.rank * repeats, tp.size * repeats) if is_cut else (0, repeats)
    components = []
    for repeat in range(repeats):
        start = repeat * width
        for component, rows in pattern.items():
            view = View.of(value.shape).narrow(0, start, rows)
            components.append(_component(component, view, first + repeat, total, axes))
            start += rows
    layout = ShardedLayout(
        site.key(name),
        without_codes(value),
        tuple(value.shape),
        tuple(components),
        replica_id=(0, 0 if is_cut else tp.rank, site.groups.dp_cp.rank),
        prepend_axis_num=len(axes),
    )
    return site.declare_codes(axes, layout, value, is_cut=is_cut)


def _component(
    name: str, view: View, index: int, total: int, axes: tuple[RankOffset, ...]
) -> LayoutComponent:
    rows, *others = view.shape
    layers = tuple(n for _, _, n in axes)
    return LayoutComponent(
        name,
        view,
        global_shape=(*layers, rows * total, *others),
        global_offset=(*(i for _, i, _ in axes), rows * index, *(0 for _ in others)),
        axis_fragmentations=(*layers, total, *(1 for _ in others)),
    )


# The tensors of one module, without those of its children.


def declare_own(
    module: nn.Module, site: Site, tensors: Sequence[OwnTensor], *, without: Collection[str] = ()
) -> ShardedStateDict:
    """Declare the named tensors of a module, and its others as equal on all ranks of tp.

    The module's FP8 state, and that its norm is zero-centred, are declared too; its children are not.
    `without` are names that are declared otherwise.
    """
    own = own_tensors(module)
    named = {*(tensor.name for tensor in tensors), *without}
    others = [OwnTensor(name, name, None) for name in own if name not in named]
    present = [tensor for tensor in (*tensors, *others) if tensor.name in own]
    state = {
        site.prefix + tensor.name: site.declare(tensor.key, own[tensor.name], tensor.sharding)
        for tensor in present
    }
    return state | declare_zero_centred(module, site, present) | declare_fp8_state(module, site)
