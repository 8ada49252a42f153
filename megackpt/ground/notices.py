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

_COLLECTED: ContextVar[Notices | None] = ContextVar("megackpt_collected_notices", default=None)


def notice(log: logging.Logger, text: str) -> None:
    """Log a warning, or add it to the list of the block that collects warnings. Local."""
    notices = _COLLECTED.get()
    if notices is None:
        log.warning("%s", text)
    else:
        notices.append((log.name, text))


@contextmanager
def collected_notices() -> Iterator[Notices]:
    """Collect the warnings of this thread in a block. If the block fails, they are logged. Local."""
    notices: Notices = []
    token = _COLLECTED.set(notices)
    try:
        yield notices
    except BaseException:
        _COLLECTED.reset(token)
        for name, text in notices:
            notice(logging.getLogger(name), text)
        raise
    _COLLECTED.reset(token)


def log_notices(of_ranks: Sequence[Notices]) -> None:
    """Log the warnings of all ranks, each text once. Local: rank 0 calls it.

    A warning that not all ranks have is logged with the first rank that has it.
    """
    ranks_of: dict[tuple[str, str], list[int]] = {}
    for rank, notices in enumerate(of_ranks):
        for name, text in dict.fromkeys((name, text) for name, text in notices):
            ranks_of.setdefault((name, text), []).append(rank)
    for (name, text), ranks in ranks_of.items():
        if len(ranks) < len(of_ranks):
            more = f" and {len(ranks) - 1} more" if len(ranks) > 1 else ""
            text = f"Rank {ranks[0]}{more}: {text}"
        logging.getLogger(name).warning("%s", text)
