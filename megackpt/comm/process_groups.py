"""Caches one megackpt group for each process group of torch.distributed and each deadline.

Also defines `AnyGroup`, the type of a group argument (a group of megackpt or of torch), its check and its
members. A single process does not import `torch_group`.
"""

from __future__ import annotations

import atexit
import hashlib
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch.distributed as dist

from megackpt.comm.collectives import gather_results
from megackpt.comm.group import Group, SingleProcess, check_group
from megackpt.errors import DeclarationError

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
    by_timeout = _GROUPS.setdefault(world, {})
    if timeout_s not in by_timeout:
        existing = next(iter(by_timeout.values()), None)
        if existing is not None:
            gather_results(existing, b"", None, doing=f"connecting all ranks with timeout_s={timeout_s:g}")
        by_timeout[timeout_s] = _connect(None, timeout_s)
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


def torch_subgroup(group: dist.ProcessGroup, *, timeout_s: float) -> Group:
    """Return a group of the ranks of a torch process group, cached; a SingleProcess for one rank.

    Collective over these ranks at the first call with each timeout_s. The group has its own connections and
    its own deadline, so checkpointing does not wait behind other collectives of the process group.
    """
    ranks = process_group_ranks(group)
    if len(ranks) == 1:
        return SingleProcess()
    by_timeout = _GROUPS.setdefault(group, {})
    if timeout_s not in by_timeout:
        by_timeout[timeout_s] = _connect(ranks, timeout_s)
    return by_timeout[timeout_s]


def process_group_ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    """Return the members of a process group as ranks of torch.distributed, ascending. Local."""
    return tuple(sorted(dist.get_process_group_ranks(group)))


def _connect(ranks: Sequence[int] | None, timeout_s: float) -> TorchGroup:
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
    return min(ranks)


def _member_ranks(group: AnyGroup) -> Sequence[int] | None:
    """Return the members of a group as ranks of torch.distributed; None if they are not known here. Local."""
    from megackpt.comm.torch_group import TorchGroup

    if isinstance(group, TorchGroup):
        return group.ranks
    return process_group_ranks(group) if isinstance(group, dist.ProcessGroup) else None


# Connecting a group is a collective and takes file descriptors, so there is one for each process group and
# deadline. The weak key removes it when the process group is destroyed.
_GROUPS: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[float, TorchGroup]] = weakref.WeakKeyDictionary()
_CONNECTED: weakref.WeakSet[TorchGroup] = weakref.WeakSet()
