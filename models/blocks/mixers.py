"""Mixers of tokens other than full attention: latent attention, and the gated delta net."""

from __future__ import annotations

import megackpt.training.parallel
from megackpt.errors import DeclarationError
from megackpt.training.parallel import GatedDeltaNet
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


# The gated delta net of a layer: that of `megackpt.training.parallel`, with the sizes of the config.


def build_delta_net(stage: Stage) -> GatedDeltaNet:
    """Return the gated delta net that the config describes.

    Raises:
        DeclarationError: the config has none.
    """
    config, sizes = stage.config, stage.config.delta_net
    if sizes is None:
        raise DeclarationError("GPTConfig.delta_net is None: give a DeltaNetConfig.")
    return GatedDeltaNet(
        config.hidden_size,
        sizes.num_key_heads,
        sizes.num_value_heads,
        sizes.key_head_dim,
        sizes.value_head_dim,
        stage.groups,
        conv_kernel_size=sizes.conv_kernel_size,
        eps=config.norm_eps,
        sequence_parallel=stage.sequence_parallel,
        dtype=config.params_dtype,
        device=stage.device,
    )
