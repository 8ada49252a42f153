"""The gated delta net of a layer: that of `megackpt.training.parallel`, with the sizes of the config."""

from __future__ import annotations

from megackpt.errors import DeclarationError
from megackpt.training.parallel import GatedDeltaNet
from models.stage import Stage


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
