"""What our optimizers need to know about the parameters of Transformer Engine's modules."""

from __future__ import annotations

from typing import Any

from torch import nn

from megackpt.contrib.transformer_engine.declare import kind_of
from megackpt.contrib.transformer_engine.site import Site, own_tensors, parallel_mode
from megackpt.training.parallel import ParallelGroups
from megackpt.training.parallel.attributes import mark


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
