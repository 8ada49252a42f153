"""The classes of Transformer Engine, each with the function that declares it; blocks and unknown classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from torch import nn

from megackpt.contrib.transformer_engine.layers import (
    NORM,
    declare_attention,
    declare_grouped,
    declare_linear,
    declare_mlp,
    declare_norm,
)
from megackpt.contrib.transformer_engine.names import Names, check_names
from megackpt.contrib.transformer_engine.operations import declare_operation, declare_sequence
from megackpt.contrib.transformer_engine.quantised import Quantised, check_quantised
from megackpt.contrib.transformer_engine.site import (
    NAMES,
    QUANTISED,
    OwnTensor,
    Site,
    components,
    own_tensors,
    parallel_mode,
    renamed,
)
from megackpt.contrib.transformer_engine.tensors import declare_alternating, declare_own
from megackpt.entities import RankOffset, ShardedStateDict
from megackpt.errors import DeclarationError
from megackpt.training.parallel import ParallelGroups
from megackpt.training.parallel import sharded_state_dict as declare_any
from megackpt.training.parallel.attributes import is_marked, mark
from megackpt.training.parallel.foreign_modules import Metadata, register_package

# Attention and transformer layers of Transformer Engine, with the names of our own layers.
#
# Queries, keys and values are arrays of their own, `linear_qkv.weight.q`, whichever way TE keeps them: as
# three parameters, one after the other, or interleaved by group.
#
# Source: TE `pytorch.attention.multi_head_attention` (the order of rows), `pytorch.transformer`.

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


PACKAGE = "transformer_engine"


def sharded_state_dict(
    module: nn.Module,
    groups: ParallelGroups,
    prefix: str = "",
    sharded_offsets: Sequence[RankOffset] = (),
    metadata: Metadata = None,
    *,
    names: Names = "canonical",
    quantised: Quantised = "values",
) -> ShardedStateDict:
    """Declare what this rank has of a module with Transformer Engine's modules anywhere in it. Local.

    Names in the dict are those of `module.state_dict()`; keys of the checkpoint may be others (see `names`).

    Args:
        module: any module.
        groups: the ranks around this one.
        prefix: of every name and key.
        sharded_offsets: `(axis, index, fragments)` of leading axes before the tensors' own.
        metadata: hints, passed to children.
        names: "canonical" for the keys of our own layers, or "megatron" for those of Megatron-Core's TE
            layers, which keep a norm with the layer after it.
        quantised: what is stored of quantised parameters (`quantized_model_init`): "values", which load at
            every layout and are quantised again; "codes" and scales, bit for bit, for shards of the same
            shapes; or nothing, if the optimizer has "masters". `LoadReport.transformed` names the form.

    Raises:
        DeclarationError: a module was built for another tp, or is of a class of TE that is not supported and
            that tp cuts.
    """
    choices = {NAMES: check_names(names), QUANTISED: check_quantised(quantised)}
    hints = {**(metadata or {}), **choices}
    return declare_any(module, groups, prefix, sharded_offsets, hints)


def declare_module_of_te(
    module: nn.Module,
    groups: ParallelGroups,
    prefix: str = "",
    sharded_offsets: Sequence[RankOffset] = (),
    metadata: Metadata = None,
) -> ShardedStateDict:
    """Declare a module of Transformer Engine, or of a class derived from one. Local.

    Arguments and errors are those of `sharded_state_dict`. A method of that name is not called.
    """
    site = Site(groups, prefix, tuple(sharded_offsets), metadata)
    kind = kind_of(module)
    if kind in BLOCKS:
        return BLOCKS[kind](module, site, _declare_child)
    if hasattr(module, "basic_ops"):
        return declare_sequence(module, site)
    if kind in LAYERS:
        return LAYERS[kind](module, site)
    return _declare_unknown(module, site)


def kind_of(module: nn.Module) -> str:
    """Return the name of the nearest class of Transformer Engine that a module is an instance of."""
    bases = type(module).__mro__
    return next((b.__name__ for b in bases if b.__module__.partition(".")[0] == PACKAGE), "")


def _declare_child(module: nn.Module, site: Site) -> ShardedStateDict:
    return declare_any(module, site.groups, site.prefix, site.stack, site.metadata)


def _declare_unknown(module: nn.Module, site: Site) -> ShardedStateDict:
    """Declare a module of another class, whose tensors are equal on all ranks of tp."""
    for name, value in own_tensors(module).items():
        if is_marked(value, "tensor_model_parallel") and site.groups.tp.size > 1:
            raise DeclarationError(
                f"{site.prefix + name!r}: {type(module).__name__} of Transformer Engine is not known here, "
                f"and tp cuts this parameter. Give its class a sharded_state_dict, or derive it from "
                f"megackpt.training.parallel.ShardedModule.",
                key=site.prefix + name,
            )
    return declare_own(module, site, []) | declare_children(module, site, {}, _declare_child)


LAYERS: Mapping[str, Callable[[nn.Module, Site], ShardedStateDict]] = {
    "Linear": declare_linear,
    "LayerNormLinear": declare_linear,
    "LayerNormMLP": declare_mlp,
    "GroupedLinear": declare_grouped,
    "LayerNorm": declare_norm,
    "RMSNorm": declare_norm,
    "DotProductAttention": declare_attention,
    "BasicLinear": declare_operation,
    "Bias": declare_operation,
    "Sequential": declare_sequence,
}
BLOCKS: Mapping[str, Callable[[nn.Module, Site, Declare], ShardedStateDict]] = {
    "MultiheadAttention": declare_multihead,
    "TransformerLayer": declare_layer,
}

register_package(PACKAGE, declare_module_of_te)


# A base class for those who derive from Transformer Engine's modules.


class TransformerEngineMixin(nn.Module):
    """Adds `sharded_state_dict` to a class of Transformer Engine. Put it before that class.

        class Projection(TransformerEngineMixin, te.Linear):
            pass

        Projection(groups, 16, 32, parallel_mode="column", tp_size=groups.tp.size)

    Attributes:
        groups: the ranks around this one.
    """

    groups: ParallelGroups

    def __init__(self, groups: ParallelGroups, *args: Any, **kwargs: Any) -> None:
        self.groups = groups
        super().__init__(*args, **kwargs)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Sequence[RankOffset] = (), metadata: Metadata = None
    ) -> ShardedStateDict:
        """Declare what this rank has of this module and its children; see `declare_module_of_te`. Local."""
        return declare_module_of_te(self, self.groups, prefix, sharded_offsets, metadata)


# What our optimizers need to know about the parameters of Transformer Engine's modules.


def mark_parameters(model: nn.Module, groups: ParallelGroups) -> None:
    """Mark the parameters of TE's modules for our optimizers. Local; call it before making one.

    TE marks the weights of all linear modules as cut over tp, also of those that every rank has whole, and
    nothing as a parameter of experts. Here `tensor_model_parallel` becomes what the modules are, and the
    parameters of grouped linear modules get `expert_parallel`. `sequence_parallel` stays as TE sets it.

    Args:
        model: any module.
        groups: the ranks around this one.

    Raises:
        DeclarationError: a module was built for another number of ranks than tp has.
    """
    for name, module in model.named_modules():
        kind = kind_of(module)
        if kind == "GroupedLinear":
            for parameter in own_tensors(module).values():
                mark(parameter, "expert_parallel")
            _set_cut(module, parallel_mode(module, Site(groups.experts, name, (), None)))
        elif kind in ("Linear", "LayerNormLinear", "BasicLinear") and not hasattr(module, "basic_ops"):
            _set_cut(module, parallel_mode(module, Site(groups, name, (), None)))
        elif kind == "LayerNormMLP" and not _is_cut(module):
            _set_cut(module, None)


def _is_cut(module: Any) -> bool:
    return bool(module.tp_size > 1 or module.set_parallel_mode)


def _set_cut(module: nn.Module, mode: str | None) -> None:
    """Set `tensor_model_parallel` of a module's weights and biases; norms in it are never cut."""
    for name, parameter in own_tensors(module).items():
        is_bias = "bias" in name
        is_cut = mode == "column" or (mode == "row" and not is_bias)
        parameter.tensor_model_parallel = is_cut and not name.startswith("layer_norm")  # type: ignore[attr-defined]
