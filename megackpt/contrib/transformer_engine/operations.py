"""Fusible operations of Transformer Engine (`te.pytorch.ops`) and the MLP that is made of them.

A sequence of a norm, a linear operation, an activation and a second linear operation has the keys of an MLP:
`linear_fc1.layer_norm_weight`, `linear_fc1.weight`, `linear_fc2.weight`. Other sequences keep their numbers.
The linear operation before a gated activation has the components gate and up.

Source: TE `pytorch.ops`; Megatron-Core `TEFusedMLP`, whose checkpoints have the same names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn

from megackpt.contrib.transformer_engine.layers import declare_grouped
from megackpt.contrib.transformer_engine.site import (
    OwnTensor,
    ParallelMode,
    Site,
    linear_sharding,
    own_tensors,
    parallel_mode,
    renamed,
)
from megackpt.contrib.transformer_engine.tensors import declare_alternating, declare_own
from megackpt.entities import ShardedStateDict

LINEAR = ("BasicLinear", "GroupedLinear")
NORMS = ("LayerNorm", "RMSNorm")
SUMS = ("AllReduce", "ReduceScatter")


class Operation(NamedTuple):
    """A basic operation of a sequence, its class's name, and its name in the state dict."""

    module: Any
    kind: str
    name: str


def basic_operations(module: nn.Module) -> Iterator[Operation]:
    """Yield the basic operations of a `Sequential`, or of an operation that is made of others, in order."""
    made_of = getattr(module, "basic_ops", None)
    if made_of is not None:
        for index, operation in enumerate(made_of):
            yield Operation(operation, type(operation).__name__, f"basic_ops.{index}")
        return
    for name, child in module.named_children():
        if hasattr(child, "basic_ops"):
            for operation in basic_operations(child):
                yield operation._replace(name=f"{name}.{operation.name}")
        else:
            yield Operation(child, type(child).__name__, name)


def declare_operation(module: nn.Module, site: Site) -> ShardedStateDict:
    """Declare a basic operation alone."""
    return _declare_operation([Operation(module, type(module).__name__, "")], 0, site)


def declare_sequence(module: nn.Module, site: Site) -> ShardedStateDict:
    """Declare a `Sequential`, or an operation that is made of others (`ops.Linear`).

    Raises:
        DeclarationError: experts with interleaved gate and up in one grouped parameter.
    """
    operations = list(basic_operations(module))
    state: ShardedStateDict = {}
    for index, operation in enumerate(operations):
        key = _key(operations, index)
        below = site.below(key) if key else site
        declared = _declare_operation(operations, index, below)
        state |= renamed(declared, below.prefix, f"{site.prefix}{operation.name}.")
    return state


def _declare_operation(operations: Sequence[Operation], index: int, site: Site) -> ShardedStateDict:
    module, kind, _ = operations[index]
    if kind in LINEAR:
        return _declare_linear(operations, index, site)
    if kind == "Bias":
        return _declare_bias(operations, index, site)
    is_fused = kind in NORMS and _role(operations, index) is not None
    names = ["weight", "bias"] if is_fused else []
    return declare_own(module, site, [OwnTensor(name, f"layer_norm_{name}", None) for name in names])


def _declare_linear(operations: Sequence[Operation], index: int, site: Site) -> ShardedStateDict:
    module, kind, _ = operations[index]
    gated = _gated_activation(operations, index)
    parts = ("gate", "up") if gated is not None else None
    width = getattr(gated, "glu_interleave_size", None)
    if kind == "GroupedLinear":
        pattern = None if width is None else {"gate": width, "up": width}
        return declare_grouped(module, site, parts, pattern=pattern)
    mode = _mode(operations, index, site)
    if width is not None:
        weight = own_tensors(module)["weight"]
        pattern = {"gate": width, "up": width}
        entity = declare_alternating("weight", weight, pattern, site, is_cut=mode == "column")
        return declare_own(module, site, [], without=["weight"]) | {f"{site.prefix}weight": entity}
    rows = own_tensors(module)["weight"].shape[0]
    sharding = linear_sharding(module, "weight", rows, mode, site, parts)
    return declare_own(module, site, [OwnTensor("weight", "weight", sharding)])


def _declare_bias(operations: Sequence[Operation], index: int, site: Site) -> ShardedStateDict:
    """Declare a `Bias` after a linear operation, cut as its outputs are."""
    module = operations[index].module
    linear = next((i for i in range(index - 1, -1, -1) if operations[i].kind in LINEAR), None)
    if linear is None:
        is_cut = getattr(module, "tensor_parallel", False)
        return declare_own(module, site, [OwnTensor("bias", "bias", 0 if is_cut else None)])
    mode = _mode(operations, linear, site)
    if mode == "row" and _is_summed(operations, index) and site.groups.tp.size > 1:
        # Added before the sum over tp: the bias of the layer is the sum of those of all ranks.
        return declare_own(module, site, [OwnTensor("bias", "bias.summands", 0)])
    gated = _gated_activation(operations, linear)
    rows = own_tensors(module)["bias"].shape[0]
    width = getattr(gated, "glu_interleave_size", None)
    if width is not None:
        pattern = {"gate": width, "up": width}
        entity = declare_alternating(
            "bias", own_tensors(module)["bias"], pattern, site, is_cut=mode == "column"
        )
        return {f"{site.prefix}bias": entity}
    parts = ("gate", "up") if gated is not None else None
    sharding = linear_sharding(operations[linear].module, "bias", rows, mode, site, parts)
    return declare_own(module, site, [OwnTensor("bias", "bias", sharding)])


def _mode(operations: Sequence[Operation], index: int, site: Site) -> ParallelMode | None:
    """Return how tp cuts a linear operation; one whose output is summed over tp is cut by columns."""
    mode = parallel_mode(operations[index].module, site)
    return "row" if mode is None and _is_summed(operations, index) else mode


def _is_summed(operations: Sequence[Operation], index: int) -> bool:
    after = next((o.kind for o in operations[index + 1 :] if o.kind != "Bias"), None)
    return after in SUMS


def _gated_activation(operations: Sequence[Operation], index: int) -> nn.Module | None:
    """Return the operation after a linear one and its bias if it is a gated activation."""
    after = next((o for o in operations[index + 1 :] if o.kind != "Bias"), None)
    return after.module if after is not None and after.kind.lower().endswith("glu") else None


def _key(operations: Sequence[Operation], index: int) -> str:
    """Return what the keys of an operation begin with."""
    role = _role(operations, index)
    if role is not None:
        return role
    # The linear operation and its bias have one weight and one bias between them.
    return operations[index].name.rpartition("basic_ops.")[0].rstrip(".") or (
        "" if operations[index].name.startswith("basic_ops.") else operations[index].name
    )


def _role(operations: Sequence[Operation], index: int) -> str | None:
    """Return which linear layer of an MLP an operation belongs to; None in any other sequence."""
    linear = [i for i, operation in enumerate(operations) if operation.kind in LINEAR]
    if len(linear) != 2 or not _has_activation(operations[linear[0] : linear[1]]):
        return None
    kind = operations[index].kind
    if kind in NORMS:
        return "linear_fc1" if index == linear[0] - 1 else None
    if kind in LINEAR or (kind == "Bias" and index > linear[0]):
        return "linear_fc1" if index < linear[1] else "linear_fc2"
    return None


def _has_activation(between: Sequence[Operation]) -> bool:
    return any(o.kind not in (*LINEAR, "Bias", *SUMS, *NORMS) for o in between)
