"""Which norms are zero-centred (`zero_centered_gamma`): their weight is what is added to 1.

Nothing in a weight says so. A checkpoint has an array next to it, `input_layernorm.weight.zero_centred`, for
each zero-centred norm of Transformer Engine. Those of older versions and of other layers have none.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch

from megackpt.contrib.transformer_engine.names import canonical_key
from megackpt.contrib.transformer_engine.site import OwnTensor, Site
from megackpt.entities import ShardedStateDict, ShardedTensor
from megackpt.errors import MismatchError, truncated_list

_RECORD = ".zero_centred"
_WEIGHTS = ("layer_norm_weight", "weight")  # in a layer that begins with a norm, and alone


def declare_zero_centred(module: Any, site: Site, tensors: Collection[OwnTensor]) -> ShardedStateDict:
    """Declare that the norm of a module is zero-centred, if it is; `tensors` are those of the module."""
    if site.names != "canonical" or not getattr(module, "zero_centered_gamma", False):
        return {}
    named = {tensor.name: tensor for tensor in tensors}
    weight = next((named[name] for name in _WEIGHTS if name in named), None)
    if weight is None:
        return {}
    record = ShardedTensor.from_rank_offsets(
        site.key(weight.key) + _RECORD,
        torch.ones(1, dtype=torch.int8),
        *site.stack,
        replica_id=(0, site.groups.tp.rank, site.groups.dp_cp.rank),
        prepend_axis_num=len(site.stack),
    )
    return {site.prefix + weight.name + _RECORD: replace(record, if_missing="keep")}


def check_zero_centred(state: ShardedStateDict, stored: Collection[str]) -> None:
    """Check that the norms to load are zero-centred if the stored ones are, and only then. Local.

    Only for checkpoints that were saved from Transformer Engine's layers by a version that records it. In
    others, zero-centred norms look like plain ones.

    Args:
        state: from `sharded_state_dict` of the model to load into.
        stored: keys of the checkpoint, as `load_sharded_metadata` returns them.

    Raises:
        MismatchError: the norms differ. Nothing was loaded.
    """
    asked = {entity.key for entity in state.values()}
    ours = {key.removesuffix(_RECORD) for key in asked if key.endswith(_RECORD)}
    theirs = {key.removesuffix(_RECORD) for key in stored if key.endswith(_RECORD)}
    # Each norm by the name that it has on its own, whichever of its names the checkpoint has.
    weights = {canonical_key(key) for key in asked} & {canonical_key(key) for key in stored}
    wrong = sorted(weights & (ours ^ theirs))
    if wrong:
        raise _mismatch(wrong, ours)


def _mismatch(keys: Sequence[str], ours: Collection[str]) -> MismatchError:
    lines = [f"{key!r}: zero-centred in the {'model' if key in ours else 'checkpoint'} only" for key in keys]
    return MismatchError(
        f"{len(keys)} norms are not what the checkpoint has:\n{truncated_list(lines)}\nBuild the model with "
        f"the zero_centered_gamma of the checkpoint, or load through a map that adds 1, such as "
        f"megatron_map(norm_added=1).",
        key=keys[0],
    )
