"""A mixture of experts as one layer: the router, the way to the experts and back, and shared experts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, cast

import torch
from torch import Tensor, nn

from megackpt.errors import DeclarationError
from megackpt.training.parallel.collectives import (
    collect_rows,
    collect_sequence,
    exchange_rows,
    gather_rows,
    reduce_scatter_rows,
    scatter_rows,
    scatter_sequence,
)
from megackpt.training.parallel.experts import divide_over_ep
from megackpt.training.parallel.groups import ParallelGroups
from megackpt.training.parallel.mixin import ShardedModule
from megackpt.training.parallel.router import Router
from megackpt.training.parallel.routing import Routing

# Brings tokens to the ranks of their experts, and the outputs back.
#
# Each rank of a pipeline stage begins with tokens of its own. `plan_rows` decides which rows it sends, by
# expert; `TokenDispatcher` exchanges them over ep, joins them over etp, whose ranks have slices of the same
# experts, and sorts them by expert. `combine` goes the same way back and sums what a token's experts
# returned.
#
# Source: Megatron-Core `moe.token_dispatcher.MoEAlltoAllTokenDispatcher`.

DropPolicy: TypeAlias = Literal["weight", "position"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """A limit on the tokens that an expert takes from one rank; a token above it skips the expert.

    The limit is counted by rank, so which tokens are dropped depends on the parallel layout.

    Attributes:
        factor: limit as a multiple of the number of tokens that an expert gets at an even load.
        drop: which tokens an expert drops: those with the smallest weight, or the last ones.
        pad: send rows of zeros up to the limit, so that all shapes are the same in every step.

    Raises:
        DeclarationError: a factor that is not positive, or another policy.

    Source: Lepikhin et al. 2020, section 2.2; Megatron-Core `moe_utils.get_capacity`,
    `moe_utils.apply_router_token_dropping`.
    """

    factor: float
    drop: DropPolicy = "weight"
    pad: bool = False

    def __post_init__(self) -> None:
        if not self.factor > 0:
            raise DeclarationError(f"Capacity.factor is {self.factor}. It must be larger than 0.")
        if self.drop not in ("weight", "position"):
            raise DeclarationError(f"Capacity.drop is {self.drop!r}. It must be 'weight' or 'position'.")

    def limit(self, choices: int, num_experts: int) -> int:
        """Return the most rows that an expert takes of `choices` (tokens times top-k) of one rank. Pure."""
        return math.ceil(choices / num_experts * self.factor)


@dataclass(frozen=True, slots=True, eq=False)
class RowPlan:
    """The rows that one rank sends, sorted by expert.

    Attributes:
        choices: int64 `[rows]`, the choice that each row is for: `token * top_k + k`; or -1 for padding.
        counts: int64 `[experts]`, rows of each expert.
    """

    choices: Tensor
    counts: Tensor


def plan_rows(routing: Routing, num_experts: int, capacity: Capacity | None) -> RowPlan:
    """Decide which of a rank's choices are sent. They are ordered by expert, then by token. Pure."""
    experts = routing.experts.flatten()
    if capacity is None:
        return RowPlan(experts.argsort(stable=True), torch.bincount(experts, minlength=num_experts))
    limit = capacity.limit(experts.numel(), num_experts)
    choices = _first_of_each_expert(routing, num_experts, limit, capacity.drop)
    counts = torch.bincount(experts[choices], minlength=num_experts)
    return _padded(choices, experts[choices], counts, limit) if capacity.pad else RowPlan(choices, counts)


def _first_of_each_expert(routing: Routing, num_experts: int, limit: int, drop: DropPolicy) -> Tensor:
    """Return at most `limit` choices of each expert, sorted by expert and then by token."""
    experts = routing.experts.flatten()
    if drop == "position":
        best_first = torch.arange(experts.numel(), device=experts.device)
    else:
        best_first = routing.weights.detach().flatten().argsort(descending=True, stable=True)
    by_expert = best_first[experts[best_first].argsort(stable=True)]
    kept = by_expert[_index_in_group(experts[by_expert], num_experts) < limit]
    kept = kept.sort().values  # back to the order of tokens, within each expert
    return kept[experts[kept].argsort(stable=True)]


def _index_in_group(sorted_experts: Tensor, num_experts: int) -> Tensor:
    """Return the index of each row among those of the same expert; the rows are sorted by expert."""
    counts = torch.bincount(sorted_experts, minlength=num_experts)
    starts = counts.cumsum(0) - counts
    return torch.arange(sorted_experts.numel(), device=sorted_experts.device) - starts[sorted_experts]


