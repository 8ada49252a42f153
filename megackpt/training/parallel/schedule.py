"""The order of work of a pipeline stage, as plain data.

Plans one-forward-one-backward and its interleaved form for several model chunks on each stage. `stages`
decides which layers are in which chunk; `pipeline` executes a plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TypeAlias, TypeVar

from megackpt.errors import DeclarationError


@dataclass(frozen=True, slots=True)
class Forward:
    """Run a model chunk of the stage on one micro-batch."""

    micro_batch: int
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class Backward:
    """Carry the gradient of one micro-batch back through a model chunk of the stage."""

    micro_batch: int
    chunk: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Exchange with the neighbours. All sends and receives are started in one batch, and all are awaited.

    Activations go to the next stage and gradients to the previous one, around a ring: what follows the last
    stage is the next model chunk of the first one. Neighbours may both have something to send, so a stage
    that waited for its send before it receives could wait for ever.

    Attributes:
        send_activation: the forward whose output is sent to the next stage, or None.
        send_gradient: the backward whose gradient is sent to the previous stage, or None.
        receive_activation: the forward whose input is received from the previous stage, or None.
        receive_gradient: the backward whose gradient is received from the next stage, or None.
    """

    send_activation: Forward | None = None
    send_gradient: Backward | None = None
    receive_activation: Forward | None = None
    receive_gradient: Backward | None = None


Action: TypeAlias = Forward | Backward | Transfer
_Computed = TypeVar("_Computed", Forward, Backward)


