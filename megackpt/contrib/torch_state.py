"""The state of torch modules and optimizers in a host's hands, by the names of their parameters.

torch's own functions take off the wrappers (DistributedDataParallel, FSDP1, FSDP2, torch.compile) and name
an optimizer's state by parameter, so that state saved under one wrapper loads under another.

Source: `torch.distributed.checkpoint.state_dict`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from megackpt.entities import ShardedStateDict, StateDict
from megackpt.errors import UnsupportedError


class TorchState:
    """Models and optimizers as one state dict.

    Keys begin with `model` and `optimizer`; with `model_1`, `optimizer_1` for the second ones, and so on.

    Args:
        models: wrapped or not.
        optimizers: of torch. The parameters of each are those of one of the models.

    Raises:
        UnsupportedError: an optimizer has parameters of several models, or of none of them.
    """

    def __init__(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        self._models = list(models)
        self._optimizers = [
            (optimizer, _model_of(optimizer, position, self._models))
            for position, optimizer in enumerate(optimizers)
        ]

    def sharded_state_dict(self) -> ShardedStateDict:
        """Declare all state, to save it or to ask for it in a load. Collective under FSDP."""
        return {**self.models(), **self.optimizers()}

    def models(self) -> ShardedStateDict:
        """Declare the models' state. Collective under FSDP."""
        return {_name("model", i): get_model_state_dict(model) for i, model in enumerate(self._models)}

    def optimizers(self) -> ShardedStateDict:
        """Declare the optimizers' state. Collective under FSDP.

        State that an optimizer makes in its first step is made here, without a change of any parameter.
        """
        return {
            _name("optimizer", i): get_optimizer_state_dict(model, optimizer)
            for i, (optimizer, model) in enumerate(self._optimizers)
        }

    def load_models(self, loaded: StateDict) -> None:
        """Put what a load returned into the models. Collective under FSDP."""
        for position, model in enumerate(self._models):
            set_model_state_dict(model, loaded[_name("model", position)])

    def load_optimizers(self, loaded: StateDict) -> None:
        """Put what a load returned into the optimizers. Collective under FSDP."""
        for position, (optimizer, model) in enumerate(self._optimizers):
            set_optimizer_state_dict(model, optimizer, loaded[_name("optimizer", position)])


def _name(kind: str, position: int) -> str:
    return f"{kind}_{position}" if position else kind


def _model_of(optimizer: Optimizer, position: int, models: Sequence[nn.Module]) -> nn.Module:
    params = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for model in models:
        if params <= {id(param) for param in model.parameters()}:
            return model
    raise UnsupportedError(
        f"Optimizer {position} ({type(optimizer).__name__}) has parameters that are not all of one model. "
        f"Make an optimizer for each model."
    )
