"""Steps that all ranks run, and whose errors are raised on all ranks.

Each function here runs a step on every rank (or on rank 0), sends the result or the error, and raises one
error on all ranks if a rank failed. No rank waits for a rank that has failed.
"""

from __future__ import annotations

import logging
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn, TypeVar

from megackpt.comm.group import Group
from megackpt.comm.messages import (
    check_same_step,
    common_error,
    decode_error,
    encode_error,
    step_header,
)
from megackpt.errors import CheckpointError, RankFailedError

T = TypeVar("T")

_log = logging.getLogger(__name__)

_RESULT, _ERROR = b"\x00", b"\x01"  # first byte of what follows the step header


@dataclass(frozen=True, slots=True)
class Numbers:
    """Numbers of one rank, or their reduction over all ranks; each is at least 0 and below 2**62.

    Attributes:
        equal: of a rank, the numbers to compare; of all ranks, 1 for each number that is equal on all, or 0.
        largest: of a rank, the numbers to maximise; of all ranks, their element-wise maximum.
    """

    equal: tuple[int, ...]
    largest: tuple[int, ...] = ()


@dataclass(slots=True)
class GatherStep:
    """A block whose results are gathered at its end.

    Attributes:
        data: this rank's result, of any length; set in the block.
        results: the results of all ranks, in rank order; empty until the block has ended.
    """

    data: bytes = b""
    results: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class ScatterStep:
    """A block at whose end rank 0 sends each rank its part.

    Attributes:
        parts: one part for each rank; set in the block on rank 0.
        part: this rank's part; empty until the block has ended.
    """

    parts: Sequence[bytes]
    part: bytes = b""


@dataclass(slots=True)
class CompareStep:
    """A block whose numbers are reduced at its end.

    Attributes:
        numbers: this rank's numbers; set in the block.
        reduced: the reduction over all ranks; set when the block has ended.
    """

    numbers: Numbers
    reduced: Numbers


def begin_step(doing: str) -> None:
    """Log that a step begins on this rank. Every step calls this first; fault tests replace it."""
    _log.debug("begin: %s", doing)


def run_step(step: Callable[[], T], *, doing: str) -> tuple[T | None, Exception | None]:
    """Return the result of a step and None, or None and the error of the step. Local."""
    try:
        begin_step(doing)
        return step(), None
    except Exception as error:  # noqa: BLE001 - sent to all ranks, and raised on all of them
        return None, error


@contextmanager
def errors_on_all_ranks(group: Group, doing: str) -> Iterator[None]:
    """Run the block on every rank; if it fails on any rank, raise the error on all ranks.

    Collective: the ranks synchronise at the end of the block.

    Args:
        group: the ranks.
        doing: what the block does, for the error's text: "writing the index".

    Raises:
        CheckpointError: as `run_on_all_ranks`.
    """
    error: Exception | None = None
    try:
        begin_step(doing)
        yield
    except Exception as failure:  # noqa: BLE001 - sent to all ranks, and raised on all of them
        error = failure
    _reduce(group, Numbers(()), error, doing=doing)


@contextmanager
def gather_step(group: Group, doing: str, *, on_all_ranks: bool = False) -> Iterator[GatherStep]:
    """Run the block on every rank, and gather what the ranks assign to `data` in it. Collective.

    Args:
        group: the ranks.
        doing: what the block does, for the error's text.
        on_all_ranks: whether every rank receives the results, or rank 0 only.

    Raises:
        CheckpointError: as `run_on_all_ranks`.
    """
    step = GatherStep()
    error: Exception | None = None
    try:
        begin_step(doing)
        yield step
    except Exception as failure:  # noqa: BLE001 - sent to all ranks, and raised on all of them
        error = failure
    if on_all_ranks:
        step.results = gather_results(group, step.data, error, doing=doing)
    else:
        _, gather = _reduce(group, Numbers(()), error, doing=doing, data=step.data)
        step.results = gather()


