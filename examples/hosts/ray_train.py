"""Ray Train with checkpoints that all workers write, and that Ray does not upload.

python examples/hosts/ray_train.py run
python examples/hosts/ray_train.py run 20 1     # until step 20, with one worker
"""

import sys
from pathlib import Path

import ray
import torch
from ray.train import CheckpointConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model

from megackpt import load, save
from megackpt.contrib.ray import get_checkpoint, report, step_directory
from megackpt.contrib.torch_state import TorchState

GLOBAL_BATCH = 4


def train(config: dict[str, int]) -> None:
    """Train until a step, from the newest reported checkpoint if there is one. Runs on every worker."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    model = prepare_model(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state, done = TorchState([model], [optimizer]), 0
    path = get_checkpoint()
    if path is not None:
        loaded = load({**state.sharded_state_dict(), "step": 0}, path)
        state.load_models(loaded)
        state.load_optimizers(loaded)
        done = loaded["step"]
    context = ray.train.get_context()
    print(f"begins after step {done}", flush=True)
    for step in range(done + 1, config["steps"] + 1):
        batch = torch.randn(GLOBAL_BATCH, 8, generator=torch.Generator().manual_seed(step))
        x = batch.chunk(context.get_world_size())[context.get_world_rank()]
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            save({**state.sharded_state_dict(), "step": step}, step_directory(step))
            report({"loss": loss.item()}, step_directory(step))


if __name__ == "__main__":
    root, steps, workers = (*sys.argv[1:], *("run", "10", "2")[len(sys.argv) - 1 :])
    ray.init(address="local", include_dashboard=False, num_cpus=3)
    TorchTrainer(
        train,
        train_loop_config={"steps": int(steps)},
        scaling_config=ScalingConfig(num_workers=int(workers)),
        run_config=RunConfig("fit", str(Path(root).resolve()), checkpoint_config=CheckpointConfig(2)),
    ).fit()
    ray.shutdown()
