"""One model chunk of a T5: encoder and decoder with cross attention, over any pipeline.

A `StageTable` counts the layers of the encoder and then those of the decoder, so that a stage has layers of
one of them or of both. What one chunk hands to the next has one shape everywhere: hidden states of the
encoder's tokens, then those of the decoder's, then a table of relative positions.

* The first chunk embeds all tokens. Those of the decoder pass by the encoder, and what the encoder makes
  of its own passes by the decoder. So two chunks at most have the embedding: the first one, and the last one
  if the output layer is tied to it.
* A table belongs to the first layer of its stack, whose chunk has it, and is handed on to the others. So
  there is one of each, and its gradients need no sum over pp.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from megackpt.errors import DeclarationError
from megackpt.parallel import (
    LayerStack,
    ModelChunks,
    ParallelGroups,
    ParallelRng,
    ShardedModule,
    StageTable,
    divide_over_tp,
)
from models.blocks.embedding import Embedding
from models.blocks.full_attention import CrossAttention, FullAttention, RelativePositions, relative_bias
from models.blocks.mlp import build_mlp
from models.blocks.norm import block_norm
from models.blocks.transformer import residual_dropout
from models.language_model import LanguageModel
from models.stage import Stage
from models.t5_config import T5Config


class T5Layer(ShardedModule):
    """A pre-norm layer over `[s, b, hidden]` (`[s/tp, b, hidden]`). Collective over tp.

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

    def forward(self, x: Tensor, bias: Tensor, memory: Tensor) -> Tensor:
        """Return the layer's output, shaped like `x`.

        Args:
            x: hidden states.
            bias: what is added to the scores of self-attention, `[1, heads/tp, s, s]`.
            memory: what the encoder made, `[m (/tp), b, hidden]`; looked at by the decoder only.
        """
        x = x + self.dropout(self.self_attention(self.input_layernorm(x), bias))
        if self.cross_attention is not None and self.pre_cross_attn_layernorm is not None:
            x = x + self.dropout(self.cross_attention(self.pre_cross_attn_layernorm(x), memory))
        x = x + self.dropout(self.mlp(self.pre_mlp_layernorm(x)))
        return x