@contextmanager
def compare_step(group: Group, doing: str, *, equal: int = 0, largest: int = 0) -> Iterator[CompareStep]:
    """Run the block on every rank, and reduce what the ranks assign to `numbers` in it. Collective.

    The length of the messages does not depend on the number of ranks.

    Args:
        group: the ranks.
        doing: what the block does, for the error's text.
        equal: how many numbers there are to compare.
        largest: how many numbers there are to maximise.

    Raises:
        CheckpointError: as `run_on_all_ranks`.
    """
    zeros = Numbers((0,) * equal, (0,) * largest)
    step = CompareStep(zeros, zeros)
    error: Exception | None = None
    try:
        begin_step(doing)
        yield step
    except Exception as failure:  # noqa: BLE001 - sent to all ranks, and raised on all of them
        error = failure
    step.reduced, _ = _reduce(group, zeros if error else step.numbers, error, doing=doing)


@contextmanager
def scatter_step(group: Group, doing: str) -> Iterator[ScatterStep]:
    """Run the block on every rank, and send each rank its part of what rank 0 assigns to `parts` in it.

    Collective. An error of rank 0 is raised on all ranks as it is: rank 0 checks here what other ranks have
    sent, and its error may be about any of them. On other ranks, the block must not fail.

    Raises:
        CheckpointError: raised in the block on rank 0; RankFailedError if the block raised something else.
    """
    step = ScatterStep([b""] * group.size)
    error: Exception | None = None
    try:
        yield step
    except Exception as failure:
        if group.rank != 0:
            raise
        error = failure

    def outcome() -> Sequence[bytes]:
        if error is not None:
            raise error
        return step.parts

    step.part = scatter_from_rank_0(group, outcome, doing=doing)


@contextmanager
def rank_0_errors_on_all_ranks(group: Group, doing: str) -> Iterator[None]:
    """Run the block on every rank, and raise an error of rank 0 on all ranks as it is. Collective.

    Raises:
        CheckpointError: as `scatter_step`.
    """
    with scatter_step(group, doing):
        yield


def run_on_all_ranks(group: Group, step: Callable[[], bytes], *, doing: str) -> list[bytes]:
    """Run a step on every rank and return the results of all ranks. Collective.

    Args:
        group: the ranks.
        step: returns this rank's result, which may have any length.
        doing: what the step does, for the error's text: "reading".

    Raises:
        CheckpointError: a rank failed. The class is that of the first failing rank's error (RankFailedError
            if that is not a CheckpointError); the text names the rank and the cause. On that rank the
            original error is the `__cause__`.
    """
    result, error = run_step(step, doing=doing)
    return gather_results(group, result or b"", error, doing=doing)


def run_and_all_gather(
    group: Group, step: Callable[[], tuple[T, bytes]], *, doing: str
) -> tuple[T, list[bytes]]:
    """Run a step on every rank; return what it made on this rank, and the messages of all ranks. Collective.

    Args:
        group: the ranks.
        step: returns a result for this rank, and a message to all ranks.
        doing: what the step does, for the error's text.

    Raises:
        CheckpointError: as `run_on_all_ranks`.
    """
    outcome, error = run_step(step, doing=doing)
    messages = gather_results(group, b"" if outcome is None else outcome[1], error, doing=doing)
    assert outcome is not None  # otherwise the error was raised
    return outcome[0], messages


def run_and_gather(group: Group, step: Callable[[], bytes], *, doing: str) -> list[bytes]:
    """Run a step on every rank, and return the results of all ranks on rank 0 only. Collective.

    Raises:
        CheckpointError: as `run_on_all_ranks`.
    """
    result, error = run_step(step, doing=doing)
    _, gather = _reduce(group, Numbers(()), error, doing=doing, data=result or b"")
    return gather()


def run_and_compare(
    group: Group,
    step: Callable[[], Numbers],
    *,
    equal: int,
    largest: int = 0,
    doing: str,
) -> Numbers:
    """Run a step on every rank, and reduce the numbers that the steps return. Collective.

    The length of the messages does not depend on the number of ranks.

    Args:
        group: the ranks.
        step: returns this rank's numbers.
        equal: how many numbers the step returns to compare.
        largest: how many numbers the step returns to maximise.
        doing: what the step does, for the error's text.

    Raises:
        CheckpointError: as `run_on_all_ranks`.
    """
    numbers, error = run_step(step, doing=doing)
    numbers = numbers or Numbers((0,) * equal, (0,) * largest)
    reduced, _ = _reduce(group, numbers, error, doing=doing)
    return reduced


