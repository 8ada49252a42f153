"""State dicts that Apex's DistributedFusedAdam itself has saved (format 2), declared to be saved again.

Such a state dict has the whole float32 state of a rank's parameters on every rank of dp.

Source: Apex `contrib/optimizers/distributed_fused_adam.py`, `_state_dict_v2`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from megackpt.errors import FormatError, MismatchError
from megackpt.integrations.group_settings import declare_settings
from megackpt.mapping import ShardedBase, ShardedStateDict
from megackpt.optim.inner_optimizer import MASTER
from megackpt.optim.sharded_state import find_param_entities, make_sharded_optimizer_tensor

_STORED_AS = {"param": MASTER, "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


def declare_gathered(
    state_dict: Mapping[str, Any], params: Sequence[Parameter], model_sharded_state_dict: ShardedStateDict
) -> ShardedStateDict:
    """Declare a state dict of DistributedFusedAdam of format 2 in the form of `sharded_state_dict`. Local.

    Save the result with the model's state, and load it into any optimizer at any layout. Read the file with
    `torch.load(path, map_location="cpu", weights_only=True)`.

    Args:
        state_dict: what the optimizer's `state_dict()` returned.
        params: the optimizer's parameters, of all groups in order.
        model_sharded_state_dict: of the model; its entities wrap the parameters.

    Raises:
        FormatError: the state dict is not of format 2. Format 1 has pickled objects of Apex and can be read
            by Apex alone, at the same configuration: save it again with a recent Apex.
        MismatchError: it has another number of parameters, or other shapes.
        DeclarationError: a parameter is not declared.
    """
    if state_dict.get("format") != 2:
        raise FormatError(
            f"the state dict of DistributedFusedAdam has the format {state_dict.get('format')!r}, not 2. "
            f"Load it with Apex at the configuration it was saved at, and save it again as format 2."
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
