"""One model chunk of a BERT: an encoder whose norms stand after its blocks, and a head for masked tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from megackpt.errors import DeclarationError
from megackpt.training.parallel import (
    LayerStack,
    ModelChunks,
    ParallelGroups,
    ParallelRng,
    ReplicatedLinear,
    ShardedModule,
    StageTable,
)
from megackpt.training.parallel.collectives import collect_sequence, gather_sequence
from models.block_config import LearnedPositions, MLPConfig, NormConfig
from models.blocks.embedding import Embedding, ReplicatedEmbedding
from models.blocks.full_attention import FullAttention, padding_bias
from models.blocks.mlp import ACTIVATIONS, build_mlp
from models.blocks.norm import block_norm
from models.blocks.transformer import residual_dropout
from models.encoder_config import EncoderConfig
from models.language_model import EncoderModel, Shape, with_rows, without_rows
from models.stage import Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class BertConfig(EncoderConfig):
    """Sizes and choices of a bidirectional encoder. Positions are learned, as many as it says.

    Attributes:
        token_types: number of token types, such as first and second sentence.
        has_token_head: whether it predicts masked tokens; otherwise the last chunk returns hidden states.
        has_pooler: whether it has a layer over the first token, for tasks on whole sequences.

    Raises:
        DeclarationError: as for `EncoderConfig`; no learned positions, no token type, or `tied_embeddings`
            without an output layer, or the other way round.

    Source: Devlin et al. 2019; transformers `BertConfig`.
    """

    token_types: int = 2
    has_token_head: bool = True
    has_pooler: bool = False
    linear_bias: bool = True
    norm_eps: float = 1e-12
    norm: NormConfig = field(default_factory=lambda: NormConfig(kind="layer"))
    mlp: MLPConfig = field(default_factory=lambda: MLPConfig(gated=False, activation="gelu"))

    def __post_init__(self) -> None:
        EncoderConfig.__post_init__(self)  # super() needs the class before `slots` made a new one of it
        self.check_choices("embedding_scale", "logit_softcap")
        if not isinstance(self.positions, LearnedPositions):
            raise DeclarationError(f"BertConfig.positions is {self.positions}. Give LearnedPositions.")
        if self.token_types < 1:
            raise DeclarationError(f"BertConfig.token_types is {self.token_types}. Give at least 1.")
        if self.tied_embeddings != self.has_token_head:
            raise DeclarationError(
                f"BertConfig.tied_embeddings is {self.tied_embeddings}, but has_token_head is "
                f"{self.has_token_head}. The output layer of BERT is always tied: give both the same value."
            )


class BertEmbedding(Embedding):
    """Token ids and types to normalised hidden states `[s (/tp), b, hidden]`. Collective over tp."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        self.tokentype_embeddings = ReplicatedEmbedding(stage, cast(BertConfig, stage.config).token_types)
        self.layernorm = block_norm(stage)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the hidden states of tokens `[b, s]`, all of type 0, or `[b, s, 2]`: ids and types."""
        ids, types = (tokens, torch.zeros_like(tokens)) if tokens.ndim == 2 else tokens.unbind(-1)
        out: Tensor = self.dropout(self.layernorm(self.vectors(ids) + self.tokentype_embeddings(types)))
        return out


class BertLayer(ShardedModule):
    """A post-norm layer over `[s, b, hidden]` (`[s/tp, b, hidden]`). Collective over tp and cp."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage.groups)
        self.self_attention = FullAttention(stage)
        self.attention_layernorm = block_norm(stage)
        self.mlp = build_mlp(stage)
        self.mlp_layernorm = block_norm(stage)
        self.dropout = residual_dropout(stage)

    def forward(self, x: Tensor, padding: Tensor | None) -> Tensor:
        """Return the layer's output, shaped like `x`; `padding` is what `padding_bias` returns."""
        x = self.attention_layernorm(x + self.dropout(self.self_attention(x, padding)))
        x = self.mlp_layernorm(x + self.dropout(self.mlp(x)))
        return x


class BertEncoder(ShardedModule):
    """The layers of this chunk. Collective over tp and cp."""

    def __init__(self, stage: Stage, owned: Sequence[int]) -> None:
        super().__init__(stage.groups)

        def build(_: int) -> BertLayer:
            return BertLayer(stage)

        self.layers = LayerStack(build, owned, stage.config.num_layers, stage.groups)

    def forward(self, x: Tensor, padding: Tensor | None) -> Tensor:
        """Return the output of the last layer; arguments as for a layer."""
        for layer in self.layers:
            x = layer(x, padding)
        return x


class TokenHead(ShardedModule):
    """What hidden states pass before the output layer; shapes do not change. Local."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage.groups)
        self.dense = _dense(stage, sequence_parallel=stage.sequence_parallel)
        self.activation = ACTIVATIONS[stage.config.mlp.activation]
        self.layer_norm = block_norm(stage)

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised features of `x`."""
        out: Tensor = self.layer_norm(self.activation(self.dense(x)))
        return out


