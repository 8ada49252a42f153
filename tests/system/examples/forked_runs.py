"""Runs of pretrain_gpt.py, each in a child of one process that has imported what they need: it takes seconds.

A program: `python -m tests.system.examples.forked_runs`. It reads a JSON list of `[flags, environment]` and
writes one of `[exit code, stdout, stderr]`. A child ends as any Python program does.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.system.examples.command_line import PRETRAIN_GPT, quiet

Run = tuple[Sequence[str], Mapping[str, str]]
"""Flags, and variables of the environment, which may say that it is a rank of many."""


def run_forked(runs: Sequence[Run], *, timeout_s: float) -> list[subprocess.CompletedProcess[str]]:
    """Run pretrain_gpt.py once for each of these, one after the other, to its end."""
    answer = subprocess.run(
        [sys.executable, "-m", __name__],
        cwd=Path(__file__).parents[3],
        env=quiet({}),
        input=json.dumps(runs),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=True,
    )
    ended = json.loads(answer.stdout)
    return [
        subprocess.CompletedProcess(flags, *message) for (flags, _), message in zip(runs, ended, strict=True)
    ]


def _serve() -> None:
    sys.path.insert(0, str(PRETRAIN_GPT.parent))
    runpy.run_path(str(PRETRAIN_GPT), run_name="imported")
    gc.freeze()  # or a child that ends writes to all of our memory, which is then copied
    runs, ended = json.load(sys.stdin), []
    for flags, environment in runs:
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as error:
            child = os.fork()
            if not child:
                _become(flags, environment, out.fileno(), error.fileno())
                return
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            for file in (out, error):
                file.seek(0)
            ended.append([code, out.read(), error.read()])
    json.dump(ended, sys.stdout)


def _become(flags: Sequence[str], environment: Mapping[str, str], out: int, error: int) -> None:
    os.dup2(out, 1)
    os.dup2(error, 2)
    os.environ.update(environment)
    sys.argv = [str(PRETRAIN_GPT), *flags]
    runpy.run_path(str(PRETRAIN_GPT), run_name="__main__")


if __name__ == "__main__":
    _serve()
