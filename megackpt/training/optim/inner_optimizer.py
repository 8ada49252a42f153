"""The torch optimizer inside of a master optimizer, and its state: created, stored and restored.

Tracks which state is real and which a placeholder (see `state_probe`), counts updates where the torch
optimizer does not, and restores loaded state. Local: nothing here depends on other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from megackpt.errors import MismatchError, OptimizerError
from megackpt.training.optim.owned_params import OwnedParam
from megackpt.training.optim.param_groups import ParamGroup
from megackpt.training.optim.state_probe import OptimizerBuilder, StateSpec, entries

OptimizerFactory: TypeAlias = Callable[[list[dict[str, Any]]], Optimizer]  # groups as torch.optim takes them
StateProbe: TypeAlias = Callable[[OptimizerBuilder, Sequence[Sequence[Tensor]]], list[list[StateSpec]]]

MASTER = "fp32_param"
"""Name under which master weights are stored, as in Megatron-Core."""
STEP = "step"
"""Name of the number of updates a parameter has had; torch's own name for it."""


class InnerOptimizer:
    """A torch optimizer on master weights, whose state exists from the start.

    Args:
        param_groups: the groups of the whole model part, in order.
        owned_params: what this rank updates of their parameters.
        factory: creates the torch optimizer.
        probe: returns the structure of the state of the masters of each group, or raises an error for an
            optimizer that cannot work on such masters.

    Attributes:
        optimizer: the torch optimizer.
    """

    def __init__(
        self,
        param_groups: Sequence[ParamGroup],
        owned_params: Sequence[OwnedParam],
        factory: OptimizerFactory,
        probe: StateProbe,
    ) -> None:
        self._param_groups = param_groups
        self._owned_params = owned_params
        self._factory = factory
        group_of = {id(p): index for index, group in enumerate(param_groups) for p in group.params}
        members = [[s for s in owned_params if group_of[id(s.param)] == g] for g in range(len(param_groups))]
        masters = [[s.master for s in group] for group in members]
        specs = probe(self._build, masters)
        self.optimizer = self._build(masters)
        _check_no_scales(self.optimizer)
        _add_unit_scales(self.optimizer, [s.master for s in owned_params])
        for group, group_specs in zip(members, specs, strict=True):
            for owned_param, spec in zip(group, group_specs, strict=True):
                owned_param.scalars, owned_param.arrays = frozenset(spec.scalars), spec.arrays
                owned_param.updates = None if STEP in spec.scalars else torch.zeros((), dtype=torch.int64)
                # Some optimizers (Adagrad) create their state when they are built: it is real from the start.
                owned_param.lazy = owned_param.fresh = not self.optimizer.state.get(owned_param.master)
                if owned_param.lazy:
                    self.optimizer.state[owned_param.master] = spec.placeholder(owned_param.master)

    def step(self, touched: Collection[int]) -> None:
        """Update the masters of those parameters whose ids are in touched, by their gradients. Local."""
        for owned_param in self._owned_params:
            if id(owned_param.param) not in touched:
                continue
            owned_param.master.grad = owned_param.grad.to(
                owned_param.master.dtype
            )  # no copy where the dtypes agree
            if owned_param.updates is not None:
                owned_param.updates += 1
            if owned_param.fresh:  # drop the placeholder: the optimizer now creates the real state
                del self.optimizer.state[owned_param.master]
                owned_param.fresh = False
        self.optimizer.step()
        for owned_param in self._owned_params:
            owned_param.master.grad = None

    def states(self, owned_param: OwnedParam) -> Iterator[tuple[str, Any]]:
        """Yield name and value of everything that is stored for an owned parameter. Local.

        A value has the shape of the owned parameter's master, or is one number: a tensor of one element, or a
        Python number. Whole masters may have states of other shapes, too.
        """
        if owned_param.has_copy:
            yield MASTER, owned_param.master
        if owned_param.updates is not None:
            yield STEP, owned_param.updates
        yield from entries(self.optimizer.state.get(owned_param.master, {}))

    def restore(self, owned_param: OwnedParam, loaded: Mapping[str, Tensor]) -> None:
        """Take over what was loaded for an owned parameter, by name. Local.

        A tensor that was filled in place is left, others are copied; what is not there stays as it is.
        Without a master the parameter is taken as it.

        Raises:
            MismatchError: a tensor has another number of elements.
        """
        for name, value in list(self.states(owned_param)):
            if name in loaded:
                self._write(owned_param, name, value, loaded[name])
            elif name == MASTER:
                owned_param.master.copy_(owned_param.data)
        if owned_param.lazy and STEP in loaded:
            owned_param.fresh = not loaded[STEP]
        elif loaded.keys() - {MASTER}:
            # Without a count of updates the loaded state may be real, and real state must not be dropped.
            owned_param.fresh = False

    def _build(self, tensors: Sequence[Sequence[Tensor]]) -> Optimizer:
        groups = [
            {**group.options, "name": group.name, "params": list(members)}
            for group, members in zip(self._param_groups, tensors, strict=True)
        ]
        return self._factory(groups)

    def _write(self, owned_param: OwnedParam, name: str, value: Tensor | float, loaded: Tensor) -> None:
        """Make state `name` of an owned parameter, now `value`, that which was loaded."""
        if not isinstance(value, Tensor):
            self.optimizer.state[owned_param.master][name] = type(value)(loaded.item())
        elif loaded.numel() != value.numel():
            raise MismatchError(
                f"state {name!r} of {owned_param} has {value.numel()} elements on this rank but "
                f"{loaded.numel()} were loaded. Load with the sharded_state_dict of this optimizer.",
                key=owned_param.key or None,
                path=f"state[{owned_param.position}].{name}",
            )
        elif loaded.data_ptr() != value.data_ptr():
            value.copy_(loaded.view(value.shape))


def _check_no_scales(optimizer: Any) -> None:
    """Raise for moments whose scales are not in the state, so that their codes alone would be stored."""
    dtypes = getattr(optimizer, "name_to_dtype_map", {})  # of Transformer Engine's FusedAdam
    scaled = [name for name, dtype in dtypes.items() if dtype in (torch.float16, torch.uint8)]
    if scaled and hasattr(optimizer, "_scales"):
        raise OptimizerError(
            f"{type(optimizer).__name__} keeps scales of {', '.join(map(repr, scaled))} outside of its "
            f"state, and codes mean nothing without them. Let it keep these states in float32 or bfloat16, "
            f"or use it without a wrapper, with megackpt.contrib.transformer_engine.fused_adam."
        )


def _add_unit_scales(optimizer: Any, masters: Sequence[Tensor]) -> None:
    """Add the scales of 1 that Transformer Engine's FusedAdam looks up for states in bfloat16.

    It makes them with the state, which is a placeholder here or was loaded.
    """
    dtypes = getattr(optimizer, "name_to_dtype_map", {})
    names = [name for name, dtype in dtypes.items() if dtype == torch.bfloat16]
    for master in masters if names and hasattr(optimizer, "_scales") else ():
        optimizer._scales[master] = {name: torch.ones(1, device=master.device) for name in names}
