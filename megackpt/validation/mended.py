"""What of a load came from elsewhere, because the place where it belongs was damaged.

Owns the record and its text.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

PARITY = "parity"
"""What parity is called as a source; a copy is called by its location."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mended:
    """Bytes that a load took from another source.

    Attributes:
        source: where they were taken from: `parity`, or the location of a copy.
        why: what is wrong with the place where they belong.
        file: name of the damaged file in the checkpoint; empty if no single one is known.
        key: array or object they are of; None for common state, the index and the commit.
        box: of which stored chunk, as `ChunkTable.describe` writes it.
        start: first byte in the file, if known.
        stop: one past the last.
    """

    source: str
    why: str
    file: str = ""
    key: str | None = None
    box: str | None = None
    start: int | None = None
    stop: int | None = None

    def __str__(self) -> str:
        of_chunk = " ".join(filter(None, (repr(self.key) if self.key is not None else "", self.box)))
        bytes_of = f"bytes {self.start}:{self.stop} of {self.file}" if self.start is not None else self.file
        return f"{', '.join(filter(None, (bytes_of, of_chunk)))}: taken from {self.source}"


def merged(records: Iterable[Mended]) -> tuple[Mended, ...]:
    """Sort records; ranges of one chunk that follow each other, from one source, become one record.

    >>> parts = [Mended(source="parity", why="", file="f", start=a, stop=a + 4) for a in (4, 0, 12)]
    >>> [(r.start, r.stop) for r in merged(parts)]
    [(0, 8), (12, 16)]
    """
    found: list[Mended] = []
    for record in sorted(records, key=lambda r: (r.file, r.start or 0, r.key or "", r.source)):
        if found and _continues(found[-1], record):
            found[-1] = replace(found[-1], stop=max(found[-1].stop or 0, record.stop or 0))
        else:
            found.append(record)
    return tuple(found)


def _continues(one: Mended, other: Mended) -> bool:
    if one.stop is None or other.start is None or other.start > one.stop:
        return False
    return replace(one, start=other.start, stop=other.stop, why=other.why) == other
