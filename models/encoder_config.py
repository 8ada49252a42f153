"""What models with an encoder share: the sizes of a GPT without some of its choices, and padding."""

from __future__ import annotations

from dataclasses import dataclass, field

from megackpt.errors import DeclarationError
from megackpt.training.parallel import ParallelLayout, StageTable
from models.block_config import AttentionConfig, MLPConfig, RotaryConfig
from models.config import GPTConfig

DECODER_CHOICES = ("qk_norm", "sinks", "window", "latent", "output_gate")
"""Choices of attention that models with an encoder do not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig(GPTConfig):
    """Sizes and choices of a model whose tokens see those after them.

    Attributes:
        pad_token_id: no token attends to tokens of the encoder with this id; None if there is no padding.

    Raises:
        DeclarationError: as for `GPTConfig`; a choice that such models do not have; or the id of padding is
            not one of the vocabulary.
    """

    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        GPTConfig.__post_init__(self)  # super() needs the class before `slots` made a new one of it
        self.check_choices("num_query_groups", "moe", "mtp", "mamba", "delta_net", "layer_blocks")
        blocks = [name for name in DECODER_CHOICES if getattr(self.attention, name)]
        if blocks or self.norm.after_blocks:
            blocks = [f"attention.{name}" for name in blocks] + ["norm.after_blocks"] * self.norm.after_blocks
            raise DeclarationError(
                f"{type(self).__name__}: {', '.join(blocks)} is for decoders only. Leave it at its default."
            )
        if self.pad_token_id is not None and not 0 <= self.pad_token_id < self.vocab_size:
            raise DeclarationError(
                f"{type(self).__name__}.pad_token_id is {self.pad_token_id}, but vocab_size is "
                f"{self.vocab_size}. Give the id of a token, or None if there is no padding."
            )

    def check_choices(self, *names: str) -> None:
        """Check that choices of a GPT that this model does not have are None.

        Raises:
            DeclarationError: they are not.
        """
        chosen = [name for name in names if getattr(self, name) is not None]
        if chosen:
            raise DeclarationError(
                f"{type(self).__name__} has no {', '.join(chosen)}. Leave {chosen[0]} at None."
            )

    def rotary_of(self, layer: int) -> RotaryConfig | None:
        """Return None: no layer has rotary positions."""
        return None


# What a T5 is: the sizes of a GPT, how its layers and tokens are divided, and buckets of distances.


@dataclass(frozen=True, slots=True, kw_only=True)
class T5Config(EncoderConfig):
    """Sizes and choices of an encoder and a decoder with positions as a bias of scores.

    `num_layers` counts the layers of both, those of the encoder first, and `seq_length` the tokens of both. A
    tied output layer gets hidden states times `1 / sqrt(hidden_size)`.

    Padding (`pad_token_id`) is that of the encoder's tokens. The decoder's needs no mask, if it comes last:
    tokens do not see those after them. It may have tokens with this id, such as the first one.

    Attributes:
        num_encoder_layers: layers of the encoder.
        encoder_length: tokens of the encoder, in every sequence.
        relative_buckets: buckets of distances, each with a number for each head.
        max_distance: all larger distances have the last bucket.

    Raises:
        DeclarationError: as for `EncoderConfig`; no layer or token is left for the encoder or the
            decoder, or there are too few buckets.

    Source: Raffel et al. 2020; transformers `T5Config`.
    """

    num_encoder_layers: int
    encoder_length: int
    relative_buckets: int = 32
    max_distance: int = 128
    norm_eps: float = 1e-6
    attention: AttentionConfig = field(default_factory=lambda: AttentionConfig(scale=1.0))
    mlp: MLPConfig = field(default_factory=lambda: MLPConfig(gated=False, activation="relu"))

    def __post_init__(self) -> None:
        EncoderConfig.__post_init__(self)  # super() needs the class before `slots` made a new one of it
        for name, own, whole in (
            ("num_encoder_layers", self.num_encoder_layers, self.num_layers),
            ("encoder_length", self.encoder_length, self.seq_length),
        ):
            if not 0 < own < whole:
                raise DeclarationError(
                    f"T5Config.{name} is {own} of {whole}. Give at least 1, and leave 1 for the decoder."
                )
        if self.relative_buckets < 4 or self.relative_buckets % 2:
            raise DeclarationError(
                f"T5Config.relative_buckets is {self.relative_buckets}. Give an even number of at least 4."
            )
        if self.max_distance <= self.relative_buckets // 2:
            raise DeclarationError(
                f"T5Config.max_distance is {self.max_distance}. It must be larger than half of the "
                f"{self.relative_buckets} buckets, which have one distance each."
            )
        self.check_choices("positions", "embedding_scale", "logit_softcap")

    @property
    def num_decoder_layers(self) -> int:
        """Layers of the decoder."""
        return self.num_layers - self.num_encoder_layers

    def check_layout(self, layout: ParallelLayout, stages: StageTable | None = None) -> None:
        """Check that `layout`, with a table of its stages or an even one, can hold this model. Pure.

        Raises:
            DeclarationError: as for `GPTConfig.check_layout`; or the encoder's tokens cannot be cut over cp.
        """
        EncoderConfig.check_layout(self, layout, stages)
        if layout.cp > 1 and self.encoder_length % (2 * layout.cp):
            raise DeclarationError(
                f"T5Config does not fit {layout}: encoder_length {self.encoder_length} is not a multiple of "
                f"2 x cp={layout.cp}. Change either."
            )

    def split_stages(self, *, pp: int, encoder_stages: int) -> StageTable:
        """Return a table that gives the encoder to the first stages, and the decoder to the others. Pure.

        Args:
            pp: number of pipeline stages.
            encoder_stages: how many of them have layers of the encoder; Megatron's
                `pipeline_model_parallel_split_rank`.

        Raises:
            DeclarationError: a part has no stage, or more stages than layers.
        """
        parts = ((self.num_encoder_layers, encoder_stages), (self.num_decoder_layers, pp - encoder_stages))
        if any(not 0 < stages <= layers for layers, stages in parts):
            raise DeclarationError(
                f"{encoder_stages} of pp={pp} stages cannot have the {self.num_encoder_layers} layers of the "
                f"encoder, and the others the {self.num_decoder_layers} of the decoder. Give each part at "
                f"least one stage and at most one for each layer."
            )
        counts = [
            len(owned) for layers, stages in parts for owned in StageTable.even(layers, pp=stages).layers
        ]
        return StageTable.from_counts(counts, pp=pp)
