"""State dicts that Apex's DistributedFusedAdam itself has saved, declared to be saved again.

One of format 2 has the whole float32 state of a rank's parameters on every rank of dp.

Source: Apex `contrib/optimizers/distributed_fused_adam.py`, `_state_dict_v2`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from megackpt.contrib.group_settings import declare_settings
from megackpt.entities import ShardedBase, ShardedStateDict
from megackpt.errors import FormatError, MismatchError
from megackpt.formats.safe_pickle import inert_class, load_value
from megackpt.formats.unknown_classes import OuterClass
from megackpt.training.optim.inner_optimizer import MASTER
from megackpt.training.optim.remainders import join_master
from megackpt.training.optim.sharded_state import find_param_entities, make_sharded_optimizer_tensor

# Turns pickled state dicts of Apex's DistributedFusedAdam (format 1) into state dicts of format 2.
#
# Such a state dict has the bytes of `torch.save` of each rank's own state: buckets with shards of moments and
# masters, and fragments that say which elements of which parameter these are. They are read with a list of
# allowed classes, and no code of them runs. Apex itself reads them at the configuration of the save only.
#
# Source: Apex `contrib/optimizers/distributed_fused_adam.py`, `_state_dict_v1`, `StateBucket` and
# `ParameterFragment`.

_MODULE = "apex.contrib.optimizers.distributed_fused_adam"
_OUTER = "DistributedFusedAdam"
_INNER = {name: inert_class(_MODULE, name) for name in ("StateBucket", "ParameterFragment")}
# Python before 3.13 pickles a class in a class as a call of getattr for the outer one.
_ALLOWED: list[Any] = [
    (OuterClass(_INNER), f"{_MODULE}.{_OUTER}"),
    *((cls, f"{_MODULE}.{_OUTER}.{name}") for name, cls in _INNER.items()),
]


@torch.no_grad()
def as_format_2(state_dict: Mapping[str, Any], params: Sequence[Parameter]) -> dict[str, Any]:
    """Return a state dict of format 1 as one of format 2, with whole float32 tensors. Local.

    Args:
        state_dict: with `gathered_states`: for each rank the bytes of its state, as uint8 tensors or bytes.
        params: the optimizer's parameters, of all groups in order, with the weights of the same checkpoint:
            int16 remainders need them.

    Raises:
        UnknownClassError: the bytes name another class than those of Apex's state. Nothing was run.
        FormatError: they are damaged, of other parameters, or not of all ranks.
    """
    ranks = [
        _read(data, f"gathered_states[{rank}]") for rank, data in enumerate(state_dict["gathered_states"])
    ]
    try:
        return _joined(ranks, params)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise FormatError(
            f"the state dict of DistributedFusedAdam cannot be put together ({type(error).__name__}: "
            f"{str(error)[:300]}). It is damaged, or of other parameters: pass those of the model part that "
            f"it was saved with, groups in order."
        ) from error


def _read(data: Tensor | bytes, where: str) -> Any:
    content = data if isinstance(data, bytes) else data.cpu().numpy().tobytes()
    with torch.serialization.safe_globals(_ALLOWED):
        return load_value(content, where=where)


def _joined(ranks: Sequence[Any], params: Sequence[Parameter]) -> dict[str, Any]:
    groups = ranks[0]["param_groups"]
    indices = [index for group in groups for index in group["params"]]
    state: dict[Any, Any] = {"step": ranks[0]["state"]["step"]}
    for index, param in zip(indices, params, strict=True):
        flat = {name: torch.zeros(param.numel()) for name in ("param", "exp_avg", "exp_avg_sq")}
        copies = torch.zeros(param.numel(), dtype=torch.int32)
        for rank in ranks:
            _fill(flat, copies, rank["state"], index, param)
        if not bool((copies == 1).all()):
            raise FormatError(
                f"parameter {index} of shape {tuple(param.shape)}: {int((copies != 1).sum())} of its "
                f"{param.numel()} elements are not in the state of exactly one rank. Pass the state of all "
                f"ranks of one distributed process group, once."
            )
        state[index] = {name: tensor.view(param.shape) for name, tensor in flat.items()}
    return {"state": state, "param_groups": groups, "format": 2}


def _fill(flat: Mapping[str, Tensor], copies: Tensor, state: Any, index: int, param: Parameter) -> None:
    """Copy what one rank has of a parameter, and count it."""
    for fragment in state[index]["fragments"]:
        if not fragment.in_local_shard:
            continue
        bucket, at = state["buckets"][fragment.bucket_id], slice(*fragment.shard_range)
        elements = slice(*fragment.shard_param_range)
        weight = param.detach().view(-1)[elements].cpu()
        if bucket.param_remainders_shard is not None:
            weight = join_master(weight, bucket.param_remainders_shard[at])
        elif bucket.params_shard is not None:
            weight = bucket.params_shard[at]
        flat["param"][elements] = weight.float()
        flat["exp_avg"][elements] = bucket.exp_avg_shard[at].float()
        flat["exp_avg_sq"][elements] = bucket.exp_avg_sq_shard[at].float()
        copies[elements] += 1


_STORED_AS = {"param": MASTER, "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


def declare_gathered(
    state_dict: Mapping[str, Any], params: Sequence[Parameter], model_sharded_state_dict: ShardedStateDict
) -> ShardedStateDict:
    """Declare a state dict of DistributedFusedAdam in the form of `sharded_state_dict`. Local.

    Save the result with the model's state, and load it into any optimizer at any layout. Read the file with
    `torch.load(path, map_location="cpu", weights_only=True)`. Where each rank saved its own state as format
    1, pass `{"format": 1, "gathered_states": [...]}` with the bytes of the files of all ranks.

    Args:
        state_dict: what the optimizer's `state_dict()` returned.
        params: the optimizer's parameters, of all groups in order, with the weights of that checkpoint.
        model_sharded_state_dict: of the model; its entities wrap the parameters.

    Raises:
        FormatError: the state dict is of another format, damaged, or not of all ranks.
        UnknownClassError: its bytes name a class that is not of Apex's state. Nothing was run.
        MismatchError: it has another number of parameters, or other shapes.
        DeclarationError: a parameter is not declared.
    """
    if "gathered_states" in state_dict:
        state_dict = as_format_2(state_dict, params)
    if state_dict.get("format") != 2:
        raise FormatError(
            f"the state dict of DistributedFusedAdam has the format {state_dict.get('format')!r} and no "
            f"'gathered_states'. Formats 1 and 2 can be read. For the state of one rank in format 1 pass the "
            f"bytes of the files of all ranks as 'gathered_states'."
        )
    groups, state = state_dict["param_groups"], state_dict["state"]
    indices = [index for group in groups for index in group["params"]]
    _check_shapes([state[index]["param"] for index in indices], params)
    entities = find_param_entities(model_sharded_state_dict, params)
    declared: dict[int, dict[str, ShardedBase]] = {
        position: {
            name: make_sharded_optimizer_tensor(
                entity, state[index][source].view(params[position].shape).float(), f"optimizer.state.{name}"
            )
            for source, name in _STORED_AS.items()
        }
        for position, (index, entity) in enumerate(zip(indices, entities, strict=True))
    }
    settings = declare_settings(groups, params, model_sharded_state_dict)
    return {"state": declared, **settings, "step": int(state["step"])}


def _check_shapes(stored: Sequence[Tensor], params: Sequence[Parameter]) -> None:
    numels, expected = [t.numel() for t in stored], [p.numel() for p in params]
    if numels != expected:
        raise MismatchError(
            f"the state dict has parameters of {numels} elements, and these are of {expected}. Pass the "
            f"parameters of the same model part, groups in the order of the optimizer that saved it.",
            path="param_groups",
        )
