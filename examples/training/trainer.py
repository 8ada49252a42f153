"""One rank of a training run: builds it, resumes it, trains it, saves it.

`Trainer.state` is what a checkpoint of this run contains.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megackpt import Checkpointer, CheckpointError, Policy, Retention, SaveSchedule, StrictHandling
from megackpt.run.checkpointer import Groups
from megackpt.training.optim import DistributedOptimizer, MixedPrecisionOptimizer
from megackpt.training.parallel import (
    MicroBatch,
    ParallelGroups,
    ParallelRng,
    context_share,
    forward_backward,
    share_losses,
    update_expert_bias,
)
from megackpt.training.state import DataPosition, RankPosition, RngState, ScheduleState, TrainingState
from models import build_gpt, init_weights
from training.arguments import Arguments, exit_with_error
from training.hugging_face import export_folder, import_weights
from training.losses import mean_loss
from training.report import Report
from training.saved_model import differences, plain_fields
from training.schedule import CosineSchedule
from training.text import Text


class Trainer:
    """A model, its optimizer, its data position and its random streams, at one layout.

    The constructor and `run` are collective over all ranks.
    """

    def __init__(self, arguments: Arguments, text: Text) -> None:
        self.arguments = arguments
        self.text = text
        self.groups = ParallelGroups.create(arguments.layout)
        self.rng = ParallelRng(arguments.seed, self.groups)
        self.model = build_gpt(
            arguments.model,
            self.groups,
            self.rng,
            sequence_parallel=arguments.sequence_parallel,
            stages=arguments.stages,
        )
        init_weights(self.model, arguments.seed)
        self.schedule = CosineSchedule(
            peak=arguments.lr,
            minimum=arguments.min_lr,
            warmup=arguments.warmup_steps,
            steps=arguments.steps,
        )
        self.optimizer = self._make_optimizer()
        self.step = 0
        self.data = DataPosition(text.order)
        self.schedule_state = ScheduleState(
            {**self.schedule.state_dict(), "weight_decay": arguments.weight_decay},
            when_different=arguments.when_schedule_differs,
        )
        rng = RngState.of_process(
            RankPosition.of(self.groups), seed=arguments.seed, parallel=self.rng, elsewhere="reseed"
        )
        self.training_state = TrainingState(
            {"data": self.data, "schedule": self.schedule_state, "rng": rng},
            timeout_s=arguments.knobs.timeout_s,
        )
        self.checkpointer = None if arguments.ckpt is None else self._make_checkpointer(arguments.ckpt)

    def _make_optimizer(self) -> DistributedOptimizer | MixedPrecisionOptimizer:
        arguments, groups = self.arguments, self._param_groups()
        if arguments.optimizer == "plain":
            return MixedPrecisionOptimizer(groups, self._adam, self.groups, clip_grad=arguments.clip_grad)
        optimizer = DistributedOptimizer(
            groups,
            self._adam,
            self.groups,
            clip_grad=arguments.clip_grad,
            overlap_grad_reduce=arguments.overlap_grad_reduce,
            overlap_param_gather=list(self.model) if arguments.overlap_param_gather else (),
        )
        optimizer.micro_batches = arguments.micro_batches
        return optimizer

    def _adam(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, lr=self.arguments.lr, betas=(0.9, 0.95))

    def _make_checkpointer(self, root: Path | str) -> Checkpointer:
        knobs = self.arguments.knobs
        replicas = self.groups.dp_cp.group
        return Checkpointer(
            root,
            retention=Retention(keep_last=knobs.keep_last, keep_every=knobs.keep_every),
            schedule=SaveSchedule(
                steps=knobs.save_interval, seconds=knobs.save_interval_seconds, signals=knobs.signals
            ),
            on_error=knobs.on_save_error,  # type: ignore[arg-type]
            verify_after_save=knobs.verify_after_save,
            async_save=knobs.async_options() if knobs.async_save else False,
            save_options=knobs.save_options(),
            load_options=replace(knobs.load_options(), complete=self._must_load_all),
            group=Groups(
                spread=replicas if knobs.dist_ckpt_parallel_save_within_dp else None,
                exchange=replicas if knobs.dist_ckpt_parallel_load else None,
            ),
        )

    @property
    def _must_load_all(self) -> bool:
        """Whether a load proves that the ranks request all of a checkpoint: unless a mode tolerates less."""
        mode = StrictHandling.of(self.arguments.knobs.dist_ckpt_load_strictness)
        return mode.on_unexpected is Policy.ERROR

    def run(self) -> int:
        """Resume if there is a checkpoint, then train to the end, saving when it is due.

        Returns:
            The exit code: 0, or that of the Checkpointer if a signal has ended the run.
        """
        note = self.resume()
        if self.checkpointer is not None and self.step < self.arguments.exit_after:
            self.checkpointer.warm_up(
                self.state(to_save=True), sharded_strategy=self.arguments.knobs.save_strategy()
            )  # then the first asynchronous save stops training no longer than the others
        with self._report() as report:
            report.start(step=self.step, layout=self.layout, note=note)
            try:
                self._train(report)
            finally:  # also if training fails, so that a step that is being written is not lost
                if self.checkpointer is not None:
                    self.checkpointer.close()
            self._export(report)
            report.end(self.step, self._newest())
        return self.checkpointer.exit_code or 0 if self.checkpointer is not None else 0

    def _newest(self) -> str | None:
        """The location of the newest checkpoint; with --on-save-error warn it may be an old one."""
        step = None if self.checkpointer is None or self.groups.rank else self.checkpointer.latest()
        return None if self.checkpointer is None or step is None else self.checkpointer.location(step)

    def _train(self, report: Report) -> None:
        """Train to the end or until a signal asks to exit, saving when it is due."""
        last = self.arguments.exit_after
        while self.step < last:
            measured = self.train_step()
            report.step(self.step, **measured)
            if self.checkpointer is None:
                continue
            due = self.checkpointer.should_save(self.step)  # collective: at every step
            if self.step == last:
                self.checkpointer.wait()  # so that the last save is not skipped
            if due or self.step == last:
                self.save(self.checkpointer, report)
            if self.checkpointer.exit_requested:
                break

    def _export(self, report: Report) -> None:
        """Write the last checkpoint as a Hugging Face folder, if --export-to asks for it."""
        arguments, checkpointer = self.arguments, self.checkpointer
        if arguments.export_to is None or checkpointer is None or self.step < arguments.exit_after:
            return
        step = checkpointer.find_latest()
        if step is None:  # with --on-save-error warn
            exit_with_error(f"--export-to: {arguments.ckpt} has no checkpoint")
        try:
            location = checkpointer.location(step)
            report.print_line(export_folder(location, arguments.export_to, arguments.init_from))
        except CheckpointError as error:  # the same on all ranks
            exit_with_error(f"cannot export to {arguments.export_to}: {error}")

    def state(self, *, to_save: bool = False) -> dict[str, Any]:
        """Declare the whole state of this run, which is what a checkpoint contains.

        Collective if it is to be saved and the optimizer's state is gathered for that.
        """
        model = self.model.sharded_state_dict()
        gather = to_save and not self.arguments.knobs.dist_ckpt_parallel_dist_opt
        how = {"gathered": True} if gather and isinstance(self.optimizer, DistributedOptimizer) else {}
        return {
            "model": model,
            "optimizer": self.optimizer.sharded_state_dict(model, **how),
            "stages": self.arguments.stages.to_json(),
            **self.training_state.sharded_state_dict(),
        }

    @property
    def layout(self) -> dict[str, int]:
        """The sizes of the parallel layout, as they are stored with a checkpoint; without axes of size 1.

        tp, pp and dp are always there, and etp only where it is not tp.
        """
        layout = self.arguments.layout
        sizes = {axis: getattr(layout, axis) for axis in ("tp", "pp", "dp")}
        sizes |= {axis: size for axis in ("cp", "vpp", "ep") if (size := getattr(layout, axis)) > 1}
        return sizes | ({"etp": layout.etp} if layout.etp != layout.tp else {})

    def save(self, checkpointer: Checkpointer, report: Report) -> None:
        """Save the current step; with --on-save-error warn it may fail."""
        began = time.monotonic()
        config = self.arguments.huggingface_config  # by which it can be exported
        saved = checkpointer.save(
            self.step,
            self.state(to_save=True),
            content_metadata={
                "layout": self.layout,
                "model": plain_fields(self.arguments.model),
                "steps": self.schedule.steps,
                **({} if config is None else {"huggingface_config": dict(config)}),
            },
            sharded_strategy=self.arguments.knobs.save_strategy(),
        )
        if saved:
            seconds = time.monotonic() - began
            report.saved(self.step, seconds=seconds, is_committed=not checkpointer.async_save)

    def resume(self) -> str:
        """Load the newest committed checkpoint, saved at any layout; return a line for the report."""
        if self.checkpointer is None:
            return f"{self._begin()} at {_text(self.layout)}; no checkpoints are made (see --ckpt)"
        step = self.checkpointer.find_latest()
        if step is None:
            return f"{self._begin()} at {_text(self.layout)}; {self.arguments.ckpt} has no checkpoint yet"
        location = self.checkpointer.location(step)
        metadata = self.checkpointer.content_metadata(step)
        saved_at = self._check_model(metadata, location)
        self._check_steps(metadata, step, location)
        try:
            loaded = self.checkpointer.load(
                self.state(),
                step=step,
                strict=StrictHandling.of(self.arguments.knobs.dist_ckpt_load_strictness),
            )
            notes = self.training_state.resume(loaded, step=step)
            self.optimizer.load_sharded_state_dict(
                loaded["optimizer"], when_different=self.arguments.when_schedule_differs
            )
        except CheckpointError as error:  # the same on all ranks
            exit_with_error(f"cannot resume {location}: {error}")
        self.step = step
        self._follow_schedule()
        return "; ".join(
            [
                f"resumed step {self.step} from {location}, saved at {_text(saved_at)}, now at "
                f"{_text(self.layout)}",
                *notes,
            ]
        )

    def _begin(self) -> str:
        """Begin a run, with the weights of --init-from if there is that; return words for the report."""
        folder = self.arguments.init_from
        if folder is None:
            return "starting from scratch"
        try:
            loaded = import_weights(self.state(), folder, self.arguments.knobs.load_options())
        except CheckpointError as error:  # the same on all ranks
            exit_with_error(f"cannot start from {folder}: {error}")
        return f"starting from {folder} ({loaded.nbytes:,} bytes on rank 0)"

    def _check_model(self, metadata: Any, location: str) -> dict[str, int]:
        """Exit if the checkpoint has another model; return the layout it was saved at."""
        if not isinstance(metadata, dict) or not {"layout", "model"} <= set(metadata):
            exit_with_error(f"{location} was not saved by pretrain_gpt.py; give another --ckpt")
        other = differences(self.arguments.model, metadata["model"])
        if other:
            exit_with_error(
                f"{location} holds another model, with {', '.join(other)}; give the flags it was trained "
                f"with, or another --ckpt"
            )
        layout: dict[str, int] = metadata["layout"]
        return layout

    def _check_steps(self, metadata: dict[str, Any], step: int, location: str) -> None:
        """Exit if --steps differs from that of the checkpoint, unless a flag chooses one of the schedules."""
        asked, begun = self.arguments.steps, metadata.get("steps", self.arguments.steps)
        if asked == begun or self.arguments.when_schedule_differs != "error":
            return
        state = f"is finished: step {step} of {begun}" if step >= begun else f"has --steps {begun}"
        exit_with_error(
            f"--steps {asked}: the run in {location} {state}, and its learning rate was scheduled for that. "
            f"Give --steps {begun}; or go on to step {asked} with --override-opt_param-scheduler, by a "
            f"schedule for all {asked}, or with --use-checkpoint-opt_param-scheduler, by that of the "
            f"checkpoint"
        )

    def _follow_schedule(self) -> None:
        """Use the resumed schedule, which may be that of the checkpoint."""
        fields = self.schedule_state.values
        for group in self.optimizer.param_groups:
            if group["name"] == "matrices":
                group["weight_decay"] = fields["weight_decay"]
        del fields["weight_decay"]
        self.schedule = CosineSchedule(**fields)

    def train_step(self) -> dict[str, Any]:
        """Train on the next global batch; return its measurements. Collective."""
        began = time.monotonic()
        first = self.data.consumed
        numbers = self._next_samples()
        micro_batches = [self._micro_batch(part) for part in numbers]
        learning_rate = self.schedule.at(self.step + 1)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.zero_grad()
        losses = forward_backward(self.model, micro_batches, self.groups)
        loss = mean_loss(share_losses(losses, len(micro_batches), self.groups), self.groups)
        norm = float(self.optimizer.step())
        update_expert_bias(self.model, self.groups)
        self.step += 1
        measured = {
            "loss": loss,
            "grad_norm": norm,
            "lr": learning_rate,
            "samples": [first, self.data.consumed],
            "seconds": round(time.monotonic() - began, 4),
        }
        if self.arguments.log_samples:
            measured["sample_numbers"] = self._gathered(sorted(n for part in numbers for n in part))
        return measured

    def _next_samples(self) -> list[list[int]]:
        """The sample numbers of each of this rank's micro-batches, its share of the next global batch."""
        dp, parts = self.groups.dp, self.arguments.micro_batches
        share = self.data.take(self.arguments.global_batch_size, dp_rank=dp.rank, dp_size=dp.size)
        size = len(share) // parts
        return [list(share[k * size : (k + 1) * size]) for k in range(parts)]

    def _micro_batch(self, numbers: list[int]) -> MicroBatch:
        """The tokens and labels of samples: of each sequence, what this rank of cp has."""
        tokens, labels = self.text.batch(numbers)
        cp = self.groups.cp
        return MicroBatch(context_share(tokens, cp, dim=1), context_share(labels, cp, dim=1))

    def _gathered(self, numbers: list[int]) -> list[int]:
        """Return the sample numbers of all data-parallel ranks, sorted."""
        if self.groups.dp.group is None:
            return numbers
        everyone: list[list[int]] = [[] for _ in range(self.groups.dp.size)]
        dist.all_gather_object(everyone, numbers, group=self.groups.dp.group)
        return sorted(n for part in everyone for n in part)

    def _report(self) -> Report:
        arguments = self.arguments
        default_path = arguments.ckpt / "metrics.jsonl" if isinstance(arguments.ckpt, Path) else None
        metrics = arguments.metrics or default_path
        return Report(metrics, steps=arguments.steps, done=self.step, is_root=self.groups.rank == 0)

    def _param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups: matrices with weight decay, norms and biases without."""
        matrices = [p for p in self.model.parameters() if p.ndim > 1]
        others = [p for p in self.model.parameters() if p.ndim <= 1]
        return [
            {"name": "matrices", "params": matrices, "weight_decay": self.arguments.weight_decay},
            {"name": "norms_and_biases", "params": others, "weight_decay": 0.0},
        ]


def _text(layout: dict[str, int]) -> str:
    return " ".join(f"{axis}{size}" for axis, size in layout.items())
