"""Print a table: what a save of Megatron-LM's pretrain_gpt.py adds to each rank's memory, and sends.

    python tests/benchmarks/bench_megatron_save.py DIRECTORY CHECKOUT [--tp 2] [--ranks 4]

Each form is the first save of a new run, with the reshardable optimizer, on processors with gloo. Bytes are
those of all floating-point tensors that the rank gives to collectives, sent or to be filled.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from tests.benchmarks.measuring import MIB, options, scratch
from tests.benchmarks.peers.counters import peak_above
from tests.contrib.megatron import megatron_pretrain
from tests.contrib.megatron.test_installing import ROOT
from tests.contrib.megatron.test_megatron_trainer import ARGUMENTS

FORMS = {
    "Megatron-Core": [],
    "Megatron-Core, memory-efficient": ["--distrib-optim-fully-reshardable-mem-efficient"],
    "megackpt": ["--megackpt"],
}
MODEL = ["--num-layers", "4", "--hidden-size", "512", "--train-iters", "1", "--save-interval", "1"]
COLLECTIVES = (
    "all_gather", "all_gather_into_tensor", "all_reduce", "all_to_all", "all_to_all_single", "broadcast",
    "gather", "recv", "reduce_scatter_tensor", "scatter", "send",
)  # fmt: skip


def be_a_rank(results: str, arguments: list[str]) -> None:
    """Train one iteration and save; write what the save has added and sent."""
    arguments = megatron_pretrain.prepare(arguments)
    training: Any = importlib.import_module("megatron.training.training")
    save = training.save_checkpoint

    def measured(iteration: int, model: Any, optimizer: Any, *rest: Any, **more: Any) -> None:
        sent: list[int] = []
        kept = {name: getattr(dist, name) for name in COLLECTIVES}
        for name, call in kept.items():
            setattr(dist, name, _counting(call, sent))
        added = peak_above(lambda: save(iteration, model, optimizer, *rest, **more))
        for name, call in kept.items():
            setattr(dist, name, call)
        parts = getattr(optimizer, "chained_optimizers", [optimizer])
        owned = [p for part in parts for group in part.optimizer.param_groups for p in group["params"]]
        answer = {"added": added, "sent": sum(sent), "share": 12 * sum(p.numel() for p in owned)}
        Path(f"{results}.{dist.get_rank()}").write_text(json.dumps(answer))

    training.save_checkpoint = measured
    megatron_pretrain.run(arguments)


def _counting(call: Callable[..., Any], sent: list[int]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            tensors = value if isinstance(value, list | tuple) else [value]
            sent.extend(t.nbytes for t in tensors if isinstance(t, Tensor) and t.is_floating_point())
        return call(*args, **kwargs)

    return called


def main() -> None:
    """Print the table."""
    asked = options(__doc__, "directory", "checkout", tp=2, ranks=4)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(asked.checkout)])}
    environment |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launch += ["--nproc-per-node", str(asked.ranks), __file__, "--rank"]
    print(f"tp {asked.tp}, dp {asked.ranks // asked.tp}\n\n| form | share | added | in collectives |")
    print("|---|---|---|---|", flush=True)
    for form, switches in FORMS.items():
        with scratch(asked.directory, "megatron") as root:
            script = str(asked.checkout / "pretrain_gpt.py")
            run = [*switches[:1], script] if form == "megackpt" else [script, *switches]
            layout = ["--tensor-model-parallel-size", str(asked.tp), "--save", str(root / "saved")]
            command = [*launch, str(root / "answer"), *run, *ARGUMENTS, *MODEL, *layout]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"{form} ended with {done.returncode}:\n{done.stderr[-4000:]}")
            ranks = [json.loads((root / f"answer.{rank}").read_text()) for rank in range(asked.ranks)]
        columns = [[f"{r[name] / MIB:.0f}" for r in ranks] for name in ("share", "added", "sent")]
        print(f"| {form} | {' | '.join(' / '.join(column) for column in columns)} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        be_a_rank(sys.argv[2], sys.argv[3:])
    else:
        main()
