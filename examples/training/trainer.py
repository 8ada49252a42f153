"""One rank of a training run: builds it, resumes it, trains it, saves it.

Owns what a checkpoint of this run contains: see `Trainer.state`.
"""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megackpt import Checkpointer, CheckpointError, KeyRule, Policy, StrictHandling
from megackpt.optim import DistributedOptimizer, MixedPrecisionOptimizer
from megackpt.parallel import MicroBatch, ParallelGroups, ParallelRng, forward_backward, share_losses
from models import GPT, GPTConfig, init_weights
from training.arguments import Arguments, refuse
from training.report import Report
from training.schedule import CosineSchedule
from training.signals import EXIT_CODE, SignalWatch
from training.text import Text

OPTIMIZERS = {"distributed": DistributedOptimizer, "plain": MixedPrecisionOptimizer}


class Trainer:
    """A model, its optimizer, its data position and its random streams, at one layout.

    Making one and `run` are collective over all ranks.
    """

    def __init__(self, arguments: Arguments, text: Text) -> None:
        self.arguments = arguments
        self.text = text
        self.groups = ParallelGroups.create(arguments.layout)
        self.rng = ParallelRng(arguments.seed, self.groups)
        self.model = GPT(
            arguments.model, self.groups, self.rng, sequence_parallel=arguments.sequence_parallel
        )
        init_weights(self.model, arguments.seed)
        self.schedule = CosineSchedule(
            peak=arguments.lr,
            minimum=arguments.min_lr,
            warmup=arguments.warmup_steps,
            steps=arguments.steps,
        )
        self.optimizer = OPTIMIZERS[arguments.optimizer](
            self._param_groups(),
            lambda groups: torch.optim.AdamW(groups, lr=arguments.lr, betas=(0.9, 0.95)),
            self.groups,
            clip_grad=arguments.clip_grad,
        )
        self.step = 0
        self.consumed_samples = 0
        self.signal = SignalWatch(arguments.knobs.exit_signal)
        self.checkpointer = None if arguments.ckpt is None else self._make_checkpointer(arguments.ckpt)

    def _make_checkpointer(self, root: Path) -> Checkpointer:
        knobs = self.arguments.knobs
        dp = self.groups.dp.group
        return Checkpointer(
            root,
            keep_last=knobs.keep_last,
            async_save=knobs.async_save,
            save_options=knobs.save_options(),
            # Random streams are not asked for at another layout; that is no fault, however strict the load.
            load_options=replace(
                knobs.load_options(), rules=(KeyRule(keys="rng_state", missing=Policy.IGNORE),)
            ),
            spread_group=dp if knobs.dist_ckpt_parallel_save_within_dp else None,
            exchange_group=dp if knobs.dist_ckpt_parallel_load else None,
        )

    def run(self) -> int:
        """Resume if there is something to resume, then train to the end, saving as asked.

        Returns the exit code: 0, or `signals.EXIT_CODE` where a signal has ended the run.
        """
        note = self.resume()
        with self._report() as report:
            report.start(step=self.step, layout=self.layout, note=note)
            try:
                signalled = self._train(report)
            finally:  # also where training fails: a step that is being written shall not be lost
                if self.checkpointer is not None:
                    self.checkpointer.close()
            newest = None if self.checkpointer is None else self.checkpointer.directory(self.step)
            report.end(self.step, newest)
        return EXIT_CODE if signalled else 0

    def _train(self, report: Report) -> bool:
        """Train to the end or until the signal comes; return whether it did."""
        last, interval = self.arguments.exit_after, self.arguments.knobs.save_interval
        signalled = False
        while self.step < last and not signalled:
            measured = self.train_step()
            report.step(self.step, **measured)
            signalled = self.signal.came()
            if signalled or self.step == last or (interval is not None and self.step % interval == 0):
                self.save(report)
        return signalled

    def state(self, *, with_rng: bool = True, to_save: bool = False) -> dict[str, Any]:
        """Declare everything that this run is made of: what a checkpoint holds.

        `rng` is left out where the streams of a checkpoint cannot be continued: at another layout than they
        were saved at. Collective where it is to be saved and optimizer state is gathered for that.
        """
        model = self.model.sharded_state_dict()
        gather = to_save and not self.arguments.knobs.dist_ckpt_parallel_dist_opt
        how = {"gathered": True} if gather and isinstance(self.optimizer, DistributedOptimizer) else {}
        return {
            "model": model,
            "optimizer": self.optimizer.sharded_state_dict(model, **how),
            "rng": self.rng.sharded_state_dict() if with_rng else {},
            "progress": {"step": self.step, "consumed_samples": self.consumed_samples},
            "schedule": self.schedule.state_dict(),
            "text": self.text.fingerprint,
        }

    @property
    def layout(self) -> dict[str, int]:
        """How the ranks are arranged, as it is stored with a checkpoint."""
        return {axis: getattr(self.arguments.layout, axis) for axis in ("tp", "pp", "dp")}

    def save(self, report: Report) -> None:
        """Save the current step, if checkpoints are wanted."""
        if self.checkpointer is None:
            return
        began = time.monotonic()
        self.checkpointer.save(
            self.step,
            self.state(to_save=True),
            content_metadata={"layout": self.layout, "model": _plain(self.arguments.model)},
            sharded_strategy=self.arguments.knobs.save_strategy(),
        )
        report.saved(
            self.step, seconds=time.monotonic() - began, is_committed=not self.checkpointer.async_save
        )

    def resume(self) -> str:
        """Load the newest committed checkpoint, whatever layout it was saved at; say what was found."""
        if self.checkpointer is None:
            return f"starting from scratch at {_text(self.layout)}; no checkpoints are made (see --ckpt)"
        step = self.checkpointer.find_latest()
        if step is None:
            return (
                f"starting from scratch at {_text(self.layout)}; {self.arguments.ckpt} has no checkpoint yet"
            )
        directory = self.checkpointer.directory(step)
        saved_at = self._check_model(self.checkpointer.content_metadata(step), directory)
        same_layout = saved_at == self.layout
        try:
            loaded = self.checkpointer.load(
                self.state(with_rng=same_layout),
                step=step,
                strict=StrictHandling.of(self.arguments.knobs.dist_ckpt_load_strictness),
            )
        except CheckpointError as error:  # the same on all ranks
            refuse(f"cannot resume: {error}")
        if loaded["text"] != self.text.fingerprint:
            refuse(
                f"{directory} was trained on other text, another --seq-length or another --seed; give the "
                f"same ones, or another --ckpt"
            )
        self.step = loaded["progress"]["step"]
        self.consumed_samples = loaded["progress"]["consumed_samples"]
        note = self._resume_optimizer(loaded["optimizer"])
        note += self._resume_schedule(CosineSchedule(**loaded["schedule"]))
        note += self._resume_rng(loaded["rng"]["rng_state"] if same_layout else None)
        return (
            f"resumed step {self.step} from {directory}, saved at {_text(saved_at)}, now at "
            f"{_text(self.layout)}{note}"
        )

    def _check_model(self, found: Any, directory: Path) -> dict[str, int]:
        """Refuse a checkpoint of another model; return the layout it was saved at."""
        if not isinstance(found, dict) or not {"layout", "model"} <= set(found):
            refuse(f"{directory} was not saved by pretrain_gpt.py; give another --ckpt")
        ours, saved = _plain(self.arguments.model), found["model"]
        other = [
            f"{name} {saved.get(name)} instead of {value}"
            for name, value in ours.items()
            if name != "dropout" and saved.get(name) != value
        ]
        if other:
            refuse(
                f"{directory} holds another model, with {', '.join(other)}; give the flags it was trained "
                f"with, or another --ckpt"
            )
        layout: dict[str, int] = found["layout"]
        return layout

    def _resume_optimizer(self, loaded: dict[str, Any]) -> str:
        decay = [group["weight_decay"] for group in self.optimizer.param_groups]
        self.optimizer.load_sharded_state_dict(loaded)
        kept = [group["weight_decay"] for group in self.optimizer.param_groups]
        if decay == kept:
            return ""
        if not self.arguments.override_schedule:
            return f"; the checkpoint's weight decay is kept: {kept[0]} instead of {decay[0]}"
        for group, value in zip(self.optimizer.param_groups, decay, strict=True):
            group["weight_decay"] = value
        return ""

    def _resume_rng(self, loaded: dict[str, Any] | None) -> str:
        if loaded is not None:
            self.rng.load_state_dict(loaded)
            return ""
        self.rng.reseed(self.step)
        return "; dropout draws from fresh streams" if self.arguments.model.dropout else ""

    def _resume_schedule(self, saved: CosineSchedule) -> str:
        if saved == self.schedule or self.arguments.override_schedule:
            return ""
        ours, kept = self.schedule.state_dict(), saved.state_dict()
        other = [f"{name} {kept[name]} instead of {ours[name]}" for name in ours if kept[name] != ours[name]]
        self.schedule = saved
        return (
            f"; the checkpoint's learning-rate schedule is kept: {', '.join(other)} "
            f"(--override-schedule follows the flags)"
        )

    def train_step(self) -> dict[str, Any]:
        """Train on the next global batch; return what was measured. Collective."""
        began = time.monotonic()
        numbers = self._next_samples()
        micro_batches = [MicroBatch(*self.text.batch(part)) for part in numbers]
        learning_rate = self.schedule.at(self.step + 1)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.zero_grad()
        losses = forward_backward(self.model, micro_batches, self.groups)
        loss = self._mean_loss(share_losses(losses, len(micro_batches), self.groups))
        norm = float(self.optimizer.step())
        self.step += 1
        first = self.consumed_samples
        self.consumed_samples += self.arguments.global_batch_size
        measured = {
            "loss": loss,
            "grad_norm": norm,
            "lr": learning_rate,
            "samples": [first, self.consumed_samples],
            "seconds": round(time.monotonic() - began, 4),
        }
        if self.arguments.log_samples:
            measured["sample_numbers"] = self._gathered(sorted(n for part in numbers for n in part))
        return measured

    def _next_samples(self) -> list[list[int]]:
        """Numbers of the samples of each of this rank's micro-batches: its share of the next global batch."""
        share = self.arguments.global_batch_size // self.groups.dp.size
        size = share // self.arguments.micro_batches
        first = self.consumed_samples + self.groups.dp.rank * share
        return [
            list(range(first + k * size, first + (k + 1) * size)) for k in range(self.arguments.micro_batches)
        ]

    def _mean_loss(self, losses: Tensor) -> float:
        """Mean over micro-batches and data-parallel ranks, all of which have equally many tokens."""
        mean = losses.mean()
        if self.groups.dp.group is not None:
            dist.all_reduce(mean, group=self.groups.dp.group)
            mean /= self.groups.dp.size
        return float(mean)

    def _gathered(self, numbers: list[int]) -> list[int]:
        """Return the sample numbers of all data-parallel ranks, sorted."""
        if self.groups.dp.group is None:
            return numbers
        everyone: list[list[int]] = [[] for _ in range(self.groups.dp.size)]
        dist.all_gather_object(everyone, numbers, group=self.groups.dp.group)
        return sorted(n for part in everyone for n in part)

    def _report(self) -> Report:
        arguments = self.arguments
        metrics = arguments.metrics or (arguments.ckpt and arguments.ckpt / "metrics.jsonl")
        return Report(metrics, steps=arguments.steps, done=self.step, is_root=self.groups.rank == 0)

    def _param_groups(self) -> list[dict[str, Any]]:
        """Matrices decay, norms and biases do not."""
        matrices = [p for p in self.model.parameters() if p.ndim > 1]
        others = [p for p in self.model.parameters() if p.ndim <= 1]
        return [
            {"name": "matrices", "params": matrices, "weight_decay": self.arguments.weight_decay},
            {"name": "norms_and_biases", "params": others, "weight_decay": 0.0},
        ]


def _text(layout: dict[str, int]) -> str:
    return " ".join(f"{axis}{size}" for axis, size in layout.items())


def _plain(model: GPTConfig) -> dict[str, int | float | bool | str | None]:
    """Return the fields of a model's configuration, with the dtype as text."""
    return asdict(model) | {"params_dtype": str(model.params_dtype)}