def plan_1f1b(stages: int, stage: int, micro_batches: int) -> tuple[Action, ...]:
    """Return the actions of `stage`: forward and backward of each micro-batch, in turn. Pure.

    A stage first runs as many forwards as there are stages after it, then alternates: at most
    `stages - stage` micro-batches are in flight. With one stage this is plain gradient accumulation.

    >>> plan_1f1b(1, 0, 2) == (Forward(0), Backward(0), Forward(1), Backward(1))
    True

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


def plan_interleaved(stages: int, stage: int, chunks: int, micro_batches: int) -> tuple[Action, ...]:
    """Return the actions of `stage` where each stage has `chunks` model chunks. Pure.

    The chunks take turns, `stages` micro-batches each, so that a stage idles only a `chunks`-th as long at
    the start and the end. At most `2 * (stages - stage - 1) + (chunks - 1) * stages + 1` forwards wait for
    their backwards.

    >>> [a for a in plan_interleaved(2, 1, 2, 2) if not isinstance(a, Transfer)][:3]
    [Forward(micro_batch=0, chunk=0), Forward(micro_batch=1, chunk=0), Forward(micro_batch=0, chunk=1)]

    Args:
        stages: number of pipeline stages.
        stage: the one whose actions are returned.
        chunks: model chunks on each stage.
        micro_batches: a multiple of `stages`.

    Raises:
        DeclarationError: no such stage, no chunk, or micro-batches that are no multiple of the stages.

    Source: Narayanan et al. 2021, section 2.2.2; the number of forwards before the first backward is that of
    Megatron-Core's `pipeline_parallel.schedules`.
    """
    _check_interleaved(stages, stage, chunks, micro_batches)
    return _plans_in_rounds(stages, chunks, micro_batches, with_backward=True)[stage]


def plan_forward(stages: int, stage: int, micro_batches: int, *, chunks: int = 1) -> tuple[Action, ...]:
    """Return the actions of `stage` for evaluation: forwards only. Pure.

    Raises:
        DeclarationError: no such stage, a negative number of micro-batches or, with several model chunks on
            each stage, one that is no multiple of the stages.
    """
    if chunks > 1:
        _check_interleaved(stages, stage, chunks, micro_batches)
        return _plans_in_rounds(stages, chunks, micro_batches, with_backward=False)[stage]
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


def _check_interleaved(stages: int, stage: int, chunks: int, micro_batches: int) -> None:
    _check_stage(stages, stage, micro_batches)
    if chunks < 1:
        raise DeclarationError(f"a stage has {chunks} model chunks. Give at least one.")
    if micro_batches % stages:
        raise DeclarationError(
            f"{micro_batches} micro-batches cannot be interleaved over {stages} stages with {chunks} model "
            f"chunks each: the chunks take turns of {stages} micro-batches. Give a multiple of {stages}, or "
            f"use one chunk for each stage."
        )


def _from_previous(stage: int, *, send: int | None = None, receive: int | None = None) -> list[Action]:
    if stage == 0 or (send is None and receive is None):
        return []
    return [
        Transfer(
            send_gradient=None if send is None else Backward(send),
            receive_activation=None if receive is None else Forward(receive),
        )
    ]


def _to_next(stages: int, stage: int, *, send: int | None = None, receive: int | None = None) -> list[Action]:
    if stage == stages - 1:
        return []
    return [
        Transfer(
            send_activation=None if send is None else Forward(send),
            receive_gradient=None if receive is None else Backward(receive),
        )
    ]


@lru_cache(maxsize=8)  # a training step asks for the same plan every time
def _plans_in_rounds(
    stages: int, chunks: int, micro_batches: int, *, with_backward: bool
) -> tuple[tuple[Action, ...], ...]:
    """Return the actions of every stage for several model chunks.

    All stages are played in rounds. In a round a stage runs its next forward and then its next backward, if
    these have what they need; what they produce is transferred at the end of the same round. So both ends of
    every message are in the same round, and no stage can wait for one that waits for it.
    """
    ring = _Ring(stages, chunks)
    progress = [
        _StageProgress(ring.order(stage, micro_batches, with_backward=with_backward))
        for stage in range(stages)
    ]
    while any(not stage.is_done for stage in progress):
        computed = [progress[stage].compute(ring, stage) for stage in range(stages)]
        assert any(computed), "the order of some stage cannot be carried out"
        transfers = [Transfer()] * stages
        for stage in range(stages):
            for action in computed[stage]:
                _send(ring, transfers, stage, action)
        for stage in range(stages):
            progress[stage].end_round(transfers[stage])
    return tuple(tuple(stage.plan) for stage in progress)


@dataclass(frozen=True, slots=True)
class _Ring:
    """The path of a micro-batch: all stages with chunk 0, then all stages with chunk 1, and so on."""

    stages: int
    chunks: int

    def order(self, stage: int, micro_batches: int, *, with_backward: bool) -> list[Forward | Backward]:
        """Return what a stage computes, in order."""
        forwards = [Forward(*self._turn(k)) for k in range(micro_batches * self.chunks)]
        if not with_backward:
            return list(forwards)
        backwards = [Backward(f.micro_batch, self.chunks - 1 - f.chunk) for f in forwards]
        # A message takes a round, and a stage computes a forward and a backward in it. So a stage must be two
        # forwards ahead of the next one, not one as in plan_1f1b.
        ahead = min(2 * (self.stages - stage - 1) + (self.chunks - 1) * self.stages, len(forwards))
        order: list[Forward | Backward] = list(forwards[:ahead])
        for forward, backward in zip(forwards[ahead:], backwards, strict=False):
            order += [forward, backward]
        return order + backwards[len(forwards) - ahead :]

    def _turn(self, k: int) -> tuple[int, int]:
        """Return micro-batch and chunk of forward k: each chunk takes `stages` micro-batches a turn."""
        turn, index = divmod(k, self.stages)
        cycle, chunk = divmod(turn, self.chunks)
        return cycle * self.stages + index, chunk

    def needs_input(self, stage: int, action: Forward | Backward) -> bool:
        """Whether the action needs something from another stage."""
        if isinstance(action, Forward):
            return (stage, action.chunk) != (0, 0)
        return (stage, action.chunk) != (self.stages - 1, self.chunks - 1)

    def follower(self, stage: int, action: _Computed) -> tuple[int, _Computed] | None:
        """Return the stage and the action that need the result of an action; None at the end of the path."""
        step = 1 if isinstance(action, Forward) else -1
        position = action.chunk * self.stages + stage + step
        if not 0 <= position < self.stages * self.chunks:
            return None
        chunk, target = divmod(position, self.stages)
        return target, replace(action, chunk=chunk)


@dataclass(slots=True)
class _StageProgress:
    """How far a stage is: the first `done` actions of `order` are in the plan, `arrived` can be computed."""

    order: Sequence[Forward | Backward]
    done: int = 0
    arrived: set[Forward | Backward] = field(default_factory=set)
    plan: list[Action] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return self.done == len(self.order)

    def compute(self, ring: _Ring, stage: int) -> list[Forward | Backward]:
        """Take the actions of one round: a forward and the backward after it, or one of them, or none."""
        taken: list[Forward | Backward] = []
        for action in self.order[self.done : self.done + 2]:
            is_ready = action in self.arrived or not ring.needs_input(stage, action)
            if not is_ready or (
                taken and not (isinstance(taken[0], Forward) and isinstance(action, Backward))
            ):
                break
            taken.append(action)
        self.done += len(taken)
        self.plan += taken
        return taken

    def end_round(self, transfer: Transfer) -> None:
        """Add the transfer of a round to the plan, if there is something to transfer."""
        if transfer != Transfer():
            self.plan.append(transfer)
        self.arrived |= {a for a in (transfer.receive_activation, transfer.receive_gradient) if a is not None}


def _send(ring: _Ring, transfers: list[Transfer], stage: int, action: Forward | Backward) -> None:
    """Enter the result of an action in the transfers of both ends."""
    if isinstance(action, Forward) and (forward := ring.follower(stage, action)) is not None:
        target, needed = forward
        transfers[stage] = replace(transfers[stage], send_activation=action)
        transfers[target] = replace(transfers[target], receive_activation=needed)
    elif isinstance(action, Backward) and (backward := ring.follower(stage, action)) is not None:
        target, gradient_of = backward
        transfers[stage] = replace(transfers[stage], send_gradient=action)
        transfers[target] = replace(transfers[target], receive_gradient=gradient_of)
