"""Recovery: the newest step that is whole, over all nodes, all tiers and the root.

Owns the choice, and falling back where a step turns out incomplete or damaged. Rank 0 decides from what all
nodes tell, and tells all; every rank carries it out. A load takes each byte from a node that has it.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from megackpt.checkpointer.loading import LastLoad, SkippedStep, with_copies_of_step
from megackpt.checkpointer.tier_survey import ROOT, StepCandidate, TierSurvey
from megackpt.comm import Group, broadcast_from_rank_0, run_and_gather, run_on_all_ranks
from megackpt.engine.checkpoint.steps import LocalSteps, step_name
from megackpt.engine.loading.fallback import DAMAGE_ERRORS
from megackpt.engine.loading.load import LoadRequest, load_state
from megackpt.engine.tiers.recover import (
    NodeStep,
    StepFiles,
    damaged_files,
    describe_step,
    list_node_steps,
    share_step,
)
from megackpt.engine.tiers.transfer import from_rank
from megackpt.errors import (
    CheckpointError,
    NotACheckpointError,
    truncated_list,
)
from megackpt.mapping import ShardedStateDict, StateDict
from megackpt.options import LoadOptions
from megackpt.planning.redundancy import Nodes
from megackpt.storage import Store
from megackpt.validation import StrictHandling

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RootAccess:
    """The durable store, as recovery sees it.

    Attributes:
        location: its path or URL.
        steps: returns its committed steps; called on rank 0.
        load: loads one of them; collective.
    """

    location: str
    steps: Callable[[], Sequence[int]]
    load: Callable[[ShardedStateDict, int], StateDict]


class Recovery:
    """One search for the newest step. Every method is collective; rank 0 decides."""

    def __init__(
        self, group: Group, nodes: Nodes, places: Sequence[LocalSteps], names: Sequence[str], root: RootAccess
    ) -> None:
        """Look at all of it. places are this node's directories of the tiers, names what they are called."""
        self._group, self._nodes, self._places, self._names = group, nodes, places, names
        self._root = root
        self._passed: list[SkippedStep] = []
        self._incomplete: list[StepCandidate] = []
        self._errors: list[CheckpointError] = []
        self._survey = self._look()

    def find(self) -> int | None:
        """Return the newest step of which every byte is somewhere; None if there is none.

        Raises:
            CheckpointError: a rank failed.
        """
        for candidate in self._queue(None):
            if candidate.tier == ROOT or self._try(candidate, partial(self._place, candidate)) is not None:
                return candidate.step
        return None

    def load(
        self, state: ShardedStateDict, step: int | None, strict: StrictHandling | str, options: LoadOptions
    ) -> tuple[StateDict, LastLoad]:
        """Load the newest step, or the one asked for, from the first place where it is whole.

        Raises:
            NotACheckpointError: there is none.
            CheckpointError: as `megackpt.load`; of damaged ones, that of the newest.
        """
        for candidate in self._queue(step):
            loaded = self._try(candidate, partial(self._load, candidate, state, strict, options))
            if loaded is not None:
                return loaded, self._report(candidate, is_newest=step is None)
        if self._errors:
            raise self._errors[0]
        what = "no committed step" if step is None else f"no committed step {step}"
        said = truncated_list([str(passed) for passed in self._passed])
        raise NotACheckpointError(
            f"{self._root.location} and the tiers beside it have {what} that is whole. Save one, or name the "
            f"directory of a run.{' Passed over:' + chr(10) + said if said else ''}",
            path=self._root.location,
        )

    def _look(self) -> TierSurvey:
        """Ask all nodes what they have; the answer is rank 0's."""
        group = self._group

        def tell() -> bytes:
            if group.rank not in self._nodes.leaders():
                return b""
            return json.dumps([self._held_in(place) for place in self._places]).encode()

        told = run_and_gather(group, tell, doing="looking for checkpoints on its node")
        said = [json.loads(told[leader]) for leader in self._nodes.leaders()] if told else []
        of_nodes = [[[NodeStep.from_json(h) for h in tier] for tier in node] for node in said]
        held = [[{h.name: h for h in node[tier]} for node in of_nodes] for tier in range(len(self._places))]
        return TierSurvey(held, self._root_steps() if group.rank == 0 else [])

    def _held_in(self, place: LocalSteps) -> list[list[object]]:
        try:
            return [held.to_json() for held in list_node_steps(place)]
        except OSError as error:  # other nodes may have what is needed
            log.warning("%s cannot be looked at, so nothing is taken from it: %s", place.location, error)
            return []

    def _root_steps(self) -> Sequence[int]:
        try:
            return self._root.steps()
        except OSError as error:  # the tiers may have what is needed
            log.warning("%s cannot be looked at, so only the tiers are: %s", self._root.location, error)
            return []

    def _queue(self, step: int | None) -> list[StepCandidate]:
        """Return the candidates, the same on every rank."""
        found = [c for c in self._survey.candidates() if step in (None, c.step)]
        said = json.dumps([[c.step, c.tier, c.commit] for c in found]).encode()
        told = broadcast_from_rank_0(self._group, said, doing="choosing a checkpoint")
        return [StepCandidate(step=s, tier=tier, commit=commit) for s, tier, commit in json.loads(told)]

    def _try(self, candidate: StepCandidate, act: Callable[[], T | None]) -> T | None:
        """Do something with a step; None if that cannot be. What is damaged on one node others may have."""
        while True:
            try:
                return act()
            except DAMAGE_ERRORS as error:
                self._errors.append(error)
                if candidate.tier == ROOT or not self._find_damage(candidate):
                    self._pass_over(candidate, str(error))
                    return None

    def _place(self, candidate: StepCandidate) -> _StepPlacement | None:
        """Find where the files of a step of a tier are, and give every node its index; None if some are lost.

        Raises:
            FormatError, IntegrityError: the index is damaged on the node that was asked.
        """
        group, survey, name = self._group, self._survey, step_name(candidate.step)
        leaders = self._nodes.leaders()
        donor = _agreed(group, survey.donor(candidate) if group.rank == 0 else None)
        if donor is None:
            self._pass_over(candidate, "no node has its index undamaged", is_incomplete=True)
            return None

        def describe() -> bytes:
            with self._opened(candidate.tier, name) as store:
                return describe_step(store).to_bytes()

        doing = "looking into a checkpoint"
        needs = StepFiles.from_bytes(from_rank(group, describe, source=leaders[donor], doing=doing))
        told = None
        if group.rank == 0:
            told = [survey.holders(candidate, needs), list(survey.lacking(candidate, needs).items())]
        holders, lacking = _agreed(group, told)
        lost = sorted(file for file, nodes in holders.items() if not nodes)
        if lost:
            self._pass_over(
                candidate,
                f"{len(lost)} of its {len(holders)} data files are on no node any more, {lost[0]} first",
                is_incomplete=True,
            )
            return None
        members = self._nodes.members()
        ranks = {file: [rank for node in nodes for rank in members[node]] for file, nodes in holders.items()}
        return _StepPlacement(
            needs=needs,
            donor=leaders[donor],
            holders={file: sorted(of_file) for file, of_file in ranks.items()},
            lacking={leaders[node]: (tuple(names), commits) for node, (names, commits) in lacking},
        )

    def _load(
        self,
        candidate: StepCandidate,
        state: ShardedStateDict,
        strict: StrictHandling | str,
        options: LoadOptions,
    ) -> StateDict | None:
        """Load a step; None if some of it is lost. In a tier, who can reach a byte reads and sends it."""
        if candidate.tier == ROOT:
            return self._root.load(state, candidate.step)
        placed = self._place(candidate)
        if placed is None:
            return None
        group, name = self._group, step_name(candidate.step)
        takes, commits = placed.lacking.get(group.rank, ((), False))
        with self._opened(candidate.tier, name) as store:
            share_step(group, store, placed.needs, source=placed.donor, takes=takes, commits=commits)
            by_exchange = replace(
                with_copies_of_step(options, name), exchange="all_to_all", cpu_transfer=True
            )
            request = LoadRequest(
                state=state,
                open_store=lambda: contextlib.nullcontext(store),
                options=by_exchange,
                strict=strict,
                file_readers=placed.holders,
            )
            return load_state(request, group).state

    def _find_damage(self, candidate: StepCandidate) -> bool:
        """Let every node check what it has of a step; say whether anything is damaged that was not known."""
        group, leaders, name = self._group, self._nodes.leaders(), step_name(candidate.step)

        def check() -> bytes:
            if group.rank not in leaders:
                return b"[]"
            with self._opened(candidate.tier, name) as store:
                return json.dumps(damaged_files(store)).encode()

        told = run_and_gather(group, check, doing="checking its copies of a checkpoint")
        is_news = False
        for node, leader in enumerate(leaders if told else ()):
            is_news |= self._survey.note_damage(candidate, node, json.loads(told[leader]))
        return bool(_agreed(group, is_news))

    @contextlib.contextmanager
    def _opened(self, tier: int, name: str) -> Iterator[Store]:
        with contextlib.closing(self._places[tier].open(name)) as store:
            yield store

    def _pass_over(self, candidate: StepCandidate, why: str, *, is_incomplete: bool = False) -> None:
        passed = SkippedStep(step=candidate.step, where=self._place_name(candidate), why=why)
        self._passed.append(passed)
        if is_incomplete:
            self._incomplete.append(candidate)
        if self._group.rank == 0:
            log.warning("Not loaded: %s", passed)

    def _place_name(self, candidate: StepCandidate) -> str:
        return self._root.location if candidate.tier == ROOT else self._names[candidate.tier]

    def _report(self, candidate: StepCandidate, *, is_newest: bool) -> LastLoad:
        """Say what was used; after a search for the newest step, remove what is of no use in the tiers."""
        survey = self._survey
        damaged = sorted(f"node {node}: {name}/{file}" for _, name, node, file in survey.damaged)
        useless: list[tuple[int, str]] = []
        if is_newest:
            useless += [(tier, name) for tier in range(len(survey.held)) for name in survey.incomplete(tier)]
            useless += [(c.tier, step_name(c.step)) for c in self._incomplete]
        damaged, useless = _agreed(self._group, [damaged, useless])
        where = self._place_name(candidate)
        if self._group.rank == 0 and (self._passed or damaged):
            log.warning("Step %s was loaded from %s.", candidate.step, where)
            if damaged:
                log.warning("Damaged copies were left out:\n%s", truncated_list(damaged))
        run_on_all_ranks(
            self._group, lambda: self._remove(useless), doing="removing torn steps from its node"
        )
        return LastLoad(step=candidate.step, where=where, skipped=tuple(self._passed), damaged=tuple(damaged))

    def _remove(self, useless: Sequence[tuple[int, str]]) -> bytes:
        if self._group.rank in self._nodes.leaders():
            for tier, name in useless:
                place = self._places[tier]
                if name in place.names() and (place.committed([name]) or place.is_leftover(name)):
                    with contextlib.suppress(OSError):
                        place.remove(name)
        return b""


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepPlacement:
    """Where the files of a step are.

    Attributes:
        needs: what it consists of.
        donor: a rank of a node that has index and common state.
        holders: ranks that can read each file of chunks, ascending.
        lacking: by leader of a node that lacks some, its small files, and whether it lacks the commit.
    """

    needs: StepFiles
    donor: int
    holders: Mapping[str, Sequence[int]]
    lacking: Mapping[int, tuple[tuple[str, ...], bool]]


def _agreed(group: Group, value: Any) -> Any:  # plain JSON values
    """Return what rank 0 has as value. Collective."""
    return json.loads(broadcast_from_rank_0(group, json.dumps(value).encode(), doing="choosing a checkpoint"))
