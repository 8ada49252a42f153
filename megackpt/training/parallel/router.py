"""The router of a mixture of experts: a linear layer whose outputs decide which experts a token goes to.

The layer, the losses that it adds to the objective, and the biases that balance the load without a loss.
`routing` has the arithmetic of one rank.

The losses are added by autograd: a router passes its weights on and adds its gradient to theirs in the
backward pass. So a pipeline stage that is not the last needs no loss to pass on. Their gradients get the same
factor as that of the main loss, which `forward_backward` sets by `set_auxiliary_loss_scale`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megackpt.errors import DeclarationError
from megackpt.training.parallel.attributes import mark
from megackpt.training.parallel.collectives import all_reduce
from megackpt.training.parallel.groups import ParallelGroups
from megackpt.training.parallel.linear import INIT_STD
from megackpt.training.parallel.mixin import ShardedModule
from megackpt.training.parallel.routing import (
    Routing,
    RoutingOptions,
    balance_loss,
    choices_for_balance,
    choose_experts,
    memberships,
    scores_of,
)


class Router(ShardedModule):
    """Chooses the experts of each token by `x W^T + b`. Collective over tp and cp.

    The weight is `[experts, hidden]`, the bias `[experts]`. Each rank routes tokens of its own: ranks of tp
    have different ones, too. So the gradients of both are partial sums over tp, and they are marked
    `sequence_parallel`. Everything after the weight is computed in float32.

    Args:
        hidden_size: extent of the last dim of the input.
        num_experts: number of experts on all ranks.
        groups: the ranks around this one.
        options: how tokens are routed.
        bias: whether there is a trained bias, initially 0.
        dtype: dtype of weight and bias.
        device: where they are.

    Attributes:
        expert_bias: float32 `[experts]`, whatever dtype the model is cast to: steps of `bias_rate` are lost
            in two bytes. A persistent buffer, or None without `bias_rate`. See `update_expert_bias`.
        chosen: int64 `[experts]`, how many tokens of this rank chose each expert since the last update of the
            bias; None before the first token. Not saved.
        losses: float32 `[2]`, this rank's parts of the load-balancing loss and the z-loss, summed over
            micro-batches; None before the first token. Not saved. See `mean_auxiliary_losses`.
        loss_scale: factor on the gradients of the two losses.

    Raises:
        DeclarationError: the options do not fit the number of experts.
    """

    expert_bias: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        groups: ParallelGroups,
        options: RoutingOptions,
        *,
        bias: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(groups)
        if faults := options.faults(num_experts):
            raise DeclarationError(
                f"RoutingOptions do not fit the router of {num_experts} experts: {'; '.join(faults)}. Change "
                f"either."
            )
        self.num_experts = num_experts
        self.options = options
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, dtype=dtype, device=device))
        mark(self.weight, "sequence_parallel")
        with torch.no_grad():
            self.weight.normal_(std=INIT_STD)
        self.bias = nn.Parameter(torch.zeros(num_experts, dtype=dtype, device=device)) if bias else None
        if self.bias is not None:
            mark(self.bias, "sequence_parallel")
        even = torch.zeros(num_experts, dtype=torch.float32, device=device)
        self.register_buffer("expert_bias", None if options.bias_rate is None else even)
        self.chosen: Tensor | None = None
        self.losses: Tensor | None = None
        self.micro_batches = 0
        self.loss_scale = 1.0

    def forward(self, tokens: Tensor, sequences: Tensor | None = None, num_sequences: int = 1) -> Routing:
        """Return the experts and weights of each token.

        In training, also counts the choices and attaches the losses to the returned weights.

        Args:
            tokens: `[n, hidden]`, this rank's own; as many on all ranks of tp and cp.
            sequences: int64 `[n]`, index of the sequence in the micro-batch that each token belongs to; None
                if there is one sequence.
            num_sequences: sequences of the micro-batch.
        """
        bias = None if self.bias is None else self.bias.float()
        logits = F.linear(tokens.float(), self.weight.float(), bias)  # [n, experts]
        scores = scores_of(logits, self.options)
        experts, weights = choose_experts(scores, self.expert_bias, self.options)
        if not (self.training and torch.is_grad_enabled()):
            return Routing(experts, weights)
        self._count(experts)
        if self.options.balance_loss or self.options.z_loss:
            if sequences is None:
                sequences = torch.zeros_like(experts[:, 0])
            loss = self._count_losses(logits, scores, sequences, num_sequences)
            # The gradients of this rank's part are averaged over cp, but the loss is a sum over cp.
            weights = _attach(weights, loss, self.loss_scale * self.groups.cp.size)
        return Routing(experts, weights)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        """Move or cast the module, as nn.Module does, but keep the bias in float32."""
        bias = self.expert_bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if bias is not None and self.expert_bias is not None and self.expert_bias.dtype != bias.dtype:
            # From the values before the cast: those after it are rounded.
            self.expert_bias = bias.to(self.expert_bias.device)
        return self

    def _count(self, experts: Tensor) -> None:
        chosen = torch.bincount(experts.flatten(), minlength=self.num_experts)
        self.chosen = chosen if self.chosen is None else self.chosen + chosen

    def _count_losses(self, logits: Tensor, scores: Tensor, sequences: Tensor, num_sequences: int) -> Tensor:
        """Return the sum of the losses, 0-dim, and add them to those of earlier micro-batches."""
        losses = torch.stack([self._balance_loss(scores, sequences, num_sequences), self._z_loss(logits)])
        self.losses = losses.detach() + (0 if self.losses is None else self.losses)
        self.micro_batches += 1
        return losses.sum()

    def _balance_loss(self, scores: Tensor, sequences: Tensor, num_sequences: int) -> Tensor:
        if not self.options.balance_loss:
            return scores.new_zeros(())
        if self.options.balance_over == "micro_batch":
            sequences, num_sequences = torch.zeros_like(sequences), 1
        members = memberships(sequences, num_sequences)
        # float32 counts exactly up to 2^24 tokens.
        chosen = members @ choices_for_balance(scores, self.options)  # [sequences, experts]
        chosen = all_reduce(all_reduce(chosen, self.groups.tp), self.groups.cp)
        tokens = chosen.sum(dim=1, keepdim=True).clamp(min=1) / self.options.top_k
        return balance_loss(scores, chosen, members, tokens, self.options)

    def _z_loss(self, logits: Tensor) -> Tensor:
        if not self.options.z_loss:
            return logits.new_zeros(())
        all_tokens = logits.shape[0] * self.groups.tp.size * self.groups.cp.size
        return logits.logsumexp(dim=-1).square().sum() * (self.options.z_loss / max(all_tokens, 1))


def routers_of(*models: nn.Module) -> list[Router]:
    """Return the routers of the models, in order. Local."""
    return [module for model in models for module in model.modules() if isinstance(module, Router)]


def set_auxiliary_loss_scale(model: object, scale: float) -> None:
    """Set the factor on the gradients of all auxiliary losses in the forward passes to come. Local.

    It is the gradient that the main loss of a micro-batch gets: the loss scale divided by the number of
    micro-batches. `forward_backward` calls this.
    """
    for router in routers_of(model) if isinstance(model, nn.Module) else []:
        router.loss_scale = scale


def update_expert_bias(models: nn.Module | Sequence[nn.Module], groups: ParallelGroups) -> None:
    """Change the biases of all routers by one step towards an even load, and count anew. Collective.

    Call it once in each training step, after all micro-batches, on all ranks. An expert that more tokens than
    the mean have chosen on all ranks gets a smaller bias by `bias_rate`, any other a larger one. The counts
    are those of the router: what a capacity drops later was chosen too.

    Args:
        models: this rank's model, or its chunks.
        groups: the ranks around this one; the sums are over tp, cp and dp.

    Source: DeepSeek-V3, section 2.1.2 (auxiliary-loss-free load balancing); Megatron-Core
    `moe_utils.get_updated_expert_bias`.
    """
    routers = [r for r in routers_of(*_as_sequence(models)) if r.expert_bias is not None]
    if not routers:
        return
    counts = torch.cat([_counts(router) for router in routers])
    counts = all_reduce(all_reduce(counts, groups.tp), groups.dp_cp)
    with torch.no_grad():
        per_router = torch.split_with_sizes(counts, [r.num_experts for r in routers])
        for router, chosen in zip(routers, per_router, strict=True):
            bias = cast(Tensor, router.expert_bias)
            rate = cast(float, router.options.bias_rate)  # there is a bias
            bias += torch.sign(chosen.float().mean() - chosen) * rate
            router.chosen = None


def mean_auxiliary_losses(models: nn.Module | Sequence[nn.Module], groups: ParallelGroups) -> Tensor:
    """Return each router's losses since the last call: load-balancing loss and z-loss. Collective.

    float32 `[routers of this stage, 2]`: means over the micro-batches and sequences of all ranks of dp.
    """
    routers = routers_of(*_as_sequence(models))
    if not routers:
        return torch.zeros(0, 2)
    sums = torch.stack([_losses(router) for router in routers])
    for router in routers:
        router.losses, router.micro_batches = None, 0
    total = all_reduce(all_reduce(sums, groups.tp), groups.dp_cp)
    return total / groups.dp.size


class _AttachedLoss(torch.autograd.Function):
    """The identity, which adds the gradient of a loss to the graph of its input.

    Source: Megatron-Core `moe_utils.MoEAuxLossAutoScaler`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.grad = torch.full_like(loss, scale)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], ctx.grad, None


def _attach(x: Tensor, loss: Tensor, scale: float) -> Tensor:
    return cast(Tensor, _AttachedLoss.apply(x, loss, scale))  # type: ignore[no-untyped-call]


def _counts(router: Router) -> Tensor:
    if router.chosen is None:
        return torch.zeros(router.num_experts, dtype=torch.int64, device=router.weight.device)
    return router.chosen


def _losses(router: Router) -> Tensor:
    if router.losses is None:
        return torch.zeros(2, device=router.weight.device)
    return router.losses / router.micro_batches


def _as_sequence(models: nn.Module | Sequence[nn.Module]) -> Sequence[nn.Module]:
    return [models] if isinstance(models, nn.Module) else models
