"""One layer: its blocks, each behind a norm and added to what came in. Usually attention and then an MLP.

The residual path, its dropout and the norms on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from megackpt.errors import DeclarationError
from megackpt.training.parallel import (
    GatedDeltaNet,
    LayerNorm,
    LayerStack,
    MambaMixer,
    MTPLayer,
    ParallelDropout,
    RMSNorm,
    ShardedModule,
)
from models.blocks.attention import SelfAttention
from models.blocks.mixers import LatentAttention, build_delta_net
from models.blocks.mlp import MLP, GatedMLP, MoE, build_mlp
from models.blocks.norm import block_norm
from models.config import BlockKind
from models.stage import Stage


class TransformerLayer(ShardedModule):
    """A pre-norm layer over `[s, b, hidden]` (`[s/tp, b, hidden]`). As collective as its blocks.

    Args:
        stage: what its parts are made with.
        index: global index of the layer, which decides which blocks it has, and what its attention sees.
    """

    def __init__(self, stage: Stage, index: int) -> None:
        super().__init__(stage.groups)
        self.kinds = stage.config.blocks[index]
        for kind in self.kinds:
            names = _NAMES[kind]
            self.add_module(names.norm, block_norm(stage))
            self.add_module(names.block, _BUILD[kind](stage, index))
            self.add_module(names.norm_after, block_norm(stage) if stage.config.norm.after_blocks else None)
        self.dropout = residual_dropout(stage)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output, shaped like `x`."""
        for kind in self.kinds:
            norm, block, norm_after = (getattr(self, name) for name in _NAMES[kind])
            out = block(norm(x))
            x = x + self.dropout(out if norm_after is None else norm_after(out))
        return x


class _Names(NamedTuple):
    """The names of a block, and of the norms before and after it, in keys. They are Megatron-Core's."""

    norm: str
    block: str
    norm_after: str


_ATTENTION = _Names("input_layernorm", "self_attention", "post_self_attn_layernorm")
_MLP = _Names("pre_mlp_layernorm", "mlp", "post_mlp_layernorm")
_MAMBA = _Names("norm", "mixer", "post_mixer_norm")
_NAMES: Mapping[BlockKind, _Names] = {
    "attention": _ATTENTION,
    "delta_net": _ATTENTION,
    "mamba": _MAMBA,
    "mlp": _MLP,
    "moe": _MLP,
}


def _attention(stage: Stage, index: int) -> SelfAttention | LatentAttention:
    has_latent = stage.config.attention.latent is not None
    return LatentAttention(stage, index) if has_latent else SelfAttention(stage, index)


def _delta_net(stage: Stage, index: int) -> GatedDeltaNet:
    return build_delta_net(stage)


def _mamba(stage: Stage, index: int) -> MambaMixer:
    config = stage.config
    if config.mamba is None:
        raise DeclarationError("GPTConfig.mamba is None: give MambaSizes.")
    return MambaMixer(
        config.hidden_size,
        config.mamba,
        stage.groups,
        sequence_parallel=stage.sequence_parallel,
        dtype=config.params_dtype,
        device=stage.device,
    )


def _mlp(stage: Stage, index: int) -> GatedMLP | MLP:
    return build_mlp(stage)


def _moe(stage: Stage, index: int) -> MoE:
    return MoE(stage)


_BUILD: Mapping[BlockKind, Callable[[Stage, int], ShardedModule]] = {
    "attention": _attention,
    "delta_net": _delta_net,
    "mamba": _mamba,
    "mlp": _mlp,
    "moe": _moe,
}
"""The function that makes a block of each kind, for the layer with an index."""


def residual_dropout(stage: Stage) -> ParallelDropout:
    """Return the dropout of the residual path.

    All of tp hold the same hidden states, so they must agree on what is dropped, unless each holds its own
    part of the sequence.
    """
    return ParallelDropout(
        stage.config.dropout, stage.rng, "distinct" if stage.sequence_parallel else "replicated"
    )


# The layers of a GPT that predict further tokens: each is as the last layer of the model.


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
