"""Meetings whose messages do not grow with the number of ranks, and those in which rank 0 speaks.

Owns what ranks compare by numbers alone, how rank 0 gives each rank its part, and how both are done in a
group that has only the two methods of `Group`.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeGuard

from megackpt.comm.group import (
    Group,
    check_one_step,
    common_error,
    encode_error,
    error_class,
    moves_bulk,
    named_step,
    raise_lost,
    run_step,
    settle,
)
from megackpt.errors import CheckpointError, RankFailedError

MOST_NUMBERS = 28
"""A meeting compares no more numbers than this, so that all its messages are equally long."""


class ReducingGroup(Group, Protocol):
    """A group that also compares numbers, and lets rank 0 give each rank something. Collectives all.

    Raises:
        RankFailedError: from every method, when a rank did not answer before the deadline.
    """

    def maximum(self, numbers: Sequence[int], *, step: bytes) -> list[int]:
        """Return the largest of what the ranks gave, number by number: at most MOST_NUMBERS, 64 bits each.

        step names what the ranks do, for the error where others do something else.
        """

    def scatter(self, parts: Sequence[bytes]) -> bytes:
        """Return this rank's part; rank 0 gives those of all ranks, others an empty list."""


class CollectingGroup(ReducingGroup, Protocol):
    """A group that also compares numbers and gathers in one meeting. A collective.

    Raises:
        RankFailedError: as those of `ReducingGroup`.
    """

    def collect(
        self, numbers: Sequence[int], data: bytes, *, step: bytes
    ) -> tuple[list[int], Callable[[], list[bytes]]]:
        """Return what `maximum` returns, and a function that returns what `gather` does.

        All ranks call that function next, or none does: it may have to send what is long.
        """


class OpeningGroup(ReducingGroup, Protocol):
    """A group that can do something else while numbers are on their way. A collective.

    Raises:
        RankFailedError: as those of `ReducingGroup`, here or from what it returns.
    """

    def open_maximum(self, numbers: Sequence[int], *, step: bytes) -> Callable[[], list[int]]:
        """Send what `maximum` does; return a function that waits for others and returns the largest.

        It is called next, before anything else is done with the group.
        """


def opens(group: Group) -> TypeGuard[OpeningGroup]:
    """Say whether a group can do something while it meets."""
    return hasattr(group, "open_maximum")


def collects(group: Group) -> TypeGuard[CollectingGroup]:
    """Say whether a group compares and gathers in one."""
    return hasattr(group, "collect")


def reduces(group: Group) -> TypeGuard[ReducingGroup]:
    """Say whether a group compares numbers itself."""
    return hasattr(group, "maximum") and hasattr(group, "scatter")


@dataclass(frozen=True, slots=True)
class Numbers:
    """What a rank says of itself, or all ranks say together; each at least 0 and below 2**62.

    Attributes:
        alike: from a rank, numbers to be compared; from all, 1 for each that all ranks have alike, else 0.
        largest: from all, the largest of the ranks' numbers.
    """

    alike: tuple[int, ...]
    largest: tuple[int, ...] = ()


def compare(
    group: Group,
    step: Callable[[], Numbers],
    *,
    alike: int,
    largest: int = 0,
    doing: str,
    meanwhile: Callable[[], None] | None = None,
) -> Numbers:
    """Run a step on every rank and compare what the steps return; a failure on any rank is raised on all.

    Collective: one small message from each rank to each where the group can. alike and largest say how many
    numbers steps return; doing says what is done, for the error's text. meanwhile is called on a rank whose
    step has not failed, while its numbers are on their way where the group can do that, else before.

    Raises:
        CheckpointError: as `together`.
    """
    said, error = run_step(step)
    mine = said or Numbers((0,) * alike, (0,) * largest)
    if error is not None:
        meanwhile = None
    found, _ = _compared(group, mine, error, doing=doing, meanwhile=meanwhile)
    return found


