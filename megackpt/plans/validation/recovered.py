"""The records of bytes that a load has read from another source, joined for the load report."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from megackpt.plans.validation.report import RecoveredBytes

PARITY = "parity"
"""`RecoveredBytes.source` of bytes that were computed from parity. For a copy it is the copy's location."""


def merge_recovered(records: Iterable[RecoveredBytes]) -> tuple[RecoveredBytes, ...]:
    """Sort records, and join ranges of one chunk and source that follow each other.

    >>> parts = [RecoveredBytes(source="parity", why="", file="f", start=a, stop=a + 4) for a in (4, 0, 12)]
    >>> [(r.start, r.stop) for r in merge_recovered(parts)]
    [(0, 8), (12, 16)]
    """
    joined: list[RecoveredBytes] = []
    # Sorted, so that a range comes right after the one that it may continue.
    for record in sorted(records, key=lambda r: (r.file, r.start or 0, r.key or "", r.source)):
        if joined and joined[-1].is_continued_by(record):
            joined[-1] = replace(joined[-1], stop=max(joined[-1].stop or 0, record.stop or 0))
        else:
            joined.append(record)
    return tuple(joined)
