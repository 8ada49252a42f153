"""The tiers of a job: which ranks share a node, and which directory of it each tier is.

Owns how that is found, what is refused, and what is warned of. What is done there is in `tier_saving` and
`recovery`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
from collections.abc import Sequence

from megackpt.checkpointer.options import MemoryTier, Tier, Tiers
from megackpt.checkpointer.recovery import Recovery, Root
from megackpt.comm import Group, run_on_all_ranks
from megackpt.engine.checkpoint.steps import LocalSteps
from megackpt.engine.tiers.save import NodeLocation
from megackpt.errors import DeclarationError
from megackpt.planning.nodes import Nodes

log = logging.getLogger(__name__)


class TierSet:
    """The tiers of a run. All methods are collective."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers.tiers
        self._node = tiers.node
        self._set_up: tuple[Nodes, tuple[LocalSteps, ...]] | None = None

    def __len__(self) -> int:
        return len(self._tiers)

    def __getitem__(self, number: int) -> Tier:
        return self._tiers[number]

    def recovery(self, group: Group, root: Root) -> Recovery:
        """Look at all tiers and the root. Collective."""
        nodes, places = self.open(group)
        return Recovery(group, nodes, places, [str(tier) for tier in self._tiers], root)

    def open(self, group: Group) -> tuple[Nodes, tuple[LocalSteps, ...]]:
        """Return the nodes of the job, and this node's directory of each tier. Collective at the first call.

        Raises:
            DeclarationError: nodes have one directory in common, or ranks of one node have not.
        """
        if self._set_up is None:
            rank, size = group.rank, group.size
            label = _label(self._node, rank)
            places = tuple(
                LocalSteps.at(os.fspath(tier.path).replace("{node}", label)) for tier in self._tiers
            )

            def tell() -> bytes:
                return json.dumps([label, [_identity(place) for place in places]]).encode()

            told = [json.loads(said) for said in run_on_all_ranks(group, tell, doing="opening its tiers")]
            nodes = Nodes.of_labels([of_rank[0] for of_rank in told])
            for number, tier in enumerate(self._tiers):
                _check_directories(tier, [of_rank[1][number] for of_rank in told], told, nodes)
                if rank == 0:
                    _warn_of(tier, places[number], nodes, size)
            self._set_up = nodes, places
        return self._set_up

    def place(self, number: int, step: int, group: Group) -> NodeLocation:
        """Return where a step lies in a tier, as this rank sees it. Collective as `open` is."""
        nodes, places = self.open(group)
        tier = self._tiers[number]
        return NodeLocation(
            root=places[number].location,
            step=step,
            nodes=nodes,
            replication_factor=tier.replication_factor,
            jump=tier.jump,
            keep_last=tier.keep_last,
        )


def _label(node: str | int | None, rank: int) -> str:
    """Return what a rank calls its node."""
    if node is not None:
        return str(node)
    per_node = os.environ.get("LOCAL_WORLD_SIZE", "")
    if per_node.isdecimal() and int(per_node):
        return str(rank // int(per_node))
    return socket.gethostname()


def _identity(place: LocalSteps) -> str:
    """Return what tells a directory from others; empty where there is none: its use will say why."""
    try:
        return place.identity()
    except OSError:
        return ""


def _check_directories(
    tier: Tier, identities: Sequence[str], told: Sequence[Sequence[str]], nodes: Nodes
) -> None:
    """Refuse a directory that is not one for each node; every rank comes to the same result."""
    first: dict[str, int] = {}
    of_node: dict[int, str] = {}
    for rank, (identity, node) in enumerate(zip(identities, nodes.of_rank, strict=True)):
        if not identity:
            continue
        other = first.setdefault(identity, rank)
        name = told[rank][0]
        if nodes.of_rank[other] != node:
            raise DeclarationError(
                f"{tier.path}: ranks {other} and {rank} are said to be on different nodes, "
                f"{told[other][0]!r} and {name!r}, and write into the same directory: a copy there would be "
                f"none. Put {{node}} into the path, or give ranks that share a node the same `Tiers.node`.",
                rank=rank,
                path=str(tier.path),
            )
        if of_node.setdefault(node, identity) != identity:
            raise DeclarationError(
                f"{tier.path}: rank {rank} is said to be on node {name!r}, and another rank there has "
                f"another directory. Give ranks of different machines a different `Tiers.node` each.",
                rank=rank,
                path=str(tier.path),
            )


def _warn_of(tier: Tier, place: LocalSteps, nodes: Nodes, size: int) -> None:
    if tier.replication_factor > nodes.count and size > 1:
        log.warning(
            "%s: replication_factor is %s, and there are %s nodes: each has all, and more cannot be had.",
            tier.path, tier.replication_factor, nodes.count,
        )  # fmt: skip
    with contextlib.suppress(OSError):
        if isinstance(tier, MemoryTier) and not place.is_in_memory():
            log.warning(
                "%s is not in memory but on a disk, so saving there is slower than it could be. Give a "
                "directory in /dev/shm or another tmpfs, or call it a LocalTier.",
                place.location,
            )