class T5Stack(ShardedModule):
    """The layers of the encoder, or of the decoder, in one chunk. Collective over tp.

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

    def forward(self, x: Tensor, memory: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        """Return the stack's output, shaped like `x`, and the table that its other layers need.

        Args:
            x: hidden states `[s (/tp), b, hidden]`.
            memory: what the encoder made, `[m (/tp), b, hidden]`; looked at by the decoder only.
            table: `[buckets, heads/tp]` of the chunk before.
        """
        if not len(self.layers):
            return x, table
        table = table if self.relative_positions is None else self.relative_positions.weight
        length = len(x) * (self.groups.tp.size if self.sequence_parallel else 1)
        bias = relative_bias(table, length, max_distance=self.max_distance, causal=self.is_decoder)
        for layer in self.layers:
            x = layer(x, bias, memory)
        return x if self.final_layernorm is None else self.dropout(self.final_layernorm(x)), table


class Activation(NamedTuple):
    """What one chunk hands to the next.

    Attributes:
        encoded: hidden states of the encoder's tokens, `[m (/tp), b, hidden]`.
        decoded: those of the decoder's, `[s (/tp), b, hidden]`.
        table: of relative positions, `[buckets, heads/tp]`; zeros before the first layer.
    """

    encoded: Tensor
    decoded: Tensor
    table: Tensor


class T5(LanguageModel):
    """One rank's chunk of a T5. Collective over tp; see `forward_backward` for pp.

    `build_t5` makes all chunks of a rank. Tokens of a micro-batch are those of the encoder followed by those
    of the decoder, `[b, encoder_length + s]`; labels are `[b, s]`.

    Args:
        config: sizes and choices.
        groups: the ranks around this one; they decide which stage this is.
        rng: random streams for dropout; may be None where config.dropout is 0.
        sequence_parallel: between the layers each rank of tp holds its part of the tokens of the encoder, and
            of the decoder; tp must divide both.
        stages: which layers are in which chunk; None splits them evenly. See `T5Config.split_stages`.
        virtual_stage: which chunk of this pipeline stage it is, in `[0, vpp)`.
        device: where the parameters lie.

    Raises:
        DeclarationError: the layout cannot hold the model, or there is dropout without rng.
    """

    config: T5Config

    def __init__(
        self,
        config: T5Config,
        groups: ParallelGroups,
        rng: ParallelRng | None = None,
        *,
        sequence_parallel: bool = False,
        stages: StageTable | None = None,
        virtual_stage: int = 0,
        device: torch.device | str | None = None,
    ) -> None:
        config.check_layout(groups.layout, stages)
        layout = groups.layout
        table = stages or StageTable.even(config.num_layers, pp=layout.pp, vpp=layout.vpp)
        stage = Stage(
            config=config, groups=groups, rng=rng, sequence_parallel=sequence_parallel, device=device
        )
        is_first = table.has_embedding(groups.pp.rank, virtual_stage)
        super().__init__(stage, Embedding(stage) if is_first else None, is_first=is_first)
        owned = table.layers_of(groups.pp.rank, virtual_stage)
        count = config.num_encoder_layers
        encoder = [index for index in range(count) if index in owned]
        decoder = [index for index in range(config.num_decoder_layers) if count + index in owned]
        self.encoder = T5Stack(stage, encoder, count, is_decoder=False)
        self.decoder = T5Stack(stage, decoder, config.num_decoder_layers, is_decoder=True)
        self.add_output_layer(stage, is_last=table.has_loss(groups.pp.rank, virtual_stage))

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Tensor:
        """Run this chunk.

        Args:
            inputs: token ids `[b, encoder_length + s]` for the first chunk; for others what the one before
                returned.
            labels: token ids `[b, s]`, negative for tokens without loss; looked at by the last chunk only.

        Returns:
            What the next chunk takes, as `activation_buffer` describes; of the last chunk the mean loss over
            the labels (0-dim, float32) or, without labels, this rank's logits `[s, b, padded_vocab/tp]`.

        Raises:
            DeclarationError: in the first chunk, no tokens are left for the decoder, or too many.
        """
        encoded, decoded, table = self._embedded(inputs) if self.is_first else self._unpacked(inputs)
        encoded, table = self.encoder(encoded, encoded, table)
        decoded, table = self.decoder(decoded, encoded, table)
        if self.output_layer is None:
            rows = _as_rows(table, like=encoded)
            return torch.cat([encoded, decoded, rows])
        if self.config.tied_embeddings:
            decoded = decoded * self.config.hidden_size**-0.5
        return self.logits(decoded) if labels is None else self.mean_loss(decoded, labels)

    def activation_buffer(self, tokens: Tensor) -> Tensor:
        """Return an empty `[tokens of both (/tp) + rows, b, hidden]` for what the previous chunk returns.

        The rows are those that the table needs, with zeros after it.
        """
        hidden = super().activation_buffer(tokens)
        return torch.cat([hidden, _as_rows(self._no_table(hidden), like=hidden)])

    def _embedded(self, tokens: Tensor) -> Activation:
        length, most = self.config.encoder_length, self.config.seq_length
        if not length < tokens.shape[1] <= most:
            raise DeclarationError(
                f"the sequences have {tokens.shape[1]} tokens. The first {length} are those of the encoder "
                f"(T5Config.encoder_length), and the decoder has the others, at most {most - length} "
                f"(T5Config.seq_length)."
            )
        assert self.embedding is not None
        ends = [length, tokens.shape[1] - length]
        encoded, decoded = (self.embedding(part) for part in torch.split_with_sizes(tokens, ends, dim=1))
        return Activation(encoded, decoded, self._no_table(encoded))

    def _unpacked(self, inputs: Tensor) -> Activation:
        table = self._no_table(inputs)
        rows, length = len(_as_rows(table, like=inputs)), self.config.encoder_length
        if self.sequence_parallel:
            length = divide_over_tp("encoder_length", length, self.groups)
        encoded, decoded, packed = torch.split_with_sizes(inputs, [length, len(inputs) - length - rows, rows])
        return Activation(encoded, decoded, packed.flatten()[: table.numel()].view(table.shape))

    def _no_table(self, like: Tensor) -> Tensor:
        """Return zeros in place of a table, on the device of a tensor."""
        heads = self.config.num_heads // self.groups.tp.size
        return like.new_zeros(self.config.relative_buckets, heads)


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
    return ModelChunks(
        [
            T5(
                config,
                groups,
                rng,
                sequence_parallel=sequence_parallel,
                stages=stages,
                virtual_stage=virtual_stage,
                device=device,
            )
            for virtual_stage in range(groups.layout.vpp)
        ],
        groups,
    )


def _as_rows(table: Tensor, *, like: Tensor) -> Tensor:
    """Return a table as whole rows `[rows, b, hidden]` of hidden states, with zeros after it. Pure."""
    batch, hidden = like.shape[1:]
    rows = -(-table.numel() // (batch * hidden))
    return F.pad(table.flatten(), (0, rows * batch * hidden - table.numel())).view(rows, batch, hidden)
