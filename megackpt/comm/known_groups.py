"""Groups over torch.distributed that are made once and used again.

Owns which there are: one for all ranks, one for each process group that a caller names, and those that are
borrowed by threads.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch.distributed as dist

from megackpt.comm.group import BulkGroup, Group, SingleProcess
from megackpt.comm.torch_group import TorchGroup
from megackpt.errors import DeclarationError


def borrow_group(group: Group, *, timeout_s: float) -> Group:
    """Return a group of the same ranks that another thread may use at the same time, until it is returned.

    Collective over the ranks of the group; over the world where none is idle.

    Raises:
        DeclarationError: the group is of a kind that knows no second channel between its ranks.
    """
    if isinstance(group, SingleProcess):
        return group
    if isinstance(group, TorchGroup):
        idle = _idle(group.ranks, timeout_s)
        return idle.pop() if idle else TorchGroup(ranks=list(group.ranks), timeout_s=timeout_s)
    raise DeclarationError(
        f"Saving asynchronously needs a second channel between ranks, which a {type(group).__name__} does "
        f"not give. Save synchronously, or leave the group to torch.distributed."
    )


def return_group(group: Group) -> None:
    """Give back a borrowed group that nobody uses any more. Every rank does, and all in the same order."""
    if isinstance(group, TorchGroup) and dist.is_initialized():
        _idle(group.ranks, group.timeout_s).append(group)


def _idle(ranks: Sequence[int], timeout_s: float) -> list[TorchGroup]:
    world = dist.group.WORLD
    assert world is not None
    return _IDLE.setdefault(world, {}).setdefault((tuple(ranks), timeout_s), [])


def world_group(*, timeout_s: float) -> Group:
    """Return the group of all ranks, cached; SingleProcess without an initialised process group.

    Collective at the first call with each timeout_s.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return SingleProcess()
    world = dist.group.WORLD
    assert world is not None
    by_timeout = _GROUPS.setdefault(world, {})
    if timeout_s not in by_timeout:
        by_timeout[timeout_s] = TorchGroup(timeout_s=timeout_s)
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
        by_timeout[timeout_s] = TorchGroup(ranks=ranks, timeout_s=timeout_s)
    return by_timeout[timeout_s]


def process_group_ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    """Return the ranks in torch.distributed of a process group's members, ascending. Local."""
    return tuple(sorted(dist.get_process_group_ranks(group)))


# Making a process group is a collective and costs descriptors, so one is kept per world and deadline. The
# weak key forgets it when the world is destroyed.
_GROUPS: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[float, TorchGroup]] = weakref.WeakKeyDictionary()

# Groups that were given back. They are kept rather than destroyed: a process group that is made after another
# was destroyed may look for its ranks at the old ones' addresses in torch's store.
_IDLE: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[tuple[int, ...], float], list[TorchGroup]]] = (
    weakref.WeakKeyDictionary()
)
