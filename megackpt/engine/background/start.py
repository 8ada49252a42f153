"""Starting a writer process: a new interpreter, with what it inherits and what it must not see."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from multiprocessing.connection import Connection

_QUIET = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL"}


def start_writer(
    kind: tuple[int, str | None, str | None], arena: int
) -> tuple[subprocess.Popen[bytes], Connection]:
    """Start the process: a new interpreter, never a fork, which would take locks and devices along."""
    ours, theirs = socket.socketpair()
    with theirs:
        settings = {
            "connection": theirs.fileno(),
            "arena": arena,
            "parent": os.getpid(),
            **dict(zip(("nice", "ionice", "hook"), kind, strict=True)),
        }
        search = os.pathsep.join(path for path in sys.path if path)
        process = subprocess.Popen(
            [sys.executable, "-m", "megackpt.engine.background.main", json.dumps(settings)],
            pass_fds=(theirs.fileno(), arena),
            stdin=subprocess.DEVNULL,
            env={**os.environ, **_QUIET, "PYTHONPATH": search},
        )
    return process, Connection(ours.detach())
