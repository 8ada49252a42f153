"""Tensors sharded like those of torch_xla's SPMD, over devices that are buffers in memory.

A fake with the interface of `XLAShardedTensor` for any number of hosts and devices: one host's object
knows the devices of that host only, as there. Where torch_xla is silent about misuse the fake raises.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from hypothesis import strategies as st


@dataclass(frozen=True, slots=True)
class SpmdLayout:
    """How an array is tiled over the devices of several hosts.

    Attributes:
        tiles: number of tiles along each dim.
        replicas: number of devices that hold each tile.
        order: devices in the order of `(*tiles, replica)`, row-major; device d belongs to host
            `d // devices_per_host`.
        hosts: number of hosts; divides the number of devices.
    """

    tiles: tuple[int, ...]
    replicas: int
    order: tuple[int, ...]
    hosts: int

    @property
    def devices_per_host(self) -> int:
        """Devices of one host."""
        return len(self.order) // self.hosts

    @property
    def is_replicated(self) -> bool:
        """Whether every device has the whole array: torch_xla treats that case apart."""
        return math.prod(self.tiles) == 1

    def tensor(self, array: torch.Tensor, host: int) -> XLAShardedTensor:
        """Return one host's view of a global array, with the array's elements on its devices."""
        devices = range(host * self.devices_per_host, (host + 1) * self.devices_per_host)
        if self.is_replicated:  # what is copied into the one tensor is on all devices
            whole = array.clone()
            return XLAShardedTensor(array, [XlaShard(whole, ..., f"CPU:{d}", d) for d in devices])
        return XLAShardedTensor(array, [self._shard(array, device) for device in devices])

    def _shard(self, array: torch.Tensor, device: int) -> XlaShard:
        positions = list(product(*(range(n) for n in self.tiles), range(self.replicas)))
        *tile, replica = positions[self.order.index(device)]
        room = [-(-extent // n) for extent, n in zip(array.shape, self.tiles, strict=True)]
        box = [
            slice(min(i * r, extent), min((i + 1) * r, extent), 1)
            for i, r, extent in zip(tile, room, array.shape, strict=True)
        ]
        data = torch.zeros(room, dtype=array.dtype)
        data[tuple(slice(0, s.stop - s.start) for s in box)] = array[tuple(box)]
        return XlaShard(data, box, f"CPU:{device}", replica)


@dataclass
class XlaShard:
    """What one device holds; fields as `torch_xla.distributed.spmd.XLAShard`."""

    data: torch.Tensor
    indices: Any  # Ellipsis, or a slice per dim
    shard_device: str
    replica_id: int

    def copy(self) -> XlaShard:
        """Return a snapshot in memory of its own."""
        return XlaShard(self.data.clone(), self.indices, self.shard_device, self.replica_id)

    def elements(self) -> torch.Tensor:
        """Return the data without padding."""
        if self.indices is Ellipsis:
            return self.data
        return self.data[tuple(slice(0, s.stop - s.start) for s in self.indices)]


class XLAShardedTensor(torch.Tensor):
    """One host's view of a sharded array; its elements can be had by `local_shards` only.

    Attributes:
        devices: what this host's devices hold.
        copies_out: how many times `local_shards` was asked for.
        loads: how many times data were put onto the devices.
    """

    devices: list[XlaShard]
    copies_out: int
    loads: int
    _whole: torch.Tensor | None

    @staticmethod
    def __new__(cls, array: torch.Tensor, devices: list[XlaShard]) -> XLAShardedTensor:
        """Wrap an array's shape and dtype; of its elements only those in devices are kept."""
        made: XLAShardedTensor = torch.Tensor._make_wrapper_subclass(cls, array.shape, dtype=array.dtype)
        made.devices = devices
        made.copies_out = made.loads = 0
        made._whole = devices[0].data if devices[0].indices is Ellipsis else None
        return made

    @property
    def local_shards(self) -> list[XlaShard]:
        """Return snapshots of this host's shards."""
        self.copies_out += 1
        return [shard.copy() for shard in self.devices]

    def load_local_shards_(self, shards: Sequence[XlaShard]) -> None:
        """Put data onto all devices of this host.

        Raises:
            ValueError: for what torch_xla rejects, and for shapes that it takes and misreads.
        """
        if self._whole is not None:
            raise ValueError("Replicated tensor should not be loaded from local shards - use copy_")
        if [s.shard_device for s in shards] != [s.shard_device for s in self.devices]:
            raise ValueError("Shards must be provided for all local devices")
        for local, shard in zip(self.devices, shards, strict=True):
            if (shard.data.shape, shard.data.dtype) != (local.data.shape, local.data.dtype):
                raise ValueError(f"{shard.data.shape} is not the padded shape {local.data.shape}")
            local.data = shard.data.clone()
        self.loads += 1

    @property
    def global_tensor(self) -> torch.Tensor:
        """Return what stands for the whole array; only of a replicated one a host has it."""
        if self._whole is None:
            raise ValueError("the whole array would have to be gathered from all hosts")
        return self._whole

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares a function there, not a method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Raise an error for every operation on the elements of the whole array."""
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise ValueError(f"{func}: the whole array would have to be gathered from all hosts")


XLAShardedTensor.__module__ = "torch_xla.distributed.spmd.xla_sharded_tensor"  # it is recognised by this


@st.composite
def spmd_layouts(draw: st.DrawFn, dims: int, *, max_tiles: int = 3) -> SpmdLayout:
    """Any tiling of an array of some dims, any replication, any order of devices, on any number of hosts."""
    tiles = tuple(draw(st.lists(st.integers(1, max_tiles), min_size=dims, max_size=dims)))
    while math.prod(tiles) > 12:
        tiles = tuple(max(1, n - 1) for n in tiles)
    replicas = draw(st.integers(1, 3))
    devices = math.prod(tiles) * replicas
    hosts = draw(st.sampled_from([n for n in range(1, min(devices, 4) + 1) if devices % n == 0]))
    return SpmdLayout(tiles, replicas, tuple(draw(st.permutations(range(devices)))), hosts)
