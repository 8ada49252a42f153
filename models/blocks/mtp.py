"""The layers of a GPT that predict further tokens: each is as the last layer of the model."""

from __future__ import annotations

from collections.abc import Sequence

from megackpt.training.parallel import LayerNorm, LayerStack, MTPLayer, RMSNorm, ShardedModule
from models.blocks.norm import block_norm
from models.blocks.transformer import TransformerLayer
from models.stage import Stage


class MultiTokenPrediction(ShardedModule):
    """Layers for further tokens, in `layers`. The keys have their numbers, as layers of a model may differ.

    Args:
        stage: what its parts are made with.
        owned: indices of the layers of this chunk: all of them.
    """

    def __init__(self, stage: Stage, owned: Sequence[int]) -> None:
        super().__init__(stage.groups)
        config = stage.config

        def norm() -> RMSNorm | LayerNorm:
            return block_norm(stage)

        def build(index: int) -> MTPLayer:
            return MTPLayer(
                TransformerLayer(stage, config.num_layers - 1),
                norm,
                config.hidden_size,
                stage.groups,
                sequence_parallel=stage.sequence_parallel,
                dtype=config.params_dtype,
                device=stage.device,
            )

        self.layers = LayerStack(build, owned, len(owned), stage.groups, homogeneous=False)
