"""The steps of a run on nodes and in the root, and which of them can be loaded from where. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from megackpt.engine.checkpoint.origins import PlacedStep, StepOrigin, step_tree
from megackpt.engine.checkpoint.steps import step_name, step_of
from megackpt.engine.tiers.node_steps import NodeStep, StepFiles

ROOT = -1
"""The number of the root among the numbers of tiers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCandidate:
    """A step that is committed somewhere.

    Attributes:
        step: its number.
        tier: number of the tier, or ROOT.
        commit: digest of metadata.json; empty for the root.
    """

    step: int
    tier: int
    commit: str = ""


@dataclass(frozen=True, slots=True)
class _TierLocation:
    """Where a step is: the number of its tier, after all tiers for the root, and how many nodes have it."""

    tier: int
    nodes: int
    candidate: StepCandidate


@dataclass(slots=True)
class TierSurvey:
    """The steps of nodes and root; only rank 0 has them.

    Attributes:
        node_steps: by tier and node, the steps there by name.
        root_steps: committed steps of the root, with what they record; None if their commit is damaged.
        damaged: damaged files, as (tier, name of the step, node, file).
        damaged_indexes: nodes whose index or commit of a step is damaged, as (tier, name of the step, node).
    """

    node_steps: Sequence[Sequence[Mapping[str, NodeStep]]]
    root_steps: Mapping[int, StepOrigin | None]
    damaged: set[tuple[int, str, int, str]] = field(default_factory=set)
    damaged_indexes: set[tuple[int, str, int]] = field(default_factory=set)

    def candidates(self, step: int | None) -> list[StepCandidate]:
        """Return the places of a step, or for None of all steps that a restart may take, the newest first.

        For one step, the newest branch comes first, and tiers in their order come before the root. If nodes
        have different commits of a step, the commit that more nodes have comes first.
        """
        placed = self.placed() if step is not None else step_tree(self.placed()).line
        ranked = sorted(placed, key=_rank)
        return [row.location.candidate for row in ranked if step in (None, row.step)]

    def placed(self) -> list[PlacedStep[_TierLocation]]:
        """Return the committed steps of all tiers and the root, with their origins."""
        rows: list[PlacedStep[_TierLocation]] = []
        for tier, nodes in enumerate(self.node_steps):
            committed = [step for steps in nodes for step in steps.values() if step.commit]
            counts = Counter((step.name, step.commit) for step in committed)
            origins = {(step.name, step.commit): step.origin for step in committed}
            for (name, commit), count in counts.items():
                number = _number_of(name)
                candidate = StepCandidate(step=number, tier=tier, commit=commit)
                rows.append(PlacedStep(number, origins[name, commit], _TierLocation(tier, count, candidate)))
        for number, origin in self.root_steps.items():
            location = _TierLocation(len(self.node_steps), 0, StepCandidate(step=number, tier=ROOT))
            rows.append(PlacedStep(number, origin, location))
        return rows

    def source_node(self, candidate: StepCandidate) -> int | None:
        """Return a node that has commit, index and common state of a step; None if there is none."""
        name = step_name(candidate.step)
        for node, steps in enumerate(self.node_steps[candidate.tier]):
            step = steps.get(name)
            is_damaged = (candidate.tier, name, node) in self.damaged_indexes
            if step and step.commit == candidate.commit and step.is_described and not is_damaged:
                return node
        return None

    def nodes_with_data(self, candidate: StepCandidate, needed: StepFiles) -> dict[str, list[int]]:
        """Return for each file of chunks the nodes that have all of it, without known damage."""
        name = step_name(candidate.step)
        nodes_of: dict[str, list[int]] = {file: [] for file in needed.data}
        for node, steps in enumerate(self.node_steps[candidate.tier]):
            sizes = steps[name].files if name in steps else {}
            for file in nodes_of.keys() & sizes.keys():
                is_damaged = (candidate.tier, name, node, file) in self.damaged
                if sizes[file] >= needed.data[file] and not is_damaged:
                    nodes_of[file].append(node)
        return nodes_of

    def missing_on_nodes(
        self, candidate: StepCandidate, needed: StepFiles
    ) -> dict[int, tuple[list[str], bool]]:
        """Return the small files that each node lacks, and whether it lacks the commit.

        Nodes that lack nothing are left out. A damaged file counts as missing.
        """
        name = step_name(candidate.step)
        missing = {}
        for node, steps in enumerate(self.node_steps[candidate.tier]):
            sizes = steps[name].files if name in steps else {}
            files = [
                file
                for file, nbytes in needed.small.items()
                if sizes.get(file) != nbytes or (candidate.tier, name, node, file) in self.damaged
            ]
            is_committed = name in steps and steps[name].commit == candidate.commit
            if files or not is_committed:
                missing[node] = (files, not is_committed)
        return missing

    def note_damage(self, candidate: StepCandidate, node: int, files: Iterable[tuple[str, bool]]) -> bool:
        """Note damaged files of a node; return whether any of them is new.

        Args:
            candidate: the step.
            node: number of the node.
            files: name of each damaged file, and whether it is a file of chunks.
        """
        name, known = step_name(candidate.step), len(self.damaged)
        for file, is_data in files:
            self.damaged.add((candidate.tier, name, node, file))
            if not is_data:
                self.damaged_indexes.add((candidate.tier, name, node))
        return len(self.damaged) > known

    def incomplete(self, tier: int) -> list[str]:
        """Return names of steps that no node has committed: their saves did not finish."""
        names = {name for steps in self.node_steps[tier] for name in steps}
        committed = {name for steps in self.node_steps[tier] for name, step in steps.items() if step.commit}
        return sorted(names - committed)


def _rank(row: PlacedStep[_TierLocation]) -> tuple[int, int, int, int]:
    branch = -1 if row.origin is None else row.origin.branch
    return -row.step, -branch, row.location.tier, -row.location.nodes


def _number_of(name: str) -> int:
    step = step_of(name)
    assert step is not None  # only directories of steps are surveyed
    return step