def _compared(
    group: Group,
    mine: Numbers,
    error: Exception | None,
    *,
    doing: str,
    data: bytes | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> tuple[Numbers, Callable[[], list[bytes]]]:
    """Compare numbers, and errors, which all raise; return a function that returns to rank 0 data of all."""
    alike = len(mine.alike)
    compared = (zlib.crc32(named_step(doing)), *mine.alike)
    sent = [int(error is not None), *compared, *(-n for n in compared), *mine.largest]
    gathered: Callable[[], list[bytes]] = partial(group.gather, data or b"")
    if meanwhile is not None and not (opens(group) and group.size > 1):
        meanwhile()
        meanwhile = None
    if not reduces(group) or group.size == 1:
        packed = struct.pack(f"<{len(sent)}q", *sent)
        everyone = settle(group, packed, error, doing=doing)
        columns = zip(*(struct.unpack(f"<{len(sent)}q", p) for p in everyone), strict=True)
        found = [max(column) for column in columns]
    else:
        try:
            if data is not None and collects(group):
                found, gathered = group.collect(sent, data, step=named_step(doing))
            elif meanwhile is not None and opens(group):
                waiting = group.open_maximum(sent, step=named_step(doing))
                try:
                    meanwhile()
                finally:  # whatever happens, all go on from here together
                    found = waiting()
            else:
                found = group.maximum(sent, step=named_step(doing))
        except RankFailedError as lost:
            raise_lost(lost, error)
        if found[0] or found[1] != -found[2 + alike]:  # every rank sees it, so they can tell each other more
            settle(group, b"", error, doing=doing)
    high, low = found[2 : 2 + alike], found[3 + alike : 3 + 2 * alike]
    same = tuple(int(a == -b) for a, b in zip(high, low, strict=True))
    return Numbers(same, tuple(found[3 + 2 * alike :])), gathered


def together_at_root(group: Group, step: Callable[[], bytes], *, doing: str) -> list[bytes]:
    """Like `together`, but only rank 0 is given the results, which may be large."""
    result, error = run_step(step)
    _, gathered = _compared(group, Numbers(()), error, doing=doing, data=result or b"")
    return gathered()


def given_by_root(group: Group, step: Callable[[], Sequence[bytes]], *, doing: str) -> bytes:
    """Run a step on rank 0, which returns what each rank is given; a failure is raised on all.

    Collective. An error of ours is that of all ranks, as it is: the step finds faults of others, too.

    Raises:
        CheckpointError: what the step raised; RankFailedError where that was not one of ours.
    """
    parts: Sequence[bytes] = []
    error: Exception | None = None
    if group.rank == 0:
        made, error = run_step(step)
        if error is not None and group.size == 1:
            raise error
        told = [b"\x00" + part for part in made or []]
        parts = told if error is None else [b"\x01" + encode_error(error)] * group.size
    try:
        answer = _scattered(group, parts, doing)
    except RankFailedError as lost:
        raise_lost(lost, error)
    if answer[:1] == b"\x00":
        return answer[1:]
    if isinstance(error, CheckpointError):
        raise error
    fields = json.loads(answer[1:])
    if not fields["class"]:
        raise common_error({0: answer[1:]}, doing) from error
    kind = error_class(fields["class"])
    raise kind(fields["text"], key=fields["key"], rank=fields["rank"], path=fields["path"])


def _scattered(group: Group, parts: Sequence[bytes], doing: str) -> bytes:
    if reduces(group):
        return group.scatter(parts)
    step = named_step(doing)
    lengths = struct.pack(f"<{len(parts)}q", *map(len, parts))
    answers = group.all_gather(step + lengths + b"".join(parts))  # to all: such a group has no other way
    check_one_step(answers, step)
    said = memoryview(answers[0])[len(step) :]
    ends = [0]
    for length in struct.unpack(f"<{group.size}q", said[: 8 * group.size]):
        ends.append(ends[-1] + length)
    body = said[8 * group.size :]
    return bytes(body[ends[group.rank] : ends[group.rank + 1]])


def from_root(group: Group, data: bytes, *, doing: str) -> bytes:
    """Return on every rank what rank 0 has in data. Collective."""
    length = given_by_root(group, lambda: [struct.pack("<q", len(data))] * group.size, doing=doing)
    if not moves_bulk(group):
        answers = group.all_gather(named_step(doing) + (data if group.rank == 0 else b""))
        check_one_step(answers, named_step(doing))
        return answers[0][len(named_step(doing)) :]
    buffer = bytearray(data) if group.rank == 0 else bytearray(struct.unpack("<q", length)[0])
    group.broadcast(memoryview(buffer), root=0)
    return bytes(buffer)
