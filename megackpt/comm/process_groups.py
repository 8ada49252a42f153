"""Caches one megackpt group for each process group of torch.distributed and each deadline.

Also defines `AnyGroup`, the type of a group argument (a group of megackpt or of torch). `subgroups` has
groups of some ranks. A single process does not import `torch_group`.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch.distributed as dist

from megackpt.comm.collectives import gather_results
from megackpt.comm.group import Group, SingleProcess, check_group

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
