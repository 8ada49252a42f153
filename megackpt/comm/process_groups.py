"""Groups that an argument gives: all ranks or some of them, checked and named by members; and of devices.

One megackpt group is cached for each process group of torch.distributed and each deadline. A single process
does not import `torch_group`.
"""

from __future__ import annotations

import atexit
import hashlib
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.distributed as dist

from megackpt.comm.collectives import gather_results
from megackpt.comm.group import Group, SingleProcess, check_group
from megackpt.errors import DeclarationError, RankFailedError

if TYPE_CHECKING:
    from megackpt.comm.torch_group import TorchGroup

AnyGroup: TypeAlias = Group | dist.ProcessGroup
"""A group of megackpt, or a process group of torch."""


def world_group(*, timeout_s: float) -> Group:
    """Return the group of all ranks, cached; a SingleProcess if torch.distributed is not initialised.

    Collective at the first call with each timeout_s. If the ranks already have a group with another deadline,
    they synchronise in that one first. So a rank that gives another timeout_s than the others gets an error
    that says so.

    Raises:
        RankFailedError: a rank did not connect, or is at another step.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return SingleProcess()
    world = dist.group.WORLD
    assert world is not None
    by_timeout = GROUPS.setdefault(world, {})
    if timeout_s not in by_timeout:
        existing = next(iter(by_timeout.values()), None)
        if existing is not None:
            gather_results(existing, b"", None, doing=f"connecting all ranks with timeout_s={timeout_s:g}")
        by_timeout[timeout_s] = connect(None, timeout_s)
    return by_timeout[timeout_s]


def group_or_world(group: Group | None, *, timeout_s: float) -> Group:
    """Return the group that an argument gives; for None the group of all ranks, as `world_group`.

    Raises:
        DeclarationError: the argument is not a `Group`.
    """
    if group is None:
        return world_group(timeout_s=timeout_s)
    check_group(group)
    return group


def connect(ranks: Sequence[int] | None, timeout_s: float) -> TorchGroup:
    """Return a new group of ranks of torch.distributed, None for all; it is closed at exit. Collective."""
    from megackpt.comm.torch_group import TorchGroup

    group = TorchGroup(ranks=ranks, timeout_s=timeout_s)
    if not _CONNECTED:
        atexit.register(_close_idle_groups)
    _CONNECTED.add(group)
    return group


def _close_idle_groups() -> None:
    """Close the groups of this module at exit, so that the threads of gloo end before the interpreter does.

    A thread of gloo that frees the memory of a message after the end of the interpreter aborts the process
    with SIGABRT ("terminate called without an active exception"): see
    https://github.com/pytorch/pytorch/pull/179291. Closing waits for work in progress, so a group in which
    a collective was interrupted stays open.
    """
    atexit.unregister(_close_idle_groups)
    for group in list(_CONNECTED):
        if group.is_idle:
            group.close()


# Connecting a group is a collective and takes file descriptors, so there is one for each process group and
# deadline. The weak key removes it when the process group is destroyed.
GROUPS: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[float, TorchGroup]] = weakref.WeakKeyDictionary()
_CONNECTED: weakref.WeakSet[TorchGroup] = weakref.WeakSet()


# Groups of some of the ranks.


def torch_subgroup(group: dist.ProcessGroup, *, timeout_s: float) -> Group:
    """Return a group of the ranks of a torch process group, cached; a SingleProcess for one rank.

    Collective over these ranks at the first call with each timeout_s. The group has its own connections and
    its own deadline, so checkpointing does not wait behind other collectives of the process group.
    """
    ranks = process_group_ranks(group)
    if len(ranks) == 1:
        return SingleProcess()
    by_timeout = GROUPS.setdefault(group, {})
    if timeout_s not in by_timeout:
        by_timeout[timeout_s] = connect(ranks, timeout_s)
    return by_timeout[timeout_s]


def process_group_ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    """Return the members of a process group as ranks of torch.distributed, ascending. Local."""
    return tuple(sorted(dist.get_process_group_ranks(group)))


def subgroup(group: AnyGroup, *, timeout_s: float) -> Group:
    """Return the group of megackpt for a process group of torch; a group of megackpt is returned itself.

    Collective over its ranks at the first call with a process group of torch.

    Raises:
        RankFailedError: a rank of the process group did not connect.
    """
    return torch_subgroup(group, timeout_s=timeout_s) if isinstance(group, dist.ProcessGroup) else group


def check_group_argument(name: str, group: object) -> None:
    """Check that an argument is an `AnyGroup`. Local.

    Raises:
        DeclarationError: the argument is something else.
    """
    if not isinstance(group, (dist.ProcessGroup, Group)):
        raise DeclarationError(
            f"{name} is {group!r}; give a process group of torch, or an object of a subclass of "
            f"megackpt.comm.Group."
        )


def subgroup_members(group: AnyGroup) -> str:
    """Return a text that identifies the members of a group, equal on all of them. Local.

    The text begins with the number of members and a colon. So a caller can check that as many ranks have
    given this group. The text is empty for a group whose members are not known here.
    """
    ranks = _member_ranks(group)
    return "" if ranks is None else f"{len(ranks)}:{hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]}"


def subgroup_label(group: AnyGroup, *, rank: int) -> int:
    """Return a number that is equal on all members of a group, and differs between disjoint groups.

    Collective over the group, unless it is a process group of torch.

    Args:
        group: one of several groups that have no rank in common.
        rank: of this process among the ranks of all these groups.

    Raises:
        DeclarationError: group is not a group.
    """
    check_group_argument("spread_group", group)
    ranks = _member_ranks(group)
    if ranks is None:
        assert isinstance(group, Group)
        ranks = [int(message) for message in group.all_gather(str(rank).encode())]
    # Groups without a common rank have different lowest ranks.
    return min(ranks)


def _member_ranks(group: AnyGroup) -> Sequence[int] | None:
    """Return the members of a group as ranks of torch.distributed; None if they are not known here. Local."""
    from megackpt.comm.torch_group import TorchGroup

    if isinstance(group, TorchGroup):
        return group.ranks
    return process_group_ranks(group) if isinstance(group, dist.ProcessGroup) else None


# Broadcasts between devices, over a process group of torch with a backend for them.
#
# The backend reports errors of devices, and its deadline is that of the process group.


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
