"""The tiers of a job: which directory of which node each tier is; saving steps there and loading them."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from megackpt.api import ReturnsState
from megackpt.checkpointer.loading import LastLoad, RootLoading
from megackpt.checkpointer.options import MemoryTier, Tier, Tiers
from megackpt.checkpointer.tier_recovery import Recovery, RootAccess
from megackpt.comm import Group, Numbers, run_and_compare, run_on_all_ranks
from megackpt.engine.background.prepared_save import Destination
from megackpt.engine.checkpoint.steps import LocalSteps, step_of
from megackpt.engine.saving.save import SaveRequest, plan_state
from megackpt.engine.tiers.save import NodeLocation, clean_node, save_on_nodes
from megackpt.errors import DeclarationError, StorageError
from megackpt.formats.damage import Damage
from megackpt.formats.registry import save_strategy
from megackpt.mapping import ShardedStateDict, StateDict
from megackpt.options import SaveOptions
from megackpt.planning.redundancy import Nodes
from megackpt.validation import StrictHandling

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

    def recovery(self, group: Group, root: RootAccess) -> Recovery:
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


@dataclass(frozen=True, slots=True)
class TierSaving:
    """Saves into tiers that return when the nodes have committed.

    Attributes:
        tiers: those of the run.
        options: of the saves.
    """

    tiers: TierSet
    options: SaveOptions

    def save(self, step: int, due: Iterable[int], request: SaveRequest, group: Group) -> bool:
        """Save a step into the tiers that have these numbers; return whether one of them has it. Collective.

        Raises:
            CheckpointError: the state is at fault, or a rank was lost; the same on every rank.
        """
        native, is_saved = in_native_format(request), False
        for number in due:
            place = self.tiers.place(number, step, group)
            try:
                self._save(place, native, group)
                is_saved = True
                if group.rank == 0:
                    warn_of_newer(place, self.tiers[number])
            except StorageError as error:
                warn_of_refusal(place, self.tiers[number], error, rank=group.rank)
        return is_saved

    def _save(self, place: NodeLocation, request: SaveRequest, group: Group) -> None:
        planned, strategy = plan_state(request, None, group, self.options)
        with contextlib.closing(place.open()) as store:
            save_on_nodes(planned, store, strategy, group, place)

        def clean() -> Numbers:
            clean_node(place, rank=group.rank)
            return Numbers(())

        run_and_compare(group, clean, equal=0, doing="removing old steps from its node")


def destinations_in_tiers(
    tiers: TierSet, due: Iterable[int], step: int, request: SaveRequest, group: Group
) -> Iterator[Destination]:
    """Yield where a step goes in the tiers that have these numbers. Collective at the first call in a run.

    Raises:
        DeclarationError: as `TierSet.open`; or the group cannot send files.
    """
    native = in_native_format(request)
    for number in due:
        yield _destination(tiers.place(number, step, group), tiers[number], native, group)


def _destination(place: NodeLocation, tier: Tier, request: SaveRequest, group: Group) -> Destination:
    def follow(_: Sequence[Damage] | None) -> None:
        warn_of_newer(place, tier)

    def failed(error: Exception) -> bool:
        if not isinstance(error, StorageError):
            return False
        warn_of_refusal(place, tier, error, rank=group.rank)
        return True

    return Destination(
        request=request,
        place=place,
        label=f"step {place.step} in {tier}",
        follow=follow,
        failed=failed,
    )


def in_native_format(request: SaveRequest) -> SaveRequest:
    """Return the request for a tier: its format is the native one, whatever the root's is."""
    return replace(request, choose=lambda: save_strategy(None), not_imported=lambda: None)


def warn_of_refusal(place: NodeLocation, tier: Tier, error: StorageError, *, rank: int) -> None:
    """Say, on rank 0, that a tier does not have a step."""
    if rank == 0:
        log.warning(
            "Step %s is not in %s, which goes on with older ones: %s", place.step, tier, error,
        )  # fmt: skip


def warn_of_newer(place: NodeLocation, tier: Tier) -> None:
    """Say that a step will not be the newest of a tier, if this node has a newer one. Local."""
    with contextlib.suppress(OSError):
        names = LocalSteps.at(place.root).names()
        newest = max((found for name in names if (found := step_of(name)) is not None), default=place.step)
        if newest > place.step:
            log.warning(
                "Step %s goes into %s although step %s is there, which stays the one that is loaded.",
                place.step, tier, newest,
            )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TierLoading:
    """How steps come out of tiers, and of the root behind them. See `StepLoading`.

    Attributes:
        tiers: storage of the nodes.
        root: how they come out of the root; its options hold for tiers, too.
    """

    tiers: TierSet
    root: RootLoading

    def load(
        self, state: ShardedStateDict, step: int | None, strict: ReturnsState, group: Group
    ) -> tuple[StateDict, LastLoad]:
        """Load a step from the first place where it is whole."""
        return self._look(strict, group).load(state, step, strict, self.root.options)

    def find_latest(self, group: Group) -> int | None:
        """Return the newest step of which every byte is somewhere."""
        return self._look(StrictHandling.ASSUME_OK_UNEXPECTED, group).find()

    def _look(self, strict: ReturnsState, group: Group) -> Recovery:
        """Look at all tiers and the root. Collective; strict is for loads from the root."""
        root = RootAccess(
            location=self.root.places.location,
            steps=self.root.steps,
            load=lambda state, step: self.root.load_step(state, step, strict, group)[0],
        )
        return self.tiers.recovery(group, root)
