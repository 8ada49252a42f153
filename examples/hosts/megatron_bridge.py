"""Megatron-Bridge's save_checkpoint and load_checkpoint in a loop: install() is all that they need.

torchrun --nproc-per-node 4 examples/hosts/megatron_bridge.py run      # 2 tensor parallel, 2 data parallel
torchrun --nproc-per-node 1 examples/hosts/megatron_bridge.py run 20
"""

import sys

import torch
import torch.distributed as dist

from megackpt.contrib import megatron

megatron.install()

from megatron.bridge.training import checkpointing, config, state
from megatron.core import num_microbatches_calculator, parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig

root, steps = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 10
torch.cuda.set_device(dist.get_node_local_rank())
dist.init_process_group()
parallel_state.initialize_model_parallel(tp := min(2, dist.get_world_size()))
groups = ProcessGroupCollection.use_mpu_process_groups()
num_microbatches_calculator.init_num_microbatches_calculator(dist.get_rank(), None, 4, 1, groups.dp.size())
torch.manual_seed(0)  # weights are drawn on the CPU, the same at any layout
tensor_parallel.model_parallel_cuda_manual_seed(0)
sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "tensor_model_parallel_size": tp}
run = state.GlobalState()
run.cfg = config.ConfigContainer(
    model=TransformerConfig(**sizes, use_cpu_initialization=True, hidden_dropout=0.0, attention_dropout=0.0),
    ddp=config.DistributedDataParallelConfig(use_distributed_optimizer=True),
    optimizer=config.OptimizerConfig(optimizer="adam", lr=1e-3, use_distributed_optimizer=True),
    checkpoint=config.CheckpointConfig(save=root, load=root, dist_ckpt_optim_fully_reshardable=True),
    train=config.TrainingConfig(train_iters=steps),
    **{"scheduler": None, "dataset": None, "tokenizer": None, "logger": config.LoggerConfig()},
)
spec = get_gpt_layer_local_spec()
model = GPTModel(run.cfg.model, spec, vocab_size=128, max_sequence_length=16, pg_collection=groups).cuda()
ddp = DistributedDataParallel(run.cfg.model, run.cfg.ddp, model)
run.cfg.optimizer.finalize()
optimizer = get_megatron_optimizer(run.cfg.optimizer, [ddp])
checkpointing.load_checkpoint(run, [ddp], optimizer, None)
print(f"begins after step {run.train_state.step}", flush=True)
samples = (torch.arange(17) * torch.arange(1, 5)[:, None]).chunk(groups.dp.size())[groups.dp.rank()].cuda()
while run.train_state.step < steps:
    run.train_state.step += 1
    tokens = (samples + run.train_state.step) % 128
    ddp.zero_grad_buffer()
    ddp(tokens[:, :-1], torch.arange(16).cuda(), None, labels=tokens[:, 1:]).mean().backward()
    ddp.finish_grad_sync()
    optimizer.step()
    if run.train_state.step % 5 == 0:
        checkpointing.save_checkpoint(run, [ddp], optimizer, None, num_floating_point_operations_so_far=0)
dist.destroy_process_group()
