"""Arrays and other state that the files of another tool hold.

Nothing is copied: each array is made of parts, which are tensors in mapped files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megackpt.codec.arrays import tensor_fault
from megackpt.codec.pickled import ForeignShardedTensor
from megackpt.errors import FormatError, UnsupportedError
from megackpt.formats.foreign.mapped_memory import elements_at, in_memory

LEFT_OUT = object()
"""Stands for a value that does not become part of the checkpoint."""
_MAX_DEPTH = 100
_COMPARED = 4 * 1024 * 1024  # elements at a time
_PLAIN = (str, int, float, bool, bytes, type(None), torch.dtype, torch.Size)


@dataclass(frozen=True, slots=True)
class SourcePart:
    """Elements of an array that are stored together: a range of the flattening of one box.

    Attributes:
        data: the elements, in order; of any shape and dtype.
        start: of the box in the array.
        shape: of the box.
        flat_start: where the elements begin in the flattening of the box.
    """

    data: Tensor
    start: tuple[int, ...]
    shape: tuple[int, ...]
    flat_start: int = 0


@dataclass(frozen=True, slots=True)
class ForeignArray:
    """An array of another tool.

    Attributes:
        key: its name in the checkpoint.
        dtype: that it is stored with; parts of another one are cast.
        shape: of the whole array.
        parts: what it is made of.
    """

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[SourcePart, ...]

    @classmethod
    def whole(cls, key: str, data: Tensor, dtype: torch.dtype | None = None) -> ForeignArray:
        """Return an array that is one tensor."""
        shape = tuple(data.shape)
        return cls(key, dtype or data.dtype, shape, (SourcePart(data, (0,) * len(shape), shape),))


def mixed_files(fault: str, file: str, key: str) -> FormatError:
    """Return the error for a file that contradicts another one about an array or a value."""
    return FormatError(f"{file}: {key!r} {fault}. Pass the files of one step of one run.", key=key, path=file)


@dataclass(slots=True)
class CollectedArray:
    """One array in the files of several ranks. Copies of a part are compared, and one is kept.

    Attributes:
        key: of the array.
        dtype: of the array in every file.
        shape: of the whole array, according to every file.
        file: the first of the files.
    """

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: str
    _parts: dict[tuple[object, ...], tuple[SourcePart, str]] = field(default_factory=dict)

    def check(self, dtype: torch.dtype, shape: tuple[int, ...], file: str) -> None:
        """Check that another file has the same dtype and shape.

        Raises:
            FormatError: it has not.
        """
        if (dtype, shape) != (self.dtype, self.shape):
            before = f"{self.dtype} {self.shape} in {self.file}"
            raise mixed_files(f"is an array of {dtype} {shape}, and one of {before}", file, self.key)

    def add(self, part: SourcePart, file: str) -> None:
        """Add a part of a file. A copy of an earlier part must have its dtype.

        Raises:
            FormatError: it has other bits than its copy in another file.
            UnsupportedError: no checkpoint can hold it.
        """
        check_tensor(part.data, self.key)
        region = (part.start, part.shape, part.flat_start, part.data.numel())
        copy, file_of_copy = self._parts.setdefault(region, (part, file))
        if copy is not part and not have_equal_bits(copy.data, part.data):
            fault = (
                f"has other bits than in {file_of_copy}, in the part of shape {part.shape} at {part.start}"
            )
            raise mixed_files(fault, file, self.key)

    def whole(self) -> ForeignArray:
        """Return the array, with each part once, in the order that they were added."""
        parts = tuple(part for part, _ in self._parts.values())
        return ForeignArray(self.key, self.dtype, self.shape, parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignState:
    """What the files of another tool hold, under the names that a checkpoint has for it.

    Attributes:
        arrays: the arrays, each key once.
        common: values that are not sharded.
        origin: content metadata: which tool wrote the files, and its version.
        left_out: what does not become part of the checkpoint, with the reason.
    """

    arrays: tuple[ForeignArray, ...]
    common: Mapping[str, Any]
    origin: Mapping[str, Any]
    left_out: tuple[str, ...] = field(default=())


def check_tensor(tensor: Tensor, key: str) -> None:
    """Reject a tensor that no checkpoint can hold.

    Raises:
        UnsupportedError: it is quantised, sparse, nested, without values, or of a dtype without one here.
    """
    fault = tensor_fault(tensor.detach())
    if fault is not None:
        raise UnsupportedError(f"{key!r:.200}: {fault}", key=key)


def have_equal_bits(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors of one shape and dtype have equal bits."""
    if first is second or first.numel() == 0:
        return True
    if not (first.is_contiguous() and second.is_contiguous()):
        return _are_equal_bytes(in_memory(first), in_memory(second))
    return all(
        _are_equal_bytes(*(elements_at(tensor, start, count) for tensor in (first, second)))
        for start in range(0, first.numel(), _COMPARED)
        for count in (min(_COMPARED, first.numel() - start),)
    )


