"""`megackpt init`: a training script to begin with."""

from __future__ import annotations

import re
from pathlib import Path

import click

from megackpt.cli.entry import EPILOG, print_result
from megackpt.cli.locations import LocalPath
from megackpt.cli.output import ProgressBars
from megackpt.errors import DeclarationError

# Both scripts differ in how the model is spread; everything about checkpoints is the same.
_TORCH = '''"""{title} that saves, stops at SIGTERM, and resumes at any number of ranks.

torchrun --nproc-per-node 2 {name} run 100
"""

import signal
import sys

import torch
import torch.distributed as dist
{imports}

from megackpt import Checkpointer, SaveSchedule
from megackpt.contrib.torch_state import TorchState
from megackpt.training.state import RankPosition, RngState

root, steps = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 100
dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank, size = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", dist.get_node_local_rank()) if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)  # the same weights on all ranks
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1)).to(device)
{wrap}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(1 + rank)  # other random numbers on each rank
torch_state = TorchState([model], [optimizer])
position = RankPosition(layout={{"dp": size}}, coordinates={{"dp": rank}})
rng = RngState.of_process(position, seed=0, elsewhere="reseed")

# A save is due every 10 steps, and when the scheduler ends the job.
schedule = SaveSchedule(steps=10, signals=(signal.SIGTERM, signal.SIGUSR1))
with Checkpointer(root, schedule=schedule, keep_last=3, async_save=True) as checkpointer:

    def state(is_loading=False):
        return torch_state.sharded_state_dict(is_loading) | {{"rng": rng.sharded_state_dict("rng.")}}

    done = checkpointer.find_latest() or 0
    if done:
        loaded = checkpointer.load(state(is_loading=True))
        torch_state.load_models(loaded)
        torch_state.load_optimizers(loaded)
        rng.resume(loaded["rng"], step=done)
    print(f"rank {{rank}} begins after step {{done}}", flush=True)
    for step in range(done + 1, steps + 1):
        x = torch.randn(32, 8, device=device)  # your data
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpointer.maybe_save(step, state)
        if checkpointer.exit_requested:
            break
    else:
        if steps > done and steps % 10:
            checkpointer.save(steps, state())  # the last step
print(f"rank {{rank}} ends", flush=True)
dist.destroy_process_group()
if checkpointer.exit_requested:
    sys.exit(checkpointer.exit_code)  # not 0: the scheduler starts the job again
'''

_TRAINER = '''"""Hugging Face's Trainer that saves, stops at SIGTERM, and resumes at any number of processes.

torchrun --nproc-per-node 2 train_trainer.py run 100
"""

import signal
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from megackpt.contrib.transformers import TrainerMixin, newest_checkpoint


class MyTrainer(TrainerMixin, Trainer):
    """A Trainer whose checkpoints, with optimizer and random streams, load at any number of processes."""


class StopAtSignal(TrainerCallback):
    """Saves and ends the run after SIGTERM."""

    def __init__(self):
        self.signum = 0
        signal.signal(signal.SIGTERM, self.note)

    def note(self, signum, frame):
        self.signum = signum

    def on_step_end(self, args, state, control, **kwargs):
        control.should_save = control.should_save or bool(self.signum)
        control.should_training_stop = control.should_training_stop or bool(self.signum)


root, steps = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 100
stop = StopAtSignal()
arguments = TrainingArguments(
    root,
    max_steps=steps,
    save_steps=10,
    save_total_limit=3,
    logging_steps=10,
    report_to="none",
    use_cpu=not torch.cuda.is_available(),  # without it, each process trains alone on a machine with no GPU
)
torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, **sizes))  # your model
tokens = (torch.randint(64, (256, 1)) + torch.arange(16) % 3) % 64  # your data
data = [{"input_ids": row, "labels": row} for row in tokens]
trainer = MyTrainer(model, arguments, train_dataset=data, callbacks=[stop])
trainer.train(resume_from_checkpoint=newest_checkpoint(root))
sys.exit(128 + stop.signum if stop.signum else 0)  # not 0: the scheduler starts the job again
'''

