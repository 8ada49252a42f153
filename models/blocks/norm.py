"""The norms of a model: which kind they are, and what their weights start at."""

from __future__ import annotations

from megackpt.training.parallel import LayerNorm, RMSNorm
from models.stage import Stage


def block_norm(stage: Stage) -> RMSNorm | LayerNorm:
    """Return a norm of hidden states, as it stands before or after a block, and at the end of the model."""
    return _norm(stage, stage.config.hidden_size, is_partial=stage.sequence_parallel)


def head_norm(stage: Stage) -> RMSNorm | LayerNorm:
    """Return a norm of the heads of queries or keys.

    Each rank of tp uses it for its own heads, so its gradients are partial sums over tp, as those of a norm
    that sees a part of the sequence.
    """
    return _norm(stage, stage.config.head_dim, is_partial=True)


def _norm(stage: Stage, size: int, *, is_partial: bool) -> RMSNorm | LayerNorm:
    config, choices = stage.config, stage.config.norm
    if choices.kind == "layer":
        return LayerNorm(
            size,
            stage.groups,
            eps=config.norm_eps,
            sequence_parallel=is_partial,
            dtype=config.params_dtype,
            device=stage.device,
        )
    return RMSNorm(
        size,
        stage.groups,
        eps=config.norm_eps,
        zero_centred=choices.zero_centred,
        sequence_parallel=is_partial,
        dtype=config.params_dtype,
        device=stage.device,
    )