class Pooler(ShardedModule):
    """Hidden states `[s (/tp), b, hidden]` to `[b, hidden]`, made of the first token.

    Collective over tp and cp.
    """

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage.groups)
        self.sequence_parallel = stage.sequence_parallel
        self.dense = _dense(stage, sequence_parallel=False)  # the first token is on all ranks

    def forward(self, x: Tensor) -> Tensor:
        """Return the pooled output."""
        own = collect_sequence(x, self.groups.tp) if self.sequence_parallel else x
        first = gather_sequence(own[:1], self.groups.cp)[0]  # of the ranks of cp, the first one has it
        return torch.tanh(self.dense(first))


class BERT(EncoderModel[BertConfig]):
    """One rank's chunk of a BERT; arguments and errors as for `EncoderModel`.

    `build_bert` makes all chunks of a rank. Tokens see all others of their sequence, except for padding, if
    the config has a `pad_token_id`.

    Attributes:
        pooler: of the last chunk, if the config has one; call it with hidden states.
    """

    embedding_type = BertEmbedding

    def add_layers(self, stage: Stage, owned: Sequence[int]) -> None:
        """Add the layers with these indices, and the heads if this is the last chunk. Local."""
        self.encoder = BertEncoder(stage, owned)
        has_head = self.is_last and self.config.has_token_head
        self.lm_head = TokenHead(stage) if has_head else None
        self.add_output_layer(stage, is_last=has_head, bias=True)
        self.pooler = Pooler(stage) if self.is_last and self.config.has_pooler else None

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Tensor:
        """Run this chunk.

        With context parallelism, tokens and labels are this rank's share, as `context_share` cuts them.

        Args:
            inputs: for the first chunk token ids `[b, s]`, or ids and types `[b, s, 2]`; for others what the
                one before returned.
            labels: token ids `[b, s]`, negative for tokens without loss; looked at by the last chunk only.

        Returns:
            What the next chunk takes, as `activation_buffer` describes; of the last chunk hidden states
            `[s (/tp), b, hidden]` or, if it predicts tokens, the mean loss over the labels (0-dim, float32;
            see `mean_loss`) or, without labels, this rank's logits `[s, b, padded_vocab/tp]`.

        Raises:
            DeclarationError: in the first chunk, a sequence longer than the model is made for.
        """
        hidden, padding = self._embedded(inputs) if self.is_first else self._received(inputs)
        hidden = cast(Tensor, self.encoder(hidden, padding))
        if not self.is_last:
            if padding is not None:
                padding = F.pad(padding, (0, self.config.seq_length - padding.shape[-1]))
            return with_rows(hidden, [padding])
        if self.lm_head is None:
            return hidden
        hidden = self.lm_head(hidden)
        return self.logits(hidden) if labels is None else self.mean_loss(hidden, labels)

    def activation_buffer(self, tokens: Tensor) -> Tensor:
        """Return an empty tensor for what the previous chunk makes of `tokens`, as `LanguageModel` does."""
        return super().activation_buffer(tokens if tokens.ndim == 2 else tokens[..., 0])

    def extra_shapes(self, batch: int) -> Sequence[Shape | None]:
        """Return the shape of what `padding_bias` returns, with zeros up to the longest sequences. Pure."""
        return [None if self.config.pad_token_id is None else (batch, 1, 1, self.config.seq_length)]

    def _embedded(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        assert self.embedding is not None
        self.check_length(tokens.shape[1])
        hidden, ids = self.embedding(tokens), tokens if tokens.ndim == 2 else tokens[..., 0]
        return hidden, padding_bias(ids, self.config.pad_token_id, self.groups.cp, hidden.dtype)

    def _received(self, inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        hidden, (padding,) = without_rows(inputs, self.extra_shapes(inputs.shape[1]))
        length = len(hidden) * self.groups.cp.size * (self.groups.tp.size if self.sequence_parallel else 1)
        return hidden, None if padding is None else padding[..., :length].detach()


def build_bert(
    config: BertConfig,
    groups: ParallelGroups,
    rng: ParallelRng | None = None,
    *,
    sequence_parallel: bool = False,
    stages: StageTable | None = None,
    device: torch.device | str | None = None,
) -> ModelChunks:
    """Return all model chunks of this rank: `groups.layout.vpp` of them. Arguments and errors as for BERT."""
    chunk = partial(
        BERT, config, groups, rng, sequence_parallel=sequence_parallel, stages=stages, device=device
    )
    return ModelChunks([chunk(virtual_stage=number) for number in range(groups.layout.vpp)], groups)


def _dense(stage: Stage, *, sequence_parallel: bool) -> ReplicatedLinear:
    hidden, dtype = stage.config.hidden_size, stage.config.params_dtype
    return ReplicatedLinear(
        hidden, hidden, stage.groups, sequence_parallel=sequence_parallel, dtype=dtype, device=stage.device
    )
