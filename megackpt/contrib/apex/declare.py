"""Declares and restores any of Apex's optimizers."""

from __future__ import annotations

import importlib.machinery
import sys
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from megackpt.contrib.apex.fragments import (
    declare_fragments,
    is_distributed_fused_adam,
    restore_fragments,
)
from megackpt.contrib.apex.whole import (
    KINDS,
    WholeKind,
    declare_whole,
    restore_whole,
    whole_kind_of,
)
from megackpt.contrib.group_settings import declare_settings, plain, restore_settings
from megackpt.entities import ShardedStateDict, StateDict
from megackpt.errors import DeclarationError
from megackpt.training.parallel.groups import ParallelGroups

# Which package of the name `apex` is installed: NVIDIA's, or the other project on the package index.


def installed_apex() -> Literal["nvidia", "other"] | None:
    """Return whose `apex` an import would find; nothing is imported. Local.

    The package of that name on the package index is another project, without optimizers. NVIDIA's is built
    from its repository.
    """
    spec = importlib.machinery.PathFinder.find_spec("apex", sys.path)
    if spec is None:
        return None
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    is_nvidias = any((folder / "multi_tensor_apply").is_dir() for folder in folders)
    return "nvidia" if is_nvidias else "other"


def installation_note() -> str:
    """Return a sentence for errors if the installed `apex` is another project, else an empty text. Local."""
    if installed_apex() != "other":
        return ""
    return (
        " The package 'apex' that is installed is not NVIDIA's but another project of that name on the "
        "package index: uninstall it, and build NVIDIA's from https://github.com/NVIDIA/apex."
    )


def sharded_state_dict(
    optimizer: Optimizer,
    model_sharded_state_dict: ShardedStateDict,
    is_loading: bool = False,
    *,
    groups: ParallelGroups | None = None,
) -> ShardedStateDict:
    """Declare the state of an optimizer of Apex: moments, masters, norms, and the settings of its groups.

    Local; for DistributedFusedAdam see `declare_fragments`. The keys are those of `megackpt.training.optim`,
    so that its optimizers load the same checkpoints.

    Args:
        optimizer: FusedAdam, FusedAdagrad, FusedSGD, FusedLAMB, FusedNovoGrad, FusedMixedPrecisionLamb or
            DistributedFusedAdam.
        model_sharded_state_dict: of the model; its entities wrap the parameters.
        is_loading: whether to create state that a new optimizer does not have yet, with moments in their own
            dtype.
        groups: the ranks around this one; FusedNovoGrad needs them if the parameters are slices.

    Returns:
        `state` by position of the parameter and name; `param_groups` by name of the group, with the number of
        each parameter's group in `param_group_of` where groups have no names; for DistributedFusedAdam also
        `step`.

    Raises:
        DeclarationError: the optimizer is none of these, keeps masters in `amp`, or has a parameter that is
            not declared.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    settings = declare_settings(optimizer.param_groups, params, model_sharded_state_dict)
    if is_distributed_fused_adam(optimizer):
        state = declare_fragments(optimizer, model_sharded_state_dict)
        step = plain(optimizer.state["step"])  # type: ignore[index]  # its own key among the parameters
        return {"state": state, **settings, "step": step}
    kind = _whole_kind(optimizer)
    state = declare_whole(optimizer, kind, model_sharded_state_dict, is_loading=is_loading, groups=groups)
    return {"state": state, **settings}


@torch.no_grad()
def load_sharded_state_dict(optimizer: Optimizer, loaded: StateDict) -> None:
    """Restore what a load of `sharded_state_dict(..., is_loading=True)` returned. Local.

    Load the model before. Of DistributedFusedAdam with remainders, the weights of this rank's fragments are
    written, too (see `megackpt.training.optim.remainders`); other ranks get them with the next step's
    parameters.

    Raises:
        MismatchError: the parameter groups have other names, or other parameters.
        DeclarationError: the optimizer is none of Apex's.
    """
    is_capturable = getattr(optimizer, "capturable", False)
    restore_settings(optimizer.param_groups, loaded, is_capturable=is_capturable)
    if not is_distributed_fused_adam(optimizer):
        restore_whole(optimizer, _whole_kind(optimizer), loaded["state"])
        return
    restore_fragments(optimizer, loaded["state"])
    state: dict[str, Any] = optimizer.state  # type: ignore[assignment]
    if isinstance(state["step"], Tensor):
        state["step"].fill_(loaded["step"])
    else:
        state["step"] = loaded["step"]


def _whole_kind(optimizer: Optimizer) -> WholeKind:
    if "DistributedFusedLAMB" in {cls.__name__ for cls in type(optimizer).__mro__}:
        raise DeclarationError(
            "DistributedFusedLAMB is not supported: it orders parameters in its flat buffers (fp32_p, "
            "fp32_m, fp32_v) by the gradients of its first backward pass, so a new one does not know yet "
            "which elements it has, and a load could not fill it. Its own state dict has these buffers of "
            "one rank, without the order. Use FusedLAMB or FusedMixedPrecisionLamb, or "
            "megackpt.training.optim."
        )
    kind = whole_kind_of(optimizer)
    if kind is None:
        known = ", ".join([*(k.name for k in KINDS), "DistributedFusedAdam"])
        raise DeclarationError(
            f"{type(optimizer).__module__}.{type(optimizer).__name__} is none of the optimizers of Apex that "
            f"are known here: {known}. For others use megackpt.training.optim.{installation_note()}"
        )
    if getattr(getattr(optimizer, "_amp_stash", None), "fp32_from_fp16_groups", None):
        raise DeclarationError(
            f"{kind.name}: apex.amp keeps its master weights in `_amp_stash`, from where they cannot be "
            f"declared. Use the optimizer without amp (FusedAdam with master_weights, or "
            f"megackpt.training.optim)."
        )
    return kind
