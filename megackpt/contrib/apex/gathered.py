"""State dicts that Apex's DistributedFusedAdam itself has saved, declared to be saved again.

One of format 2 has the whole float32 state of a rank's parameters on every rank of dp.

Source: Apex `contrib/optimizers/distributed_fused_adam.py`, `_state_dict_v2`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from megackpt.contrib.apex.format_1 import as_format_2
from megackpt.contrib.group_settings import declare_settings
from megackpt.entities import ShardedBase, ShardedStateDict
from megackpt.errors import FormatError, MismatchError
from megackpt.training.optim.inner_optimizer import MASTER
from megackpt.training.optim.sharded_state import find_param_entities, make_sharded_optimizer_tensor

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
