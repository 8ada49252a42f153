"""Pre-train a small GPT on text, with checkpoints that resume at any layout.

    export OMP_NUM_THREADS=1    # threads of each rank; torchrun warns where it has to choose
    export RUN="--ckpt /tmp/run --steps 200"
    torchrun --nproc-per-node 4 examples/pretrain_gpt.py --tp 2 --pp 2 $RUN --exit-after 100
    torchrun --nproc-per-node 2 examples/pretrain_gpt.py $RUN

The first run ends half-way; the second goes on from there, on half as many ranks. The same with a mixture of
8 experts, over expert parallelism, then over interleaved pipeline stages with context parallelism:

    export RUN="--ckpt /tmp/moe --steps 200 --experts 8 --shared-experts 1"
    torchrun --nproc-per-node 4 examples/pretrain_gpt.py --ep 4 $RUN --exit-after 100
    torchrun --nproc-per-node 4 examples/pretrain_gpt.py --pp 2 --vpp 2 --cp 2 --micro-batches 2 $RUN

Other models are those of a file like config.json, or of examples/presets:

    export RUN="--ckpt /tmp/deepseek --steps 200 --model deepseek_v3"
    torchrun --nproc-per-node 4 examples/pretrain_gpt.py --tp 2 --ep 4 --etp 1 $RUN

A model of Hugging Face is trained on from its folder, and becomes one again at the end:

    export RUN="--init-from DIR --ckpt /tmp/hf --steps 20 --warmup-steps 2 --lr 1e-5 --bf16"
    torchrun --nproc-per-node 4 examples/pretrain_gpt.py --tp 2 $RUN --export-to /tmp/trained

`--help` lists all flags. Where to look next: `training/trainer.py` shows how a training loop declares, saves
and resumes its state.
"""

from __future__ import annotations

import logging
import os

import torch
import torch.distributed as dist
from training.arguments import exit_with_error, parse_arguments
from training.text import NoTextError, Text
from training.trainer import Trainer


def main(argv: list[str] | None = None, store: dist.Store | None = None) -> int:
    """Run one rank; started by torchrun, or alone. Return the exit code.

    Args:
        argv: the flags; None for those of the process.
        store: where ranks find each other; None for that of torchrun.
    """
    logging.basicConfig(format="%(message)s", level=logging.WARNING)  # an incomplete checkpoint, for example
    arguments = parse_arguments(argv)
    try:
        text = Text.read(arguments.data, seq_length=arguments.model.seq_length, seed=arguments.seed)
    except NoTextError as error:
        exit_with_error(str(error))
    # All checks that need no other ranks are done. From here on ranks wait for each other.
    torch.use_deterministic_algorithms(True)
    if "RANK" in os.environ:
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    try:
        return Trainer(arguments, text).run()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    raise SystemExit(main())
