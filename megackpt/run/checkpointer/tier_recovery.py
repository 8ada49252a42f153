"""Finding and loading the newest complete step, over all nodes, all tiers and the root.

Rank 0 decides from the reports of all nodes and broadcasts each decision; every rank executes it. If a step
is incomplete or damaged, the next candidate is tried. A load takes each byte from a node that has it.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from megackpt.comm import Group, broadcast_from_rank_0, errors_on_all_ranks, gather_step
from megackpt.engine.checkpoint.origins import PlacedStep, StepOrigin
from megackpt.engine.checkpoint.step_roots import LocalSteps
from megackpt.engine.checkpoint.steps import step_name
from megackpt.engine.loading.fallback import DAMAGE_ERRORS
from megackpt.engine.loading.load import load_state
from megackpt.engine.loading.source import LoadRequest
from megackpt.engine.tiers.node_steps import (
    NodeStep,
    StepFiles,
    damaged_files,
    describe_step,
    list_node_steps,
    share_step,
)
from megackpt.engine.tiers.transfer import broadcast_from_rank
from megackpt.entities import StateDict
from megackpt.errors import CheckpointError, NotACheckpointError, truncated_list
from megackpt.run.checkpointer.loading import (
    LastLoad,
    RootLoading,
    SkippedStep,
    StepRequest,
    with_copies_of_step,
)
from megackpt.run.checkpointer.root import read_tree, scan
from megackpt.run.checkpointer.tier_survey import ROOT, StepCandidate, TierSurvey
from megackpt.run.checkpointer.tiers import TierDirectories, TierSet
from megackpt.storage import Store

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class TierLoading:
    """Loads steps from tiers and the root. See `StepLoading`.

    Attributes:
        tiers: storage of the nodes.
        root: loads from the root; its options are used for tiers, too.
    """

    tiers: TierSet
    root: RootLoading

    def load(self, request: StepRequest, step: int | None, group: Group) -> tuple[StateDict, LastLoad]:
        """Load a step from the first tier that has all of it, or from the root."""
        return self._begin_recovery(group).load(request, step)

    def find_latest(self, group: Group) -> int | None:
        """Return the newest step that is complete, in the root or over all nodes of a tier."""
        return self._begin_recovery(group).find()

    def survey(self, group: Group) -> Sequence[PlacedStep[Any]]:
        """Return the committed steps of all tiers and the root on rank 0. Collective."""
        return _survey(group, self.tiers.open(group), self.root).placed()

    def _begin_recovery(self, group: Group) -> Recovery:
        return Recovery.begin(group, self.tiers.open(group), self.root)


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepPlacement:
    """The files of a step, and the ranks that can read them.

    Attributes:
        files: the files of the step.
        source: a rank of a node that has index and common state.
        readers: by file of chunks, the ranks that can read it, ascending.
        missing: for nodes that lack files, by the leader of the node: the small files that it lacks, and
            whether it lacks the commit.
    """

    files: StepFiles
    source: int
    readers: Mapping[str, Sequence[int]]
    missing: Mapping[int, tuple[tuple[str, ...], bool]]


class Recovery:
    """One search for the newest complete step. Every method is collective; rank 0 decides."""

    def __init__(
        self, group: Group, directories: TierDirectories, root: RootLoading, survey: TierSurvey
    ) -> None:
        self._group, self._root, self._survey = group, root, survey
        self._nodes, self._tiers, self._names = directories.nodes, directories.tiers, directories.names
        self._skipped: list[SkippedStep] = []
        self._incomplete: list[StepCandidate] = []
        self._errors: list[CheckpointError] = []

    @classmethod
    def begin(cls, group: Group, directories: TierDirectories, root: RootLoading) -> Recovery:
        """Return a recovery with the steps of all nodes and of the root. Collective."""
        return cls(group, directories, root, _survey(group, directories, root))

    def find(self) -> int | None:
        """Return the newest step that is complete, in the root or over all nodes of a tier; None without one.

        Raises:
            CheckpointError: a rank failed.
        """
        for candidate in self._candidates(None):
            if candidate.tier == ROOT or self._locate(candidate) is not None:
                return candidate.step
        return None

    def load(self, request: StepRequest, step: int | None) -> tuple[StateDict, LastLoad]:
        """Load the newest complete step, or the given step, from the first tier that has all of it.

        Raises:
            NotACheckpointError: there is none.
            CheckpointError: as `megackpt.load`; if all are damaged, the error of the newest.
        """
        for candidate in self._candidates(step):
            loaded = self._load(candidate, request)
            if loaded is not None:
                return loaded, self._finish(candidate, is_newest=step is None)
        if self._errors:
            raise self._errors[0]
        what = "no committed step" if step is None else f"no committed step {step}"
        skipped = truncated_list([str(skipped) for skipped in self._skipped])
        location = self._root.directories.location
        raise NotACheckpointError(
            f"{location} and its tiers have {what} that is complete. Save one, or name the directory of a "
            f"run.{' Skipped:' + chr(10) + skipped if skipped else ''}",
            path=location,
        )

    def _candidates(self, step: int | None) -> list[StepCandidate]:
        """Return the candidates, best first, on every rank."""
        rows = [[c.step, c.tier, c.commit] for c in self._survey.candidates(step)]
        return [
            StepCandidate(step=number, tier=tier, commit=commit)
            for number, tier, commit in _from_rank_0(self._group, rows)
        ]

    def _load(self, candidate: StepCandidate, request: StepRequest) -> StateDict | None:
        """Load a step; None if some of it is lost or damaged."""
        if candidate.tier == ROOT:
            return self._attempt(
                candidate, lambda: self._root.load_step(request, candidate.step, self._group)[0]
            )
        return self._attempt(candidate, lambda: self._load_from_tier(candidate, request))

    def _locate(self, candidate: StepCandidate) -> _StepPlacement | None:
        """Find the files of a step of a tier; None if some are lost or damaged."""
        return self._attempt(candidate, lambda: self._find_files(candidate))

    def _attempt(self, candidate: StepCandidate, act: Callable[[], T | None]) -> T | None:
        """Call a function on a step; return None if the step is too damaged.

        If new damage is found, the call is repeated without the damaged copies.
        """
        while True:
            try:
                return act()
            except DAMAGE_ERRORS as error:
                self._errors.append(error)
                if candidate.tier == ROOT or not self._find_damage(candidate):
                    self._skip(candidate, str(error))
                    return None

    def _find_files(self, candidate: StepCandidate) -> _StepPlacement | None:
        """Find the nodes that have the files of a step of a tier; None if some files are lost.

        Raises:
            FormatError, IntegrityError: the index is damaged on the node that reads it.
        """
        group, leaders = self._group, self._nodes.leaders()
        source_node = _from_rank_0(group, self._survey.source_node(candidate) if group.rank == 0 else None)
        if source_node is None:
            self._skip(candidate, "no node has its index undamaged", is_incomplete=True)
            return None

        def described() -> bytes:
            with self._open(candidate.tier, step_name(candidate.step)) as store:
                return describe_step(store).to_bytes()

        doing = "looking into a checkpoint"
        source = leaders[source_node]
        files = StepFiles.from_bytes(broadcast_from_rank(group, described, source=source, doing=doing))
        nodes_of, missing = self._nodes_with_files(candidate, files)
        lost = sorted(file for file, nodes in nodes_of.items() if not nodes)
        if lost:
            why = f"{len(lost)} of its {len(nodes_of)} data files are on no node any more, {lost[0]} first"
            self._skip(candidate, why, is_incomplete=True)
            return None
        members = self._nodes.members()
        return _StepPlacement(
            files=files,
            source=source,
            readers={
                file: sorted(rank for node in nodes for rank in members[node])
                for file, nodes in nodes_of.items()
            },
            missing={leaders[node]: (tuple(names), commit) for node, (names, commit) in missing},
        )

    def _nodes_with_files(self, candidate: StepCandidate, files: StepFiles) -> Any:
        """Return the nodes that have each data file, and what each node lacks, as rank 0 knows it."""
        survey = self._survey
        if self._group.rank > 0:
            return _from_rank_0(self._group, None)
        missing = survey.missing_on_nodes(candidate, files)
        return _from_rank_0(self._group, [survey.nodes_with_data(candidate, files), list(missing.items())])

    def _load_from_tier(self, candidate: StepCandidate, request: StepRequest) -> StateDict | None:
        """Load a step of a tier: a rank that can read a byte sends it to the ranks that need it."""
        placement = self._find_files(candidate)
        if placement is None:
            return None
        group, name = self._group, step_name(candidate.step)
        takes, commits = placement.missing.get(group.rank, ((), False))
        options = replace(
            with_copies_of_step(self._root.options, name), exchange="all_to_all", cpu_transfer=True
        )
        with self._open(candidate.tier, name) as store:
            share_step(group, store, placement.files, source=placement.source, takes=takes, commits=commits)
            load_request = LoadRequest(
                state=request.state,
                open_store=lambda: contextlib.nullcontext(store),
                options=options,
                strict=request.strict,
                file_readers=placement.readers,
                maps=request.maps,
                config=request.config,
            )
            return load_state(load_request, group)[0]

    def _find_damage(self, candidate: StepCandidate) -> bool:
        """Check the files of a step on every node; return whether new damage was found."""
        group, leaders, name = self._group, self._nodes.leaders(), step_name(candidate.step)
        with gather_step(group, "checking its copies of a checkpoint") as checking:
            if group.rank in leaders:
                with self._open(candidate.tier, name) as store:
                    checking.data = json.dumps(damaged_files(store)).encode()
        is_new = False
        for node, leader in enumerate(leaders if checking.results else ()):
            is_new |= self._survey.note_damage(candidate, node, json.loads(checking.results[leader]))
        return bool(_from_rank_0(group, is_new))

    @contextlib.contextmanager
    def _open(self, tier: int, name: str) -> Iterator[Store]:
        with contextlib.closing(self._tiers[tier].open(name)) as store:
            yield store

    def _skip(self, candidate: StepCandidate, why: str, *, is_incomplete: bool = False) -> None:
        skipped = SkippedStep(step=candidate.step, where=self._name_of(candidate), why=why)
        self._skipped.append(skipped)
        if is_incomplete:
            self._incomplete.append(candidate)
        if self._group.rank == 0:
            log.warning("Not loaded: %s", skipped)

    def _name_of(self, candidate: StepCandidate) -> str:
        is_root = candidate.tier == ROOT
        return self._root.directories.location if is_root else self._names[candidate.tier]

    def _finish(self, candidate: StepCandidate, *, is_newest: bool) -> LastLoad:
        """Return the step that was used; after a load of the newest, remove steps that cannot be loaded."""
        survey = self._survey
        damaged = sorted(f"node {node}: {name}/{file}" for _, name, node, file in survey.damaged)
        useless: list[tuple[int, str]] = []
        if is_newest:
            useless += [
                (tier, name) for tier in range(len(survey.node_steps)) for name in survey.incomplete(tier)
            ]
            useless += [(c.tier, step_name(c.step)) for c in self._incomplete]
        damaged, useless = _from_rank_0(self._group, [damaged, useless])
        where = self._name_of(candidate)
        if self._group.rank == 0 and (self._skipped or damaged):
            log.warning("Step %s was loaded from %s.", candidate.step, where)
            if damaged:
                log.warning("Damaged copies were not used:\n%s", truncated_list(damaged))
        with errors_on_all_ranks(self._group, "removing incomplete steps from its node"):
            self._remove(useless)
        return LastLoad(
            step=candidate.step, where=where, skipped=tuple(self._skipped), damaged=tuple(damaged)
        )

    def _remove(self, useless: Sequence[tuple[int, str]]) -> None:
        """Remove steps of tiers from this node, as far as possible. Done by one rank of each node."""
        if self._group.rank in self._nodes.leaders():
            for tier, name in useless:
                steps = self._tiers[tier]
                if name in steps.names() and (steps.committed([name]) or steps.is_leftover(name)):
                    with contextlib.suppress(OSError):
                        steps.remove(name)


def _survey(group: Group, directories: TierDirectories, root: RootLoading) -> TierSurvey:
    """Gather the steps of all nodes; return them on rank 0, and an empty survey elsewhere. Collective."""
    leaders = directories.nodes.leaders()
    with gather_step(group, "looking for checkpoints on its node") as looking:
        if group.rank in leaders:
            looking.data = json.dumps([_steps_in(tier) for tier in directories.tiers]).encode()
    by_node = [json.loads(looking.results[leader]) for leader in leaders] if looking.results else []
    node_steps = [
        [{row[0]: NodeStep.from_json(row) for row in tiers[number]} for tiers in by_node]
        for number in range(len(directories.tiers))
    ]
    return TierSurvey(node_steps, _root_steps(root) if group.rank == 0 else {})


def _steps_in(tier: LocalSteps) -> list[list[object]]:
    try:
        return [step.to_json() for step in list_node_steps(tier)]
    except OSError as error:  # other nodes may have the needed files
        log.warning("%s cannot be listed, so nothing is loaded from it: %s", tier.location, error)
        return []


def _root_steps(root: RootLoading) -> Mapping[int, StepOrigin | None]:
    try:
        tree = read_tree(root.directories, scan(root.directories).committed)
        return {placed.step: placed.origin for placed in (*tree.line, *tree.abandoned)}
    except OSError as error:  # the tiers may have the needed step
        location = root.directories.location
        log.warning("%s cannot be listed, so only the tiers are searched: %s", location, error)
        return {}


def _from_rank_0(group: Group, value: Any) -> Any:  # plain JSON values
    """Return rank 0's value on every rank. Collective."""
    return json.loads(broadcast_from_rank_0(group, json.dumps(value).encode(), doing="choosing a checkpoint"))
