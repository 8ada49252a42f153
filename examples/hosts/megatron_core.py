"""Megatron-Core's GPT and distributed optimizer: install() is all that its dist_checkpointing needs.

torchrun --nproc-per-node 4 examples/hosts/megatron_core.py run      # 2 tensor parallel, 2 data parallel
torchrun --nproc-per-node 1 examples/hosts/megatron_core.py run 20
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from megackpt.contrib import megatron

megatron.install()

from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig


def state(step, **is_loading):
    """Return what a checkpoint has; with is_loading=True, what to load."""
    kind = {"distrib_optim_sharding_type": "fully_reshardable"}  # at any layout
    weights = model.sharded_state_dict(metadata=kind)
    moments = optimizer.sharded_state_dict(weights, **is_loading, metadata=kind)
    return {"model": weights, "optimizer": moments, "step": step}


root, steps, done = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 10, 0
torch.cuda.set_device(dist.get_node_local_rank())
dist.init_process_group()
parallel_state.initialize_model_parallel(tp := min(2, dist.get_world_size()))
torch.manual_seed(0)  # weights are drawn on the CPU, the same at any layout
tensor_parallel.model_parallel_cuda_manual_seed(0)
sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "tensor_model_parallel_size": tp}
config = TransformerConfig(**sizes, use_cpu_initialization=True, hidden_dropout=0.0, attention_dropout=0.0)
model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=128, max_sequence_length=16).cuda()
ddp = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True), model)
optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-3, use_distributed_optimizer=True), [ddp])
if whole := sorted(root.glob("*/metadata.json")):  # written last
    loaded = dist_checkpointing.load(state(0, is_loading=True), whole[-1].parent)
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    done = loaded["step"]
print(f"begins after step {done}", flush=True)
dp = ddp.dp_group
samples = (torch.arange(17) * torch.arange(1, 5)[:, None]).chunk(dp.size())[dp.rank()].cuda()
for step in range(done + 1, steps + 1):
    tokens = (samples + step) % 128
    ddp.zero_grad_buffer()
    ddp(tokens[:, :-1], torch.arange(16).cuda(), None, labels=tokens[:, 1:]).mean().backward()
    ddp.finish_grad_sync()
    optimizer.step()
    if step % 5 == 0:
        dist_checkpointing.save(state(step), root / f"iter_{step:07d}")
dist.destroy_process_group()
