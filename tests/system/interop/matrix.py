"""Who can read what whom wrote: every peer writes, every peer reads, values are compared bit for bit.

    python tests/system/interop/matrix.py [torch_dist] [zarr] [--few] [--page]

prints the tables; `--page` puts them into docs/interop.md. Peers of another environment are left out,
visibly, until environments.py has made it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.system.interop.environments import ROOT, lacks, python_of
from tests.system.interop.jobs import Job
from tests.system.interop.plan import (
    READERS,
    TORCH_DIST,
    ZARR_1,
    ZARR_3,
    Backend,
    Program,
    Read,
    Written,
    asked_form,
    checkpoints,
    reads,
    unread,
    unwritten,
)

HERE = Path(__file__).parent
PAGE, HEAD = ROOT / "docs" / "interop.md", HERE / "page_head.md"
TIMEOUT_S = 400
KINDS = {"model": "model", "adam": "plain Adam", "distopt": "distributed optimizer"}


@dataclass(frozen=True)
class Outcome:
    """What a job came to: an error or "", and what it said."""

    error: str
    remark: str


def run_jobs(program: Program, ranks: int, jobs: list[Job]) -> list[Outcome]:
    missing = lacks(program.env, *program.modules)
    if missing:
        return [Outcome(f"absent: {missing}", "") for _ in jobs]
    python = python_of(program.env)
    assert python is not None
    with tempfile.TemporaryDirectory() as folder:
        asked, messages = Path(folder, "jobs.json"), Path(folder, "results.json")
        asked.write_text(json.dumps([job.to_json() for job in jobs]))
        command = [python, program.script, str(asked), str(messages), *program.flags, f"--ranks={ranks}"]
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{HERE}", "OMP_NUM_THREADS": "1"}
        began = time.monotonic()
        with open(Path(folder, "log"), "w+") as log:
            # Not a pipe: a process that a peer's rank forked may live longer, and would keep the pipe open.
            process = subprocess.Popen(
                command, cwd=HERE, env=environment, stdout=log, stderr=log, start_new_session=True
            )
            try:
                process.wait(TIMEOUT_S)
            except subprocess.TimeoutExpired:
                log.write(f"it did not end in {TIMEOUT_S} s")
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            log.flush()
            message = Path(log.name).read_text()[-2000:]
        seconds = time.monotonic() - began
        print(
            f"{seconds:4.0f} s: {len(jobs)} jobs of {program.peer} {program.flags} {program.env}",
            file=sys.stderr,
        )
        results = json.loads(messages.read_text()) if messages.exists() else []
    lost = {"error": f"the peer's process ended: {message}", "remark": ""}
    results += [lost] * (len(jobs) - len(results))
    return [Outcome(r["error"], r["remark"]) for r in results]


def write_all(written: Iterable[Written], root: Path) -> dict[Written, Outcome]:
    groups: dict[tuple[Program, int], list[Written]] = defaultdict(list)
    for write in written:
        groups[write.program, write.layout[2]].append(write)
    outcomes: dict[Written, Outcome] = {}
    for (program, ranks), ones in groups.items():
        outcomes |= zip(
            ones, run_jobs(program, ranks, [job_of(w, w.layout, "write", root) for w in ones]), strict=True
        )
    return outcomes


def read_all(asked: Iterable[Read], root: Path) -> dict[Read, Outcome]:
    groups: dict[tuple[Program, int], list[Read]] = defaultdict(list)
    for read in asked:
        groups[read.program, read.layout[2]].append(read)
    outcomes: dict[Read, Outcome] = {}
    for (program, ranks), ones in groups.items():
        jobs = [job_of(r.written, r.layout, "read", root, form=asked_form(r)) for r in ones]
        outcomes |= zip(ones, run_jobs(program, ranks, jobs), strict=True)
    return outcomes


def job_of(written: Written, layout: tuple[int, int, int], op: str, root: Path, *, form: str = "") -> Job:
    tp, pp, _ = layout
    by_megatron = written.program.script == "megatron_peer.py"
    return Job(
        op=op,
        kind=written.kind,
        path=str(root / written.name),
        backend=written.backend[0],
        version=written.backend[1],
        tp=tp,
        pp=pp,
        optimizer_format=form or written.form,
        same_layout=layout == written.layout,
        has_common=by_megatron,
        has_objects=by_megatron,
        naming=written.naming,
    )


@dataclass(frozen=True)
class Cell:
    """A cell of a table."""

    passed: int  # readings that gave every value bit for bit
    cannot: tuple[str, ...]  # why it cannot pass, where its peer cannot
    wrong: tuple[str, ...]  # what went otherwise than said

    def text(self) -> str:
        if self.wrong:
            return "WRONG: " + "; ".join(self.wrong)
        if self.passed:
            return f"pass ({self.passed})"
        return "; ".join(self.cannot) or "-"


@dataclass(frozen=True)
class Table:
    """The readings of one format: rows are (what, format of it, writer)."""

    backend: Backend
    rows: dict[tuple[str, str, str], dict[str, Cell]]

    def wrong(self) -> list[str]:
        """Return what went otherwise than said, each with its row and column."""
        return [
            f"{' / '.join(filter(None, row))} read by {reader}: {text}"
            for row, cells in self.rows.items()
            for reader, cell in cells.items()
            for text in cell.wrong
        ]


def table_of(backend: Backend, root: Path, *, few: bool) -> Table:
    """Write and read everything of a format."""
    planned = checkpoints(backend, few=few)
    written = write_all(planned, root)
    asked = [r for w in planned if not written[w].error for r in reads(w, few=few)]
    readings = read_all(asked, root)
    rows: dict[tuple[str, str, str], dict[str, list[tuple[str, str]]]] = {}
    for planned_write in planned:
        row = rows.setdefault(
            (KINDS[planned_write.kind], form_of(planned_write), planned_write.program.peer), defaultdict(list)
        )
        for reader in READERS[backend]:
            row[reader] += judge(
                planned_write,
                written[planned_write],
                reader,
                [(r, readings[r]) for r in asked if r.written == planned_write],
            )
    return Table(
        backend,
        {row: {reader: cell_of(cells[reader]) for reader in READERS[backend]} for row, cells in rows.items()},
    )


def form_of(written: Written) -> str:
    return written.form + (
        " (DCP's names)" if written.naming == "dcp" and written.program.peer != "DCP" else ""
    )


def judge(
    written: Written, outcome: Outcome, reader: str, readings: list[tuple[Read, Outcome]]
) -> list[tuple[str, str]]:
    """Return what one checkpoint adds to a cell: ("pass" | "cannot" | "wrong", text)."""
    if outcome.error:
        reason, text = unwritten(written)
        if outcome.error.startswith("absent"):
            return [("cannot", outcome.error)]
        if reason and text in outcome.error:
            return [("cannot", f"cannot be written: {reason}")]
        return [("wrong", f"writing at {written.layout}: {last_line(outcome.error)}")]
    of_reader = [(r, o) for r, o in readings if r.program.peer == reader]
    if not of_reader:
        return [("cannot", unread(written, reader))]
    return [judge_one(read, result) for read, result in of_reader]


def judge_one(read: Read, result: Outcome) -> tuple[str, str]:
    if result.error.startswith("absent"):
        return ("cannot", result.error)
    if read.rejected:
        ok = read.text in result.error and result.error
        return (
            ("cannot", read.rejected)
            if ok
            else ("wrong", f"expected {read.text!r}: {last_line(result.error) or 'passed'}")
        )
    if result.error:
        source = f"{' '.join(read.written.program.flags)} {read.written.program.env} {read.written.layout}"
        where = f"at {read.layout} ({' '.join(read.program.flags)} {read.program.env})"
        return ("wrong", f"{source} {where}: {last_line(result.error)}")
    return ("pass", "")


def last_line(error: str) -> str:
    return next((line for line in reversed(error.splitlines()) if line.strip()), "")[:400]


def cell_of(message: list[tuple[str, str]]) -> Cell:
    return Cell(
        passed=sum(what == "pass" for what, _ in message),
        cannot=tuple(dict.fromkeys(text for what, text in message if what == "cannot")),
        wrong=tuple(dict.fromkeys(text for what, text in message if what == "wrong")),
    )


def show(table: Table) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable

    name, version = table.backend
    shown = RichTable(title=f"{name} version {version}: read by", box=box.SIMPLE_HEAD, show_lines=True)
    for title in ("what", "written by", *READERS[table.backend]):
        shown.add_column(title)
    for (what, form, writer), cells in table.rows.items():
        shown.add_row(f"{what}\n{form}".strip(), writer, *(c.text() for c in cells.values()))
    Console(width=200).print(shown)


def write_page(tables: Iterable[Table]) -> None:
    """Write the page; tables that are not given stay as they are."""
    sections = (
        {section.splitlines()[0]: section for section in PAGE.read_text().split("## ")[1:]}
        if PAGE.exists()
        else {}
    )
    sections |= {section.splitlines()[0]: section for section in map(markdown, tables)}
    body = "\n".join(
        f"## {sections[title].rstrip()}\n" for title in map(title_of, READERS) if title in sections
    )
    PAGE.write_text(f"{HEAD.read_text()}\n{body}")


def title_of(backend: Backend) -> str:
    return f"{backend[0]}, version {backend[1]}"


def markdown(table: Table) -> str:
    readers = READERS[table.backend]
    lines = [
        title_of(table.backend),
        "",
        f"| what | written by | {' | '.join(f'read by {r}' for r in readers)} |",
    ]
    lines.append("|---" * (len(readers) + 2) + "|")
    for (what, form, writer), cells in table.rows.items():
        texts = [cells[reader].text().replace("|", "\\|") for reader in readers]
        lines.append(f"| {what}{f', `{form}`' if form else ''} | {writer} | {' | '.join(texts)} |")
    return "\n".join([*lines, ""])


def main() -> int:
    """Print the tables that the command line asks for; return 1 if a cell is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("formats", nargs="*", default=[], help="torch_dist, zarr")
    parser.add_argument("--few", action="store_true", help="one layout, and peers of this environment only")
    parser.add_argument("--page", action="store_true", help="write docs/interop.md")
    parser.add_argument("--root", help="keep the checkpoints here")
    asked = parser.parse_args()
    backends = [b for b in (TORCH_DIST, ZARR_1, ZARR_3) if not asked.formats or b[0] in asked.formats]
    with tempfile.TemporaryDirectory() as folder:
        tables = [table_of(b, Path(asked.root or folder), few=asked.few) for b in backends]
    for table in tables:
        show(table)
    wrong = [line for table in tables for line in table.wrong()]
    print("\n".join(wrong))
    if asked.page:
        write_page(tables)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
