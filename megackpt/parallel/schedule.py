"""The layers of each pipeline stage, and the order in which a stage works, as plain data.

Splits layers into stages, and plans the one-forward-one-backward schedule. `pipeline` executes a plan.
"""

from __future__ import annotations

from collections.abc import Sequence
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


def split_layers(num_layers: int, stages: int, *, counts: Sequence[int] | None = None) -> tuple[range, ...]:
    """Return the global layer indices of each stage, in order.

    Without `counts` the stages differ by one layer at most, and the first ones have more: the last one also
    computes the logits.

    >>> split_layers(5, 2)
    (range(0, 3), range(3, 5))

    Args:
        num_layers: layers of the whole model.
        stages: number of pipeline stages.
        counts: layers of each stage, for an uneven split; 0 for a stage with other work.

    Raises:
        DeclarationError: fewer layers than stages; or counts that are not one for each stage, or do not add
            up.
    """
    if counts is None:
        if not 1 <= stages <= num_layers:
            raise DeclarationError(
                f"{num_layers} layers cannot be split over pp={stages} stages: a stage would have none. Use "
                f"at most {num_layers} stages, or give the layers of each stage."
            )
        share, more = divmod(num_layers, stages)
        counts = [share + (stage < more) for stage in range(stages)]
    if len(counts) != stages or sum(counts) != num_layers or min(counts) < 0:
        raise DeclarationError(
            f"layers per stage {tuple(counts)} do not fit {num_layers} layers over pp={stages} stages. Give "
            f"{stages} numbers that add up to {num_layers}."
        )
    starts = [sum(counts[:stage]) for stage in range(stages)]
    return tuple(range(start, start + count) for start, count in zip(starts, counts, strict=True))


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
