"""The torch optimizer inside, and its state as something that exists, is stored and is restored.

Owns which state is real and which a placeholder (see `state_init`), the count of updates where the torch
optimizer has none, and taking over loaded state. Knows nothing of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from megackpt.errors import MismatchError
from megackpt.optim.owned import Slot
from megackpt.optim.param_groups import ParamGroup
from megackpt.optim.state_init import Build, ProbeKind, probe_state

OptimizerFactory: TypeAlias = Callable[[list[dict[str, Any]]], Optimizer]  # groups as torch.optim takes them
Check: TypeAlias = Callable[[Build, Sequence[Sequence[ProbeKind]]], None]

MASTER = "fp32_param"
"""Name under which master weights are stored, as in Megatron-Core."""
STEP = "step"
"""Name of the number of updates a parameter has had; torch's own name for it."""


class InnerOptimizer:
    """A torch optimizer on the masters of slots, whose state exists from the start.

    Args:
        param_groups: the groups of the whole model part, in order.
        slots: what this rank updates of their parameters.
        factory: makes the torch optimizer.
        check: refuses an optimizer that does not suit such masters.

    Attributes:
        optimizer: the torch optimizer.
    """

    def __init__(
        self,
        param_groups: Sequence[ParamGroup],
        slots: Sequence[Slot],
        factory: OptimizerFactory,
        check: Check,
    ) -> None:
        self._param_groups = param_groups
        self._slots = slots
        self._factory = factory
        group_of = {id(p): index for index, group in enumerate(param_groups) for p in group.params}
        members = [[s for s in slots if group_of[id(s.param)] == g] for g in range(len(param_groups))]
        kinds = [list(dict.fromkeys(ProbeKind.of(s.master) for s in group)) for group in members]
        check(self._build, kinds)
        specs = probe_state(self._build, kinds)
        self.optimizer = self._build([[s.master for s in group] for group in members])
        for group, spec_of in zip(members, specs, strict=True):
            for slot in group:
                spec = spec_of[ProbeKind.of(slot.master)]
                slot.scalars = frozenset(spec.scalars)
                slot.updates = None if STEP in spec.scalars else torch.zeros((), dtype=torch.int64)
                # Some optimizers (Adagrad) make their state when they are built: it is real from the start.
                slot.lazy = slot.fresh = not self.optimizer.state.get(slot.master)
                if slot.lazy:
                    self.optimizer.state[slot.master] = spec.placeholder(slot.master)

    def step(self, touched: Collection[int]) -> None:
        """Update the masters of those parameters whose ids are in touched, by the slots' gradients. Local."""
        for slot in self._slots:
            if id(slot.param) not in touched:
                continue
            slot.master.grad = slot.grad.to(slot.master.dtype)  # no copy where the dtypes agree
            if slot.updates is not None:
                slot.updates += 1
            if slot.fresh:  # drop the placeholder: now the optimizer makes the real state
                del self.optimizer.state[slot.master]
                slot.fresh = False
        self.optimizer.step()
        for slot in self._slots:
            slot.master.grad = None

    def states(self, slot: Slot) -> Iterator[tuple[str, Any]]:
        """Yield name and value of everything that is stored for a slot. Local.

        A value has the shape of the slot's master, or is one number: a tensor of one element, or a Python
        number.
        """
        if slot.has_copy:
            yield MASTER, slot.master
        if slot.updates is not None:
            yield STEP, slot.updates
        for name, value in self.optimizer.state.get(slot.master, {}).items():
            if value is not None:
                yield name, value

    def restore(self, slot: Slot, loaded: Mapping[str, Tensor]) -> None:
        """Take over what was loaded for a slot, by name. Local.

        A tensor that was filled in place is left, others are copied; what is not there stays as it is.
        Without a master the parameter is taken as it.

        Raises:
            MismatchError: a tensor has another number of elements.
        """
        for name, value in list(self.states(slot)):
            if name in loaded:
                self._write(slot, name, value, loaded[name])
            elif name == MASTER:
                slot.master.copy_(slot.data)
        if slot.lazy and STEP in loaded:
            slot.fresh = not loaded[STEP]
        elif loaded.keys() - {MASTER}:
            slot.fresh = False  # without a count there is no telling, and what was loaded must not be dropped

    def _build(self, tensors: Sequence[Sequence[Tensor]]) -> Optimizer:
        groups = [
            {**group.options, "name": group.name, "params": list(members)}
            for group, members in zip(self._param_groups, tensors, strict=True)
        ]
        return self._factory(groups)

    def _write(self, slot: Slot, name: str, value: Tensor | float, loaded: Tensor) -> None:
        """Make state `name` of a slot, now `value`, that which was loaded."""
        if not isinstance(value, Tensor):
            self.optimizer.state[slot.master][name] = type(value)(loaded.item())
        elif loaded.numel() != value.numel():
            raise MismatchError(
                f"state {name!r} of {slot} has {value.numel()} elements on this rank but {loaded.numel()} "
                f"were loaded. Load with the sharded_state_dict of this optimizer.",
                key=slot.key or None,
                path=f"state[{slot.position}].{name}",
            )
        elif loaded.data_ptr() != value.data_ptr():
            value.copy_(loaded.view(value.shape))
