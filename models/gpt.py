"""One model chunk of a GPT: all of it, one pipeline stage, or one virtual stage of a pipeline stage.

A `StageTable` decides which layers are in which chunk. The first one has the embedding, the last one the
final norm and the logits. With tied embeddings over several stages, the last one has a second copy of the
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
    ModelChunks,
    ParallelGroups,
    ParallelLayout,
    ParallelRng,
    ShardedModule,
    StageTable,
    VocabParallelOutput,
    divide_over_tp,
    mark,
    second_copy,
    vocab_parallel_cross_entropy,
)
from models.blocks.embedding import Embedding
from models.blocks.norm import block_norm
from models.blocks.transformer import TransformerLayer
from models.config import GPTConfig
from models.stage import Stage

EMBEDDING_KEY = "embedding.word_embeddings.weight"
OUTPUT_KEY = "output_layer.weight"


class Decoder(ShardedModule):
    """The layers of this chunk and, in the last chunk, the final norm. `[s (/tp), b, hidden]` to the same.

    Args:
        stage: what its parts are made with.
        owned: global indices of this chunk's layers.
        is_last: whether this is the last chunk of the model.
    """

    def __init__(self, stage: Stage, owned: Sequence[int], *, is_last: bool) -> None:
        super().__init__(stage.groups)

        def build(index: int) -> TransformerLayer:
            return TransformerLayer(stage, index)

        config = stage.config
        equal = len(set(config.moe_layers)) == 1
        self.layers = LayerStack(build, owned, config.num_layers, stage.groups, homogeneous=equal)
        self.final_layernorm = block_norm(stage) if is_last else None

    def forward(self, x: Tensor) -> Tensor:
        """Return what the next stage, or the output layer, takes."""
        x = self.layers(x)
        return x if self.final_layernorm is None else self.final_layernorm(x)


class GPT(ShardedModule):
    """One rank's chunk of a decoder-only transformer. Collective over tp; see `forward_backward` for pp.

    Each stage has one chunk, or several with virtual pipeline parallelism; `build_gpt` makes all of them.

    Initial weights are those of the layers, which differ by layout; `init_weights` makes them equal.

    Args:
        config: sizes and choices.
        groups: the ranks around this one; they decide which stage this is.
        rng: random streams for dropout; may be None where config.dropout is 0.
        sequence_parallel: between the layers each rank of tp holds its part of the sequence only; tp must
            divide the sequence length then.
        stages: which layers are in which chunk; None splits them evenly.
        virtual_stage: which chunk of this pipeline stage it is, in `[0, vpp)`.
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
        virtual_stage: int = 0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(groups)
        table = _stage_table(config, groups.layout, stages)
        is_first = table.has_embedding(groups.pp.rank, virtual_stage)
        is_last = table.has_loss(groups.pp.rank, virtual_stage)
        self.config = config
        self.sequence_parallel = sequence_parallel
        stage = Stage(
            config=config, groups=groups, rng=rng, sequence_parallel=sequence_parallel, device=device
        )
        self.embedding = Embedding(stage) if is_first else None
        self.decoder = Decoder(stage, table.layers_of(groups.pp.rank, virtual_stage), is_last=is_last)
        self.output_layer = (
            VocabParallelOutput(
                config.vocab_size,
                config.hidden_size,
                groups,
                tied=config.tied_embeddings and is_first,
                make_divisible=config.make_vocab_divisible,
                sequence_parallel=sequence_parallel,
                dtype=config.params_dtype,
                device=device,
            )
            if is_last
            else None
        )
        if self._has_two_copies:
            self._mark_copies()

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Tensor:
        """Run this chunk.

        With context parallelism, tokens and labels are this rank's share, as `context_share` cuts them: s
        counts the tokens of this rank, and the loss is the mean over them. The loss of the batch is the mean
        over `groups.dp_cp`.

        Args:
            inputs: token ids `[b, s]` for the first chunk, hidden states `[s (/tp), b, hidden]` for others.
            labels: token ids `[b, s]`; looked at by the last chunk only.

        Returns:
            Hidden states `[s (/tp), b, hidden]`; of the last chunk the mean loss over the tokens (0-dim,
            float32) or, without labels, this rank's logits `[s, b, padded_vocab/tp]`.

        Raises:
            DeclarationError: in the first chunk, a sequence longer than the model is made for.
        """
        if self.embedding is not None:
            self._check_length(inputs.shape[1])
        hidden = inputs if self.embedding is None else self.embedding(inputs)
        hidden = cast(Tensor, self.decoder(hidden))
        if self.output_layer is None:
            return hidden
        logits = cast(Tensor, self.output_layer(hidden, self._tied_weight()))
        if (cap := self.config.logit_softcap) is not None:
            logits = cap * torch.tanh(logits / cap)
        if labels is None:
            return logits
        losses = vocab_parallel_cross_entropy(
            logits, labels.transpose(0, 1), self.groups.tp, vocab_size=self.config.vocab_size
        )
        return losses.mean()

    def activation_buffer(self, tokens: Tensor) -> Tensor:
        """Return an empty `[s (/tp), b, hidden]` for what the previous chunk makes of `tokens` `[b, s]`."""
        batch, sequence = tokens.shape
        if self.sequence_parallel:
            sequence = divide_over_tp("sequence length", sequence, self.groups)
        shape = (sequence, batch, self.config.hidden_size)
        return torch.empty(shape, dtype=self.config.params_dtype, device=tokens.device)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Sequence[RankOffset] = (), metadata: Metadata = None
    ) -> ShardedStateDict:
        """Declare this chunk; the last one's tied output weight is a second copy of the embedding. Local."""
        result = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        if self._has_two_copies and self.output_layer is not None:
            result[prefix + OUTPUT_KEY] = second_copy(result[prefix + OUTPUT_KEY], prefix + EMBEDDING_KEY)
        return result

    def _check_length(self, own: int) -> None:
        """Raise an error if sequences, of which this rank of cp has `own` tokens, are too long."""
        cp, allowed = self.groups.cp.size, self.config.seq_length
        if own * cp > allowed:
            shares = f" ({own} on each of {cp} ranks of cp)" if cp > 1 else ""
            hint = ", give each rank of cp its context_share" if cp > 1 else ""
            raise DeclarationError(
                f"the sequences have {own * cp} tokens{shares}, but GPTConfig.seq_length is {allowed}. Cut "
                f"them{hint}, or make the model for longer ones."
            )

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


def build_gpt(
    config: GPTConfig,
    groups: ParallelGroups,
    rng: ParallelRng | None = None,
    *,
    sequence_parallel: bool = False,
    stages: StageTable | None = None,
    device: torch.device | str | None = None,
) -> ModelChunks:
    """Return all model chunks of this rank: `groups.layout.vpp` of them. Arguments and errors as for GPT."""
    table = _stage_table(config, groups.layout, stages)
    return ModelChunks(
        [
            GPT(
                config,
                groups,
                rng,
                sequence_parallel=sequence_parallel,
                stages=table,
                virtual_stage=virtual_stage,
                device=device,
            )
            for virtual_stage in range(table.vpp)
        ],
        groups,
    )


def _stage_table(config: GPTConfig, layout: ParallelLayout, stages: StageTable | None) -> StageTable:
    config.check_layout(layout, stages)
    return StageTable.even(config.num_layers, pp=layout.pp, vpp=layout.vpp) if stages is None else stages
