"""Who can read what whom wrote: every peer writes, every peer reads, values are compared bit for bit.

Peers of another environment are left out until environments.py has made it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tests.system.interop.environments import ROOT, lacks, python_of
from tests.system.interop.jobs import Job
from tests.system.interop.plan import (
    Backend,
    Layout,
    Program,
    Read,
    Written,
    asked_form,
    checkpoints,
    models_of,
    reads,
    unwritten,
)

HERE = Path(__file__).parent
TIMEOUT_S = 400
Task = tuple[Program, Layout, Job]
"""What a program does at a layout."""


def run_all(backend: Backend, root: Path, *, few: bool) -> tuple[int, list[str]]:
    """Write and read everything of a format; return how many readings passed, and what went wrong."""
    written = checkpoints(backend, few=few)
    errors = run_tasks([(w.program, w.layout, job_of(w, w.layout, "write", root)) for w in written])
    wrong = [wrong_write(w, error) for w, error in zip(written, errors, strict=True)]
    asked = [r for w, error in zip(written, errors, strict=True) if not error for r in reads(w, few=few)]
    errors = run_tasks(
        [(r.program, r.layout, job_of(r.written, r.layout, "read", root, form=asked_form(r))) for r in asked]
    )
    wrong += [wrong_read(r, error) for r, error in zip(asked, errors, strict=True)]
    return errors.count(""), [text for text in wrong if text]


def run_tasks(tasks: Sequence[Task]) -> list[str]:
    """Return the error of each task, "" if it had none; a program starts once for each number of ranks."""
    groups: dict[tuple[Program, int], list[int]] = defaultdict(list)
    for number, (program, layout, _) in enumerate(tasks):
        groups[program, layout[2]].append(number)
    errors = {}
    for (program, ranks), numbers in groups.items():
        errors |= zip(numbers, run_jobs(program, ranks, [tasks[n][2] for n in numbers]), strict=True)
    return [errors[number] for number in range(len(tasks))]


def run_jobs(program: Program, ranks: int, jobs: list[Job]) -> list[str]:
    missing = lacks(program.env, *program.modules)
    if missing:
        return [f"absent: {missing}" for _ in jobs]
    python = python_of(program.env)
    assert python is not None
    with tempfile.TemporaryDirectory() as folder:
        asked, messages = Path(folder, "jobs.json"), Path(folder, "results.json")
        asked.write_text(json.dumps([asdict(job) for job in jobs]))
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
    return results + [f"the peer's process ended: {message}"] * (len(jobs) - len(results))


def job_of(written: Written, layout: Layout, op: str, root: Path, *, form: str = "") -> Job:
    tp, pp, _ = layout
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
        by_megatron=bool(models_of(written.program)),
        naming=written.naming,
    )


def wrong_write(written: Written, error: str) -> str:
    """Return what went otherwise than planned when a checkpoint was written, or ""."""
    reason, text = unwritten(written)
    if not error or error.startswith("absent") or (reason and text in error):
        return ""
    return f"{written.name}: writing: {last_line(error)}"


def wrong_read(read: Read, error: str) -> str:
    """Return what went otherwise than planned when a checkpoint was read, or ""."""
    is_rejected = bool(error) and read.text in error
    if error.startswith("absent") or (is_rejected if read.rejected else not error):
        return ""
    expected = f"expected {read.text!r}, not " if read.rejected else ""
    where = f"{read.program.peer} {read.program.flags} {read.program.env} at {read.layout}"
    return f"{read.written.name} read by {where}: {expected}{last_line(error) or 'success'}"


def last_line(error: str) -> str:
    return next((line for line in reversed(error.splitlines()) if line.strip()), "")[:400]
