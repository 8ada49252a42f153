"""Steps that all ranks run, and whose errors are raised on all ranks.

Each step is a block: it runs on every rank (or on rank 0), sends the result or the error at its end, and
raises one error on all ranks if a rank failed. No rank waits for a rank that has failed.
"""

from __future__ import annotations

import logging
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn

from megackpt.comm.group import (
    Group,
    check_same_step,
    common_error,
    decode_error,
    encode_error,
    step_header,
)
from megackpt.errors import CheckpointError, RankFailedError

_log = logging.getLogger(__name__)

_RESULT, _ERROR = b"\x00", b"\x01"  # first byte of what follows the step header


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
    """A block whose numbers are compared, maximised or added at its end. Each is at least 0, and below 2**62.

    Attributes:
        equal: this rank's numbers to compare, by name; set in the block.
        largest: this rank's numbers to maximise, by name; set in the block.
        added: this rank's numbers to add, by name, below `2**SUMMAND_BITS`; set in the block.
        is_equal: whether a number to compare is equal on all ranks, by name; empty until the block has ended.
        maximum: the maximum over all ranks, by name; empty until the block has ended.
        total: the sum over all ranks, by name; empty until the block has ended.
    """

    equal: dict[str, int] = field(default_factory=dict)
    largest: dict[str, int] = field(default_factory=dict)
    added: dict[str, int] = field(default_factory=dict)
    is_equal: dict[str, bool] = field(default_factory=dict)
    maximum: dict[str, int] = field(default_factory=dict)
    total: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class _KeptError:
    """The error of a block that has ended, to send to the other ranks; None if it did not fail."""

    error: Exception | None = None


@contextmanager
def _error_kept() -> Iterator[_KeptError]:
    kept = _KeptError()
    try:
        yield kept
    except Exception as failure:  # noqa: BLE001 - sent to all ranks, and raised on all of them
        kept.error = failure


def begin_step(doing: str) -> None:
    """Log that a step begins on this rank. Every step calls this first; fault tests replace it."""
    _log.debug("begin: %s", doing)


@contextmanager
def errors_on_all_ranks(group: Group, doing: str) -> Iterator[None]:
    """Run the block on every rank; if it fails on any rank, raise the error on all ranks.

    Collective: the ranks synchronise at the end of the block.

    Args:
        group: the ranks.
        doing: what the block does, for the error's text: "writing the index".

    Raises:
        CheckpointError: a rank failed. The class is that of the first failing rank's error (RankFailedError
            if that is not a CheckpointError); the text names the rank and the cause. On that rank the
            original error is the `__cause__`.
    """
    with _error_kept() as kept:
        begin_step(doing)
        yield
    _reduce(group, (), (), kept.error, doing=doing)


@contextmanager
def gather_step(group: Group, doing: str, *, on_all_ranks: bool = False) -> Iterator[GatherStep]:
    """Run the block on every rank, and gather what the ranks assign to `data` in it. Collective.

    Args:
        group: the ranks.
        doing: what the block does, for the error's text.
        on_all_ranks: whether every rank receives the results, or rank 0 only.

    Raises:
        CheckpointError: as `errors_on_all_ranks`.
    """
    step = GatherStep()
    with _error_kept() as kept:
        begin_step(doing)
        yield step
    if on_all_ranks:
        step.results = gather_results(group, step.data, kept.error, doing=doing)
    else:
        # If a rank has failed, this raises on all ranks, so no rank calls `gather` alone.
        step.results = _reduce(group, (), (), kept.error, doing=doing, data=step.data).gather()


@contextmanager
def compare_step(
    group: Group,
    doing: str,
    *,
    equal: Sequence[str] = (),
    largest: Sequence[str] = (),
    added: Sequence[str] = (),
) -> Iterator[CompareStep]:
    """Run the block on every rank, and reduce the numbers that the ranks set in it. Collective.

    The length of the messages does not depend on the number of ranks.

    Args:
        group: the ranks.
        doing: what the block does, for the error's text.
        equal: names of the numbers to compare; the same on all ranks. The block sets all of them.
        largest: names of the numbers to maximise; likewise.
        added: names of the numbers to add; likewise.

    Raises:
        CheckpointError: as `errors_on_all_ranks`.
    """
    step = CompareStep()
    with _error_kept() as kept:
        begin_step(doing)
        yield step
        assert step.equal.keys() == set(equal)
        assert step.largest.keys() == set(largest)
        assert step.added.keys() == set(added)
    # A rank that has failed has not set all of them, and its message has the length of every other.
    reduced = _reduce(
        group,
        [step.equal.get(name, 0) for name in equal],
        [step.largest.get(name, 0) for name in largest],
        kept.error,
        added=[step.added.get(name, 0) for name in added],
        doing=doing,
    )
    step.is_equal = dict(zip(equal, reduced.is_equal, strict=True))
    step.maximum = dict(zip(largest, reduced.maxima, strict=True))
    step.total = dict(zip(added, reduced.sums, strict=True))


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
        if group.rank == 0:
            begin_step(doing)
        yield step
    except Exception as failure:
        if group.rank != 0:
            # A scatter carries messages of rank 0 only, so the error of another rank cannot reach the others.
            raise
        error = failure
    step.part = _scatter(group, step.parts, error, doing=doing)


