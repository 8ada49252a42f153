"""One model chunk of a T5: encoder and decoder with cross attention, over any pipeline.

A `StageTable` counts the layers of the encoder and then those of the decoder, so that a stage has layers of
one of them or of both. What one chunk hands to the next has one shape everywhere: hidden states of the
encoder's tokens, then those of the decoder's, then a table of relative positions, and which of the encoder's
tokens are padding.

* The first chunk embeds all tokens. Those of the decoder pass by the encoder, and what the encoder makes
  of its own passes by the decoder. So two chunks at most have the embedding: the first one, and the last one
  if the output layer is tied to it.
* A table belongs to the first layer of its stack, whose chunk has it, and is handed on to the others. So
  there is one of each, and its gradients need no sum over pp.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor

from megackpt.errors import DeclarationError
from megackpt.training.parallel import (
    LayerStack,
    ModelChunks,
    ParallelGroups,
    ParallelRng,
    ShardedModule,
    StageTable,
    divide_over_tp,
)
from models.blocks.full_attention import (
    CrossAttention,
    FullAttention,
    RelativePositions,
    padding_bias,
    relative_bias,
)
from models.blocks.mlp import build_mlp
from models.blocks.norm import block_norm
from models.blocks.transformer import residual_dropout
from models.encoder_config import T5Config
from models.language_model import EncoderModel, Shape, with_rows, without_rows
from models.stage import Stage


class T5Layer(ShardedModule):
    """A pre-norm layer over `[s, b, hidden]` (`[s/tp, b, hidden]`). Collective over tp and cp.

    Args:
        stage: what its parts are made with.
        has_memory: whether it attends to what the encoder made, as layers of the decoder do.
    """

    def __init__(self, stage: Stage, *, has_memory: bool) -> None:
        super().__init__(stage.groups)
        self.input_layernorm = block_norm(stage)
        self.self_attention = FullAttention(stage)
        self.pre_cross_attn_layernorm = block_norm(stage) if has_memory else None
        self.cross_attention = CrossAttention(stage) if has_memory else None
        self.pre_mlp_layernorm = block_norm(stage)
        self.mlp = build_mlp(stage)
        self.dropout = residual_dropout(stage)

    def forward(self, x: Tensor, bias: Tensor, memory: Tensor, padding: Tensor | None) -> Tensor:
        """Return the layer's output, shaped like `x`.

        Args:
            x: hidden states.
            bias: what is added to the scores of self-attention, `[1 or b, heads/tp, s, cp * s]`.
            memory: what the encoder made, `[m (/tp), b, hidden]`; looked at by the decoder only.
            padding: what is added to the scores of the memory, `[b, 1, 1, cp * m]`; None for nothing.
        """
        x = x + self.dropout(self.self_attention(self.input_layernorm(x), bias))
        if self.cross_attention is not None and self.pre_cross_attn_layernorm is not None:
            seen = self.cross_attention(self.pre_cross_attn_layernorm(x), memory, padding)
            x = x + self.dropout(seen)
        x = x + self.dropout(self.mlp(self.pre_mlp_layernorm(x)))
        return x


class T5Stack(ShardedModule):
    """The layers of the encoder, or of the decoder, in one chunk. Collective over tp and cp.

    With its first layer it has the table of relative positions, and with its last one the final norm.

    Args:
        stage: what its parts are made with.
        owned: indices of the layers, counted in this stack.
        total: number of layers of this stack in the model.
        is_decoder: whether tokens see those before them only, and the memory.
    """

    def __init__(self, stage: Stage, owned: Sequence[int], total: int, *, is_decoder: bool) -> None:
        super().__init__(stage.groups)

        def build(_: int) -> T5Layer:
            return T5Layer(stage, has_memory=is_decoder)

        config = cast(T5Config, stage.config)
        self.is_decoder, self.max_distance = is_decoder, config.max_distance
        self.sequence_parallel = stage.sequence_parallel
        buckets = config.relative_buckets
        self.relative_positions = RelativePositions(stage, buckets) if 0 in owned else None
        self.layers = LayerStack(build, owned, total, stage.groups)
        self.final_layernorm = block_norm(stage) if total - 1 in owned else None
        self.dropout = residual_dropout(stage)

    def forward(
        self, x: Tensor, memory: Tensor, table: Tensor, padding: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the stack's output, shaped like `x`, and the table that its other layers need.

        Args:
            x: hidden states `[s (/tp), b, hidden]`.
            memory: what the encoder made, `[m (/tp), b, hidden]`; looked at by the decoder only.
            table: `[buckets, heads/tp]` of the chunk before.
            padding: what `padding_bias` returns of the encoder's tokens.
        """
        if not len(self.layers):
            return x, table
        table = table if self.relative_positions is None else self.relative_positions.weight
        cp, is_causal = self.groups.cp, self.is_decoder
        length = len(x) * cp.size * (self.groups.tp.size if self.sequence_parallel else 1)
        bias = relative_bias(table, length, cp, max_distance=self.max_distance, causal=is_causal)
        if padding is not None and not self.is_decoder:
            bias = bias + padding
        for layer in self.layers:
            x = layer(x, bias, memory, padding)
        return x if self.final_layernorm is None else self.dropout(self.final_layernorm(x)), table


