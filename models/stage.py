"""What every part of one pipeline stage is made with.

This list depends on the layout; `config` describes the model itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megackpt.training.parallel import ParallelGroups, ParallelRng
from models.config import GPTConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Sizes of the model, ranks around this one, and choices that all parts of a stage share.

    Attributes:
        config: the model's sizes.
        groups: the ranks around this one.
        rng: random streams for dropout; may be None where config.dropout is 0.
        sequence_parallel: what goes into parts and comes out is cut along the sequence, `[s/tp, b, hidden]`.
        device: where the parameters lie.
    """

    config: GPTConfig
    groups: ParallelGroups
    rng: ParallelRng | None = None
    sequence_parallel: bool = False
    device: torch.device | str | None = None
