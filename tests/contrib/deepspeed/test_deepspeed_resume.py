"""A run of DeepSpeed goes on with our layers and optimizer, at tp=2 and dp=2, on real ranks.

Tolerance: the two frameworks add the products of a layer and the gradients of the ranks in another order. A
step of Adam moves an element by about the learning rate, and depends on quotients of gradients and not on
their size, so that 1e-3 of a step leaves room for these last bits in the two steps; a lost moment or a step
count that is one off moves elements by more than 2e-2 of a step.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import megackpt
from megackpt.testing.ranks import RankPool
from megackpt.training.optim import DistributedOptimizer
from megackpt.training.parallel import (
    ColumnParallelLinear,
    ParallelGroups,
    ParallelLayout,
    RowParallelLinear,
    ShardedModule,
    VocabParallelEmbedding,
)
from tests.contrib.deepspeed.deepspeed_program import (
    LEARNING_RATE,
    MORE_STEPS,
    STATES,
    STEPS,
    batch,
    mean_square,
)
from tests.support.effort import sampled

STORED = Path(__file__).parent / "folders"
OF_A_STEP = 1e-3


class ParallelNet(ShardedModule):
    """The model of `tests.contrib.deepspeed.deepspeed_program`, of parallel layers with the same names."""

    def __init__(self, groups: ParallelGroups) -> None:
        super().__init__(groups)
        self.emb = VocabParallelEmbedding(12, 6, groups, make_divisible=1)
        self.fc1 = ColumnParallelLinear(6, 10, groups)
        self.fc2 = RowParallelLinear(10, 6, groups)
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.frozen(self.fc2(torch.relu(self.fc1(self.emb(tokens)))))
        return hidden


def _resumed(directory: Path) -> None:
    """Load a checkpoint, save it again as it was loaded, train, and save the result."""
    groups = ParallelGroups.create(ParallelLayout(tp=2, dp=2))
    model = ParallelNet(groups)
    trained = [p for p in model.parameters() if p.requires_grad]
    decayed = {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.0}
    others = {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.5}  # stored: another one
    optimizer = DistributedOptimizer([decayed, others], lambda g: torch.optim.AdamW(g, lr=1.0), groups)

    def declared() -> dict[str, object]:
        state = model.sharded_state_dict()
        return {"model": state, "optimizer": optimizer.sharded_state_dict(state)}

    loaded = megackpt.load(declared(), directory / "imported")
    model.load_state_dict(loaded["model"], strict=False)
    optimizer.load_sharded_state_dict(loaded["optimizer"])
    megackpt.save(declared(), directory / "loaded")
    for step in range(STEPS, STEPS + MORE_STEPS):
        optimizer.zero_grad()
        tokens, target = batch(groups.dp.rank, step)
        mean_square(model(tokens), target).backward()
        optimizer.step()
    megackpt.save(declared(), directory / "trained")


@sampled(6)
@pytest.mark.parametrize("case", ["zero1", "zero2", "zero3_subgroups"])
def test_training_goes_on_at_tp2_dp2(case: str, rank_pool: RankPool, tmp_path: Path) -> None:
    megackpt.import_deepspeed(STORED / case, tmp_path / "imported")
    rank_pool.run(_resumed, 4, tmp_path)
    truth = torch.load(STORED / f"{case}.truth.pt")
    loaded = megackpt.load_plain_tensors(tmp_path / "loaded")
    trained = megackpt.load_plain_tensors(tmp_path / "trained")
    for name, states in truth["states"].items():
        assert torch.equal(loaded[name], states["fp32_param"])
        for state in STATES:
            assert torch.equal(loaded[f"optimizer.state.{state}.{name}"], states[state])
        assert loaded[f"optimizer.state.step.{name}"] == STEPS
        moved = (trained[name] - truth["after"][name]).abs().max()
        assert moved <= OF_A_STEP * LEARNING_RATE, name
        assert (trained[name] - loaded[name]).abs().max() > 0.1 * LEARNING_RATE
