"""Multi-token prediction: layers after the model. Each predicts one token further ahead than the one before.

Layer k makes hidden states of those of layer k - 1 (first of the model, after its final norm) and of the
embeddings of the tokens that are k ahead; the output layer makes logits of the token k + 1 ahead of them.

Source: DeepSeek-V3, section 2.2; Megatron-Core `multi_token_prediction.MultiTokenPredictionLayer` (names).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from megackpt.training.parallel.collectives import scatter_sequence
from megackpt.training.parallel.context import context_positions, context_share, gather_context
from megackpt.training.parallel.groups import Axis, ParallelGroups
from megackpt.training.parallel.linear import ColumnParallelLinear
from megackpt.training.parallel.mixin import ShardedModule


class MTPLayer(ShardedModule):
    """One layer of multi-token prediction. As collective as its transformer layer, and over tp.

    Args:
        transformer_layer: hidden states `[s, b, hidden]` (`[s/tp, b, hidden]`) to the same.
        norm: returns a new norm of hidden states; there are three.
        hidden_size: extent of a hidden state.
        groups: the ranks around this one.
        sequence_parallel: hidden states and embeddings are cut along the sequence.
        dtype: dtype of the projection.
        device: where it is.
    """

    def __init__(
        self,
        transformer_layer: nn.Module,
        norm: Callable[[], nn.Module],
        hidden_size: int,
        groups: ParallelGroups,
        *,
        sequence_parallel: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(groups)
        self.sequence_parallel = sequence_parallel
        self.enorm = norm()
        self.hnorm = norm()
        self.eh_proj = ColumnParallelLinear(
            2 * hidden_size,
            hidden_size,
            groups,
            bias=False,
            gather_output=True,
            sequence_parallel=sequence_parallel,
            dtype=dtype,
            device=device,
        )
        self.transformer_layer = transformer_layer
        self.final_layernorm = norm()

    def forward(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """Return hidden states of one more token ahead.

        Args:
            hidden: `[s, b, hidden]` (`[s/tp, b, hidden]`), of the model or of the layer before.
            embedded: embeddings of the next token of each, of the same shape.
        """
        x: Tensor = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))
        if self.sequence_parallel:
            x = scatter_sequence(x, self.groups.tp)
        return cast(Tensor, self.final_layernorm(self.transformer_layer(x)))


def tokens_ahead(tokens: Tensor, distance: int, cp: Axis) -> Tensor:
    """Return for each token of this rank's share the one `distance` later. Collective over cp.

    The last ones of a sequence, which have none, get tokens from its start: see `mean_over_tokens_ahead`.

    Args:
        tokens: int64 `[b, s/cp]`, this rank's share as `context_share` cuts it.
        distance: how many tokens later.
        cp: the ranks that have the other shares.
    """
    whole = gather_context(tokens, cp, dim=1)
    return context_share(whole.roll(-distance, dims=1), cp, dim=1)


def mean_over_tokens_ahead(losses: Tensor, distance: int, cp: Axis) -> Tensor:
    """Return the mean of losses `[s/cp, b]` of tokens that have one `distance` later, 0-dim. Local.

    The mean over cp is that of whole sequences: a rank has more or fewer such tokens than another.
    """
    length = losses.shape[0] * cp.size
    exists = context_positions(length, cp, device=losses.device) < length - distance
    count = max(length - distance, 1) * losses.shape[1]
    return (losses * exists.unsqueeze(1)).sum() * (cp.size / count)
