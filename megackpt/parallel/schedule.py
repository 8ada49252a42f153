"""The order in which a pipeline stage works, as plain data.

Plans the one-forward-one-backward schedule. `stages` decides which layers a stage has; `pipeline` executes a
plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from megackpt.errors import DeclarationError


@dataclass(frozen=True, slots=True)
class Forward:
    """Run the stage on one micro-batch."""

    micro_batch: int


@dataclass(frozen=True, slots=True)
class Backward:
    """Carry the gradient of one micro-batch back through the stage."""

    micro_batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Exchange with one neighbour. Send and receive are started in one batch, and both are awaited.

    Between a stage and the next, activations go forward and gradients come back. Both neighbours may have
    something to send, so a stage that waited for its send before it receives could wait for ever.

    Attributes:
        peer: which neighbour.
        send: micro-batch whose activation (to the next stage) or gradient (to the previous one) is sent, or
            None.
        receive: micro-batch whose gradient (from the next stage) or activation (from the previous one) is
            received, or None.
    """

    peer: Literal["previous", "next"]
    send: int | None = None
    receive: int | None = None


Action: TypeAlias = "Forward | Backward | Transfer"


def plan_1f1b(stages: int, stage: int, micro_batches: int) -> tuple[Action, ...]:
    """Return the actions of `stage`: forward and backward of each micro-batch, in turn. Pure.

    A stage first runs as many forwards as there are stages after it, then alternates: at most
    `stages - stage` micro-batches are in flight. With one stage this is plain gradient accumulation.

    >>> plan_1f1b(1, 0, 2)
    (Forward(micro_batch=0), Backward(micro_batch=0), Forward(micro_batch=1), Backward(micro_batch=1))

    Raises:
        DeclarationError: no such stage, or a negative number of micro-batches.

    Source: Narayanan et al. 2021, section 2.2.1 (PipeDream-Flush, 1F1B).
    """
    _check_stage(stages, stage, micro_batches)
    ahead = min(stages - stage - 1, micro_batches)
    steady = micro_batches - ahead
    plan: list[Action] = []
    for k in range(ahead):
        plan += [*_from_previous(stage, receive=k), Forward(k), *_to_next(stages, stage, send=k)]
    if steady:
        plan += _from_previous(stage, receive=ahead)
    for k in range(steady):
        upcoming = ahead + k + 1
        plan += [Forward(ahead + k), *_to_next(stages, stage, send=ahead + k, receive=k), Backward(k)]
        plan += _from_previous(stage, send=k, receive=upcoming if upcoming < micro_batches else None)
    for k in range(steady, micro_batches):
        plan += [*_to_next(stages, stage, receive=k), Backward(k), *_from_previous(stage, send=k)]
    return tuple(plan)


def plan_forward(stages: int, stage: int, micro_batches: int) -> tuple[Action, ...]:
    """Return the actions of `stage` for evaluation: forwards only. Pure.

    Raises:
        DeclarationError: no such stage, or a negative number of micro-batches.
    """
    _check_stage(stages, stage, micro_batches)
    plan: list[Action] = []
    for k in range(micro_batches):
        plan += [*_from_previous(stage, receive=k), Forward(k), *_to_next(stages, stage, send=k)]
    return tuple(plan)


def _check_stage(stages: int, stage: int, micro_batches: int) -> None:
    if not 0 <= stage < stages or micro_batches < 0:
        raise DeclarationError(
            f"there is no plan for stage {stage} of {stages} with {micro_batches} micro-batches. Give a "
            f"stage of 0..{stages - 1} and at least 0 micro-batches."
        )


def _from_previous(stage: int, *, send: int | None = None, receive: int | None = None) -> list[Action]:
    nothing = stage == 0 or (send is None and receive is None)
    return [] if nothing else [Transfer(peer="previous", send=send, receive=receive)]


def _to_next(stages: int, stage: int, *, send: int | None = None, receive: int | None = None) -> list[Action]:
    return [] if stage == stages - 1 else [Transfer(peer="next", send=send, receive=receive)]
