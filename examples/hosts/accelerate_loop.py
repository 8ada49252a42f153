"""A training loop of Hugging Face accelerate whose checkpoints are megackpt's.

accelerate launch --cpu --num_processes 2 examples/hosts/accelerate_loop.py run
accelerate launch --cpu --num_processes 1 examples/hosts/accelerate_loop.py run 20
"""

import sys

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

from megackpt import Checkpointer
from megackpt.contrib.accelerate import AcceleratorState

GLOBAL_BATCH = 4


def main(root: str, steps: int) -> None:
    """Train until a step, from the newest checkpoint under root if there is one."""
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    x = torch.randn(1024, 8)
    data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), GLOBAL_BATCH // accelerator.num_processes)
    model, optimizer, schedule, data = accelerator.prepare(model, optimizer, schedule, data)

    state = AcceleratorState(accelerator)
    with Checkpointer(root, keep_last=2) as checkpointer:
        done = checkpointer.find_latest() or 0
        if done:
            for note in state.resume(checkpointer.load(state.sharded_state_dict(is_loading=True)), step=done):
                accelerator.print(note)
        accelerator.print(f"begins after step {done}", flush=True)
        batches = iter(accelerator.skip_first_batches(data, done))
        for step in range(done + 1, steps + 1):
            x, y = next(batches)
            loss = (model(x) - y).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            accelerator.print(
                f"step {step}: loss {accelerator.reduce(loss.detach(), 'mean').item():.6f}", flush=True
            )
            if step % 5 == 0:
                checkpointer.save(step, state.sharded_state_dict())
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 10)
