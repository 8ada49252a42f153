"""Targets of a load that share memory: a tied weight under two keys, a buffer and a view of it.

Each of them is read into memory of its own. When everything is read, this memory is copied into the
targets. A target that then differs from its own values was overwritten by another target, and an error
names both. So a tied weight can be loaded, and two keys never leave a mixture in one tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from megackpt.entities import ShardedTensor
from megackpt.errors import MismatchError

_MAX_WORK = 10_000
"""Steps that numpy may take to find whether two strided views share memory. If these are not enough, the
views are treated as if they did, which costs memory for a copy and nothing else."""


@dataclass(frozen=True, slots=True)
class SharedTargets:
    """The targets of one rank, where some of them share memory.

    Attributes:
        tensors: what is read into: the targets, or copies of those that share memory.
        names: keys of the targets.
        targets: their memory.
        partners: for each target that shares memory, one target that it shares memory with; both by number.
        values: memory of their own for the targets that share memory, by number.
    """

    tensors: Sequence[ShardedTensor]
    names: Sequence[str]
    targets: Sequence[torch.Tensor]
    partners: Mapping[int, int]
    values: Mapping[int, torch.Tensor]

    @classmethod
    def of(cls, tensors: Sequence[ShardedTensor]) -> SharedTargets:
        """Find the targets that share memory, and allocate memory for their values. Each has data."""
        targets = [t.data for t in tensors if t.data is not None]
        assert len(targets) == len(tensors)
        partners = sharing(targets)
        values = {i: torch.empty_like(targets[i].detach(), requires_grad=False) for i in partners}
        read = [replace(t, data=values[i]) if i in values else t for i, t in enumerate(tensors)]
        return cls(read, [t.key for t in tensors], targets, partners, values)

    def copy_to_shared(self) -> None:
        """Copy what was read into the targets that share memory."""
        with torch.no_grad():
            for i, value in self.values.items():
                self.targets[i].detach().copy_(value)

    def check(self, where: str) -> None:
        """Check that every target has the values of its key, when all are filled.

        Args:
            where: location of the checkpoint, for the error.

        Raises:
            MismatchError: a target that shares its memory has other values, and has overwritten them.
        """
        for i, partner in self.partners.items():
            if not _same_bits(self.targets[i], self.values[i]):
                first, second = sorted((self.names[i], self.names[partner]))
                raise MismatchError(
                    f"{where}: {first!r} and {second!r} were loaded into the same memory, and the "
                    f"checkpoint has different values for it. Load each key into a tensor of its own "
                    f"(clone()), or ask for one of them only.",
                    key=first,
                    path=where,
                )


def sharing(tensors: Sequence[torch.Tensor]) -> dict[int, int]:
    """Return the tensors that share an element in memory with another tensor, each with one such tensor.

    Tensors are numbered by their positions.
    """
    # Tensor i has the bytes [low[i], high[i]) of device[i]. Where that is empty, its memory is empty or not
    # known.
    address_ranges = [_address_range(tensor) for tensor in tensors]
    devices = {device: i for i, device in enumerate(sorted({device for device, _, _ in address_ranges}))}
    device = np.array([devices[device] for device, _, _ in address_ranges], np.int64)
    # Unsigned, as an address may need all 64 bits.
    low, high = (np.array([address_range[i] for address_range in address_ranges], np.uint64) for i in (1, 2))
    sharing_with: dict[int, int] = {}
    for number in devices.values():
        rows = np.flatnonzero((device == number) & (high > low))
        # Sorted by first byte: only tensors of one device are compared, as each device has its own addresses.
        rows = rows[np.argsort(low[rows], kind="stable")]
        reach = np.maximum.accumulate(high[rows])  # the end of all tensors up to each
        # A tensor begins a group if all tensors before it end before its first byte. Only tensors of one
        # group can share memory.
        begins_anew = np.append(True, low[rows][1:] >= reach[:-1]) if len(rows) else np.zeros(0, np.bool_)
        # The first tensor always begins a group, so its position separates nothing.
        for group in np.split(rows, np.flatnonzero(begins_anew)[1:]):
            if len(group) > 1:
                _find_in(group.tolist(), tensors, low, high, sharing_with)
    return sharing_with


def _find_in(
    group: Sequence[int], tensors: Sequence[torch.Tensor], low: Any, high: Any, sharing_with: dict[int, int]
) -> None:
    """Add the pairs of a group that share memory; the group is sorted by first byte."""
    for at, i in enumerate(group):
        for j in group[at + 1 :]:
            # All later ones begin even further behind.
            if low[j] >= high[i]:
                break
            # One partner of each is enough for an error, and a comparison of strided views takes long.
            if (i not in sharing_with or j not in sharing_with) and _share_memory(tensors[i], tensors[j]):
                sharing_with.setdefault(i, j)
                sharing_with.setdefault(j, i)


def _address_range(tensor: torch.Tensor) -> tuple[str, int, int]:
    """Return the device of a tensor, the address of its first byte, and the address after its last byte."""
    if not tensor.numel() or tensor.is_meta:
        return "", 0, 0
    try:
        low = tensor.data_ptr()
    except RuntimeError:  # a library whose tensors have no addresses: nothing is known of their memory
        return "", 0, 0
    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return str(tensor.device), low, low + (reach + 1) * tensor.element_size()


def _share_memory(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors whose address ranges overlap have an element in common."""
    # Contiguous tensors have no gaps in which the other one could lie.
    if first.is_contiguous() and second.is_contiguous():
        return True
    views = _AddressArray(first).array(), _AddressArray(second).array()
    try:
        return np.shares_memory(*views, max_work=_MAX_WORK)  # type: ignore[arg-type]  # takes any number
    except np.exceptions.TooHardError:
        return True


class _AddressArray:
    """The addresses of a tensor's elements, for numpy, which does not read the memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        width = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "shape": tuple(tensor.shape),
            "typestr": f"|V{width}",
            "data": (tensor.data_ptr(), True),
            "strides": tuple(step * width for step in tensor.stride()),
        }

    def array(self) -> Any:  # of a dtype without a name
        """Return the addresses as an array."""
        return np.asarray(self)


def _same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors have the same bits, so that a NaN equals itself."""
    pair = (t.detach().to(first.device).contiguous() for t in (first, second))
    return torch.equal(*(t.reshape(-1).view(torch.uint8) for t in pair))
