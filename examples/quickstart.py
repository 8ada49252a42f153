"""A layer of your own, saved at one layout and resumed at another.

torchrun --nproc-per-node 4 examples/quickstart.py    # TP2 x DP2
torchrun --nproc-per-node 2 examples/quickstart.py    # TP2: continues at the step that was reached
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megackpt import Checkpointer
from megackpt.training.optim import DistributedOptimizer
from megackpt.training.parallel import ParallelGroups, ParallelLayout, ShardedModule

FEATURES = 8


class Scale(ShardedModule):
    """Multiplies each feature by a weight of its own; tensor parallelism cuts the features."""

    tp_sharding = {"weight": 0}  # noqa: RUF012 - read-only by its type in ShardedModule

    def __init__(self, groups: ParallelGroups) -> None:
        super().__init__(groups)
        self.weight = nn.Parameter(torch.zeros(FEATURES // groups.tp.size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scale local features `[batch, features / tp]`."""
        return x * self.weight


def run(root: str, steps: int = 10) -> None:
    """Train for some steps more than the newest checkpoint under root has, and save."""
    groups = ParallelGroups.create(ParallelLayout(tp=2, dp=dist.get_world_size() // 2))
    model = Scale(groups)
    optimizer = DistributedOptimizer(model.parameters(), lambda p: torch.optim.Adam(p, lr=0.1), groups)

    def state_at(step: int) -> dict[str, Any]:
        model_state = model.sharded_state_dict()
        return {"model": model_state, "optimizer": optimizer.sharded_state_dict(model_state), "step": step}

    with Checkpointer(root, keep_last=2) as checkpointer:
        done = 0
        if checkpointer.find_latest() is not None:
            loaded = checkpointer.load(state_at(done))  # fills the tensors of model and optimizer
            optimizer.load_sharded_state_dict(loaded["optimizer"])
            done = loaded["step"]
        for step in range(done + 1, done + steps + 1):
            x = torch.ones(4, FEATURES // groups.tp.size)
            loss = (model(x) - 3).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if dist.get_rank() == 0:
                print(f"step {step}, {dist.get_world_size()} ranks, loss {loss.item():.4f}")
        checkpointer.save(done + steps, state_at(done + steps))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run(sys.argv[1] if len(sys.argv) > 1 else "quickstart")
    dist.destroy_process_group()
