"""Tiers: storage of the nodes themselves, where steps are kept besides the root.

Owns what a tier is. Which directories of which nodes it is, is in `tier_set`; how steps go into it, in
`tier_saving`; which step is loaded, from where, in `recovery`.
"""

from __future__ import annotations

import os
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from megackpt.arguments import check_count
from megackpt.errors import DeclarationError
from megackpt.storage import absolute_path


@dataclass(frozen=True, slots=True)
class Tier:
    """Node-local storage for steps; see `MemoryTier` and `LocalTier`.

    Attributes:
        path: a directory with the same path on every node; `{node}` in it stands for the node's name.
        every: steps that are multiples of it are saved here.
        keep_last: how many steps stay; while the next is written there is one more.
        replication_factor: how many nodes have each byte. 1 survives the death of processes, 2 the loss of a
            node. With fewer nodes, every node has it.
        jump: how many nodes further the next copy is; choose it so that they fail independently.
    """

    kind: ClassVar[str] = "tier"

    path: str | os.PathLike[str]
    _: KW_ONLY
    every: int = 1
    keep_last: int = 2
    replication_factor: int = 2
    jump: int = 1

    def __post_init__(self) -> None:
        kind = type(self).__name__
        if not isinstance(self.path, (str, os.PathLike)) or not os.fspath(self.path):
            raise DeclarationError(f"{kind}: path is {self.path!r}; give a directory, as '/dev/shm/run'.")
        for name in ("every", "keep_last", "replication_factor", "jump"):
            check_count(f"{kind}: {name}", getattr(self, name))

    def __str__(self) -> str:
        return f"the {self.kind} tier {os.fspath(self.path)}"


@dataclass(frozen=True, slots=True)
class MemoryTier(Tier):
    """A directory in the memory of each node, such as `/dev/shm/run`.

    It outlives processes, and with a replication_factor above 1 the loss of a node, but not of all nodes.

    >>> MemoryTier("/dev/shm/run", every=10).replication_factor
    2
    """

    kind: ClassVar[str] = "memory"


@dataclass(frozen=True, slots=True)
class LocalTier(Tier):
    """A directory on a disk of each node. It outlives a loss of power, where the node comes back."""

    kind: ClassVar[str] = "local disk"


def check_tiers(tiers: object) -> None:
    """Check what can be known of tiers before they are used. Local.

    Raises:
        DeclarationError: they are no tiers, or two of them are one directory.
    """
    if not isinstance(tiers, (list, tuple)) or not all(isinstance(tier, Tier) for tier in tiers):
        raise DeclarationError(f"tiers is {tiers!r}; give a list of tiers, as [MemoryTier('/dev/shm/run')].")
    paths = [absolute_path(tier.path) for tier in tiers]
    twice = next((path for path in paths if paths.count(path) > 1), None)
    if twice is not None:
        raise DeclarationError(f"Two tiers are in {twice}. Give each a directory of its own.")