class Activation(NamedTuple):
    """What one chunk hands to the next.

    Attributes:
        encoded: hidden states of the encoder's tokens, `[m (/tp), b, hidden]`.
        decoded: those of the decoder's, `[s (/tp), b, hidden]`.
        table: of relative positions, `[buckets, heads/tp]`; zeros before the first layer.
        padding: what `padding_bias` returns of the encoder's tokens.
    """

    encoded: Tensor
    decoded: Tensor
    table: Tensor
    padding: Tensor | None


class T5(EncoderModel[T5Config]):
    """One rank's chunk of a T5; arguments and errors as for `EncoderModel`.

    `build_t5` makes all chunks of a rank. Tokens of a micro-batch are those of the encoder followed by those
    of the decoder, `[b, encoder_length + s]`; labels are `[b, s]`. With context parallelism they are this
    rank's share of the encoder's tokens followed by that of the decoder's, each as `context_share` cuts it.
    For stages that have layers of one of the two, see `T5Config.split_stages`.
    """

    def add_layers(self, stage: Stage, owned: Sequence[int]) -> None:
        """Add both stacks, and the output layer if this is the last chunk. Local."""
        count, further = self.config.num_encoder_layers, self.config.num_decoder_layers
        encoder = [index for index in range(count) if index in owned]
        decoder = [index for index in range(further) if count + index in owned]
        self.encoder = T5Stack(stage, encoder, count, is_decoder=False)
        self.decoder = T5Stack(stage, decoder, further, is_decoder=True)
        self.add_output_layer(stage, is_last=self.is_last)

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Tensor:
        """Run this chunk.

        Args:
            inputs: token ids for the first chunk; for others what the one before returned.
            labels: token ids, negative for tokens without loss; looked at by the last chunk only.

        Returns:
            What the next chunk takes, as `activation_buffer` describes; of the last chunk the mean loss over
            the labels (0-dim, float32; see `mean_loss`) or, without labels, this rank's logits
            `[s, b, padded_vocab/tp]`.

        Raises:
            DeclarationError: in the first chunk, no tokens are left for the decoder, or too many.
        """
        encoded, decoded, table, padding = self._embedded(inputs) if self.is_first else self._received(inputs)
        encoded, table = self.encoder(encoded, encoded, table, padding)
        decoded, table = self.decoder(decoded, encoded, table, padding)
        if self.output_layer is None:
            return with_rows(torch.cat([encoded, decoded]), [table, padding])
        if self.config.tied_embeddings:
            decoded = decoded * self.config.hidden_size**-0.5
        return self.logits(decoded) if labels is None else self.mean_loss(decoded, labels)

    def extra_shapes(self, batch: int) -> Sequence[Shape | None]:
        """Return the shapes of the table, and of the padding if there is any. Pure."""
        config = self.config
        padding = None if config.pad_token_id is None else (batch, 1, 1, config.encoder_length)
        return (config.relative_buckets, config.num_heads // self.groups.tp.size), padding

    def _embedded(self, tokens: Tensor) -> Activation:
        cp, config = self.groups.cp, self.config
        length, most = config.encoder_length // cp.size, config.seq_length // cp.size
        if not length < tokens.shape[1] <= most:
            share = f" of this rank of cp={cp.size}" if cp.size > 1 else ""
            raise DeclarationError(
                f"the sequences{share} have {tokens.shape[1]} tokens. The first {length} are those of the "
                f"encoder (T5Config.encoder_length), and the decoder has the others, at most {most - length} "
                f"(T5Config.seq_length)."
            )
        assert self.embedding is not None
        ids = tokens.tensor_split([length], dim=1)
        encoded, decoded = (self.embedding(part) for part in ids)
        (table, _) = self.extra_shapes(len(tokens))
        padding = padding_bias(ids[0], config.pad_token_id, cp, encoded.dtype)
        return Activation(encoded, decoded, encoded.new_zeros(table), padding)

    def _received(self, inputs: Tensor) -> Activation:
        hidden, (table, padding) = without_rows(inputs, self.extra_shapes(inputs.shape[1]))
        length = self.config.encoder_length // self.groups.cp.size
        if self.sequence_parallel:
            length = divide_over_tp("encoder_length", length, self.groups)
        encoded, decoded = hidden.tensor_split([length])
        assert table is not None
        return Activation(encoded, decoded, table, None if padding is None else padding.detach())


def build_t5(
    config: T5Config,
    groups: ParallelGroups,
    rng: ParallelRng | None = None,
    *,
    sequence_parallel: bool = False,
    stages: StageTable | None = None,
    device: torch.device | str | None = None,
) -> ModelChunks:
    """Return all model chunks of this rank: `groups.layout.vpp` of them. Arguments and errors as for T5."""
    chunk = partial(
        T5, config, groups, rng, sequence_parallel=sequence_parallel, stages=stages, device=device
    )
    return ModelChunks([chunk(virtual_stage=number) for number in range(groups.layout.vpp)], groups)
