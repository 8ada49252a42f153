"""Several runs of pretrain_gpt.py, one after the other in the same processes: they need not start again.

    torchrun --nproc-per-node 4 examples/training/phases.py FILE

FILE is a JSON list with the arguments of each run.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

sys.path[0] = str(Path(__file__).parents[1])  # of pretrain_gpt.py, as if that was started


def main() -> int:
    """Do the runs in this rank; return the exit code of the first that fails, or 0."""
    import pretrain_gpt

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False)
    for number, arguments in enumerate(json.loads(Path(sys.argv[1]).read_text())):
        # Each run connects its ranks anew, by names of its own.
        code = pretrain_gpt.main(arguments, dist.PrefixStore(f"run {number}", store))
        if code:
            return code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
