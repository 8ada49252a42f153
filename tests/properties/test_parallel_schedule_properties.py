"""Laws of the pipeline plans, checked by running all stages of a plan in one process."""

from __future__ import annotations

from hypothesis import given
from hypothesis.strategies import integers

from megackpt.parallel import Action, Backward, Forward, Transfer, plan_1f1b, plan_forward

stages_ = integers(1, 6)
micro_batches_ = integers(0, 12)

Plans = list[tuple[Action, ...]]


def simulate(plans: Plans) -> list[tuple[int, Action]]:
    """Run the plans of all stages and return the actions in the order they ended, with their stage.

    The strictest possible network: nothing is buffered, so that a message moves only while its sender and its
    receiver both wait for it. Actions that need what has not arrived are errors.
    """
    position = [0] * len(plans)
    waiting: list[set[str]] = [set() for _ in plans]  # what the current transfer of each stage still lacks
    have: list[set[tuple[str, int]]] = [set() for _ in plans]
    done: list[tuple[int, Action]] = []
    for stage, plan in enumerate(plans):
        waiting[stage] = _open(plan, 0)
    progress = True
    while progress:
        progress = False
        for stage, plan in enumerate(plans):
            while position[stage] < len(plan) and not waiting[stage]:
                action = plan[position[stage]]
                _perform(stage, len(plans), action, have[stage])
                done.append((stage, action))
                position[stage] += 1
                waiting[stage] = _open(plan, position[stage])
                progress = True
        for stage in range(len(plans) - 1):
            progress |= _move(plans, position, waiting, have, stage)
    assert position == [len(plan) for plan in plans], f"deadlock at {position} of {plans}"
    return done


def _open(plan: tuple[Action, ...], at: int) -> set[str]:
    if at == len(plan) or not isinstance(action := plan[at], Transfer):
        return set()
    return {side for side in ("send", "receive") if getattr(action, side) is not None}


def _move(plans: Plans, position: list[int], waiting: list[set[str]], have: list[set], left: int) -> bool:
    """Let one message pass between stage `left` and the next if both ends wait for it."""
    right = left + 1
    if position[left] == len(plans[left]) or position[right] == len(plans[right]):
        return False
    a, b = plans[left][position[left]], plans[right][position[right]]
    if not (
        isinstance(a, Transfer) and isinstance(b, Transfer) and a.peer == "next" and b.peer == "previous"
    ):
        return False
    for sender, receiver, source, target, what in ((a, b, left, right, "in"), (b, a, right, left, "grad")):
        if "send" in waiting[source] and "receive" in waiting[target]:
            assert sender.send == receiver.receive, "two neighbours disagree about the micro-batch"
            waiting[source].discard("send")
            waiting[target].discard("receive")
            have[target].add((what, sender.send))
            return True
    return False


def _perform(stage: int, stages: int, action: Action, have: set[tuple[str, int]]) -> None:
    if isinstance(action, Forward):
        assert stage == 0 or ("in", action.micro_batch) in have
        have.add(("out", action.micro_batch))
    elif isinstance(action, Backward):
        assert ("out", action.micro_batch) in have
        assert stage == stages - 1 or ("grad", action.micro_batch) in have
        have.add(("in_grad", action.micro_batch))
    elif action.send is not None:
        assert (("out" if action.peer == "next" else "in_grad"), action.send) in have


@given(stages=stages_, micro_batches=micro_batches_)
def test_1f1b_ends_without_deadlock_even_if_nothing_is_buffered(stages: int, micro_batches: int) -> None:
    simulate([plan_1f1b(stages, stage, micro_batches) for stage in range(stages)])


@given(stages=stages_, micro_batches=micro_batches_)
def test_forward_plan_ends_without_deadlock(stages: int, micro_batches: int) -> None:
    done = simulate([plan_forward(stages, stage, micro_batches) for stage in range(stages)])
    assert sum(isinstance(action, Forward) for _, action in done) == stages * micro_batches


@given(stages=stages_, micro_batches=micro_batches_)
def test_each_stage_runs_every_micro_batch_once_each_way_in_order(stages: int, micro_batches: int) -> None:
    for stage in range(stages):
        plan = plan_1f1b(stages, stage, micro_batches)
        assert [a.micro_batch for a in plan if isinstance(a, Forward)] == list(range(micro_batches))
        assert [a.micro_batch for a in plan if isinstance(a, Backward)] == list(range(micro_batches))


@given(stages=stages_, micro_batches=micro_batches_)
def test_micro_batches_in_flight_are_bounded_by_the_stages_to_come(stages: int, micro_batches: int) -> None:
    for stage in range(stages):
        in_flight = most = 0
        for action in plan_1f1b(stages, stage, micro_batches):
            in_flight += isinstance(action, Forward) - isinstance(action, Backward)
            most = max(most, in_flight)
        assert most == min(stages - stage, micro_batches)
