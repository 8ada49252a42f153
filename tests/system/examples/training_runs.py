"""Small runs of pretrain_gpt.py's Trainer on worker ranks, and what their metrics files say."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from training.arguments import Arguments, parse_arguments
from training.text import Text
from training.trainer import Trainer

from megackpt.testing.ranks import RankPool
from megackpt.training.parallel import ParallelLayout

# The smallest model that can be cut into 4 along each axis: heads and query groups, layers, samples.
SMALL_MODEL = [
    "--num-layers=4",
    "--hidden-size=32",
    "--num-heads=4",
    "--num-query-groups=4",
    "--ffn-hidden-size=32",
    "--seq-length=16",
    "--global-batch-size=8",
    "--micro-batches=2",
    "--warmup-steps=3",
    "--lr=3e-3",
    "--min-lr=3e-4",
]
MOE = ("--experts=4", "--shared-experts=1", "--expert-ffn-hidden-size=16", "--expert-bias-rate=1e-3")
LAYOUTS = {
    "1 rank": ParallelLayout(),
    "TP4": ParallelLayout(tp=4),
    "PP4": ParallelLayout(pp=4),
    "DP4": ParallelLayout(dp=4),
    "TP2xPP2": ParallelLayout(tp=2, pp=2),
    "TP2xDP2": ParallelLayout(tp=2, dp=2),
    "PP2xDP2": ParallelLayout(pp=2, dp=2),
    "TP2xPP2xVPP2": ParallelLayout(tp=2, pp=2, vpp=2),
    "CP2xDP2": ParallelLayout(cp=2, dp=2),
    "EP4": ParallelLayout(dp=4, ep=4),
    "TP2xPP2xEP2xETP1": ParallelLayout(tp=2, pp=2, ep=2, etp=1),
    "CP2xDP2xEP2": ParallelLayout(cp=2, dp=2, ep=2),
    "CP2xPP2xVPP2xEP2": ParallelLayout(cp=2, pp=2, vpp=2, ep=2),
}


def write_text(path: Path) -> Path:
    """Write 20,000 bytes of made-up words, so that there is something to learn; return the path."""
    generator = random.Random(5)
    words = ["".join(generator.choices("abcdefgh", k=generator.randint(2, 6))) for _ in range(50)]
    path.write_text(" ".join(generator.choices(words, k=6000))[:20_000])
    return path


def arguments_for(layout: ParallelLayout, flags: Sequence[str]) -> Arguments:
    """Return what pretrain_gpt.py would run with, at a layout."""
    return parse_arguments(
        [
            *SMALL_MODEL,
            *(f"--{axis}={getattr(layout, axis)}" for axis in ("tp", "pp", "vpp", "cp", "ep", "etp")),
            *flags,
        ],
        world_size=layout.world_size,
    )


def train(pool: RankPool, name: str, directory: Path, *flags: str) -> None:
    """Run what pretrain_gpt.py runs, at a layout of LAYOUTS, with checkpoints in `directory`."""
    layout = LAYOUTS[name]
    pool.run(run_trainer, layout.world_size, arguments_for(layout, [f"--ckpt={directory}", *flags]))


def run_trainer(arguments: Arguments) -> None:
    """Train as pretrain_gpt.py does. Collective, in a worker rank."""
    with deterministic():
        make_trainer(arguments).run()


def make_trainer(arguments: Arguments) -> Trainer:
    """Make what pretrain_gpt.py makes. Collective, in a worker rank."""
    text = Text.read(arguments.data, seq_length=arguments.model.seq_length, seed=arguments.seed)
    return Trainer(arguments, text)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Choose algorithms as pretrain_gpt.py does, and undo it: workers serve other tests, too."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def metrics_of(directory: Path) -> dict[int, dict[str, Any]]:
    """Return what was measured in each step, without the time it took; a step may have one line only."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "event" not in line]
    assert len({line["step"] for line in steps}) == len(steps)
    return {line["step"]: {k: v for k, v in line.items() if k != "seconds"} for line in steps}


def events_of(directory: Path, event: str) -> list[dict[str, Any]]:
    """Return the lines about an event, `start` or `save`."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line.get("event") == event]
