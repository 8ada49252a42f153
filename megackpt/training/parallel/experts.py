"""The experts of a layer: stacked, with one weight for all experts of this rank, or modules of their own.

The axis over the experts is cut over `groups.ep`, and every expert over `groups.etp`, which may be another
number of ranks than tp. `ExpertStack` has experts that are modules of their own; `moe` brings tokens to the
ranks of their experts.

Initial values are drawn from torch's global generator and depend on the layout; see `models.init`.

Source: Megatron-Core `moe.experts.TEGroupedMLP` (names and what is cut).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megackpt.errors import DeclarationError
from megackpt.training.parallel.attributes import mark
from megackpt.training.parallel.groups import ParallelGroups
from megackpt.training.parallel.linear import divide_over_tp, new_weights, split_components
from megackpt.training.parallel.mixin import ShardedModule
from megackpt.training.parallel.stack import Axes, ModuleSequence
from megackpt.training.parallel.tp_sharding import TpSharding

# The activation of gated MLPs and experts: what is between gate and up, and the projection down.


@dataclass(frozen=True, slots=True, kw_only=True)
class SwiGLU:
    """`gate * sigmoid(alpha * gate) * (up + up_offset)`, of values that may be clamped first.

    The defaults are the usual `silu(gate) * up`. GPT-OSS has alpha 1.702, a limit of 7 and an offset of 1.

    Attributes:
        alpha: factor on the gate inside of the sigmoid.
        limit: the gate is clamped from above to this value, and up to this value on both sides; None for
            neither.
        up_offset: added to up, after the clamp.

    Raises:
        DeclarationError: a limit that is not positive.

    Source: Shazeer 2020, equation 6; transformers `GptOssExperts`.
    """

    alpha: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0

    def __post_init__(self) -> None:
        if self.limit is not None and not self.limit > 0:
            raise DeclarationError(
                f"SwiGLU.limit is {self.limit}. It must be larger than 0, or None for no limit."
            )

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return the activation of two tensors of one shape. Pure."""
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        gate = F.silu(gate) if self.alpha == 1 else gate * (self.alpha * gate).sigmoid()
        return gate * (up + self.up_offset) if self.up_offset else gate * up


GatedActivation: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""From gate and up, both `[rows, ffn/etp]`, to the input of the projection down, element by element."""


def divide_over_ep(num_experts: int, groups: ParallelGroups) -> int:
    """Return the number of experts of one rank. Pure.

    Raises:
        DeclarationError: ep does not divide `num_experts`.
    """
    if num_experts % groups.ep.size:
        raise DeclarationError(
            f"{num_experts} experts cannot be spread evenly over ep={groups.ep.size} ranks. Choose a "
            f"multiple of {groups.ep.size}, or a smaller ep.",
            rank=groups.rank,
        )
    return num_experts // groups.ep.size


class GroupedColumnLinear(ShardedModule):
    """`y = x W[e]^T + b[e]`, every W[e] cut by rows: weight `[experts/ep, out/etp, in]`. Local.

    Input `[rows, in]` sorted by expert, output `[rows, out/etp]`.

    Args:
        num_experts: number of experts on all ranks.
        in_features: extent of the last dim of the input.
        out_features: extent of the last dim of the whole output, or names and extents of its components (gate
            and up). A rank's slice is then its slice of the first one, then of the second, and so on. Each is
            an array of its own in the checkpoint, `weight.gate` with shape `[experts, gate, in]`.
        groups: the ranks around this one.
        bias: whether there is a bias `[experts/ep, out/etp]`.
        dtype: dtype of the parameters.
        device: where the parameters are.

    Raises:
        DeclarationError: ep does not divide the experts, or etp the outputs or a component of them.
    """

    expert_axis = {"weight": 0, "bias": 0}  # noqa: RUF012 - read-only by its type in ShardedModule

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int | Mapping[str, int],
        groups: ParallelGroups,
        *,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        local = None
        if isinstance(out_features, int):
            rows = divide_over_tp("out_features", out_features, groups.experts)
        else:
            local = {
                n: divide_over_tp(f"component {n!r}", s, groups.experts) for n, s in out_features.items()
            }
            rows = sum(local.values())
        sharding = TpSharding(dim=1, components=local)
        super().__init__(groups, tp_sharding={"weight": sharding, "bias": sharding})
        experts = divide_over_ep(num_experts, groups)
        self.local_components = local
        shape = (experts, rows, in_features)
        self.weight, self.bias = new_weights(shape, bias=bias, dtype=dtype, device=device)

    def forward(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Return this rank's slice of the outputs; `counts[e]` rows are of local expert e."""
        return _grouped_linear(x, self.weight, self.bias, counts)

    def split(self, y: Tensor) -> tuple[Tensor, ...]:
        """Return the components of an output `y`, in order. Local.

        Raises:
            DeclarationError: the layer was made without components.
        """
        return split_components(y, self.local_components)


