"""The part of a training state that another family's checkpoint can fill: weights, and their masters."""

from __future__ import annotations

from typing import Any

import torch

from megackpt.entities import ShardedLayout, ShardedStateDict, ShardedTensor, ShardedTensorFactory
from megackpt.entities.recognition import is_torch_sharded
from megackpt.entities.tree import ABSENT, map_leaves

MASTER = "optimizer.state.fp32_param."
"""What the key of a float32 master weight begins with; the key of its parameter follows."""

OPTIMIZER = "optimizer."
"""What the key of any optimizer state begins with."""


def parameter_key(key: str) -> str:
    """Return the key of the parameter that a key belongs to: that of a master weight, or the key itself.

    >>> parameter_key("optimizer.state.fp32_param.decoder.final_layernorm.weight")
    'decoder.final_layernorm.weight'
    """
    return key.removeprefix(MASTER)


def weights_of(sharded_state_dict: ShardedStateDict) -> ShardedStateDict:
    """Return the part of a state dict that a folder of weights can fill. Local.

    That are the parameters and buffers of the model in floating point, and the float32 master weights of its
    optimizer. Moments, numbers of steps, random states, positions in the data and everything that is no
    tensor are left out.

    Args:
        sharded_state_dict: as for `megackpt.load`. The keys of optimizer state begin with `optimizer.`.
    """
    kept = map_leaves(_kept, sharded_state_dict)
    return {} if kept is ABSENT else kept


def is_weight(key: str) -> bool:
    """Return whether a key is that of a parameter, buffer or master weight."""
    return key.startswith(MASTER) or not key.startswith(OPTIMIZER)


def _kept(path: str, leaf: Any) -> Any:
    if isinstance(leaf, (ShardedTensor, ShardedLayout, ShardedTensorFactory)):
        key, dtype = leaf.key, getattr(leaf, "dtype", None)
    elif isinstance(leaf, torch.Tensor) or is_torch_sharded(leaf):
        key, dtype = path, leaf.dtype
    else:
        return ABSENT
    is_float = dtype is None or dtype.is_floating_point
    return leaf if is_float and is_weight(key) else ABSENT
