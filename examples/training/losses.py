"""The loss that a training script shows."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from megackpt.training.parallel import ParallelGroups


def mean_loss(losses: Tensor, groups: ParallelGroups) -> float:
    """Return the mean over micro-batches, and over the ranks of dp and cp, which have equally many tokens.

    Collective over dp and cp.
    """
    mean, ranks = losses.mean(), groups.dp_cp
    if ranks.group is not None:
        dist.all_reduce(mean, group=ranks.group)
        mean /= ranks.size
    return float(mean)