class GroupedRowLinear(ShardedModule):
    """`y = x W[e]^T + b[e]`, every W[e] cut by columns: weight `[experts/ep, out, in/etp]`. Local.

    Input `[rows, in/etp]` sorted by expert. The output `[rows, out]` is this rank's part of a sum over etp;
    the bias `[experts/ep, out]` is in the part of the first rank.

    Args:
        num_experts: number of experts on all ranks.
        in_features: extent of the last dim of the whole input.
        out_features: extent of the last dim of the output.
        groups: the ranks around this one.
        bias: whether there is a bias.
        dtype: dtype of the parameters.
        device: where the parameters are.

    Raises:
        DeclarationError: ep does not divide the experts, or etp in_features.
    """

    expert_axis = {"weight": 0, "bias": 0}  # noqa: RUF012 - read-only by its type in ShardedModule
    tp_sharding = {"weight": 2}  # noqa: RUF012

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        groups: ParallelGroups,
        *,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(groups)
        experts = divide_over_ep(num_experts, groups)
        local = divide_over_tp("in_features", in_features, groups.experts)
        shape = (experts, out_features, local)
        self.weight, self.bias = new_weights(shape, bias=bias, dtype=dtype, device=device)

    def forward(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Return this rank's part of the outputs; `counts[e]` rows are of local expert e."""
        bias: Tensor | None = self.bias
        if bias is not None and not self.groups.etp.is_first:
            # Nothing is added here, but the gradient is the same as on the first rank.
            bias = bias - bias.detach()
        return _grouped_linear(x, self.weight, bias, counts)


class GroupedReplicatedLinear(ShardedModule):
    """`y = x W[e]^T`, every W[e] whole on all ranks of etp: weight `[experts/ep, out, in]`. Local.

    Input `[rows, in]` sorted by expert, output `[rows, out]`. Either may be this rank's part of a sum over
    etp, so that the gradient is: it is marked to be summed over etp.

    Args:
        num_experts: number of experts on all ranks.
        in_features: extent of the last dim of the input.
        out_features: extent of the last dim of the output.
        groups: the ranks around this one.
        dtype: dtype of the weight.
        device: where the weight is.

    Raises:
        DeclarationError: ep does not divide the experts.
    """

    expert_axis = {"weight": 0}  # noqa: RUF012 - read-only by its type in ShardedModule

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        groups: ParallelGroups,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(groups)
        experts = divide_over_ep(num_experts, groups)
        shape = (experts, out_features, in_features)
        self.weight, _ = new_weights(shape, bias=False, dtype=dtype, device=device)
        mark(self.weight, "sequence_parallel")

    def forward(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the outputs; `counts[e]` rows are of local expert e."""
        return _grouped_linear(x, self.weight, None, counts)


class GatedExperts(ShardedModule):
    """`down(activation(gate(x), up(x)))` of every expert of this rank. Local.

    Input and output `[rows, hidden]`, sorted by expert. All ranks of etp get the same rows; the output is
    this rank's part of a sum over etp (see `output_is_partial`).

    Args:
        num_experts: number of experts on all ranks.
        hidden_size: extent of input and output.
        ffn_hidden_size: extent inside of one expert.
        groups: the ranks around this one.
        bias: whether the linear layers have biases.
        activation: between the projections; None for `silu(gate) * up`.
        dtype: dtype of the parameters.
        device: where the parameters are.

    Raises:
        DeclarationError: ep does not divide the experts, or etp ffn_hidden_size.
    """

    output_is_partial = True

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        ffn_hidden_size: int,
        groups: ParallelGroups,
        *,
        bias: bool = False,
        activation: GatedActivation | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(groups)
        self.num_experts = num_experts
        self.activation = SwiGLU() if activation is None else activation
        components = {"gate": ffn_hidden_size, "up": ffn_hidden_size}
        made: dict[str, Any] = {"bias": bias, "dtype": dtype, "device": device}
        self.linear_fc1 = GroupedColumnLinear(num_experts, hidden_size, components, groups, **made)
        self.linear_fc2 = GroupedRowLinear(num_experts, ffn_hidden_size, hidden_size, groups, **made)

    def forward(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the outputs of `rows`, which are ordered by local expert: `counts[e]` rows of expert e."""
        gate, up = self.linear_fc1.split(self.linear_fc1(rows, counts))  # each [rows, ffn/etp]
        out: Tensor = self.linear_fc2(self.activation(gate, up), counts)
        return out


class PlainExperts(ShardedModule):
    """`down(activation(up(x)))` of every expert of this rank. Local.

    Input, output, arguments and errors are those of `GatedExperts`, but for the activation: from `up(x)`
    `[rows, ffn/etp]` to the input of the projection down, element by element.
    """

    output_is_partial = True

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        ffn_hidden_size: int,
        groups: ParallelGroups,
        *,
        activation: Callable[[Tensor], Tensor],
        bias: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(groups)
        self.num_experts = num_experts
        self.activation = activation
        made: dict[str, Any] = {"bias": bias, "dtype": dtype, "device": device}
        self.linear_fc1 = GroupedColumnLinear(num_experts, hidden_size, ffn_hidden_size, groups, **made)
        self.linear_fc2 = GroupedRowLinear(num_experts, ffn_hidden_size, hidden_size, groups, **made)

    def forward(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the outputs of `rows`, which are ordered by local expert: `counts[e]` rows of expert e."""
        out: Tensor = self.linear_fc2(self.activation(self.linear_fc1(rows, counts)), counts)
        return out


def _grouped_linear(x: Tensor, weight: Tensor, bias: Tensor | None, counts: Sequence[int]) -> Tensor:
    """Apply the e-th of the stacked weights to the e-th group of rows.

    An expert without rows takes part all the same, so that its gradient is 0 and not missing.
    """
    weights = weight.unbind()
    biases = [None] * len(weights) if bias is None else bias.unbind()
    groups = torch.split_with_sizes(x, list(counts))
    return torch.cat([F.linear(rows, w, b) for rows, w, b in zip(groups, weights, biases, strict=True)])


# Experts that are modules of their own, one per expert.
#
# In the checkpoint every tensor of an expert has a leading axis over all experts of the layer, as
# `LayerStack` adds one over all layers.


class ExpertStack(ModuleSequence):
    """The experts of a layer on this rank. As collective as an expert is, over etp.

    An expert is any module from `[rows, hidden]` to `[rows, hidden]`. If etp is larger than 1, all ranks of
    etp call it with the same rows and expect the same output: layers made with `groups.experts` do so, a
    column layer followed by a row layer for instance. Names in the state dict count the experts of this rank
    (`0.weight`); the checkpoint has one key for each tensor (`weight`), with a leading axis over all experts.

        ExpertStack(lambda index: Expert(hidden, ffn, groups.experts), 64, groups)

    Args:
        build: returns the expert with a global index. All experts have the same structure.
        num_experts: number of experts on all ranks.
        groups: the ranks around this one.

    Raises:
        DeclarationError: ep does not divide the experts; an expert has a layer that was made with `groups`
            instead of `groups.experts`.

    Source: Megatron-Core `moe.experts.SequentialMLP`.
    """

    output_is_partial = False

    def __init__(self, build: Callable[[int], nn.Module], num_experts: int, groups: ParallelGroups) -> None:
        local = divide_over_ep(num_experts, groups)
        owned = range(groups.ep.rank * local, (groups.ep.rank + 1) * local)
        super().__init__((_checked(build(i), i) for i in owned), groups, inner_groups=groups.experts)
        self.num_experts = num_experts
        self.owned = owned

    def forward(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the outputs of `rows`, which are ordered by local expert: `counts[e]` rows of expert e."""
        parts = torch.split_with_sizes(rows, list(counts))
        # An expert without rows is called, too: its gradients are to be 0 and not missing, and its layers
        # may communicate.
        return torch.cat([expert(part) for expert, part in zip(self.children(), parts, strict=True)])

    def keys_and_axes(self, number: int, prefix: str, axes: Axes) -> tuple[str, Axes]:
        """Return keys without a number, and an axis over the experts after those of the layer."""
        return prefix, (*axes, (len(axes), self.owned[number], self.num_experts))


def _checked(expert: nn.Module, index: int) -> nn.Module:
    """Check the groups that an expert was made with, and mark its parameters."""
    for name, module in expert.named_modules():
        if isinstance(module, ShardedModule) and not module.groups.for_experts:
            raise DeclarationError(
                f"expert {index}: {name or 'it'} ({type(module).__name__}) was made with the groups of dense "
                f"layers, so that it would be cut over tp and not over etp. Make it with groups.experts."
            )
    for param in expert.parameters():
        mark(param, "expert_parallel")
    return expert
