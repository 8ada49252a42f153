"""Pre-train a small T5 to restore hidden text, with checkpoints that resume at any layout.

    torchrun --nproc-per-node 4 examples/pretrain_t5.py --tp 2 --pp 2 --encoder-stages 1
    torchrun --nproc-per-node 2 examples/pretrain_t5.py --tp 2
    torchrun --nproc-per-node 4 examples/pretrain_t5.py --cp 2

Each run goes on where the one before ended.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from training.losses import mean_loss
from training.text import Text

from megackpt import Checkpointer
from megackpt.training.optim import DistributedOptimizer
from megackpt.training.parallel import (
    Axis,
    MicroBatch,
    ParallelGroups,
    ParallelLayout,
    context_share,
    forward_backward,
    share_losses,
)
from models import T5Config, build_t5, init_weights

LENGTH, HIDDEN = 48, slice(16, 32)  # tokens of a sample, and which of them the decoder has to restore
HIDDEN_ID, SAMPLES_OF_A_STEP, SAMPLES = 319, 16, 4  # the last one of a micro-batch


def micro_batch(text: Text, first: int, cp: Axis) -> MicroBatch:
    """Return samples with hidden tokens for the encoder, and the hidden ones for the decoder.

    Of each sequence, this rank of cp has its share of the encoder's tokens, and of the decoder's.
    """
    tokens, _ = text.batch(range(first, first + SAMPLES))
    labels = tokens[:, HIDDEN].clone()
    tokens[:, HIDDEN] = HIDDEN_ID
    start = torch.full_like(labels[:, :1], HIDDEN_ID)
    encoder, decoder, targets = (
        context_share(x, cp, dim=1) for x in (tokens, torch.cat([start, labels[:, :-1]], dim=1), labels)
    )
    return MicroBatch(torch.cat([encoder, decoder], dim=1), targets)


def run(flags: argparse.Namespace) -> list[float]:
    """Train for some steps more than the newest checkpoint has, and save; return the losses. Collective."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    groups = ParallelGroups.create(ParallelLayout.infer(ranks, tp=flags.tp, pp=flags.pp, cp=flags.cp))
    config = T5Config(
        vocab_size=320, hidden_size=64, num_layers=4, num_encoder_layers=2, num_heads=4,
        seq_length=LENGTH + HIDDEN.stop - HIDDEN.start, encoder_length=LENGTH,
    )  # fmt: skip
    split = flags.encoder_stages
    stages = None if split is None else config.split_stages(pp=flags.pp, encoder_stages=split)
    model = build_t5(config, groups, stages=stages)
    init_weights(model, seed=1)
    optimizer = DistributedOptimizer(model.parameters(), lambda p: torch.optim.AdamW(p, lr=3e-3), groups)
    text = Text.read([], seq_length=LENGTH, seed=1)

    def state_at(step: int) -> dict[str, Any]:
        declared = model.sharded_state_dict()
        return {"model": declared, "optimizer": optimizer.sharded_state_dict(declared), "step": step}

    shown: list[float] = []
    with Checkpointer(flags.ckpt, keep_last=2) as checkpointer:
        done = 0
        if checkpointer.find_latest() is not None:
            loaded = checkpointer.load(state_at(done))
            optimizer.load_sharded_state_dict(loaded["optimizer"])
            done = loaded["step"]
        for step in range(done, done + flags.steps):
            first = step * SAMPLES_OF_A_STEP
            starts = range(first, first + SAMPLES_OF_A_STEP, SAMPLES)
            batches = [micro_batch(text, start, groups.cp) for start in starts]
            own = batches[groups.dp.rank :: groups.dp.size]
            losses = share_losses(forward_backward(model, own, groups), len(own), groups)
            shown.append(mean_loss(losses, groups))
            optimizer.step()
            optimizer.zero_grad()
            if groups.rank == 0:
                print(f"step {step + 1}: loss {shown[-1]:.4f}", flush=True)
        checkpointer.save(done + flags.steps, state_at(done + flags.steps))
    return shown


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for flag in ("--tp", "--pp", "--cp"):
        parser.add_argument(flag, type=int, default=1)
    parser.add_argument(
        "--encoder-stages", type=int, help="stages of the encoder; the others have the decoder"
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ckpt", default="pretrain_t5")
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    run(parser.parse_args())
    if dist.is_initialized():
        dist.destroy_process_group()
