"""The interface through which ranks communicate: small messages, numbers, and bulk bytes between buffers.

`Group` is the base class of every group. A subclass must implement `all_gather` and `gather`. Every other
method has a default that uses these two; a group for many ranks or many bytes overrides it. This module does
not import torch.
"""

from __future__ import annotations

import json
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeAlias

from megackpt import errors
from megackpt.errors import CheckpointError, DeclarationError, RankFailedError

# Encodes the messages between ranks: their fields, the name of the step, and the error that ended it.


def join_fields(fields: Sequence[bytes]) -> bytes:
    """Join byte strings to one message, each with its length in 8 bytes. `split_fields` is the inverse. Pure.

    >>> split_fields(join_fields([b"rows", b"", b"values"]))
    [b'rows', b'', b'values']
    """
    return b"".join(part for field in fields for part in (len(field).to_bytes(8, "little"), field))


def split_fields(message: bytes) -> list[bytes]:
    """Return the byte strings that `join_fields` has joined. Pure."""
    fields, position = [], 0
    while position < len(message):
        start = position + 8
        position = start + int.from_bytes(message[start - 8 : start], "little")
        fields.append(message[start:position])
    return fields


def step_header(doing: str) -> bytes:
    """Return the first bytes of every message of a step: the length of its name, and the name."""
    return len(doing.encode()).to_bytes(4, "little") + doing.encode()


def read_step_header(message: bytes) -> bytes:
    """Return the step header of a message; it may be empty for a message that has none."""
    return message[: 4 + int.from_bytes(message[:4], "little")]


def check_same_step(messages: Sequence[bytes], step: bytes) -> None:
    """Check that the messages of all ranks begin with the header of this rank's step.

    Raises:
        RankFailedError: a rank is at another step, so its message must not be interpreted.
    """
    different = [rank for rank, message in enumerate(messages) if not message.startswith(step)]
    if different:
        raise RankFailedError(
            f"Ranks are at different steps: rank(s) {describe_ranks(different)} sent "
            f"{_describe_step(messages[different[0]])} while this one sent {_describe_step(step)}. Call the "
            f"same functions in the same order on all ranks, with equal arguments and options.",
            rank=different[0],
        )


def _describe_step(message: bytes) -> str:
    length = int.from_bytes(message[:4], "little")
    name = message[4 : 4 + length]
    # A message of another kind has arbitrary bytes here. An error must not show them as a name.
    is_name = len(message) >= 4 + length and name.isascii() and name.decode("ascii").isprintable()
    return f"what belongs to {name.decode('ascii')!r}" if is_name and name else "a message of another kind"


def encode_error(error: BaseException) -> bytes:
    """Return an error as a value that can be sent to other ranks. Pure."""
    if isinstance(error, CheckpointError):
        where = {"key": error.key, "rank": error.rank, "path": error.path}
        return json.dumps({"class": type(error).__name__, "text": error.message, **where}).encode()
    fields = {"class": "", "text": f"{type(error).__name__}: {error}", "key": None, "path": None}
    return json.dumps(fields).encode()


def decode_error(data: bytes) -> CheckpointError:
    """Return the error that was given to `encode_error`, or a RankFailedError with its text."""
    fields = json.loads(data)
    kind = error_class(fields["class"])
    return kind(fields["text"], key=fields["key"], rank=fields.get("rank"), path=fields["path"])


def common_error(failures: dict[int, bytes], doing: str) -> CheckpointError:
    """Return the error that all ranks raise, given the encoded errors of some ranks."""
    # Every rank must choose the same error, so the lowest rank's stands for all.
    first = min(failures)
    fields = json.loads(failures[first])
    further = sorted(set(failures) - {first})
    also = f" Ranks {describe_ranks(further)} failed too." if further else ""
    text = f"Rank {first} failed while {doing}: {fields['text']}{also}"
    return error_class(fields["class"])(text, key=fields["key"], rank=first, path=fields["path"])


def error_class(name: str) -> type[CheckpointError]:
    """Return the class of that name in `megackpt.errors`, or RankFailedError if there is none."""
    # The name comes from another process, so it must not select anything but an error of this library.
    kind: object = getattr(errors, name, None) if name else None
    return kind if isinstance(kind, type) and issubclass(kind, CheckpointError) else RankFailedError


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, without gloo's advice for users of collectives.

    Errors of C++ libraries have their stack in the other lines.
    """
    lines = str(error).partition(" This is typically")[0].strip().splitlines()
    return lines[0] if lines else "no reason given"


def describe_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text, the first eight of them: `0, 2, 5`."""
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


PeerBuffer: TypeAlias = tuple[int, memoryview]
"""A rank of the group, and the buffer that is sent to it or received from it."""

MAX_NUMBERS = 29
"""The most numbers that one reduction of the engine takes, so that its messages have one length."""

SUMMAND_BITS = 40
"""A number that ranks add has at most so many bits, so that the sum over four million ranks has 62."""


