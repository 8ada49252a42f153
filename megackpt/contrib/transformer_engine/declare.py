"""Which function declares which class of Transformer Engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import nn

from megackpt.contrib.transformer_engine.blocks import (
    Declare,
    declare_children,
    declare_layer,
    declare_multihead,
)
from megackpt.contrib.transformer_engine.grouped import declare_grouped
from megackpt.contrib.transformer_engine.layers import (
    declare_attention,
    declare_linear,
    declare_mlp,
    declare_norm,
)
from megackpt.contrib.transformer_engine.names import Names, check_names
from megackpt.contrib.transformer_engine.operations import declare_operation, declare_sequence
from megackpt.contrib.transformer_engine.own_tensors import declare_own
from megackpt.contrib.transformer_engine.quantised import Quantised, check_quantised
from megackpt.contrib.transformer_engine.site import NAMES, QUANTISED, Site, own_tensors
from megackpt.entities import RankOffset, ShardedStateDict
from megackpt.errors import DeclarationError
from megackpt.training.parallel import ParallelGroups
from megackpt.training.parallel import sharded_state_dict as declare_any
from megackpt.training.parallel.attributes import is_marked
from megackpt.training.parallel.foreign_modules import Metadata, register_package

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
