"""What models with an encoder share: the sizes of a GPT without some of its choices, and padding."""

from __future__ import annotations

from dataclasses import dataclass

from megackpt.errors import DeclarationError
from models.block_config import RotaryConfig
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
