"""Groups of ranks that act together.

Owns the protocol that the engine speaks, the group of one process, and the rule that makes failures common:
a step's error on one rank is the same error on all. Nothing here depends on torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias, TypeGuard

from megackpt import errors
from megackpt.errors import CheckpointError, RankFailedError

Parcel: TypeAlias = tuple[int, memoryview]
"""A rank of the group, and bytes that go there or come from there."""


class Group(Protocol):
    """Ranks that exchange small messages; every method is a collective."""

    @property
    def rank(self) -> int:
        """Number of this process in the group."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def all_gather(self, data: bytes) -> list[bytes]:
        """Return what every rank gave, in rank order.

        Raises:
            RankFailedError: a rank did not answer before the deadline.
        """

    def gather(self, data: bytes) -> list[bytes]:
        """Return on rank 0 what every rank gave, in rank order; nothing on the others."""


class BulkGroup(Group, Protocol):
    """A group that also moves much data, between buffers of the caller's: none is made by the group.

    Every method is a collective, and buffers are contiguous and writable.

    Raises:
        RankFailedError: from every method, when a rank did not answer before the deadline.
    """

    def exchange(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> None:
        """Move parcels between pairs of ranks: the i-th sent to a rank fills the i-th received from this one.

        Both have equal lengths. One buffer may be sent to several ranks.
        """

    def broadcast(self, data: memoryview, *, root: int) -> None:
        """Fill data on every rank with what root has in it; equally long everywhere."""

    def all_gather_into(self, data: memoryview, everyone: memoryview) -> None:
        """Fill everyone with what each rank has in data, in rank order; equally long everywhere."""


def moves_bulk(group: Group) -> TypeGuard[BulkGroup]:
    """Say whether a group can move much data."""
    return all(hasattr(group, name) for name in ("exchange", "broadcast", "all_gather_into"))


class SingleProcess:
    """The group of a process that is alone."""

    rank = 0
    size = 1

    def all_gather(self, data: bytes) -> list[bytes]:
        """Return the data alone."""
        return [data]

    def gather(self, data: bytes) -> list[bytes]:
        """Return the data alone."""
        return [data]

    def exchange(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> None:
        """Copy from each buffer into the one it belongs to."""
        for (_, data), (_, out) in zip(sends, receives, strict=True):
            out[:] = data

    def broadcast(self, data: memoryview, *, root: int) -> None:
        """Do nothing."""

    def all_gather_into(self, data: memoryview, everyone: memoryview) -> None:
        """Copy the data."""
        everyone[:] = data


def together(group: Group, step: Callable[[], bytes], *, doing: str) -> list[bytes]:
    """Run a step on every rank and return all ranks' results; a failure on any rank is raised on all of them.

    Collective. doing says what is done, for the error's text.

    Raises:
        CheckpointError: of the class that the first failing rank raised (RankFailedError where it was not
            one of ours); it names the rank and its cause. On that rank the original stands behind it as
            `__cause__`.
    """
    return _settle(group, *_run(step), doing=doing)


def together_at_root(group: Group, step: Callable[[], bytes], *, doing: str) -> list[bytes]:
    """Like `together`, but only rank 0 is given the results, which may be large."""
    result, error = _run(step)
    _settle(group, b"", error, doing=doing)
    return group.gather(result)


def _run(step: Callable[[], bytes]) -> tuple[bytes, Exception | None]:
    try:
        return step(), None
    except Exception as error:  # noqa: BLE001 - handed over to all ranks, and raised again there
        return b"", error


def _settle(group: Group, result: bytes, error: Exception | None, *, doing: str) -> list[bytes]:
    if error is not None and group.size == 1:
        raise error
    told = (b"\x00" + result) if error is None else (b"\x01" + _encode(error))
    step = _named(doing)
    try:
        answers = group.all_gather(step + told)
    except RankFailedError as lost:
        if isinstance(error, RankFailedError):  # lost in the step already: that names who was missing first
            raise error from lost
        raise lost from error
    _check_one_step(answers, doing)
    at = len(step)
    failures = {rank: a[at + 1 :] for rank, a in enumerate(answers) if a[at : at + 1] != b"\x00"}
    if failures:
        raise _common_error(failures, doing) from error
    return [answer[at + 1 :] for answer in answers]


def _named(doing: str) -> bytes:
    """Return what each message of a step begins with."""
    return len(doing.encode()).to_bytes(4, "little") + doing.encode()


def _check_one_step(answers: Sequence[bytes], doing: str) -> None:
    """Check that all messages are from one step.

    Raises:
        RankFailedError: some are from another step, so what follows would be taken for what it is not.
    """
    others = [rank for rank, answer in enumerate(answers) if not answer.startswith(_named(doing))]
    if others:
        raise RankFailedError(
            f"Ranks are at different steps: rank(s) {describe_ranks(others)} sent "
            f"{_step_of(answers[others[0]])} while this one was {doing!r}. Call the same functions in the "
            f"same order on all ranks, with equal options.",
            rank=others[0],
        )


def _step_of(answer: bytes) -> str:
    """Say which step a message is from."""
    length = int.from_bytes(answer[:4], "little")
    name = answer[4 : 4 + length]
    is_name = len(answer) > 4 + length and name.isascii() and name.decode("ascii").isprintable()
    return f"what belongs to {name.decode('ascii')!r}" if is_name and name else "a message of another kind"


def _encode(error: Exception) -> bytes:
    if isinstance(error, CheckpointError):
        fields = {"class": type(error).__name__, "text": error.message, "key": error.key, "path": error.path}
    else:
        fields = {"class": "", "text": f"{type(error).__name__}: {error}", "key": None, "path": None}
    return json.dumps(fields).encode()


def _common_error(failures: dict[int, bytes], doing: str) -> CheckpointError:
    first = min(failures)
    fields = json.loads(failures[first])
    others = sorted(set(failures) - {first})
    also = (
        f" Ranks {', '.join(map(str, others[:8]))}{', ...' if len(others) > 8 else ''} failed too."
        if others
        else ""
    )
    kind = _error_class(fields["class"])
    text = f"Rank {first} failed while {doing}: {fields['text']}{also}"
    return kind(text, key=fields["key"], rank=first, path=fields["path"])


def _error_class(name: str) -> type[CheckpointError]:
    """Look a class of our own error tree up by name; anything else becomes a RankFailedError."""
    found: object = getattr(errors, name, None) if name else None
    return found if isinstance(found, type) and issubclass(found, CheckpointError) else RankFailedError


def describe_ranks(ranks: Sequence[int]) -> str:
    """Ranks as text, the first eight of them: `0, 2, 5`."""
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