_MEGATRON = '''"""Megatron-Core's GPT that saves, stops at SIGTERM, and resumes at any layout; it needs GPUs.

torchrun --nproc-per-node 4 train_megatron.py run 100      # 2 tensor parallel, 2 data parallel
"""

import signal
import sys

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig

from megackpt import Checkpointer, SaveSchedule
from megackpt.training.state import RankPosition, RngState

root, steps = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 100
torch.cuda.set_device(dist.get_node_local_rank())
dist.init_process_group()
parallel_state.initialize_model_parallel(tp := min(2, dist.get_world_size()))
torch.manual_seed(0)  # weights are drawn on the CPU, the same at any layout
tensor_parallel.model_parallel_cuda_manual_seed(0)
sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "tensor_model_parallel_size": tp}
config = TransformerConfig(**sizes, use_cpu_initialization=True)
model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=128, max_sequence_length=16).cuda()
ddp = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True), model)
optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-3, use_distributed_optimizer=True), [ddp])
dp = ddp.dp_group
sizes = {"tp": tp, "dp": dp.size()}
at = {"tp": parallel_state.get_tensor_model_parallel_rank(), "dp": dp.rank()}
rng = RngState.of_process(RankPosition(layout=sizes, coordinates=at), seed=0, elsewhere="reseed")


def state(is_loading=False):
    """Return what a checkpoint has."""
    kind = {"distrib_optim_sharding_type": "fully_reshardable"}  # at any layout
    weights = model.sharded_state_dict(metadata=kind)
    moments = optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=kind)
    return {"model": weights, "optimizer": moments, "rng": rng.sharded_state_dict("rng.")}


schedule = SaveSchedule(steps=10, signals=(signal.SIGTERM, signal.SIGUSR1))
with Checkpointer(root, schedule=schedule, keep_last=3, async_save=True) as checkpointer:
    done = checkpointer.find_latest() or 0
    if done:
        loaded = checkpointer.load(state(is_loading=True))
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        rng.resume(loaded["rng"], step=done)
    samples = (torch.arange(17) * torch.arange(1, 5)[:, None]).chunk(dp.size())[dp.rank()].cuda()  # your data
    for step in range(done + 1, steps + 1):
        tokens = (samples + step) % 128
        ddp.zero_grad_buffer()
        ddp(tokens[:, :-1], torch.arange(16).cuda(), None, labels=tokens[:, 1:]).mean().backward()
        ddp.finish_grad_sync()
        optimizer.step()
        checkpointer.maybe_save(step, state)
        if checkpointer.exit_requested:
            break
dist.destroy_process_group()
if checkpointer.exit_requested:
    sys.exit(checkpointer.exit_code)  # not 0: the scheduler starts the job again
'''

SCRIPTS = {
    "ddp": _TORCH.format(
        name="train_ddp.py",
        title="DistributedDataParallel training",
        imports="from torch.nn.parallel import DistributedDataParallel",
        wrap="model = DistributedDataParallel(model)",
    ),
    "fsdp2": _TORCH.format(
        name="train_fsdp2.py",
        title="FSDP2 training",
        imports="from torch.distributed.fsdp import fully_shard",
        wrap="for layer in (model[0], model):\n    fully_shard(layer)",
    ),
    "megatron": _MEGATRON,
    "trainer": _TRAINER,
}
"""The scripts by kind."""


@click.command(name="init", epilog=EPILOG)
@click.argument("kind", metavar="KIND", type=click.Choice(sorted(SCRIPTS)))
@click.argument("path", metavar="[FILE]", required=False, type=LocalPath(dir_okay=False))
def command(kind: str, path: str | None) -> None:
    """Write a training script that saves, resumes, and ends well at signals, to begin with.

    KIND is ddp, fsdp2, megatron (Megatron-Core) or trainer (Hugging Face). FILE is train_ddp.py for ddp, and
    so on. The script runs as it is, on a model of a few layers; replace the model and the data by yours. A
    file that exists is not changed.
    """
    target = Path(path or f"train_{kind}.py")
    with ProgressBars("writing the script"):
        # Python looks in the script's folder first, so megatron.py would be imported instead of the package.
        if target.stem in re.findall(r"^(?:from|import) (\w+)", SCRIPTS[kind], re.MULTILINE):
            raise DeclarationError(
                f"{target} would hide {target.stem}, which the script imports. Name another FILE.",
                path=str(target),
            )
        if target.exists() and target.read_bytes() != SCRIPTS[kind].encode():
            raise DeclarationError(
                f"{target} exists, and is not changed. Name another FILE.", path=str(target)
            )
        target.write_text(SCRIPTS[kind])
    run = f"torchrun --nproc-per-node 2 {target} run 100"
    print_result({"file": str(target), "run": run}, f"{target} is written. Run it: {run}")