class Group(ABC):
    """Ranks that call the same methods in the same order: every method but the constructor is a collective.

    Buffers (memoryviews) are contiguous and writable and belong to the caller.

    Attributes:
        rank: number of this process in the group.
        size: number of ranks.

    Raises:
        RankFailedError: from every method, when a rank did not answer before the deadline of the group.
    """

    rank: int
    size: int

    @abstractmethod
    def all_gather(self, data: bytes) -> list[bytes]:
        """Return the data of every rank, in rank order. Lengths may differ between ranks."""

    @abstractmethod
    def gather(self, data: bytes) -> list[bytes]:
        """Return on rank 0 the data of every rank, in rank order, and an empty list on the other ranks."""

    def all_reduce_max(self, numbers: Sequence[int], *, step: bytes) -> list[int]:
        """Return the element-wise maximum over all ranks.

        Args:
            numbers: equally many on all ranks, each representable in 64 bits.
            step: header of the step (see `step_header`), for the error if ranks are at different steps.
        """
        return [max(column) for column in self._columns(numbers, step)]

    def all_reduce(
        self, largest: Sequence[int], added: Sequence[int], *, step: bytes
    ) -> tuple[list[int], list[int]]:
        """Return the element-wise maximum of some numbers, and the sums of others, over all ranks.

        Args:
            largest: equally many on all ranks, each representable in 64 bits.
            added: equally many on all ranks, each at least 0 and below `2**SUMMAND_BITS`.
            step: header of the step, as for `all_reduce_max`.
        """
        numbers, count = (*largest, *added), len(largest)
        columns = self._columns(numbers, step)
        return [max(column) for column in columns[:count]], [sum(column) for column in columns[count:]]

    def _columns(self, numbers: Sequence[int], step: bytes) -> list[tuple[int, ...]]:
        """Return each number of all ranks."""
        packed = struct.pack(f"<{len(numbers)}q", *numbers)
        messages = self.all_gather(step + packed)
        check_same_step(messages, step)
        return list(zip(*(struct.unpack(f"<{len(numbers)}q", m[len(step) :]) for m in messages), strict=True))

    def all_reduce_max_then_gather(
        self, numbers: Sequence[int], data: bytes, *, step: bytes
    ) -> tuple[list[int], Callable[[], list[bytes]]]:
        """Return the element-wise maximum, and a function that gathers data on rank 0.

        Either all ranks call that function next, or none does. A group may send short data together with the
        numbers.
        """
        return self.all_reduce_max(numbers, step=step), lambda: self.gather(data)

    def scatter(self, parts: Sequence[bytes]) -> bytes:
        """Return this rank's part. Rank 0 gives the parts of all ranks; other ranks give an empty list."""
        step = step_header("scatter")
        messages = self.all_gather(step + struct.pack(f"<{len(parts)}q", *map(len, parts)) + b"".join(parts))
        check_same_step(messages, step)
        # Only the message of rank 0 has parts. Those of the other ranks end after the header.
        message = memoryview(messages[0])[len(step) :]
        lengths_of_parts = struct.unpack(f"<{self.size}q", message[: 8 * self.size])
        begin = 8 * self.size + sum(lengths_of_parts[: self.rank])
        return bytes(message[begin : begin + lengths_of_parts[self.rank]])

    def exchange(self, sends: Sequence[PeerBuffer], receives: Sequence[PeerBuffer]) -> None:
        """Move bytes between pairs of ranks, all pairs at once.

        The i-th buffer that a rank sends to another fills the i-th buffer that the other receives from it;
        both have equal lengths. One buffer may be sent to several ranks.
        """
        heads = b"".join(struct.pack("<qq", peer, data.nbytes) for peer, data in sends)
        message = struct.pack("<q", len(sends)) + heads + b"".join(data for _, data in sends)
        incoming = [_buffers_for(self.rank, m) for m in self.all_gather(message)]
        # The buffers of a message keep the order of `sends`, so each receive takes the next one of its peer.
        for peer, buffer in receives:
            buffer[:] = incoming[peer].pop(0)

    def broadcast(self, data: memoryview, *, root: int) -> None:
        """Fill data on every rank with the bytes that root has in it. The length is equal on all ranks."""
        data[:] = self.all_gather(bytes(data) if self.rank == root else b"")[root]


def _buffers_for(rank: int, message: bytes) -> list[bytes]:
    """Return the buffers for one rank in a message of the default `Group.exchange`."""
    (count,) = struct.unpack_from("<q", message)
    heads = [struct.unpack_from("<qq", message, 8 + 16 * i) for i in range(count)]
    begin, buffers = 8 + 16 * count, []
    for peer, nbytes in heads:
        if peer == rank:
            buffers.append(message[begin : begin + nbytes])
        begin += nbytes
    return buffers


class SingleProcess(Group):
    """The group of a process that has no other ranks."""

    rank = 0
    size = 1

    def all_gather(self, data: bytes) -> list[bytes]:
        """Return the data unchanged: this is the only rank."""
        return [data]

    def gather(self, data: bytes) -> list[bytes]:
        """Return the data unchanged: this is the only rank."""
        return [data]

    def exchange(self, sends: Sequence[PeerBuffer], receives: Sequence[PeerBuffer]) -> None:
        """Copy each sent buffer into the received buffer of the same position."""
        for (_, data), (_, out) in zip(sends, receives, strict=True):
            out[:] = data

    def broadcast(self, data: memoryview, *, root: int) -> None:
        """Do nothing."""


def check_group(group: object, *, name: str = "group") -> None:
    """Check that an argument is a `Group`. Local.

    Raises:
        DeclarationError: the argument is something else, for example a process group of torch.
    """
    if not isinstance(group, Group):
        raise DeclarationError(
            f"{name} is {group!r}, which is not a megackpt.comm.Group. Leave it out for all ranks of "
            f"torch.distributed; for some ranks give megackpt.comm.TorchGroup(ranks=[...], timeout_s=...); a "
            f"group of your own must be a subclass of megackpt.comm.Group."
        )