@contextmanager
def rank_0_errors_on_all_ranks(group: Group, doing: str) -> Iterator[None]:
    """Run the block on every rank, and raise an error of rank 0 on all ranks as it is. Collective.

    Raises:
        CheckpointError: as `scatter_step`.
    """
    with scatter_step(group, doing):
        yield


def _scatter(group: Group, parts: Sequence[bytes], error: Exception | None, *, doing: str) -> bytes:
    """Send rank 0's parts, or its error, and return this rank's part."""
    # A single process raises its own error unchanged, with its class and traceback.
    if error is not None and group.size == 1:
        raise error
    messages: Sequence[bytes] = []
    if group.rank == 0 and error is None:
        messages = [_RESULT + part for part in parts]
    elif error is not None:
        messages = [_ERROR + _encode_error_of_rank_0(error, doing)] * group.size
    try:
        message = group.scatter(messages)
    except RankFailedError as lost:
        raise_lost_rank(lost, error)
    if message[:1] == _RESULT:
        return message[1:]
    # Rank 0 raises the error itself, which has the traceback. Other ranks raise a copy from the message.
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
    # A broadcast fills buffers of equal length, so all ranks need the length first.
    with scatter_step(group, doing) as step:
        step.parts = [struct.pack("<q", len(data))] * group.size  # those of rank 0 are sent
    buffer = bytearray(data) if group.rank == 0 else bytearray(struct.unpack("<q", step.part)[0])
    group.broadcast(memoryview(buffer), root=0)
    return bytes(buffer)


def gather_results(group: Group, result: bytes, error: Exception | None, *, doing: str) -> list[bytes]:
    """Return the results of all ranks, or raise the common error if there is one. Collective.

    Raises:
        CheckpointError: as `errors_on_all_ranks`.
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


@dataclass(frozen=True, slots=True)
class _Reduced:
    """What all ranks know after a step that no rank has failed.

    Attributes:
        is_equal: whether each number to compare is equal on all ranks.
        maxima: the maximum of each number to maximise.
        sums: the sum of each number to add.
        gather: gathers the data of the step on rank 0; all ranks call it, or none does.
    """

    is_equal: Sequence[bool]
    maxima: Sequence[int]
    sums: Sequence[int]
    gather: Callable[[], list[bytes]]


def _reduce(
    group: Group,
    equal: Sequence[int],
    largest: Sequence[int],
    error: Exception | None,
    *,
    doing: str,
    added: Sequence[int] = (),
    data: bytes | None = None,
) -> _Reduced:
    """Reduce the numbers of all ranks and raise the common error if there is one. Collective.

    A step has numbers to add, or data to gather, or neither.
    """
    step = step_header(doing)
    # A number is equal on all ranks if its maximum equals its minimum, which is minus the maximum of its
    # negative. The digest of the step is compared in the same way: ranks at different steps stop here.
    compared = (zlib.crc32(step), *equal)
    sent = [int(error is not None), *compared, *(-n for n in compared), *largest]
    sums: list[int] = []
    gather: Callable[[], list[bytes]] = partial(group.gather, data or b"")
    try:
        if data is not None:
            reduced, gather = group.all_reduce_max_then_gather(sent, data, step=step)
        elif added:
            reduced, sums = group.all_reduce(sent, added, step=step)
        else:
            reduced = group.all_reduce_max(sent, step=step)
    except RankFailedError as lost:
        raise_lost_rank(lost, error)
    count = len(compared)
    has_failed, maxima, minima = reduced[0], reduced[1 : 1 + count], reduced[1 + count : 1 + 2 * count]
    is_equal = [high == -low for high, low in zip(maxima, minima, strict=True)]
    if has_failed or not is_equal[0]:
        # All ranks have received the same numbers, so all of them exchange their errors now.
        gather_results(group, b"", error, doing=doing)
    return _Reduced(is_equal[1:], reduced[1 + 2 * count :], sums, gather)
