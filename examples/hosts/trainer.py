"""Hugging Face's Trainer with checkpoints of megackpt: a mixin, and nothing else changes.

torchrun --nproc-per-node 2 examples/hosts/trainer.py run
torchrun --nproc-per-node 1 examples/hosts/trainer.py run 20
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from megackpt.contrib.transformers import TrainerMixin, newest_checkpoint

GLOBAL_BATCH = 4


class MyTrainer(TrainerMixin, Trainer):
    """A Trainer whose checkpoints load at any number of processes."""


class PrintBegin(TrainerCallback):
    """Prints the step after which the run begins."""

    def on_train_begin(self, args, state, control, **kwargs):
        """Print the step."""
        print(f"begins after step {state.global_step}", flush=True)


def main(root: str, steps: int) -> None:
    """Train until a step, from the newest checkpoint under root if there is one."""
    arguments = TrainingArguments(
        root,
        max_steps=steps,
        save_steps=5,
        save_total_limit=2,
        logging_steps=1,
        learning_rate=1e-2,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    arguments.per_device_train_batch_size = GLOBAL_BATCH // arguments.world_size
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
        )
    )
    tokens = torch.randint(64, (256, 1)) + torch.arange(16) % 3  # each sample repeats three tokens
    data = [{"input_ids": row % 64, "labels": row % 64} for row in tokens]
    trainer = MyTrainer(model, arguments, train_dataset=data, callbacks=[PrintBegin()])
    trainer.train(resume_from_checkpoint=newest_checkpoint(root))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 10)
