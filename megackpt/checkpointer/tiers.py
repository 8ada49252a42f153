"""Tiers: storage of the nodes themselves, where steps are kept besides the root.

Owns what a tier is, which ranks share a node, when a step goes into which tier, and how long it stays there.
How it is written is `engine.tier_save`'s; which step is loaded, from where, is `recovery`'s.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import ClassVar

from megackpt.arguments import check_count
from megackpt.checkpointer.recovery import Recovery, Root
from megackpt.comm import BulkGroup, Group, moves_bulk, together
from megackpt.engine.save import SaveRequest, plan_state
from megackpt.engine.steps import LocalPlaces, step_name, step_of
from megackpt.engine.tier_save import save_on_nodes
from megackpt.errors import DeclarationError, StorageError
from megackpt.formats.registry import save_strategy
from megackpt.options import SaveOptions
from megackpt.planning import Nodes

log = logging.getLogger(__name__)


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


class TierSet:
    """The tiers of a run. All methods but `due` are collective.

    node names the node of this rank, for jobs that do not run one group of LOCAL_WORLD_SIZE ranks after the
    other on each node, as torchrun does.
    """

    def __init__(self, tiers: Sequence[Tier], *, node: str | int | None) -> None:
        self._tiers = tuple(tiers)
        self._node = node
        self._set_up: tuple[Nodes, tuple[LocalPlaces, ...]] | None = None

    def __len__(self) -> int:
        return len(self._tiers)

    def __getitem__(self, number: int) -> Tier:
        return self._tiers[number]

    def due(self, step: int) -> list[int]:
        """Return the numbers of the tiers that a step goes into. Local."""
        return [number for number, tier in enumerate(self._tiers) if step % tier.every == 0]

    def save(self, step: int, request: SaveRequest, group: Group, options: SaveOptions) -> bool:
        """Save a step into the tiers where it is due, then remove there what is not kept. Collective.

        Return whether a tier has it. One that refuses it, a full one for instance, is a warning: the step is
        then missing there, and older ones stay.

        Raises:
            CheckpointError: the state is at fault, or a rank was lost; the same on every rank.
        """
        due = self.due(step)
        if not due:
            return False
        bulk = bulk_of(group)
        nodes, places = self.open(bulk)
        is_saved = False
        for number in due:
            tier, place = self._tiers[number], places[number]
            try:
                self._save(step, tier, place, request, bulk, nodes, options)
                is_saved = True
            except StorageError as error:
                if group.rank == 0:
                    log.warning(
                        "Step %s is not in %s, which goes on with older ones: %s", step, tier, error,
                    )  # fmt: skip
        return is_saved

    def recovery(self, group: Group, root: Root) -> Recovery:
        """Look at all tiers and the root. Collective."""
        bulk = bulk_of(group)
        nodes, places = self.open(bulk)
        return Recovery(bulk, nodes, places, [str(tier) for tier in self._tiers], root)

    def open(self, group: BulkGroup) -> tuple[Nodes, tuple[LocalPlaces, ...]]:
        """Return the nodes of the job, and this node's directory of each tier. Collective at the first call.

        Raises:
            DeclarationError: nodes have one directory in common, or ranks of one node have not.
        """
        if self._set_up is None:
            rank, size = group.rank, group.size
            label = _label(self._node, rank)
            places = tuple(
                LocalPlaces.at(os.fspath(tier.path).replace("{node}", label)) for tier in self._tiers
            )

            def tell() -> bytes:
                return json.dumps([label, [_identity(place) for place in places]]).encode()

            told = [json.loads(said) for said in together(group, tell, doing="opening its tiers")]
            nodes = Nodes.of_labels([of_rank[0] for of_rank in told])
            for number, tier in enumerate(self._tiers):
                _check_directories(tier, [of_rank[1][number] for of_rank in told], told, nodes)
                if rank == 0:
                    _warn_of(tier, places[number], nodes, size)
            self._set_up = nodes, places
        return self._set_up

    def _save(
        self,
        step: int,
        tier: Tier,
        place: LocalPlaces,
        request: SaveRequest,
        group: BulkGroup,
        nodes: Nodes,
        options: SaveOptions,
    ) -> None:
        native = replace(request, choose=lambda: save_strategy(None))
        if group.rank == 0:
            _warn_of_newer(place, step, tier)
        with contextlib.closing(place.open(step_name(step))) as store:
            planned, strategy = plan_state(native, store, group, options)
            keepers = nodes.keepers(copies=tier.replication_factor, jump=tier.jump)
            save_on_nodes(planned, store, strategy, group, nodes, keepers)

        def clean() -> bytes:
            if group.rank in nodes.leaders():
                _clean(place, saved=step, keep_last=tier.keep_last)
            return b""

        # All nodes have committed the new step by now.
        together(group, clean, doing="removing old steps from its node")


def bulk_of(group: Group) -> BulkGroup:
    """Return the group as one that moves bulk data.

    Raises:
        DeclarationError: it cannot.
    """
    if not moves_bulk(group):
        raise DeclarationError(
            f"Tiers send files between nodes, which a {type(group).__name__} cannot. Add the methods of "
            f"megackpt.comm.BulkGroup, leave the group to torch.distributed, or save without tiers."
        )
    return group


def check_tiers(tiers: object) -> None:
    """Check what can be known of tiers before they are used. Local.

    Raises:
        DeclarationError: they are no tiers, or two of them are one directory.
    """
    if not isinstance(tiers, (list, tuple)) or not all(isinstance(tier, Tier) for tier in tiers):
        raise DeclarationError(f"tiers is {tiers!r}; give a list of tiers, as [MemoryTier('/dev/shm/run')].")
    paths = [os.path.abspath(tier.path) for tier in tiers]
    twice = next((path for path in paths if paths.count(path) > 1), None)
    if twice is not None:
        raise DeclarationError(f"Two tiers are in {twice}. Give each a directory of its own.")


def _label(node: str | int | None, rank: int) -> str:
    """Return what a rank calls its node."""
    if node is not None:
        return str(node)
    per_node = os.environ.get("LOCAL_WORLD_SIZE", "")
    if per_node.isdecimal() and int(per_node):
        return str(rank // int(per_node))
    return socket.gethostname()


def _identity(place: LocalPlaces) -> str:
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
                f"none. Put {{node}} into the path, or give ranks that share a node one `node`.",
                rank=rank,
                path=str(tier.path),
            )
        if of_node.setdefault(node, identity) != identity:
            raise DeclarationError(
                f"{tier.path}: rank {rank} is said to be on node {name!r}, and another rank there has "
                f"another directory. Give ranks of different machines different `node`s.",
                rank=rank,
                path=str(tier.path),
            )


def _warn_of(tier: Tier, place: LocalPlaces, nodes: Nodes, size: int) -> None:
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


def _warn_of_newer(place: LocalPlaces, step: int, tier: Tier) -> None:
    with contextlib.suppress(OSError):  # saving there will say more
        newest = max((found for name in place.names() if (found := step_of(name)) is not None), default=step)
        if newest > step:
            log.warning(
                "Step %s goes into %s although step %s is there, which stays the one that is loaded.",
                step, tier, newest,
            )  # fmt: skip


def _clean(place: LocalPlaces, *, saved: int, keep_last: int) -> None:
    """Remove torn steps up to this one and committed ones that are too many, as far as that is possible."""
    steps = {name: step for name in place.names() if (step := step_of(name)) is not None}
    committed = sorted(place.committed(steps), key=steps.__getitem__)
    surplus = [name for name in committed[:-keep_last] if steps[name] != saved]
    older = [name for name, step in steps.items() if step <= saved and name not in committed]
    for name in [*surplus, *(name for name in older if place.is_leftover(name))]:
        with contextlib.suppress(OSError):
            place.remove(name)
