"""Encodes the messages between ranks: their fields, the name of the step, and the error that ended it."""

from __future__ import annotations

import json
from collections.abc import Sequence

from megackpt import errors
from megackpt.errors import CheckpointError, RankFailedError


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
