"""Everything that reads a checkpoint, as functions of a directory.

Lists the entry points that every attack goes through.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import megackpt
from megackpt.checkpointer import Checkpointer
from megackpt.cli import main
from tests.system.attacks.crafting import DCP, HUGGINGFACE, arrays_request, dcp_request, request


def asked(base: str) -> Any:
    """What a load asks for."""
    if base == HUGGINGFACE:
        return arrays_request()
    return dcp_request() if base == DCP else request(empty=True)


def values(base: str) -> Mapping[str, Callable[[Path], Any]]:
    """Readers that give values, which must be those that were saved."""
    return {
        "load": lambda d: megackpt.load(asked(base), d),
        "load_plain_tensors": megackpt.load_plain_tensors,
        "load_common_state_dict": megackpt.load_common_state_dict,
        "load_content_metadata": megackpt.load_content_metadata,
        "load_sharded_metadata": lambda d: sorted(megackpt.load_sharded_metadata(d)),
        "load_tensors_metadata": lambda d: {
            key: (str(t.dtype), t.global_shape) for key, t in megackpt.load_tensors_metadata(d).items()
        },
        "Checkpointer": lambda d: _resumed(base, d.parent),
    }


def _resumed(base: str, root: Path) -> Any:
    with Checkpointer(root) as checkpointer:
        if checkpointer.latest() is None:
            raise megackpt.NotACheckpointError("no step", path=str(root))
        return checkpointer.load(asked(base))


def commands(good: Path, scratch: Path) -> Mapping[str, Callable[[Path], list[str]]]:
    """Commands; good is the base of an attack, scratch an empty directory."""
    return {
        "ls": lambda d: ["ls", str(d.parent)],
        "inspect": lambda d: ["inspect", str(d), "--json"],
        "verify": lambda d: ["verify", str(d), "--deep"],
        "diff": lambda d: ["diff", str(d), str(good)],
        "convert": lambda d: ["convert", str(d), str(scratch / "converted"), "--to", "megackpt"],
    }


def run(arguments: list[str]) -> tuple[int, str, str]:
    """Run a command in this process; return exit code, stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    return code, out.getvalue(), err.getvalue()
