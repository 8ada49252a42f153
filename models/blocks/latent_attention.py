"""Latent attention with the positions, windows and choices of a decoder."""

from __future__ import annotations

import megackpt.training.parallel
from megackpt.errors import DeclarationError
from models.blocks.attention import CausalAttention, has_input_bias, has_output_bias, sinks
from models.stage import Stage


class LatentAttention(CausalAttention, megackpt.training.parallel.LatentAttention):
    """Latent attention over `[s, b, hidden]` (`[s/tp, b, hidden]`). Collective over tp and cp.

    The projections are those of `megackpt.training.parallel.LatentAttention`; `CausalAttention` has what
    happens between them.

    Args:
        stage: what its parts are made with.
        index: global index of the layer, which decides about the window and the positions.

    Raises:
        DeclarationError: the config has no latent attention.
    """

    def __init__(self, stage: Stage, index: int = 0) -> None:
        config = stage.config
        if config.attention.latent is None:
            raise DeclarationError("GPTConfig.attention.latent is None: give LatentSizes.")
        megackpt.training.parallel.LatentAttention.__init__(
            self,
            config.hidden_size,
            config.num_heads,
            config.attention.latent,
            stage.groups,
            bias=has_input_bias(stage),
            output_bias=has_output_bias(stage),
            sequence_parallel=stage.sequence_parallel,
            dtype=config.params_dtype,
            device=stage.device,
        )
        self.choose(stage)
        self.choose_positions(stage, index)
        self.softmax_offset = sinks(stage)
