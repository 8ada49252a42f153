"""The tiers of a job: their directories on the nodes, synchronous saves into them, and warnings."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from megackpt.comm import Group, errors_on_all_ranks, gather_step
from megackpt.engine.checkpoint.step_roots import LocalSteps
from megackpt.engine.saving.save import plan_save
from megackpt.engine.saving.save_request import SaveRequest
from megackpt.engine.tiers.save import NodeLocation, clean_node, save_on_nodes
from megackpt.errors import DeclarationError, StorageError
from megackpt.options import SaveOptions
from megackpt.plans.planning.redundancy import Nodes
from megackpt.run.checkpointer.options import MemoryTier, Tier, Tiers

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierDirectories:
    """The directories of the tiers of a job.

    Attributes:
        nodes: the nodes of the job.
        tiers: this node's directory of each tier.
        names: the name of each tier in messages.
    """

    nodes: Nodes
    tiers: Sequence[LocalSteps]
    names: Sequence[str]


class TierSet:
    """The tiers of a run on the nodes of a job. All methods are collective."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers.tiers
        self._node = tiers.node
        self._directories: TierDirectories | None = None

    def __len__(self) -> int:
        return len(self._tiers)

    def __getitem__(self, number: int) -> Tier:
        return self._tiers[number]

    def open(self, group: Group) -> TierDirectories:
        """Return the directories of the tiers. Collective at the first call.

        Raises:
            DeclarationError: nodes share a directory, or ranks of one node have different ones.
        """
        if self._directories is None:
            self._directories = self._find_directories(group)
        return self._directories

    def _find_directories(self, group: Group) -> TierDirectories:
        label = _label(self._node, group.rank)
        steps = tuple(LocalSteps.at(os.fspath(tier.path).replace("{node}", label)) for tier in self._tiers)
        with gather_step(group, "opening its tiers", on_all_ranks=True) as step:
            step.data = json.dumps([label, [_identity(of_tier) for of_tier in steps]]).encode()
        reports = [json.loads(report) for report in step.results]
        labels = [report[0] for report in reports]
        nodes = Nodes.of_labels(labels)
        for number, tier in enumerate(self._tiers):
            _check_directories(tier, [report[1][number] for report in reports], labels, nodes)
            if group.rank == 0:
                _warn_of_tier(tier, steps[number], nodes, group.size)
        return TierDirectories(nodes=nodes, tiers=steps, names=[str(tier) for tier in self._tiers])

    def location(self, number: int, step: int, group: Group) -> NodeLocation:
        """Return the path of a step in a tier on this rank's node. Collective, as `open` is."""
        directories, tier = self.open(group), self._tiers[number]
        return NodeLocation(
            root=directories.tiers[number].location,
            step=step,
            nodes=directories.nodes,
            replication_factor=tier.replication_factor,
            jump=tier.jump,
            keep_last=tier.keep_last,
        )


def _label(node: str | int | None, rank: int) -> str:
    """Return the name of this rank's node."""
    if node is not None:
        return str(node)
    per_node = os.environ.get("LOCAL_WORLD_SIZE", "")
    if per_node.isdecimal() and int(per_node):
        return str(rank // int(per_node))
    return socket.gethostname()


def _identity(steps: LocalSteps) -> str:
    """Return the identity of a directory; empty if there is none: then the first save raises the error."""
    try:
        return steps.identity()
    except OSError:
        return ""


def _check_directories(tier: Tier, identities: Sequence[str], labels: Sequence[str], nodes: Nodes) -> None:
    """Check that a tier has one directory for each node. Every rank gets the same result.

    Args:
        tier: the tier.
        identities: the identity of each rank's directory.
        labels: the name of each rank's node.
        nodes: the nodes of the job.

    Raises:
        DeclarationError: nodes share a directory, or ranks of one node have different ones.
    """
    first_rank: dict[str, int] = {}
    of_node: dict[int, str] = {}
    for rank, (identity, node) in enumerate(zip(identities, nodes.of_rank, strict=True)):
        if not identity:
            continue
        other = first_rank.setdefault(identity, rank)
        fault = ""
        if nodes.of_rank[other] != node:
            fault = (
                f"ranks {other} and {rank} are declared to be on different nodes, {labels[other]!r} and "
                f"{labels[rank]!r}, but write into the same directory, so a copy there protects nothing. Put "
                f"{{node}} into the path, or give ranks that share a node the same `Tiers.node`."
            )
        elif of_node.setdefault(node, identity) != identity:
            fault = (
                f"rank {rank} is declared to be on node {labels[rank]!r}, but another rank of this node has "
                f"another directory. Give ranks of different machines different `Tiers.node`."
            )
        if fault:
            raise DeclarationError(f"{tier.path}: {fault}", rank=rank, path=str(tier.path))


def _warn_of_tier(tier: Tier, steps: LocalSteps, nodes: Nodes, size: int) -> None:
    """Log warnings about a tier that is weaker or slower than its options say."""
    if tier.replication_factor > nodes.count and size > 1:
        log.warning(
            "%s: replication_factor is %s, but there are %s nodes. Each node has all bytes.",
            tier.path, tier.replication_factor, nodes.count,
        )  # fmt: skip
    with contextlib.suppress(OSError):
        if isinstance(tier, MemoryTier) and not steps.is_in_memory():
            log.warning(
                "%s is not in memory but on a disk, so saving there is slower than it could be. Give a "
                "directory in /dev/shm or another tmpfs, or call it a LocalTier.",
                steps.location,
            )


@dataclass(frozen=True, slots=True)
class TierSaving:
    """Saves steps into tiers, and returns when the nodes have committed.

    Attributes:
        tiers: the tiers of the run.
        options: options of the saves.
    """

    tiers: TierSet
    options: SaveOptions

    def save(self, step: int, due: Iterable[int], request: SaveRequest, group: Group) -> bool:
        """Save a step into the tiers with these numbers; return whether one of them has it. Collective.

        If a tier cannot store the step, a warning is logged, and its older steps stay.

        Raises:
            CheckpointError: the state is invalid, or a rank was lost; the same on every rank.
        """
        native, is_saved = in_native_format(request), False
        for number in due:
            location = self.tiers.location(number, step, group)
            try:
                self._save(location, native, group)
                is_saved = True
            except StorageError as error:
                warn_of_failure(location, self.tiers[number], error, rank=group.rank)
        return is_saved

    def _save(self, location: NodeLocation, request: SaveRequest, group: Group) -> None:
        planned = plan_save(request, None, group)
        with contextlib.closing(location.open()) as store:
            save_on_nodes(planned, store, group, location)
        with errors_on_all_ranks(group, "removing old steps from its node"):
            clean_node(location, rank=group.rank)


def in_native_format(request: SaveRequest) -> SaveRequest:
    """Return the request for a tier, whose format is always the native one."""
    return replace(request, format=None)


def warn_of_failure(location: NodeLocation, tier: Tier, error: StorageError, *, rank: int) -> None:
    """Log a warning on rank 0 that a step could not be saved into a tier."""
    if rank == 0:
        log.warning(
            "Step %s is not in %s, which keeps its older steps: %s", location.step, tier, error,
        )  # fmt: skip
