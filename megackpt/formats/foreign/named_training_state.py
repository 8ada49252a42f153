"""The training state of another tool by the names of parameters, and the keys that a checkpoint gives it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megackpt.errors import FormatError
from megackpt.formats.foreign.state import ForeignArray, ForeignState, consecutive_parts, plain_part

MASTER = "fp32_param"
"""The name of the master weights among the states, as in `megackpt.training.optim`."""


class StoredWeight(NamedTuple):
    """A weight or buffer that the files have: its whole shape, and the parts that follow each other."""

    shape: tuple[int, ...]
    parts: Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class NamedParam:
    """A trained parameter.

    Attributes:
        shape: of the whole parameter.
        states: masters and elementwise states by name; of each, the parts that follow each other.
        numbers: other states, such as the number of steps.
        group: number of its group in the optimizer.
    """

    shape: tuple[int, ...]
    states: Mapping[str, Sequence[Tensor]]
    numbers: Mapping[str, Any]
    group: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTrainingState:
    """All that the files of a training run have.

    Attributes:
        weights: weights and buffers that are stored themselves, by name.
        dtypes: of the model's weights and buffers.
        params: the trained parameters by name.
        aliases: further names of parameters.
        groups: options of the optimizer's groups.
        others: other values, for common state.
        origin: the tool that wrote the files.
        left_out: what cannot be taken over.
        where: names the files in errors.
    """

    weights: Mapping[str, StoredWeight]
    dtypes: Mapping[str, torch.dtype]
    params: Mapping[str, NamedParam]
    aliases: Mapping[str, str]
    groups: Sequence[Mapping[str, Any]]
    others: Mapping[str, Any]
    origin: str
    left_out: Sequence[str] = field(default=())
    where: str = ""

    def state(self, keys: str, *, weights: str, prefix: str) -> ForeignState:
        """Return arrays and common state under the keys of megackpt or of torch.

        Args:
            keys: "megackpt" or "torch"; see `megackpt.import_deepspeed`.
            weights: "model" or "masters".
            prefix: of the names of parameters, with the keys of megackpt.
        """
        left_out = list(self.left_out)
        others = plain_part(self.others, "", left_out)
        groups = plain_part(list(self.groups), "param_groups", left_out)
        named = list(self._weights(masters=weights == "masters"))
        if keys == "torch":
            # If the weights are the masters, a second copy under `masters.` has nothing to add.
            arrays = [*_weight_arrays(named, "model."), *self._torch_states(with_masters=weights == "model")]
            optimizer = self._torch_optimizer(groups)
        else:
            arrays = [*_weight_arrays(named, prefix), *self._megackpt_states(prefix)]
            optimizer = {"param_groups": {str(i): group for i, group in enumerate(groups)}}
        return ForeignState(
            arrays=tuple(arrays),
            common={"optimizer": optimizer, **others},
            origin={"imported_from": self.origin},
            left_out=tuple(left_out),
        )

    def _weights(
        self, *, masters: bool
    ) -> Iterator[tuple[str, torch.dtype, tuple[int, ...], Sequence[Tensor]]]:
        """Yield name, dtype, shape and parts of each weight and buffer.

        A weight that is not stored itself is the master, rounded to the model's dtype, as ZeRO-3 makes it.
        """
        for name in sorted({*self.weights, *self.params, *self.aliases}):
            param = self.params.get(self.aliases.get(name, name))
            if param is not None and (masters or name not in self.weights):
                parts = param.states[MASTER]
                dtype = parts[0].dtype if masters else self.dtypes.get(name, parts[0].dtype)
                yield name, dtype, param.shape, parts
            elif name in self.weights or self.aliases.get(name) in self.weights:
                shape, parts = self.weights[name if name in self.weights else self.aliases[name]]
                yield name, self._widened(parts[0].dtype) if masters else parts[0].dtype, shape, parts
            else:
                raise FormatError(
                    f"{self.where}: {name!r} has no values in these files. They are damaged.",
                    key=name,
                    path=self.where,
                )

    def _widened(self, dtype: torch.dtype) -> torch.dtype:
        """Return the masters' dtype in place of a shorter one: frozen weights have no masters."""
        master = next((param.states[MASTER][0].dtype for param in self.params.values()), dtype)
        return master if dtype.is_floating_point and dtype.itemsize < master.itemsize else dtype

    def _megackpt_states(self, prefix: str) -> Iterator[ForeignArray]:
        for name, param in self.params.items():
            key = f"{prefix}{name}"
            for state, parts in param.states.items():
                yield _array(f"optimizer.state.{state}.{key}", parts[0].dtype, param.shape, parts)
            for state, number in self._numbers(param):
                yield ForeignArray.whole(f"optimizer.state.{state}.{key}", number)
            if len(self.groups) > 1:
                yield ForeignArray.whole(f"optimizer.param_group.{key}", torch.tensor(param.group))

    def _torch_states(self, *, with_masters: bool) -> Iterator[ForeignArray]:
        for name, param in self.params.items():
            for state, parts in param.states.items():
                if state != MASTER:
                    key = f"optimizer.state.{name}.{state}"
                    yield _array(key, parts[0].dtype, param.shape, parts)
                elif with_masters:
                    yield _array(f"masters.{name}", parts[0].dtype, param.shape, parts)

    def _torch_optimizer(self, groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the optimizer's numbers and groups by the names of parameters."""
        members = [[n for n, param in self.params.items() if param.group == i] for i in range(len(groups))]
        return {
            "state": {name: dict(self._numbers(param)) for name, param in self.params.items()},
            "param_groups": [{**g, "params": names} for g, names in zip(groups, members, strict=True)],
        }

    def _numbers(self, param: NamedParam) -> Iterator[tuple[str, Tensor]]:
        """Yield the 0-dim states of a parameter; the number of steps also if its group has it."""
        numbers = dict(param.numbers)
        if len(param.states) > 1 and "step" not in numbers and param.group < len(self.groups):
            step = self.groups[param.group].get("step")
            numbers |= {} if step is None else {"step": step}
        for name, value in numbers.items():
            if isinstance(value, Tensor | int | float):
                yield name, torch.as_tensor(value, dtype=torch.float32 if name == "step" else None).clone()


def _weight_arrays(
    named: Sequence[tuple[str, torch.dtype, tuple[int, ...], Sequence[Tensor]]], prefix: str
) -> Iterator[ForeignArray]:
    for name, dtype, shape, parts in named:
        yield _array(f"{prefix}{name}", dtype, shape, parts)


def _array(key: str, dtype: torch.dtype, shape: tuple[int, ...], parts: Sequence[Tensor]) -> ForeignArray:
    return ForeignArray(key, dtype, shape, consecutive_parts(parts, shape))
