"""Broadcasts between devices, over a process group of torch with a backend for them.

The backend reports errors of devices, and its deadline is that of the process group.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from megackpt.comm.group import Group
from megackpt.errors import DeclarationError, RankFailedError


class DeviceGroup:
    """The ranks of a torch process group, and a device of this process that its backend reaches.

    Without a process group, the ranks are all ranks of torch.distributed.

    Raises:
        DeclarationError: group is not a process group of torch, or torch.distributed is not initialised.
    """

    def __init__(self, group: Group | dist.ProcessGroup | None, device: torch.device | None = None) -> None:
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        if not isinstance(group, dist.ProcessGroup):
            raise DeclarationError(
                "cpu_transfer=False broadcasts between devices. This needs a process group of "
                "torch.distributed with a backend for them, such as NCCL. Give one as exchange_group, or "
                "leave cpu_transfer out."
            )
        self._group, self._device = group, device or torch.device("cpu")

    def on(self, device: torch.device) -> DeviceGroup:
        """Return the same ranks with another device. Local."""
        return DeviceGroup(self._group, device)

    def empty(self, nbytes: int) -> torch.Tensor:
        """Return an uninitialised uint8 tensor of shape [nbytes] on the device. Local."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def broadcast(self, data: torch.Tensor, *, root: int) -> torch.Tensor:
        """Return root's data, a uint8 tensor, on the device of each rank. Collective.

        Args:
            data: of equal size on all ranks; only that of root is used.
            root: rank of the group.

        Raises:
            RankFailedError: the broadcast failed; the deadline of the backend may have passed.
        """
        # `to` copies no data that is on the device already, so the broadcast may fill the caller's tensor.
        on_device = data.to(self._device)
        try:
            # torch takes the root as a rank of the world, also in a smaller group.
            dist.broadcast(on_device, dist.get_global_rank(self._group, root), group=self._group)
            if on_device.is_cuda:  # the caller may overwrite the host buffer when this returns
                torch.cuda.synchronize(self._device)
        except RuntimeError as error:
            raise RankFailedError(
                f"A broadcast between devices failed (seen by rank {dist.get_rank()}): {error}. Look at the "
                f"logs of the other ranks, or load with cpu_transfer=True."
            ) from error
        return on_device