def _padded(choices: Tensor, experts: Tensor, counts: Tensor, limit: int) -> RowPlan:
    table = choices.new_full((counts.numel(), limit), -1)
    table[experts, _index_in_group(experts, counts.numel())] = choices
    return RowPlan(table.flatten(), torch.full_like(counts, limit))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dispatch:
    """Where the rows of one dispatch went, for the way back.

    Attributes:
        routing: the routing of this rank's tokens.
        plan: the rows that this rank sent.
        sent: rows for each rank of ep.
        received: rows from each rank of ep.
        joined: rows of each rank of etp, after the exchange over ep.
        by_expert: int64 `[rows]`, the order that sorted the joined rows by expert.
        counts: rows of each local expert, after all.
    """

    routing: Routing
    plan: RowPlan
    sent: Sequence[int]
    received: Sequence[int]
    joined: Sequence[int]
    by_expert: Tensor
    counts: Sequence[int]


class TokenDispatcher:
    """Exchanges tokens over the ranks of the experts of one layer.

    Args:
        num_experts: number of experts on all ranks.
        groups: the ranks around this one.
        capacity: limit on the tokens of an expert; None drops no token.
        output_is_partial: whether an expert's output is this rank's part of a sum over etp; otherwise it is
            equal on all ranks of etp, and so is the gradient of its input.

    Raises:
        DeclarationError: ep does not divide the experts.
    """

    def __init__(
        self,
        num_experts: int,
        groups: ParallelGroups,
        *,
        capacity: Capacity | None = None,
        output_is_partial: bool = True,
    ) -> None:
        self.local_experts = divide_over_ep(num_experts, groups)
        self.num_experts = num_experts
        self.groups = groups
        self.capacity = capacity
        self.join = gather_rows if output_is_partial else collect_rows
        self.separate = reduce_scatter_rows if output_is_partial else scatter_rows

    def dispatch(self, tokens: Tensor, routing: Routing) -> tuple[Tensor, Dispatch]:
        """Return the rows of this rank's experts, sorted by expert, and the way back. Collective.

        All ranks of ep and etp call it, also those without tokens. `tokens` are `[n, hidden]`, n may differ
        by rank; the rows are `[sum(counts), hidden]`.
        """
        ep, etp = self.groups.ep, self.groups.etp
        plan = plan_rows(routing, self.num_experts, self.capacity)
        sent = plan.counts.view(ep.size, self.local_experts)
        received = exchange_rows(sent, ep, [1] * ep.size, [1] * ep.size)  # rows by (source, local expert)
        joined = collect_rows(received[None], etp, [1] * etp.size)  # [etp, ep, local experts]
        by_expert = _order_by_expert(joined)
        # The only copies to the host: the sizes of what is exchanged must be known there.
        sizes = _Sizes(sent.sum(1).tolist(), received.sum(1).tolist(), joined.sum((1, 2)).tolist())
        top_k = routing.experts.shape[-1]
        rows = cast(Tensor, _SelectRows.apply(tokens, plan.choices, top_k))  # type: ignore[no-untyped-call]
        rows = exchange_rows(rows, ep, sizes.sent, sizes.received)
        rows = self.join(rows, etp, sizes.joined).index_select(0, by_expert)
        return rows, Dispatch(
            routing=routing,
            plan=plan,
            sent=sizes.sent,
            received=sizes.received,
            joined=sizes.joined,
            by_expert=by_expert,
            counts=joined.sum((0, 1)).tolist(),
        )

    def combine(self, rows: Tensor, dispatch: Dispatch) -> Tensor:
        """Return each token's weighted sum over its experts, `[n, hidden]`. Collective.

        The sum is in float32 and in the order of the choices. A choice that was dropped counts as 0.
        """
        unsorted = torch.empty_like(rows).index_copy(0, dispatch.by_expert, rows)
        own = self.separate(unsorted, self.groups.etp, dispatch.joined)
        own = exchange_rows(own, self.groups.ep, dispatch.received, dispatch.sent)
        weights = dispatch.routing.weights
        real = dispatch.plan.choices >= 0
        outputs = own.new_zeros((weights.numel(), own.shape[-1]))
        outputs = outputs.index_copy(0, dispatch.plan.choices[real], own[real])
        outputs = outputs.view(*weights.shape, own.shape[-1])  # [n, top_k, hidden]
        return (outputs.float() * weights.unsqueeze(-1)).sum(dim=1).to(rows.dtype)


