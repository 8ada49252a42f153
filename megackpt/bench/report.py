"""What was measured: rows, ratios, a table."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rich.filesize import decimal
from rich.table import Table

RAW = {
    "save": ("write, direct", "write, buffered"),
    "load, cold": ("read, direct", "read, cold"),
    "load, warm": ("read, warm",),
    "async, total": ("write, direct", "write, buffered"),
}
"""Cases, and the raw cases whose fastest is their limit. A resharded load has that of a warm one."""

RAW_NAME = "raw I/O"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One case of one contender.

    Attributes:
        case: what was done.
        who: by whom; RAW_NAME for files without a checkpoint.
        nbytes: bytes of all ranks that were written, each once, or that they asked for.
        seconds: of each measured run, from a common start to the end of the slowest rank.
        verified: whether what was loaded, or what was saved and then loaded, is equal bit by bit after every
            run, that which does not count among them; None for raw I/O.
        differing: a key whose bits were not those that were saved.
        refused: why it was not done; there are no seconds then.
    """

    case: str
    who: str
    nbytes: int = 0
    seconds: tuple[float, ...] = ()
    verified: bool | None = None
    differing: str | None = None
    refused: str | None = None

    @property
    def median_s(self) -> float | None:
        """The median time; None if it was not done."""
        return statistics.median(self.seconds) if self.seconds else None

    @property
    def rate(self) -> float | None:
        """Bytes per second in median; None if it was not done."""
        return self.nbytes / self.median_s if self.median_s else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All rows, and what they stand for.

    Attributes:
        command: the settings.
        machine: where it ran.
        state: what was saved.
        rows: what was measured.
        phases: with a profile, seconds by what was done ("save", "load"), rank and phase; sums over threads.
    """

    command: dict[str, Any]
    machine: dict[str, Any]
    state: dict[str, Any]
    rows: tuple[Row, ...]
    phases: dict[str, list[dict[str, float]]] = field(default_factory=dict)

    @property
    def peers(self) -> list[str]:
        """Names of the other libraries that took part."""
        return [name for name in self.command["peers"] if any(row.who == name for row in self.rows)]

    @property
    def is_verified(self) -> bool:
        """Whether every load gave what was saved."""
        return all(row.verified is not False for row in self.rows)

    def median_s(self, case: str, who: str) -> float | None:
        """Return the median time of a contender in a case; None if there is none."""
        return next((r.median_s for r in self.rows if (r.case, r.who) == (case, who)), None)

    def limit(self, case: str) -> float | None:
        """Return the bytes per second of raw I/O for a case; None where there is no such limit."""
        if case == "async, stall":
            return None
        names = RAW.get(case, RAW["load, warm"])
        rates = [r.rate for r in self.rows if r.who == RAW_NAME and r.case in names and r.rate]
        return max(rates, default=None)

    def ratios(self, row: Row) -> dict[str, float]:
        """Compare a row: its share of the raw limit, and how many times faster it is than each peer."""
        found: dict[str, float] = {}
        if row.rate is None or row.median_s is None or row.who == RAW_NAME:
            return found
        limit = self.limit(row.case)
        if limit:
            found["raw"] = row.rate / limit
        for peer in self.peers:
            theirs = self.median_s(row.case, peer)
            if theirs and peer != row.who:
                found[peer] = theirs / row.median_s
        return found

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        return {
            "command": self.command,
            "machine": self.machine,
            "state": self.state,
            "phases": self.phases,
            "rows": [_row_to_json(row) | {"ratios": self.ratios(row)} for row in self.rows],
        }

    @classmethod
    def from_json(cls, said: dict[str, Any]) -> Report:
        """Return what `to_json` was called on."""
        stored = ("case", "who", "nbytes", "verified", "differing", "refused")
        rows = tuple(
            Row(seconds=tuple(row["seconds"]), **{name: row[name] for name in stored}) for row in said["rows"]
        )
        return cls(rows=rows, **{k: said[k] for k in ("command", "machine", "state", "phases")})

    def table(self) -> Table:
        """Return a table of medians and ratios."""
        title = (
            f"{decimal(self.state['nbytes'])} on {self.command['ranks']} ranks, {self.machine['directory']}"
        )
        table = Table(title=title)
        table.add_column("case", no_wrap=True)
        table.add_column("who", no_wrap=True)
        for heading in ("median", "rate", "of raw", *(f"{peer} takes" for peer in self.peers), "equal"):
            table.add_column(heading, justify="right", no_wrap=True)
        before: Row | None = None
        for row in self.rows:
            is_new = before is None or row.case != before.case
            if before is not None and is_new and row.who != RAW_NAME:
                table.add_section()
            table.add_row(row.case if is_new else "", row.who, *self._cells(row))
            before = row
        return table

    def refusals(self) -> list[str]:
        """Say once why something was not done."""
        return list(dict.fromkeys(f"{r.who}: {r.refused}." for r in self.rows if r.refused))

    def _cells(self, row: Row) -> Iterator[str]:
        if row.median_s is None or row.rate is None:
            yield from ("-",) * (4 + len(self.peers))
            return
        ratios = self.ratios(row)
        yield f"{row.median_s:.3f} s"
        yield f"{row.rate / 1e9:.2f} GB/s" if row.case != "async, stall" else ""
        yield f"{ratios['raw']:.0%}" if "raw" in ratios else ""
        for peer in self.peers:
            yield f"{ratios[peer]:.2f}x" if peer in ratios else ""
        yield {None: "", True: "yes", False: "NO"}[row.verified]


def _row_to_json(row: Row) -> dict[str, Any]:
    return {
        "case": row.case,
        "who": row.who,
        "nbytes": row.nbytes,
        "seconds": list(row.seconds),
        "median_s": row.median_s,
        "bytes_per_s": row.rate,
        "verified": row.verified,
        "differing": row.differing,
        "refused": row.refused,
    }
