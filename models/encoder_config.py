"""What models with an encoder share: the sizes of a GPT without some of its choices, and no cp."""

from __future__ import annotations

from dataclasses import dataclass

from megackpt.errors import DeclarationError
from megackpt.parallel import ParallelLayout, StageTable
from models.block_config import RotaryConfig
from models.config import GPTConfig

DECODER_CHOICES = ("qk_norm", "sinks", "window", "latent", "output_gate")
"""Choices of attention that models with an encoder do not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig(GPTConfig):
    """Sizes and choices of a model whose tokens see those after them.

    Raises:
        DeclarationError: as for `GPTConfig`; or a choice that such models do not have.
    """

    def __post_init__(self) -> None:
        GPTConfig.__post_init__(self)  # super() needs the class before `slots` made a new one of it
        self.check_choices("num_query_groups", "moe", "mtp", "mamba", "delta_net", "layer_blocks")
        blocks = [name for name in DECODER_CHOICES if getattr(self.attention, name)]
        if blocks or self.norm.after_blocks:
            blocks = [f"attention.{name}" for name in blocks] + ["norm.after_blocks"] * self.norm.after_blocks
            raise DeclarationError(
                f"{type(self).__name__}: {', '.join(blocks)} is for decoders only. Leave it at its default."
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

    def check_layout(self, layout: ParallelLayout, stages: StageTable | None = None) -> None:
        """Check that `layout`, with a table of its stages or an even one, can hold this model. Pure.

        Raises:
            DeclarationError: as for `GPTConfig.check_layout`; or sequences are cut over cp.
        """
        if layout.cp > 1:
            raise DeclarationError(
                f"{type(self).__name__} does not fit {layout}: its sequences are not cut over cp, as tokens "
                f"see those after them. Set cp to 1."
            )
        GPTConfig.check_layout(self, layout, stages)
