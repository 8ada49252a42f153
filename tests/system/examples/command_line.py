"""Scripts as a user starts them under torchrun, as processes of their own."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

PRETRAIN_GPT = Path(__file__).parents[3] / "examples" / "pretrain_gpt.py"
TIMEOUT_S = 300


def torchrun(ranks: int, *words: object) -> list[str]:
    """Return the command line that runs a script, or `-m` and a module, on so many ranks of this machine."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*start, *map(str, words)]


def quiet(environment: Mapping[str, str]) -> dict[str, str]:
    """Our own environment, in which torchrun need not warn of the number of threads."""
    return {**os.environ, "OMP_NUM_THREADS": "1", **environment}
