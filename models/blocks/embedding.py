"""What comes before the layers: the embedding of tokens, and of positions where they are learned."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megackpt.training.parallel import ShardedModule, VocabParallelEmbedding, context_positions
from megackpt.training.parallel.attributes import mark
from models.block_config import LearnedPositions
from models.blocks.transformer import residual_dropout
from models.stage import Stage


class Embedding(ShardedModule):
    """Token ids `[b, s]` to hidden states `[s, b, hidden]` (`[s/tp, b, hidden]`). Collective over tp."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage.groups)
        config = stage.config
        self.scale = config.embedding_scale
        self.word_embeddings = VocabParallelEmbedding(
            config.vocab_size,
            config.hidden_size,
            stage.groups,
            make_divisible=config.make_vocab_divisible,
            sequence_parallel=stage.sequence_parallel,
            dtype=config.params_dtype,
            device=stage.device,
        )
        positions = config.positions
        self.position_embeddings = (
            ReplicatedEmbedding(stage, positions.count) if isinstance(positions, LearnedPositions) else None
        )
        self.dropout = residual_dropout(stage)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the hidden states of `tokens`."""
        out: Tensor = self.dropout(self.vectors(tokens))
        return out

    def vectors(self, tokens: Tensor) -> Tensor:
        """Return the sums of the vectors of tokens and positions, shaped as the hidden states."""
        hidden: Tensor = self.word_embeddings(tokens.transpose(0, 1))
        if self.scale is not None:
            # Rounded to the dtype of the embeddings first, as Gemma was trained.
            hidden = hidden * torch.tensor(self.scale, dtype=hidden.dtype, device=hidden.device)
        if self.position_embeddings is not None:
            cp = self.groups.cp
            positions = context_positions(tokens.shape[1] * cp.size, cp, device=tokens.device)
            hidden = hidden + self.position_embeddings(positions.unsqueeze(0))
        return hidden


class ReplicatedEmbedding(ShardedModule):
    """A learned vector for each of a few ids; weight `[count, hidden]`, equal on all ranks of tp. Local.

    Args:
        stage: what it is made with.
        count: number of ids, such as positions or types of tokens.
    """

    def __init__(self, stage: Stage, count: int) -> None:
        super().__init__(stage.groups)
        config = stage.config
        weight = torch.zeros(count, config.hidden_size, dtype=config.params_dtype, device=stage.device)
        self.weight = nn.Parameter(weight.normal_(std=config.init_std))
        self.sequence_parallel = stage.sequence_parallel
        if stage.sequence_parallel:
            mark(self.weight, "sequence_parallel")

    def forward(self, ids: Tensor) -> Tensor:
        """Return the vectors `[s (/tp), b, hidden]` of ids `[b, s]`."""
        ids, tp = ids.transpose(0, 1), self.groups.tp
        return F.embedding(ids.chunk(tp.size)[tp.rank] if self.sequence_parallel else ids, self.weight)
