"""One model chunk of a BERT: an encoder whose norms stand after its blocks, and a head for masked tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megackpt.errors import DeclarationError
from megackpt.parallel import (
    LayerStack,
    ModelChunks,
    ParallelGroups,
    ParallelRng,
    ReplicatedLinear,
    ShardedModule,
    StageTable,
    collect_sequence,
    mark,
)
from models.block_config import LearnedPositions, MLPConfig, NormConfig
from models.blocks.embedding import Embedding
from models.blocks.full_attention import FullAttention
from models.blocks.mlp import ACTIVATIONS, build_mlp
from models.blocks.norm import block_norm
from models.blocks.transformer import residual_dropout
from models.encoder_config import EncoderConfig
from models.language_model import LanguageModel
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
        self.tokentype_embeddings = TokenTypes(stage, cast(BertConfig, stage.config).token_types)
        self.layernorm = block_norm(stage)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the hidden states of tokens `[b, s]`, all of type 0, or `[b, s, 2]`: ids and types."""
        ids, types = (tokens, torch.zeros_like(tokens)) if tokens.ndim == 2 else tokens.unbind(-1)
        out: Tensor = self.dropout(self.layernorm(self.vectors(ids) + self.tokentype_embeddings(types)))
        return out


class TokenTypes(ShardedModule):
    """A vector for each type of tokens; weight `[types, hidden]`, equal on all ranks of tp. Local."""

    def __init__(self, stage: Stage, count: int) -> None:
        super().__init__(stage.groups)
        config = stage.config
        weight = torch.empty(count, config.hidden_size, dtype=config.params_dtype, device=stage.device)
        self.weight = nn.Parameter(weight.normal_(std=config.init_std))
        self.sequence_parallel = stage.sequence_parallel
        if stage.sequence_parallel:
            mark(self.weight, "sequence_parallel")

    def forward(self, types: Tensor) -> Tensor:
        """Return the vectors `[s (/tp), b, hidden]` of the types `[b, s]` of this rank's tokens."""
        types, tp = types.transpose(0, 1), self.groups.tp
        return F.embedding(types.chunk(tp.size)[tp.rank] if self.sequence_parallel else types, self.weight)


class BertLayer(ShardedModule):
    """A post-norm layer over `[s, b, hidden]` (`[s/tp, b, hidden]`). Collective over tp."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage.groups)
        self.self_attention = FullAttention(stage)
        self.attention_layernorm = block_norm(stage)
        self.mlp = build_mlp(stage)
        self.mlp_layernorm = block_norm(stage)
        self.dropout = residual_dropout(stage)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output, shaped like `x`."""
        x = self.attention_layernorm(x + self.dropout(self.self_attention(x)))
        x = self.mlp_layernorm(x + self.dropout(self.mlp(x)))
        return x


