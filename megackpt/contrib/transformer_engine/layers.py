"""Linear layers, norms and attention of Transformer Engine, alone.

Source: TE `pytorch.module`, Megatron-Core `extensions.transformer_engine` (what tp cuts).
"""

from __future__ import annotations

from typing import Any

from torch import nn

from megackpt.contrib.transformer_engine.own_tensors import declare_own
from megackpt.contrib.transformer_engine.patterns import declare_alternating
from megackpt.contrib.transformer_engine.site import (
    OwnTensor,
    Site,
    alternating_parts,
    check_tp_size,
    components,
    linear_sharding,
    own_tensors,
    parallel_mode,
)
from megackpt.entities import ShardedStateDict
from megackpt.training.parallel import TpSharding

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
