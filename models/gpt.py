"""One pipeline stage of a GPT.

Decides which module is on which stage: the embedding on the first, layers on all, the final norm and the
logits on the last. With tied embeddings over several stages, the last one holds a second copy of the
embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from megackpt.errors import DeclarationError
from megackpt.mapping import RankOffset, ShardedStateDict
from megackpt.parallel import (
    LayerStack,
    Metadata,
    ParallelGroups,
    ParallelRng,
    ShardedModule,
    StageTable,
    VocabParallelEmbedding,
    VocabParallelOutput,
    divide_over_tp,
    mark,
    second_copy,
    vocab_parallel_cross_entropy,
)
from models.blocks.transformer import TransformerLayer, block_norm, residual_dropout
from models.config import GPTConfig
from models.stage import Stage

EMBEDDING_KEY = "embedding.word_embeddings.weight"
OUTPUT_KEY = "output_layer.weight"


class Embedding(ShardedModule):
    """Token ids `[b, s]` to hidden states `[s, b, hidden]` (`[s/tp, b, hidden]`). Collective over tp."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage.groups)
        config = stage.config
        self.word_embeddings = VocabParallelEmbedding(
            config.vocab_size,
            config.hidden_size,
            stage.groups,
            make_divisible=config.make_vocab_divisible,
            sequence_parallel=stage.sequence_parallel,
            dtype=config.params_dtype,
            device=stage.device,
        )
        self.dropout = residual_dropout(stage)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the hidden states of `tokens`."""
        out: Tensor = self.dropout(self.word_embeddings(tokens.transpose(0, 1)))
        return out


class Decoder(ShardedModule):
    """The layers of this stage and, on the last stage, the final norm. `[s (/tp), b, hidden]` to the same.

    Args:
        stage: what its parts are made with.
        owned: global indices of this stage's layers.
    """

    def __init__(self, stage: Stage, owned: Sequence[int]) -> None:
        super().__init__(stage.groups)

        def build(index: int) -> TransformerLayer:
            return TransformerLayer(stage)

        self.layers = LayerStack(build, owned, stage.config.num_layers, stage.groups)
        self.final_layernorm = block_norm(stage) if stage.groups.pp.is_last else None

    def forward(self, x: Tensor) -> Tensor:
        """Return what the next stage, or the output layer, takes."""
        x = self.layers(x)
        return x if self.final_layernorm is None else self.final_layernorm(x)


class GPT(ShardedModule):
    """One rank's stage of a decoder-only transformer. Collective over tp; see `forward_backward` for pp.

    Initial weights are those of the layers, which differ by layout; `init_weights` makes them equal.

    Args:
        config: sizes and choices.
        groups: the ranks around this one; they decide which stage this is.
        rng: random streams for dropout; may be None where config.dropout is 0.
        sequence_parallel: between the layers each rank of tp holds its part of the sequence only; tp must
            divide the sequence length then.
        stages: which layers are on which stage; None splits them evenly.
        device: where the parameters lie.

    Raises:
        DeclarationError: the layout cannot hold the model, or there is dropout without rng.
    """

    def __init__(
        self,
        config: GPTConfig,
        groups: ParallelGroups,
        rng: ParallelRng | None = None,
        *,
        sequence_parallel: bool = False,
        stages: StageTable | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(groups)
        config.check_layout(groups.layout)
        if stages is None:
            stages = StageTable.even(config.num_layers, pp=groups.pp.size)
        stages.check_layout(pp=groups.pp.size)
        stages.check_num_layers(config.num_layers)
        self.config = config
        self.sequence_parallel = sequence_parallel
        stage = Stage(
            config=config, groups=groups, rng=rng, sequence_parallel=sequence_parallel, device=device
        )
        self.embedding = Embedding(stage) if groups.pp.is_first else None
        self.decoder = Decoder(stage, stages.layers_of(groups.pp.rank))
        self.output_layer = (
            VocabParallelOutput(
                config.vocab_size,
                config.hidden_size,
                groups,
                tied=config.tied_embeddings and groups.pp.is_first,
                make_divisible=config.make_vocab_divisible,
                sequence_parallel=sequence_parallel,
                dtype=config.params_dtype,
                device=device,
            )
            if groups.pp.is_last
            else None
        )
        if self._has_two_copies:
            self._mark_copies()

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Tensor:
        """Run this stage.

        Args:
            inputs: token ids `[b, s]` on the first stage, hidden states `[s (/tp), b, hidden]` on the others.
            labels: token ids `[b, s]`; looked at on the last stage only.

        Returns:
            Hidden states `[s (/tp), b, hidden]`; on the last stage the mean loss over all tokens (0-dim,
            float32) or, without labels, this rank's logits `[s, b, padded_vocab/tp]`.

        Raises:
            DeclarationError: on the first stage, a sequence longer than the model is made for.
        """
        if self.embedding is not None and inputs.shape[1] > self.config.seq_length:
            raise DeclarationError(
                f"the sequences have {inputs.shape[1]} tokens, but GPTConfig.seq_length is "
                f"{self.config.seq_length}. Cut them, or make the model for longer ones."
            )
        hidden = inputs if self.embedding is None else self.embedding(inputs)
        hidden = cast(Tensor, self.decoder(hidden))
        if self.output_layer is None:
            return hidden
        logits = cast(Tensor, self.output_layer(hidden, self._tied_weight()))
        if labels is None:
            return logits
        losses = vocab_parallel_cross_entropy(
            logits, labels.transpose(0, 1), self.groups.tp, vocab_size=self.config.vocab_size
        )
        return losses.mean()

    def activation_buffer(self, tokens: Tensor) -> Tensor:
        """Return an empty `[s (/tp), b, hidden]` for what the previous stage makes of `tokens` `[b, s]`."""
        batch, sequence = tokens.shape
        if self.sequence_parallel:
            sequence = divide_over_tp("sequence length", sequence, self.groups)
        shape = (sequence, batch, self.config.hidden_size)
        return torch.empty(shape, dtype=self.config.params_dtype, device=tokens.device)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Sequence[RankOffset] = (), metadata: Metadata = None
    ) -> ShardedStateDict:
        """Declare this stage; the last one's tied output weight is a second copy of the embedding. Local."""
        result = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        if self._has_two_copies and self.output_layer is not None:
            result[prefix + OUTPUT_KEY] = second_copy(result[prefix + OUTPUT_KEY], prefix + EMBEDDING_KEY)
        return result

    def _tied_weight(self) -> Tensor | None:
        """The embedding, where the output layer has no weight of its own: tied, on a single stage."""
        return (
            self.embedding.word_embeddings.weight
            if self.embedding is not None and self.config.tied_embeddings
            else None
        )

    @property
    def _has_two_copies(self) -> bool:
        return self.config.tied_embeddings and self.groups.pp.size > 1

    def _mark_copies(self) -> None:
        """Tell the optimizer that first and last stage hold one weight twice."""
        if self.embedding is not None:
            mark(self.embedding.word_embeddings.weight, "shared_embedding")
        if self.output_layer is not None and self.output_layer.weight is not None:
            mark(self.output_layer.weight, "shared_embedding", "is_duplicate")