class BertEncoder(ShardedModule):
    """The layers of this chunk, in `layers`."""

    def __init__(self, stage: Stage, owned: tuple[int, ...]) -> None:
        super().__init__(stage.groups)

        def build(_: int) -> BertLayer:
            return BertLayer(stage)

        self.layers = LayerStack(build, owned, stage.config.num_layers, stage.groups)


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
    """Hidden states `[s (/tp), b, hidden]` to `[b, hidden]`, made of the first token. Collective over tp."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage.groups)
        self.sequence_parallel = stage.sequence_parallel
        self.dense = _dense(stage, sequence_parallel=False)  # the first token is on all ranks

    def forward(self, x: Tensor) -> Tensor:
        """Return the pooled output."""
        first = collect_sequence(x, self.groups.tp)[0] if self.sequence_parallel else x[0]
        return torch.tanh(self.dense(first))


class BERT(LanguageModel):
    """One rank's chunk of a BERT. Collective over tp; see `forward_backward` for pp. `build_bert` makes all.

    Attention sees all tokens of a sequence: there is no mask for padding.

    Args:
        config: sizes and choices.
        groups: the ranks around this one; they decide which stage this is.
        rng: random streams for dropout; may be None where config.dropout is 0.
        sequence_parallel: between the layers each rank of tp holds its part of the sequence only; tp must
            divide the sequence length then.
        stages: which layers are in which chunk; None splits them evenly.
        virtual_stage: which chunk of this pipeline stage it is, in `[0, vpp)`.
        device: where the parameters lie.

    Attributes:
        pooler: of the last chunk, if the config has one; call it with hidden states.

    Raises:
        DeclarationError: the layout cannot hold the model, or there is dropout without rng.
    """

    def __init__(
        self,
        config: BertConfig,
        groups: ParallelGroups,
        rng: ParallelRng | None = None,
        *,
        sequence_parallel: bool = False,
        stages: StageTable | None = None,
        virtual_stage: int = 0,
        device: torch.device | str | None = None,
    ) -> None:
        config.check_layout(groups.layout, stages)
        layout, at = groups.layout, (groups.pp.rank, virtual_stage)
        table = stages or StageTable.even(config.num_layers, pp=layout.pp, vpp=layout.vpp)
        stage = Stage(
            config=config, groups=groups, rng=rng, sequence_parallel=sequence_parallel, device=device
        )
        is_first, is_last = table.has_embedding(*at), table.has_loss(*at)
        super().__init__(stage, BertEmbedding(stage) if is_first else None, is_first=is_first)
        self.encoder = BertEncoder(stage, table.layers_of(*at))
        has_head = is_last and config.has_token_head
        self.lm_head = TokenHead(stage) if has_head else None
        self.add_output_layer(stage, is_last=has_head, bias=True)
        self.pooler = Pooler(stage) if is_last and config.has_pooler else None

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Tensor:
        """Run this chunk.

        Args:
            inputs: for the first chunk token ids `[b, s]`, or ids and types `[b, s, 2]`; hidden states
                `[s (/tp), b, hidden]` for others.
            labels: token ids `[b, s]`, negative for tokens without loss; looked at by the last chunk only.

        Returns:
            Hidden states `[s (/tp), b, hidden]`; of the last chunk, if it predicts tokens, the mean loss over
            the labels (0-dim, float32) or, without labels, this rank's logits `[s, b, padded_vocab/tp]`.

        Raises:
            DeclarationError: in the first chunk, a sequence longer than the model is made for.
        """
        hidden = inputs
        if self.embedding is not None:
            if inputs.shape[1] > self.config.seq_length:
                raise DeclarationError(
                    f"the sequences have {inputs.shape[1]} tokens, but BertConfig.seq_length is "
                    f"{self.config.seq_length}. Cut them, or make the model for longer ones."
                )
            hidden = self.embedding(inputs)
        hidden = cast(Tensor, self.encoder.layers(hidden))
        if self.lm_head is None:
            return hidden
        hidden = self.lm_head(hidden)
        return self.logits(hidden) if labels is None else self.mean_loss(hidden, labels)

    def activation_buffer(self, tokens: Tensor) -> Tensor:
        """Return an empty `[s (/tp), b, hidden]` for what the previous chunk makes of `tokens`."""
        return super().activation_buffer(tokens if tokens.ndim == 2 else tokens[..., 0])


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
    chunks = [
        BERT(
            config,
            groups,
            rng,
            sequence_parallel=sequence_parallel,
            stages=stages,
            virtual_stage=virtual_stage,
            device=device,
        )
        for virtual_stage in range(groups.layout.vpp)
    ]
    return ModelChunks(chunks, groups)


def _dense(stage: Stage, *, sequence_parallel: bool) -> ReplicatedLinear:
    hidden, dtype = stage.config.hidden_size, stage.config.params_dtype
    return ReplicatedLinear(
        hidden, hidden, stage.groups, sequence_parallel=sequence_parallel, dtype=dtype, device=stage.device
    )
