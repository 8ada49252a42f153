"""Groups of ranks that act together.

Owns the protocol that the engine speaks, the group of one process, and the rule that makes failures common:
a step's error on one rank is the same error on all. Nothing here depends on torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol, TypeAlias, TypeGuard, TypeVar

from megackpt import errors
from megackpt.errors import CheckpointError, DeclarationError, RankFailedError

T = TypeVar("T")

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


def is_group(group: object) -> bool:
    """Say whether something has the methods of a group; a process group of torch has not."""
    return all(hasattr(group, name) for name in ("rank", "size", "all_gather", "gather"))


def check_group(group: object) -> None:
    """Check that something is a group, by its methods. Local.

    Raises:
        DeclarationError: it is none, a process group of torch for instance.
    """
    if not is_group(group):
        raise DeclarationError(
            f"group is {group!r}, which lacks the methods of megackpt.comm.Group. Leave it out for all ranks "
            f"of torch.distributed; for some give megackpt.comm.TorchGroup(ranks=[...], timeout_s=...)."
        )


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
    result, error = run_step(step)
    return settle(group, result or b"", error, doing=doing)


def run_step(step: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return what a step returned, or its error."""
    try:
        return step(), None
    except Exception as error:  # noqa: BLE001 - handed over to all ranks, and raised again there
        return None, error


def settle(group: Group, result: bytes, error: Exception | None, *, doing: str) -> list[bytes]:
    """Return all ranks' results, or raise the common error if there is one; see `together`. Collective."""
    if error is not None and group.size == 1:
        raise error
    told = (b"\x00" + result) if error is None else (b"\x01" + encode_error(error))
    step = named_step(doing)
    try:
        answers = group.all_gather(step + told)
    except RankFailedError as lost:
        raise_lost(lost, error)
    check_one_step(answers, step)
    at = len(step)
    failures = {rank: a[at + 1 :] for rank, a in enumerate(answers) if a[at : at + 1] != b"\x00"}
    if failures:
        raise common_error(failures, doing) from error
    return [answer[at + 1 :] for answer in answers]


def raise_lost(lost: RankFailedError, error: Exception | None) -> NoReturn:
    """Raise that ranks do not answer, or what a step that failed here has noticed of that before."""
    if isinstance(error, RankFailedError):  # lost in the step already: that names who was missing first
        raise error from lost
    raise lost from error


def named_step(doing: str) -> bytes:
    """Return what each message of a step begins with."""
    return len(doing.encode()).to_bytes(4, "little") + doing.encode()


def check_one_step(answers: Sequence[bytes], step: bytes) -> None:
    """Check that all messages are from one step, which those of this rank begin with.

    Raises:
        RankFailedError: some are from another step, so what follows would be taken for what it is not.
    """
    others = [rank for rank, answer in enumerate(answers) if not answer.startswith(step)]
    if others:
        raise RankFailedError(
            f"Ranks are at different steps: rank(s) {describe_ranks(others)} sent "
            f"{_step_of(answers[others[0]])} while this one sent {_step_of(step)}. Call the same "
            f"functions in the same order on all ranks, with equal arguments and options.",
            rank=others[0],
        )


def step_in(message: bytes) -> bytes:
    """Return what a message of a step begins with, which may be empty for other messages."""
    return message[: 4 + int.from_bytes(message[:4], "little")]


def _step_of(answer: bytes) -> str:
    """Say which step a message is from."""
    length = int.from_bytes(answer[:4], "little")
    name = answer[4 : 4 + length]
    is_name = len(answer) >= 4 + length and name.isascii() and name.decode("ascii").isprintable()
    return f"what belongs to {name.decode('ascii')!r}" if is_name and name else "a message of another kind"


def encode_error(error: BaseException) -> bytes:
    """Return an error as it is sent to other ranks."""
    if isinstance(error, CheckpointError):
        where = {"key": error.key, "rank": error.rank, "path": error.path}
        return json.dumps({"class": type(error).__name__, "text": error.message, **where}).encode()
    fields = {"class": "", "text": f"{type(error).__name__}: {error}", "key": None, "path": None}
    return json.dumps(fields).encode()


def common_error(failures: dict[int, bytes], doing: str) -> CheckpointError:
    """Return the error of all ranks for the encoded ones of some."""
    first = min(failures)
    fields = json.loads(failures[first])
    others = sorted(set(failures) - {first})
    also = (
        f" Ranks {', '.join(map(str, others[:8]))}{', ...' if len(others) > 8 else ''} failed too."
        if others
        else ""
    )
    kind = error_class(fields["class"])
    text = f"Rank {first} failed while {doing}: {fields['text']}{also}"
    return kind(text, key=fields["key"], rank=first, path=fields["path"])


def error_class(name: str) -> type[CheckpointError]:
    """Look a class of our own error tree up by name; anything else becomes a RankFailedError."""
    found: object = getattr(errors, name, None) if name else None
    return found if isinstance(found, type) and issubclass(found, CheckpointError) else RankFailedError


def describe_ranks(ranks: Sequence[int]) -> str:
    """Ranks as text, the first eight of them: `0, 2, 5`."""
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
