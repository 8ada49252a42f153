"""pretrain_gpt.py as a user starts it under torchrun, as processes of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

PRETRAIN_GPT = Path(__file__).parents[3] / "examples" / "pretrain_gpt.py"
TIMEOUT_S = 300


def torchrun(ranks: int, script: Path, flags: Sequence[str]) -> list[str]:
    """Return the command line that runs a script on `ranks` ranks of this machine."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*start, str(script), *flags]


def quiet(environment: Mapping[str, str]) -> dict[str, str]:
    """Our own environment, in which torchrun need not warn of the number of threads."""
    return {**os.environ, "OMP_NUM_THREADS": "1", **environment}
