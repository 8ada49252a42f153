"""pretrain_gpt.py, but rank 0 stops for ever right before it commits a step. Started by torchrun.

The directory $WATCHED gets a file `rank-<r>` with the process id of each rank, and a file `stopped` when all
of the step directory $STOP_AT is written but the commit.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

import pretrain_gpt

from megackpt.storage import LocalStore

WATCHED = Path(os.environ["WATCHED"])
STOP_AT = os.environ["STOP_AT"]

replace_for_real = LocalStore.replace


def replace_or_stop(store: LocalStore, name: str, data: bytes) -> None:
    """Replace a small file, unless it is the commit of the step."""
    if name == "metadata.json" and Path(store.location).name == STOP_AT:
        (WATCHED / "stopped").touch()
        time.sleep(3600)
    replace_for_real(store, name, data)


if __name__ == "__main__":
    (WATCHED / f"rank-{os.environ['RANK']}").write_text(str(os.getpid()))
    LocalStore.replace = replace_or_stop  # type: ignore[method-assign]
    pretrain_gpt.main()
