"""A mixture of experts as one layer: the router, the way to the experts and back, and shared experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from megackpt.errors import DeclarationError
from megackpt.training.parallel.collectives import collect_sequence, scatter_sequence
from megackpt.training.parallel.dispatch import Capacity, TokenDispatcher
from megackpt.training.parallel.groups import ParallelGroups
from megackpt.training.parallel.mixin import ShardedModule
from megackpt.training.parallel.router import Router


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