def _are_equal_bytes(first: Tensor, second: Tensor) -> bool:
    # As bytes: NaN is not equal to itself as a number.
    return torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in (first, second)))


def plain_part(value: Any, path: str, left_out: list[str], depth: int = 0) -> Any:
    """Return a copy of a value with plain containers, values and tensors only; list what is left out.

    Tensors are copied: in the files they are mapped. What is nested more than 100 levels deep is left out.

    Raises:
        UnsupportedError: the value contains a ShardedTensor, or a tensor that no checkpoint can hold.
    """
    if depth > _MAX_DEPTH:  # it may contain itself
        left_out.append(f"{path:.200} (nested too deep)")
        return LEFT_OUT
    if isinstance(value, ForeignShardedTensor):
        raise UnsupportedError(
            f"{path:.200} is a ShardedTensor inside of a tuple, a set or client state, where it cannot be "
            f"put together. Save it in dicts and lists.",
            key=path,
        )
    if isinstance(value, Tensor):
        check_tensor(value, path)
        return in_memory(value)
    if isinstance(value, _PLAIN):
        return value
    if type(value).__name__ in ("dict", "OrderedDict") and isinstance(value, dict):
        items = {k: plain_part(v, f"{path}.{k}".lstrip("."), left_out, depth + 1) for k, v in value.items()}
        return {k: v for k, v in items.items() if v is not LEFT_OUT}
    if type(value) in (list, tuple, set, frozenset):
        members = [plain_part(v, f"{path}.{i}", left_out, depth + 1) for i, v in enumerate(value)]
        return type(value)(v for v in members if v is not LEFT_OUT)
    if isinstance(value, np.ndarray | np.generic):
        return value.copy()
    name = getattr(value, "qualname", type(value).__name__)
    left_out.append(f"{path} (an object of {getattr(value, 'module', type(value).__module__)}.{name})")
    return LEFT_OUT


# The training state of another tool by the names of parameters, and the keys that a checkpoint gives it.

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
        if keys == "torch":
            # If the weights are the masters, a second copy under `masters.` has nothing to add.
            arrays = [
                *self._weights("model.", masters=weights == "masters"),
                *self._torch_states(with_masters=weights == "model"),
            ]
            optimizer = self._torch_optimizer(groups)
        else:
            arrays = [
                *self._weights(prefix, masters=weights == "masters"),
                *self._megackpt_states(prefix),
            ]
            optimizer = {"param_groups": {str(i): group for i, group in enumerate(groups)}}
        return ForeignState(
            arrays=tuple(arrays),
            common={"optimizer": optimizer, **others},
            origin={"imported_from": self.origin},
            left_out=tuple(left_out),
        )

    def _weights(self, prefix: str, *, masters: bool) -> Iterator[ForeignArray]:
        """Yield each weight and buffer.

        A weight that is not stored itself is the master, rounded to the model's dtype, as ZeRO-3 makes it.
        """
        for name in sorted({*self.weights, *self.params, *self.aliases}):
            param = self.params.get(self.aliases.get(name, name))
            if param is not None and (masters or name not in self.weights):
                parts = param.states[MASTER]
                dtype = parts[0].dtype if masters else self.dtypes.get(name, parts[0].dtype)
                yield _array(f"{prefix}{name}", dtype, param.shape, parts)
            elif name in self.weights or self.aliases.get(name) in self.weights:
                shape, parts = self.weights[name if name in self.weights else self.aliases[name]]
                dtype = self._widened(parts[0].dtype) if masters else parts[0].dtype
                yield _array(f"{prefix}{name}", dtype, shape, parts)
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
                number = in_memory(value) if isinstance(value, Tensor) else value
                yield name, torch.as_tensor(number, dtype=torch.float32 if name == "step" else None).clone()


def _array(key: str, dtype: torch.dtype, shape: tuple[int, ...], tensors: Sequence[Tensor]) -> ForeignArray:
    """Return an array of tensors that follow each other in its flattening."""
    parts, at = [], 0
    for data in tensors:
        if data.numel():
            parts.append(SourcePart(data, (0,) * len(shape), shape, at))
            at += data.numel()
    return ForeignArray(key, dtype, shape, tuple(parts))
