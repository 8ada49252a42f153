"""What nodes and root have of a run's steps, and what follows from it: which step is loaded, from where.

Pure. Looking at nodes, and carrying out what is decided here, is `recovery`'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from megackpt.engine.checkpoint.steps import step_name, step_of
from megackpt.engine.tiers.recover import NodeStep, StepFiles

ROOT = -1
"""Stands for the root where numbers stand for tiers."""


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


@dataclass(slots=True)
class TierSurvey:
    """What nodes and root have; known to rank 0.

    Attributes:
        held: by tier and node, the steps there by name.
        in_root: committed steps of the root.
        damaged: files that are not what was saved, as (tier, name of the step, node, file).
        unfit: nodes whose index or commit of a step is damaged, as (tier, name of the step, node).
    """

    held: Sequence[Sequence[Mapping[str, NodeStep]]]
    in_root: Sequence[int]
    damaged: set[tuple[int, str, int, str]] = field(default_factory=set)
    unfit: set[tuple[int, str, int]] = field(default_factory=set)

    def candidates(self) -> list[StepCandidate]:
        """Return committed steps: the newest first, of one step the tiers in their order, then the root.

        Where nodes have different commits of a step, the one that more of them have comes first.
        """
        found: list[tuple[int, int, int, StepCandidate]] = []
        for tier, nodes in enumerate(self.held):
            counts: dict[tuple[str, str], int] = {}
            for steps in nodes:
                for name, held in steps.items():
                    if held.commit:
                        counts[name, held.commit] = counts.get((name, held.commit), 0) + 1
            for (name, commit), count in counts.items():
                step = _number(name)
                found.append((-step, tier, -count, StepCandidate(step=step, tier=tier, commit=commit)))
        last = len(self.held)
        found += [(-step, last, 0, StepCandidate(step=step, tier=ROOT)) for step in self.in_root]
        return [candidate for *_, candidate in sorted(found, key=lambda row: row[:3])]

    def donor(self, candidate: StepCandidate) -> int | None:
        """Return a node that has commit, index and common state of a step; None if there is none."""
        name = step_name(candidate.step)
        for node, steps in enumerate(self.held[candidate.tier]):
            held = steps.get(name)
            is_fit = (candidate.tier, name, node) not in self.unfit
            if held is not None and held.commit == candidate.commit and held.is_described and is_fit:
                return node
        return None

    def holders(self, candidate: StepCandidate, needs: StepFiles) -> dict[str, list[int]]:
        """Return the nodes that have each file of chunks, whole as far as is known."""
        name = step_name(candidate.step)
        files: dict[str, list[int]] = {file: [] for file in needs.data}
        for node, steps in enumerate(self.held[candidate.tier]):
            held = steps[name].files if name in steps else {}
            for file in files.keys() & held.keys():
                is_damaged = (candidate.tier, name, node, file) in self.damaged
                if held[file] >= needs.data[file] and not is_damaged:
                    files[file].append(node)
        return files

    def lacking(self, candidate: StepCandidate, needs: StepFiles) -> dict[int, tuple[list[str], bool]]:
        """Return for each node that lacks some which small files, and whether the commit."""
        name = step_name(candidate.step)
        found = {}
        for node, steps in enumerate(self.held[candidate.tier]):
            held = steps[name].files if name in steps else {}
            lacks = [
                file
                for file, nbytes in needs.small.items()
                if held.get(file) != nbytes or (candidate.tier, name, node, file) in self.damaged
            ]
            is_committed = name in steps and steps[name].commit == candidate.commit
            if lacks or not is_committed:
                found[node] = (lacks, not is_committed)
        return found

    def note_damage(self, candidate: StepCandidate, node: int, files: Iterable[tuple[str, bool]]) -> bool:
        """Take what a node has found damaged; say whether that is news."""
        name, known = step_name(candidate.step), len(self.damaged)
        for file, is_data in files:
            self.damaged.add((candidate.tier, name, node, file))
            if not is_data:
                self.unfit.add((candidate.tier, name, node))
        return len(self.damaged) > known

    def incomplete(self, tier: int) -> list[str]:
        """Return steps that no node has committed: their saves did not finish."""
        names = {name for steps in self.held[tier] for name in steps}
        committed = {name for steps in self.held[tier] for name, held in steps.items() if held.commit}
        return sorted(names - committed)


def _number(name: str) -> int:
    step = step_of(name)
    assert step is not None  # nothing else is surveyed
    return step
