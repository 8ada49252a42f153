"""Attention and transformer layers of Transformer Engine, with the names of our own layers.

Queries, keys and values are arrays of their own, `linear_qkv.weight.q`, whichever way TE keeps them: as three
parameters, one after the other, or interleaved by group.

Source: TE `pytorch.attention.multi_head_attention` (the order of rows), `pytorch.transformer`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torch import nn

from megackpt.contrib.transformer_engine.layers import NORM
from megackpt.contrib.transformer_engine.own_tensors import declare_own
from megackpt.contrib.transformer_engine.patterns import declare_alternating
from megackpt.contrib.transformer_engine.site import (
    OwnTensor,
    Site,
    components,
    own_tensors,
    parallel_mode,
    renamed,
)
from megackpt.entities import ShardedStateDict

# The children of modules, and what their keys begin with.
ATTENTION: Mapping[str, str] = {
    "layernorm_qkv": "linear_qkv",
    "qkv": "linear_qkv",
    "layernorm_query": "linear_q",
    "query_layer": "linear_q",
    "key_value": "linear_kv",
    "proj": "linear_proj",
    "q_norm": "q_layernorm",
    "k_norm": "k_layernorm",
}
LAYER: Mapping[str, str] = {"layernorm_mlp": "mlp", "inter_attention": "cross_attention"}

_PARTS = {"query": "q", "key": "k", "value": "v"}  # what parameters_split calls them

Declare: TypeAlias = Callable[[nn.Module, Site], ShardedStateDict]


def declare_children(
    module: nn.Module, site: Site, names: Mapping[str, str], declare: Declare
) -> ShardedStateDict:
    """Declare the children of a module by `declare`, with keys that begin with the given names."""
    state: ShardedStateDict = {}
    for name, child in module.named_children():
        below = site.below(names.get(name, name))
        state |= renamed(declare(child, below), below.prefix, f"{site.prefix}{name}.")
    return state


def declare_layer(module: nn.Module, site: Site, declare: Declare) -> ShardedStateDict:
    """Declare a `TransformerLayer`."""
    return declare_own(module, site, []) | declare_children(module, site, LAYER, declare)


def declare_multihead(module: Any, site: Site, declare: Declare) -> ShardedStateDict:
    """Declare a `MultiheadAttention`: its projections by heads, its other children by `declare`."""
    head, shared = module.hidden_size_per_attention_head, module.num_attention_heads // module.num_gqa_groups
    one_group = {
        "linear_qkv": {"q": shared * head, "k": head, "v": head},
        "linear_kv": {"k": head, "v": head},
        "linear_q": {"": shared * head},
    }
    state = declare_own(module, site, [])
    for name, child in module.named_children():
        key = ATTENTION.get(name, name)
        below = site.below(key)
        declared = (
            declare_projection(child, below, one_group[key], is_interleaved=module.qkv_weight_interleaved)
            if key in one_group
            else declare(child, below)
        )
        state |= renamed(declared, below.prefix, f"{site.prefix}{name}.")
    return state


def declare_projection(
    module: nn.Module, site: Site, one_group: Mapping[str, int], *, is_interleaved: bool
) -> ShardedStateDict:
    """Declare a projection to queries, keys and values.

    Args:
        module: a `Linear` or `LayerNormLinear`.
        site: where it is.
        one_group: the components of one query group, and their rows.
        is_interleaved: whether the groups follow each other; otherwise the components do.
    """
    is_cut = parallel_mode(module, site) == "column"
    own = own_tensors(module)
    state: ShardedStateDict = {}
    tensors = list(NORM)
    for name, value in own.items():
        kind = "weight" if name.endswith("weight") else "bias"
        if name.startswith("layer_norm_"):
            continue
        if name != kind or len(one_group) == 1:  # a parameter of one component
            part = "" if len(one_group) == 1 else "." + _PARTS[name.removesuffix(f"_{kind}")]
            tensors.append(OwnTensor(name, kind + part, 0 if is_cut else None))
        elif is_interleaved:
            state[site.prefix + name] = declare_alternating(kind, value, one_group, site, is_cut=is_cut)
        else:
            groups = value.shape[0] // sum(one_group.values())
            sizes = {part: rows * groups for part, rows in one_group.items()}
            tensors.append(OwnTensor(name, kind, components(sizes, site, is_cut)))
    return (
        declare_own(module, site, tensors, without=[name for name in own if site.prefix + name in state])
        | state
    )
