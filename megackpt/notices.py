"""Warnings of code that runs on all ranks: each is logged once, by one rank.

`notice` logs a warning at once. Inside of a `collected_notices` block it adds the warning to a list instead.
A collective function sends the lists of all ranks with its next message, and rank 0 logs them with
`log_notices`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

Notices = list[tuple[str, str]]
"""Names of loggers and texts of warnings, in order."""

_HELD: ContextVar[Notices | None] = ContextVar("megackpt_held_notices", default=None)


def notice(log: logging.Logger, text: str) -> None:
    """Log a warning, or hold it back for the ranks to compare. Local."""
    held = _HELD.get()
    if held is None:
        log.warning("%s", text)
    else:
        held.append((log.name, text))


@contextmanager
def collected_notices() -> Iterator[Notices]:
    """Hold the warnings of a block back, of this thread. If the block fails, they are logged. Local."""
    held: Notices = []
    token = _HELD.set(held)
    try:
        yield held
    except BaseException:
        _HELD.reset(token)
        for name, text in held:
            notice(logging.getLogger(name), text)
        raise
    _HELD.reset(token)


def log_notices(of_ranks: Sequence[Notices]) -> None:
    """Log the warnings of all ranks, each text once; one that not all ranks have names the first that has it.

    Local: rank 0 calls it.
    """
    ranks: dict[tuple[str, str], list[int]] = {}
    for rank, notices in enumerate(of_ranks):
        for name, text in dict.fromkeys((name, text) for name, text in notices):
            ranks.setdefault((name, text), []).append(rank)
    for (name, text), found in ranks.items():
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        said = text if len(found) == len(of_ranks) else f"Rank {found[0]}{more}: {text}"
        logging.getLogger(name).warning("%s", said)
