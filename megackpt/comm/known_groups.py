"""Groups over torch.distributed that are made once and used again.

Owns which there are: one for all ranks, and one for each process group that a caller names; and that they are
let go of before the process ends.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Sequence

import torch.distributed as dist

from megackpt.comm.group import BulkGroup, Group, SingleProcess, settle
from megackpt.comm.torch_group import TorchGroup


def world_group(*, timeout_s: float) -> Group:
    """Return the group of all ranks, cached; SingleProcess without an initialised process group.

    Collective at the first call with each timeout_s: ranks meet in a group that they have, if they have one,
    so that a rank with another deadline than the others is found there.

    Raises:
        RankFailedError: a rank did not come, or is about to do something else.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return SingleProcess()
    world = dist.group.WORLD
    assert world is not None
    by_timeout = _GROUPS.setdefault(world, {})
    if timeout_s not in by_timeout:
        known = next(iter(by_timeout.values()), None)
        if known is not None:
            settle(known, b"", None, doing=f"connecting all ranks with timeout_s={timeout_s:g}")
        by_timeout[timeout_s] = _made(None, timeout_s)
    return by_timeout[timeout_s]


def torch_subgroup(group: dist.ProcessGroup, *, timeout_s: float) -> BulkGroup:
    """Return a group of the same ranks as a torch process group, cached; SingleProcess for one rank.

    Collective over these ranks at the first call with each timeout_s. It has connections and a deadline of
    its own, so that checkpointing does not wait behind what else the given group does.
    """
    ranks = process_group_ranks(group)
    if len(ranks) == 1:
        return SingleProcess()
    by_timeout = _GROUPS.setdefault(group, {})
    if timeout_s not in by_timeout:
        by_timeout[timeout_s] = _made(ranks, timeout_s)
    return by_timeout[timeout_s]


def process_group_ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    """Return the ranks in torch.distributed of a process group's members, ascending. Local."""
    return tuple(sorted(dist.get_process_group_ranks(group)))


def _made(ranks: Sequence[int] | None, timeout_s: float) -> TorchGroup:
    group = TorchGroup(ranks=ranks, timeout_s=timeout_s)
    if not _MADE:
        atexit.register(_let_go)
    _MADE.add(group)
    return group


def _let_go() -> None:
    """End the threads of gloo while Python is still there: no program does so for groups it has not made.

    A thread of gloo that lets go of a message's memory later than that ends the process with SIGABRT
    ("terminate called without an active exception"), after all went well: see
    https://github.com/pytorch/pytorch/pull/179291. To end threads is to wait for what they do, so a group in
    which something was broken off is left alone.
    """
    atexit.unregister(_let_go)
    for group in list(_MADE):
        if group.is_idle:
            group.close()


# Making a process group is a collective and costs descriptors, so one is kept per world and deadline. The
# weak key forgets it when the world is destroyed.
_GROUPS: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[float, TorchGroup]] = weakref.WeakKeyDictionary()
_MADE: weakref.WeakSet[TorchGroup] = weakref.WeakSet()