@dataclass(frozen=True, slots=True)
class _Sizes:
    sent: Sequence[int]
    received: Sequence[int]
    joined: Sequence[int]


def _order_by_expert(counts: Tensor) -> Tensor:
    """Return the stable order by local expert of rows that come by (etp, ep, local expert)."""
    local = torch.arange(counts.shape[-1], device=counts.device).expand_as(counts)
    return local.flatten().repeat_interleave(counts.flatten()).argsort(stable=True)


class _SelectRows(torch.autograd.Function):
    """The token of each choice, or zeros for padding; gradients are summed in the order of the choices.

    Indexing with repeated indices would sum them in an order that differs from run to run on a GPU.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, choices: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(choices)
        ctx.shape = (tokens.shape[0], top_k, tokens.shape[1])
        real = choices >= 0
        rows = tokens.new_zeros((choices.numel(), tokens.shape[1]))
        rows[real] = tokens.index_select(0, choices[real] // top_k)
        return rows

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (choices,) = ctx.saved_tensors
        n, top_k, hidden = ctx.shape
        by_choice = grads[0].new_zeros((n * top_k, hidden))
        real = choices >= 0
        by_choice[choices[real]] = grads[0][real]
        return by_choice.view(n, top_k, hidden).sum(dim=1), None, None


class Experts(Protocol):
    """The experts of a layer on this rank: `GatedExperts`, `ExpertStack`, or a module of your own.

    Attributes:
        num_experts: number of experts on all ranks.
        output_is_partial: whether the output is this rank's part of a sum over etp. If not, it is equal on
            all ranks of etp, as is the gradient of the input.
    """

    num_experts: int
    output_is_partial: bool

    def __call__(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Return outputs `[n, hidden]` of `rows`, ordered by local expert: `counts[e]` rows of expert e."""


class MixtureOfExperts(ShardedModule):
    """Routed experts, plus shared ones that all tokens go to. Collective over tp, cp, ep and etp.

    Input `[s, b, hidden]`, equal on all ranks of tp (with sequence_parallel `[s/tp, b, hidden]`, this rank's
    part of the sequence); the output is like the input. Without sequence_parallel every rank of tp routes an
    equal part of the tokens, and the outputs are joined.

    Args:
        router: the router.
        experts: the experts, as many as the router has.
        groups: the ranks around this one.
        capacity: limit on the tokens of an expert; None drops no token.
        shared_experts: a module from hidden states to hidden states of the same shape, made with the groups
            of dense layers; its output is added.
        sequence_parallel: the input is cut along the sequence, dim 0.

    Raises:
        DeclarationError: the router has another number of experts.
    """

    def __init__(
        self,
        router: Router,
        experts: Experts,
        groups: ParallelGroups,
        *,
        capacity: Capacity | None = None,
        shared_experts: nn.Module | None = None,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__(groups)
        if router.num_experts != experts.num_experts:
            raise DeclarationError(
                f"the router chooses among {router.num_experts} experts, but there are "
                f"{experts.num_experts}. Make both with the same number."
            )
        self.router = router
        self.experts = cast(nn.Module, experts)
        self.shared_experts = shared_experts
        self.sequence_parallel = sequence_parallel
        self.dispatcher = TokenDispatcher(
            experts.num_experts, groups, capacity=capacity, output_is_partial=experts.output_is_partial
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output, shaped like `x`."""
        out = self._routed(x)
        return out if self.shared_experts is None else out + self.shared_experts(x)

    def _routed(self, x: Tensor) -> Tensor:
        tp, batch = self.groups.tp, x.shape[1]
        tokens = x.flatten(0, 1)  # token i is of sequence i mod b
        if not self.sequence_parallel:
            tokens = scatter_sequence(tokens, tp)
        # With sequence_parallel every rank's first token is of sequence 0.
        first = 0 if self.sequence_parallel else tp.rank * tokens.shape[0]
        sequences = torch.arange(first, first + tokens.shape[0], device=x.device) % batch
        routing = self.router(tokens, sequences, batch)
        rows, dispatch = self.dispatcher.dispatch(tokens, routing)
        out = self.dispatcher.combine(self.experts(rows, dispatch.counts), dispatch)
        if not self.sequence_parallel:
            out = collect_sequence(out, tp)
        return out.view_as(x)
