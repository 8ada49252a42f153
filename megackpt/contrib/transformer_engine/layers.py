"""Linear layers, also grouped ones, norms and attention of Transformer Engine.

Source: TE `pytorch.module`, Megatron-Core `extensions.transformer_engine` (what tp cuts).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megackpt.contrib.transformer_engine.fp8_state import declare_fp8_state
from megackpt.contrib.transformer_engine.quantised import declare_group, members_of, without_codes
from megackpt.contrib.transformer_engine.site import (
    OwnTensor,
    ParallelMode,
    Site,
    alternating_parts,
    check_tp_size,
    components,
    is_cut,
    linear_sharding,
    own_tensors,
    parallel_mode,
)
from megackpt.contrib.transformer_engine.tensors import declare_alternating, declare_own
from megackpt.entities import (
    RankOffset,
    ShardedBase,
    ShardedLayout,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
)
from megackpt.errors import DeclarationError
from megackpt.training.parallel import TpSharding
from megackpt.training.parallel.mixin import declare_tensor

NORM = (OwnTensor("layer_norm_weight", "layer_norm_weight", None),
        OwnTensor("layer_norm_bias", "layer_norm_bias", None))  # fmt: skip
"""The tensors of a norm inside of the layer that follows it."""


def declare_linear(module: nn.Module, site: Site) -> ShardedStateDict:
    """Declare a `Linear` or `LayerNormLinear`.

    A weight of its own, named by `parameters_split`, is stored as a component: `q_weight` as `weight.q`.
    """
    tensors = linear_tensors(module, site)
    pattern = alternating_parts(module)
    mode = parallel_mode(module, site)
    if pattern is None or mode == "row":
        return declare_own(module, site, [*NORM, *tensors])
    own = own_tensors(module)
    state = declare_own(module, site, NORM, without=[tensor.name for tensor in tensors])
    for name, key, _ in tensors:
        state[site.prefix + name] = declare_alternating(
            key, own[name], pattern, site, is_cut=mode == "column"
        )
    return state


def linear_tensors(module: Any, site: Site) -> list[OwnTensor]:
    """Return the weights and biases of a `Linear` or `LayerNormLinear`, and how tp cuts them."""
    mode = parallel_mode(module, site)
    own = own_tensors(module)
    tensors = []
    for kind, names in (("weight", module.weight_names), ("bias", module.bias_names)):
        for name in names:
            if name not in own:
                continue
            sharding = linear_sharding(module, kind, own[name].shape[0], mode, site)
            tensors.append(OwnTensor(name, component_key(name, kind), sharding))
    return tensors


def component_key(name: str, kind: str) -> str:
    """Return the name in keys of a weight or bias that `parameters_split` may have named.

    >>> component_key("query_weight", "weight"), component_key("bias", "bias")
    ('weight.query', 'bias')
    """
    part = name.removesuffix(kind).rstrip("_")
    return f"{kind}.{part}" if part else kind


def declare_mlp(module: Any, site: Site) -> ShardedStateDict:
    """Declare a `LayerNormMLP`: the first layer cut by rows, the second by columns.

    The names are those of two linear layers. The first layer of a gated MLP has the components gate and up.
    """
    own = own_tensors(module)
    rows, inner = own["fc1_weight"].shape[0], own["fc2_weight"].shape[1]
    is_cut = module.tp_size > 1 or module.set_parallel_mode
    if is_cut:
        check_tp_size(module, site)
    first: int | TpSharding | None = 0 if is_cut else None
    if rows == 2 * inner:
        first = components({"gate": inner, "up": inner}, site, is_cut)
    return declare_own(module, site, [
        OwnTensor("layer_norm_weight", "linear_fc1.layer_norm_weight", None),
        OwnTensor("layer_norm_bias", "linear_fc1.layer_norm_bias", None),
        OwnTensor("fc1_weight", "linear_fc1.weight", first),
        OwnTensor("fc1_bias", "linear_fc1.bias", first),
        OwnTensor("fc2_weight", "linear_fc2.weight", 1 if is_cut else None),
        OwnTensor("fc2_bias", "linear_fc2.bias", None),
    ])  # fmt: skip


def declare_norm(module: nn.Module, site: Site) -> ShardedStateDict:
    """Declare a `LayerNorm` or `RMSNorm`: equal on all ranks of tp."""
    return declare_own(module, site, [])


def declare_attention(module: nn.Module, site: Site) -> ShardedStateDict:
    """Declare a `DotProductAttention`: a learnable softmax offset for each head of this rank."""
    own = own_tensors(module)
    if "softmax_offset" in own:
        check_tp_size(module, site)
    return declare_own(module, site, [OwnTensor("softmax_offset", "softmax_offset", 0)])


# Grouped linear layers of Transformer Engine: the experts of one rank.
#
# Every expert is a matrix of its own (`weight0`, `weight1`, ...), or all are one grouped tensor `weight`.
# Both are stored as one array `weight` with an axis over all experts, after the axes of the layers:
# `[experts, out, in]`. It is cut over ep, and each matrix over etp as `parallel_mode` says.
#
# Source: TE `pytorch.module.grouped_linear`; Megatron-Core `TEGroupedLinear._sharded_state_dict_grouped`.


def declare_grouped(
    module: Any,
    site: Site,
    parts: Sequence[str] | None = None,
    *,
    pattern: Mapping[str, int] | None = None,
) -> ShardedStateDict:
    """Declare a `GroupedLinear`, whose rows are the equal components `parts` (see `linear_sharding`).

    With `pattern`, components alternate in blocks of so many rows. It is that of `set_components` if None.

    Raises:
        DeclarationError: the parts alternate in one grouped parameter.
    """
    site = replace(site, groups=site.groups.experts)
    count = number_of_experts(module)
    mode = parallel_mode(module, site)
    pattern = alternating_parts(module) if pattern is None else pattern
    state: ShardedStateDict = {}
    for name, value in own_tensors(module).items():
        kind, expert = _kind_and_expert(name)
        rows = value.shape[1 if expert is None else 0]
        sharding = linear_sharding(module, kind, rows, mode, site, parts)
        if pattern is not None and mode != "row":
            state[site.prefix + name] = _declare_alternating(kind, value, pattern, site, expert, count, mode)
        elif expert is None:
            state[site.prefix + name] = _declare_stacked(kind, value, sharding, site, count)
        else:
            state[site.prefix + name] = _declare_expert(kind, value, sharding, site, expert, count)
    return state | declare_fp8_state(module, site, count)


def number_of_experts(module: Any) -> int:
    """Return the number of experts of a grouped module on this rank."""
    count: int = module.num_gemms if hasattr(module, "num_gemms") else module.num_groups
    return count


def _kind_and_expert(name: str) -> tuple[str, int | None]:
    """Split `weight3` into its kind and local expert; a grouped tensor has no single one."""
    kind = name.rstrip("0123456789")
    return kind, int(name[len(kind) :]) if name != kind else None


def _declare_expert(
    kind: str, value: Tensor, sharding: int | TpSharding | None, site: Site, expert: int, count: int
) -> ShardedBase:
    return site.declare_in(_axes_of(expert, count, site), kind, value, sharding)


def _declare_alternating(
    kind: str,
    value: Tensor,
    pattern: Mapping[str, int],
    site: Site,
    expert: int | None,
    count: int,
    mode: ParallelMode | None,
) -> ShardedBase:
    if expert is None:
        raise DeclarationError(
            f"{site.prefix + kind!r}: gate and up alternate (glu_interleave_size) in one parameter of all "
            f"experts. Build the model with single_grouped_weight=False, so that each expert is a parameter.",
            key=site.prefix + kind,
        )
    axes = _axes_of(expert, count, site)
    return declare_alternating(kind, value, pattern, site, is_cut=mode == "column", axes=axes)


def _axes_of(expert: int, count: int, site: Site) -> tuple[RankOffset, ...]:
    """Return the leading axes of one of `count` local experts: those of the layers, then that of experts."""
    ep = site.groups.ep
    return (*site.stack, (len(site.stack), ep.rank * count + expert, ep.size * count))


def _declare_stacked(
    kind: str, value: Tensor, sharding: int | TpSharding | None, site: Site, count: int
) -> ShardedBase:
    ep, of_one = site.groups.ep, sharding
    if isinstance(sharding, int):
        sharding += 1
    elif sharding is not None:
        sharding = replace(sharding, dim=sharding.dim + 1)
    cuts = (*site.stack, (len(site.stack), ep.rank, ep.size))
    members = members_of(value)
    if members:
        empty = torch.empty(value.shape, dtype=value.dtype, device="meta")
        shape = declare_tensor(site.key(kind), empty, sharding, site.groups, site.stack, cuts)
        assert isinstance(shape, ShardedTensor | ShardedLayout)
        declared = [_declare_member(kind, m, of_one, site, i, count) for i, m in enumerate(members)]
        return declare_group(shape, value, declared, site.quantised)
    view = plain_view(site.prefix + kind, value)
    entity = declare_tensor(site.key(kind), view, sharding, site.groups, site.stack, cuts)
    return entity if view is value else _of_grouped_parameter(entity, value)


def _declare_member(
    kind: str, member: Tensor, sharding: int | TpSharding | None, site: Site, expert: int, count: int
) -> ShardedBase:
    """Declare one quantised matrix of a grouped parameter, under the keys of a parameter of its own."""
    axes = _axes_of(expert, count, site)
    plain = declare_tensor(site.key(kind), without_codes(member), sharding, site.groups, axes, axes)
    return site.declare_codes(axes, plain, member, is_cut=is_cut(sharding), in_group=True)


def _of_grouped_parameter(entity: ShardedBase, parameter: Tensor) -> ShardedBase:
    """Declare a grouped parameter, by which optimizers find it, as the view of its memory in `entity`."""
    assert isinstance(entity, ShardedTensor | ShardedLayout)
    return ShardedTensorFactory(
        entity.key,
        parameter,
        build_fn=lambda key, tensor, replica_id, flattened_range: replace(entity, key=key),
        merge_fn=lambda loaded: parameter,
        replica_id=entity.replica_id,
        of_states=entity.without_data(),
    )


def plain_view(key: str, value: Tensor) -> Tensor:
    """Return the elements of a grouped tensor `[experts, ...]`, as a tensor in the same memory.

    Raises:
        DeclarationError: they are quantised.
    """
    data = getattr(value, "rowwise_data", None)
    if data is None:
        return value
    if getattr(value, "quantizer", None) is not None:
        raise DeclarationError(
            f"{key!r}: all experts are one quantised {type(value).__name__}, whose codes are not values. "
            f"Build the model with single_grouped_weight=False, so that each expert is a parameter.",
            key=key,
        )
    view: Tensor = data.view(value.shape)
    return view