def scatter_from_rank_0(group: Group, step: Callable[[], Sequence[bytes]], *, doing: str) -> bytes:
    """Run a step on rank 0 that returns one part for each rank, and return this rank's part. Collective.

    Raises:
        CheckpointError: raised by the step, and unchanged on all ranks, since rank 0 may have found a fault
            of another rank; RankFailedError if the step raised something else.
    """
    parts: Sequence[bytes] = []
    error: Exception | None = None
    if group.rank == 0:
        results, error = run_step(step, doing=doing)
        if error is not None and group.size == 1:
            raise error
        messages = [_RESULT + part for part in results or []]
        parts = messages if error is None else [_ERROR + _encode_error_of_rank_0(error, doing)] * group.size
    try:
        message = group.scatter(parts)
    except RankFailedError as lost:
        raise_lost_rank(lost, error)
    if message[:1] == _RESULT:
        return message[1:]
    if isinstance(error, CheckpointError):
        raise error
    raise decode_error(message[1:]) from error


def _encode_error_of_rank_0(error: Exception, doing: str) -> bytes:
    encoded = encode_error(error)
    if isinstance(error, CheckpointError):
        return encoded
    return encode_error(common_error({0: encoded}, doing))


def broadcast_from_rank_0(group: Group, data: bytes, *, doing: str) -> bytes:
    """Return rank 0's data on every rank; the data of other ranks is not used. Collective."""
    length = scatter_from_rank_0(group, lambda: [struct.pack("<q", len(data))] * group.size, doing=doing)
    buffer = bytearray(data) if group.rank == 0 else bytearray(struct.unpack("<q", length)[0])
    group.broadcast(memoryview(buffer), root=0)
    return bytes(buffer)


def gather_results(group: Group, result: bytes, error: Exception | None, *, doing: str) -> list[bytes]:
    """Return the results of all ranks, or raise the common error if there is one. Collective.

    Raises:
        CheckpointError: as `run_on_all_ranks`.
    """
    if error is not None and group.size == 1:
        raise error
    # A rank that failed sends its error in place of its result, so no rank waits for it.
    step = step_header(doing)
    message = step + (_RESULT + result if error is None else _ERROR + encode_error(error))
    try:
        messages = group.all_gather(message)
    except RankFailedError as lost:
        raise_lost_rank(lost, error)
    check_same_step(messages, step)
    bodies = [message[len(step) :] for message in messages]
    failures = {rank: body[1:] for rank, body in enumerate(bodies) if body[:1] != _RESULT}
    if failures:
        raise common_error(failures, doing) from error
    return [body[1:] for body in bodies]


def raise_lost_rank(lost: RankFailedError, error: Exception | None) -> NoReturn:
    """Raise the error of a rank that does not answer.

    If this rank's own step has failed because a rank was lost, its error is raised instead: it names the rank
    that was lost first.
    """
    if isinstance(error, RankFailedError):
        raise error from lost
    raise lost from error


def _reduce(
    group: Group,
    numbers: Numbers,
    error: Exception | None,
    *,
    doing: str,
    data: bytes | None = None,
) -> tuple[Numbers, Callable[[], list[bytes]]]:
    """Reduce the numbers of all ranks and raise the common error if there is one. Collective.

    Returns:
        The reduced numbers, and a function that gathers data on rank 0.
    """
    step = step_header(doing)
    # A number is equal on all ranks if its maximum equals its minimum, which is minus the maximum of its
    # negative. The digest of the step is compared in the same way: ranks at different steps stop here.
    compared = (zlib.crc32(step), *numbers.equal)
    sent = [int(error is not None), *compared, *(-n for n in compared), *numbers.largest]
    gather: Callable[[], list[bytes]] = partial(group.gather, data or b"")
    try:
        if data is not None:
            largest, gather = group.all_reduce_max_then_gather(sent, data, step=step)
        else:
            largest = group.all_reduce_max(sent, step=step)
    except RankFailedError as lost:
        raise_lost_rank(lost, error)
    count = len(compared)
    has_failed, maxima, minima = largest[0], largest[1 : 1 + count], largest[1 + count : 1 + 2 * count]
    is_equal = [int(high == -low) for high, low in zip(maxima, minima, strict=True)]
    if has_failed or not is_equal[0]:
        # All ranks have received the same numbers, so all of them exchange their errors now.
        gather_results(group, b"", error, doing=doing)
    return Numbers(tuple(is_equal[1:]), tuple(largest[1 + 2 * count :])), gather
