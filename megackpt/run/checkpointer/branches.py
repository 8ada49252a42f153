"""The branch to which a run saves, and what happens to newer steps that it does not continue.

The first save after the start of a run or a load looks at all steps, and so does a save of a step that is not
greater than the last one. Rank 0 decides, and all ranks know the decision. Other saves need no communication.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megackpt.comm import Group, gather_step
from megackpt.engine.checkpoint.origins import PlacedStep, StepOrigin, is_ancestor, newest_known, step_tree
from megackpt.errors import DeclarationError
from megackpt.run.checkpointer.loading import LastLoad, StepLoading
from megackpt.run.checkpointer.options import OnNewerSteps

log = logging.getLogger(__name__)

_LISTED_STEPS = 5  # steps that a message names; of more, the first and the last


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchDecision:
    """The branch of a save.

    Attributes:
        branch: its number.
        earlier: as in `StepOrigin`, as pairs of branch and step.
        continues: the step that the run continues; None if there is none.
        continues_run: as in `StepOrigin`.
        newest: the step that a restart would take before the save; None if there is none.
        left: steps that a restart might have taken before the save, and that this step does not come from,
            ascending; and damaged steps with greater numbers. Empty if the save continues the newest step.
    """

    branch: int = 0
    earlier: Sequence[tuple[int, int]] = ()
    continues: int | None = None
    continues_run: str = ""
    newest: int | None = None
    left: Sequence[int] = ()


def decide_branch(
    step: int, steps: Sequence[PlacedStep[Any]], *, run: str, loaded: int | None
) -> BranchDecision:
    """Decide to which branch a step is saved. Pure.

    Args:
        step: its number.
        steps: all committed steps of the root and the tiers.
        run: id of the run that saves it.
        loaded: the step that the run has loaded; None if it has loaded none.
    """
    line = step_tree(steps).line
    damaged_newer = [placed.step for placed in line if placed.origin is None and placed.step > step]
    newest = newest_known(steps)
    if newest is None:
        return BranchDecision(continues=loaded, left=damaged_newer)
    own = newest_known(placed for placed in steps if placed.origin is not None and placed.origin.run == run)
    continued = own or newest_known(placed for placed in steps if placed.step == loaded)
    if continued is None and loaded is not None:  # it is gone; it was a step of the line, or newer than it
        continued = PlacedStep(loaded, _origin(newest), None)
    earlier: Mapping[int, int] = _origin(newest).earlier
    if _is_newest(step, continued, newest):
        branch, left = _origin(newest).branch, damaged_newer
    else:
        # The new branch leaves the line after the continued step, or before the step that it replaces.
        branch = 1 + max(_origin(placed).branch for placed in steps if placed.origin is not None)
        earlier = {} if continued is None else _branches_before(step, continued)
        new = PlacedStep(step, StepOrigin(branch=branch, earlier=earlier), None)
        left = [p.step for p in line if p.origin is None or not is_ancestor(p, new)]
    return BranchDecision(
        branch=branch,
        earlier=sorted(earlier.items()),
        continues=None if continued is None else continued.step,
        continues_run="" if continued is None else _origin(continued).run,
        newest=newest.step,
        left=sorted(set(left)),
    )


def _is_newest(step: int, continued: PlacedStep[Any] | None, newest: PlacedStep[Any]) -> bool:
    """Return whether a save of a step continues the newest one.

    A run that has loaded no step may have read the newest one in another way, if its own number is greater.
    """
    if continued is None:
        return step > newest.step
    is_on_branch = _origin(continued).branch == _origin(newest).branch
    return is_on_branch and min(step, continued.step) >= newest.step


def _branches_before(step: int, continued: PlacedStep[Any]) -> dict[int, int]:
    """Return `StepOrigin.earlier` of a step on a new branch."""
    origin = _origin(continued)
    last_steps = {**origin.earlier, origin.branch: continued.step}
    return {branch: min(last, step - 1) for branch, last in last_steps.items() if step > 0}


def _origin(placed: PlacedStep[Any]) -> StepOrigin:
    assert placed.origin is not None  # `newest_known` returns no other
    return placed.origin


class RunBranch:
    """The branch of a run, from the start or a load to the next load.

    Args:
        loading: knows the steps of the run.
        on_newer_steps: as for `Checkpointer`.
        where: the root, for messages.

    Attributes:
        to_discard: steps to remove after the next commit; on rank 0.
    """

    def __init__(self, loading: StepLoading, on_newer_steps: OnNewerSteps, *, where: str) -> None:
        self._loading, self._on_newer_steps, self._where = loading, on_newer_steps, where
        self._decision: BranchDecision | None = None
        self._run = secrets.token_hex(4)  # only rank 0's is used
        self._loaded: int | None = None
        self._skipped: frozenset[int] = frozenset()
        self._begun: int | None = None  # the last step whose save began
        self._saved: int | None = None  # the last step that was saved, or is being saved
        self.to_discard: frozenset[int] = frozenset()

    def loaded(self, last_load: LastLoad) -> None:
        """Note that the run continues another step. Local."""
        self._decision, self._run = None, secrets.token_hex(4)
        self._loaded = last_load.step
        self._skipped = frozenset(skipped.step for skipped in last_load.skipped)
        self._begun = self._saved = None

    def is_decided(self, step: int) -> bool:
        """Return whether `origin` of a step needs no communication. Local; equal on all ranks."""
        return self._decision is not None and (self._begun is None or step > self._begun)

    def origin(self, step: int, group: Group) -> StepOrigin:
        """Return what a step records, before its save; decide on the branch if need be. Collective.

        Raises:
            DeclarationError: there are newer steps, and on_newer_steps is "error".
            CheckpointError: the steps cannot be read; the same on every rank.
        """
        if not self.is_decided(step):
            self._decision = self._decide(step, group)
            self._saved = None
        decision = self._decision
        assert decision is not None
        self._begun = step
        has_saved = self._saved is not None
        return StepOrigin(
            run=self._run,
            branch=decision.branch,
            continues=self._saved if has_saved else decision.continues,
            continues_run=self._run if has_saved else decision.continues_run,
            earlier=dict(decision.earlier),
        )

    def saved(self, step: int) -> None:
        """Note that a step was saved, or is being saved. Local."""
        self._saved = step

    def _decide(self, step: int, group: Group) -> BranchDecision:
        steps = self._loading.survey(group)
        with gather_step(group, "choosing the branch of a run", on_all_ranks=True) as deciding:
            own = decide_branch(step, steps, run=self._run, loaded=self._loaded)
            deciding.data = json.dumps(asdict(own)).encode() if group.rank == 0 else b""
        decision = BranchDecision(**json.loads(deciding.results[0]))
        left = sorted(set(decision.left) - self._skipped)
        if left and self._on_newer_steps == "error":
            raise DeclarationError(
                f"{_what_is_left(step, decision, self._where)}. Nothing is saved, because of "
                f"on_newer_steps='error'. Load the newest step; or move other steps aside with "
                f"{_rollback(step, decision, self._where)}; or give a new run its own root; or choose "
                f"on_newer_steps='keep'.",
                path=self._where,
            )
        if group.rank == 0:
            if decision.left:
                log.warning(
                    "%s. %s", _what_is_left(step, decision, self._where), self._effect(step, decision)
                )
            elif decision.continues is None and decision.newest is not None:
                log.warning("%s", _unrelated_text(step, decision.newest, self._where))
            if self._on_newer_steps == "discard":
                # Of a run that has loaded nothing, smaller numbers are not newer.
                least = step if decision.continues is None else 0
                self.to_discard = frozenset(other for other in decision.left if other >= least)
        return decision

    def _effect(self, step: int, decision: BranchDecision) -> str:
        if self._on_newer_steps == "discard":
            return f"They are removed when step {step} is committed, unless they are pinned."
        return (
            f"They stay as an abandoned branch: a restart takes step {step} or one that follows it, and "
            f"retention neither counts nor removes them. `megackpt ls` shows them, and "
            f"{_rollback(step, decision, self._where)} moves them aside before this save."
        )


def _rollback(step: int, decision: BranchDecision, where: str) -> str:
    target = step if decision.continues is None else min(step, decision.continues)
    return f"`megackpt rollback {where} {target}`"


def _what_is_left(step: int, decision: BranchDecision, where: str) -> str:
    does = f"continues step {decision.continues}"
    if decision.continues is None:
        does = "continues no step"
    elif step <= decision.continues:
        does = f"goes back from step {decision.continues}"
    return f"Step {step} {does} and leaves these steps of {where} behind: {_listed(decision.left)}"


def _unrelated_text(step: int, newest: int, where: str) -> str:
    return (
        f"Step {step} is saved to {where}, which has steps up to {newest}, and this Checkpointer has loaded "
        f"none of them. Give a new run its own root. To continue a run, load with Checkpointer.load."
    )


def _listed(steps: Sequence[int]) -> str:
    if len(steps) <= _LISTED_STEPS:
        return ", ".join(map(str, steps))
    return f"{len(steps)} steps from {steps[0]} to {steps[-1]}"
