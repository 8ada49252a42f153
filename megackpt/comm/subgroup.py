"""Groups that a caller names: ours, or process groups of torch.

Owns their translation into a `BulkGroup` or into a label that tells which ranks belong together.
"""

from __future__ import annotations

import hashlib
from typing import TypeAlias

import torch.distributed as dist

from megackpt.comm.group import BulkGroup, Group, is_group, moves_bulk
from megackpt.comm.known_groups import process_group_ranks, torch_subgroup
from megackpt.comm.torch_group import TorchGroup
from megackpt.errors import DeclarationError

GivenGroup: TypeAlias = "Group | dist.ProcessGroup"


def subgroup(given: GivenGroup, *, timeout_s: float) -> BulkGroup:
    """Return the group of the given one's ranks that moves bulk data.

    Collective over these ranks at the first call with a process group of torch.

    Raises:
        DeclarationError: a group of another kind that cannot move bulk data.
        RankFailedError: a rank of it did not come.
    """
    check_subgroup(given)
    if isinstance(given, dist.ProcessGroup):
        return torch_subgroup(given, timeout_s=timeout_s)
    assert moves_bulk(given)
    return given


def check_subgroup(given: GivenGroup) -> None:
    """Check that `subgroup` has a use for a group. Local.

    Raises:
        DeclarationError: a group of another kind that cannot move bulk data.
    """
    if not isinstance(given, dist.ProcessGroup) and not moves_bulk(given):
        raise DeclarationError(
            f"A group of class {type(given).__name__} has no methods exchange, broadcast and "
            f"all_gather_into, so "
            f"ranks cannot send each other what they read. Add them (see megackpt.comm.BulkGroup), "
            f"give a torch "
            f"process group, or use exchange='direct'."
        )


def check_given_group(name: str, given: object) -> None:
    """Check that an argument is a group, of ours or of torch. Local.

    Raises:
        DeclarationError: it is none.
    """
    if not isinstance(given, dist.ProcessGroup) and not is_group(given):
        raise DeclarationError(
            f"{name} is {given!r}; give a process group of torch, or an object with the methods of "
            f"megackpt.comm.Group."
        )


def subgroup_members(given: GivenGroup) -> str:
    """Return text that tells the members of a group, the same on all of them; "" where only they know. Local.

    It begins with how many they are and a colon: as many ranks must name it.
    """
    if isinstance(given, dist.ProcessGroup):
        ranks = process_group_ranks(given)
    elif isinstance(given, TorchGroup):
        ranks = given.ranks
    else:
        return ""
    return f"{len(ranks)}:{hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]}"


def subgroup_label(given: GivenGroup, *, rank: int) -> int:
    """Return a number that is the same on all members of a group, and another in each group beside it.

    Collective over the group unless it is one of torch's; rank is this process's in all groups together.

    Raises:
        DeclarationError: it is no group.
    """
    check_given_group("spread_group", given)
    if isinstance(given, dist.ProcessGroup):
        return min(process_group_ranks(given))
    if isinstance(given, TorchGroup):
        return min(given.ranks)
    return min(int(said) for said in given.all_gather(str(rank).encode()))
