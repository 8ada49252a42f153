"""What the flags of pretrain_gpt.py ask for, and checks of their values and combinations.

Invalid flags are one line of text on rank 0 and exit code 2, before any rank waits for another.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from megackpt import CheckpointError
from megackpt.contrib.megatron.config import CheckpointConfig
from megackpt.training.parallel import Capacity, ParallelLayout, RoutingOptions, StageTable
from megackpt.training.state import WhenDifferent
from models import GPTConfig, MoEConfig
from training.flags import MODEL_FLAGS, exit_with_error, make_parser
from training.hugging_face import (
    SEQ_LENGTH,
    config_of_flags,
    flags_unlike_mixtral,
    model_of,
    read_config,
    read_model,
)
from training.text import VOCAB_SIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The checked flags of pretrain_gpt.py.

    Attributes:
        layout: the sizes that the flags give; the remaining ranks are data-parallel.
        stages: which layers are on which pipeline stage.
        model: the configuration of the model.
        exit_after: the step after which this process ends; `steps` by default.
        huggingface_config: the config.json of the model; None if no family of Hugging Face has it.
        init_from: the Hugging Face folder that a run without a checkpoint begins with, or its URL.
        export_to: the Hugging Face folder that is written at the end, or its URL.
        ckpt: the directory of the checkpoints, or its URL; None: no checkpoints are made.
        knobs: how checkpoints are made and loaded.
        when_schedule_differs: what to do if a checkpoint was trained with another schedule.
        metrics: the file for metrics; None for a file in `ckpt`, if that is a directory.
    """

    layout: ParallelLayout
    stages: StageTable
    model: GPTConfig
    micro_batches: int
    global_batch_size: int
    sequence_parallel: bool
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    optimizer: str
    steps: int
    exit_after: int
    lr: float
    min_lr: float
    warmup_steps: int
    weight_decay: float
    clip_grad: float
    seed: int
    data: Sequence[Path]
    huggingface_config: Mapping[str, Any] | None
    init_from: Path | str | None
    export_to: Path | str | None
    ckpt: Path | str | None
    knobs: CheckpointConfig
    when_schedule_differs: WhenDifferent
    metrics: Path | None
    log_samples: bool


def parse_arguments(argv: list[str] | None = None, *, world_size: int | None = None) -> Arguments:
    """Parse and check the flags. Local; exits if they are invalid, see `exit_with_error`.

    Args:
        argv: the flags; None for those of the process.
        world_size: the number of ranks; None for the one that torchrun sets.
    """
    flags = make_parser().parse_args(argv)
    world_size = int(os.environ.get("WORLD_SIZE", "1")) if world_size is None else world_size
    try:
        table = _given_stages(flags)
        layout = ParallelLayout.infer(
            world_size,
            tp=flags.tp,
            pp=flags.pp,
            cp=flags.cp,
            ep=flags.ep,
            etp=flags.tp if flags.etp is None else flags.etp,
            vpp=(1 if table is None else table.vpp) if flags.vpp is None else flags.vpp,
        )
        model, flags.huggingface_config = _model(flags)
        flags.seq_length = model.seq_length
        model.check_layout(layout, table)
        stages = StageTable.even(model.num_layers, pp=layout.pp, vpp=layout.vpp) if table is None else table
        knobs = CheckpointConfig(
            **{field.name: getattr(flags, field.name) for field in fields(CheckpointConfig)}
        )
        knobs.save_strategy()
    except CheckpointError as error:
        exit_with_error(str(error))
    if flags.exit_after is None:
        flags.exit_after = flags.steps
    _check(flags, layout, model)
    flags.when_schedule_differs = _when_schedule_differs(flags)
    others = {name: getattr(flags, name) for name in Arguments.__slots__ if hasattr(flags, name)}
    return Arguments(layout=layout, stages=stages, model=model, knobs=knobs, **others)


def _model(flags: argparse.Namespace) -> tuple[GPTConfig, Mapping[str, Any] | None]:
    """Return the model of --init-from or --model, or that of the flags, and its config.json."""
    dtype = torch.bfloat16 if flags.bf16 else torch.float32
    source = "config.json in --init-from" if flags.model_from is None else "--model"
    if flags.init_from is not None and flags.model_from is not None:
        exit_with_error("--model and --init-from both describe the model; leave one out")
    if flags.init_from is not None or flags.model_from is not None:
        defaults = make_parser().parse_args([])
        chosen = [flag for flag in MODEL_FLAGS if _value(flags, flag) != _value(defaults, flag)]
        faults = [f"{', '.join(chosen)}: the model is that of {source}; leave them out."] if chosen else []
        config = read_config(flags.init_from) if flags.model_from is None else read_model(flags.model_from)
        model = model_of(
            config, seq_length=flags.seq_length, dropout=flags.dropout, dtype=dtype, faults=faults
        )
        return model, config
    model = GPTConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=flags.hidden_size,
        num_layers=flags.num_layers,
        num_heads=flags.num_heads,
        num_query_groups=flags.num_query_groups,
        ffn_hidden_size=flags.ffn_hidden_size,
        seq_length=SEQ_LENGTH if flags.seq_length is None else flags.seq_length,
        dropout=flags.dropout,
        tied_embeddings=not flags.untie_embeddings,
        make_vocab_divisible=1,
        params_dtype=dtype,
        moe=_experts(flags),
    )
    return model, config_of_flags(model)


def _value(flags: argparse.Namespace, flag: str) -> Any:
    return getattr(flags, flag.removeprefix("--").replace("-", "_"))


def _experts(flags: argparse.Namespace) -> MoEConfig | None:
    """Return the mixture of experts that the flags describe; None without --experts."""
    if flags.experts is None:
        return None
    width = flags.expert_ffn_hidden_size or flags.ffn_hidden_size or flags.hidden_size
    return MoEConfig(
        num_experts=flags.experts,
        ffn_hidden_size=width,
        routing=RoutingOptions(
            top_k=flags.top_k,
            score_function=flags.router_score,
            normalise=flags.top_k > 1,
            balance_loss=flags.balance_loss,
            z_loss=flags.z_loss,
            bias_rate=flags.expert_bias_rate,
        ),
        capacity=None if flags.capacity_factor is None else Capacity(factor=flags.capacity_factor),
        shared_ffn_hidden_size=flags.shared_experts * width,
        layer_freq=flags.moe_layer_freq,
    )


def _given_stages(flags: argparse.Namespace) -> StageTable | None:
    """Return the table of --pipeline-layout; None without that flag."""
    if flags.pipeline_layout is None:
        return None
    return StageTable.from_string(flags.pipeline_layout, pp=flags.pp)


def _check(flags: argparse.Namespace, layout: ParallelLayout, model: GPTConfig) -> None:
    """Exit if numbers are too small, or flags contradict each other or the layout."""
    for name in (
        "steps",
        "exit_after",
        "save_interval",
        "keep_last",
        "keep_every",
        "async_staging_bytes",
        "micro_batches",
        "global_batch_size",
    ):
        value = getattr(flags, name)
        if value is not None and value < 1:
            exit_with_error(f"--{name.replace('_', '-')} is {value}; give at least 1")
    if flags.exit_after > flags.steps:
        exit_with_error(
            f"--exit-after {flags.exit_after} is beyond the end of the run, --steps {flags.steps}"
        )
    share = layout.dp * flags.micro_batches
    if flags.global_batch_size % share:
        exit_with_error(
            f"--global-batch-size {flags.global_batch_size} does not split into dp={layout.dp} x "
            f"--micro-batches={flags.micro_batches}; make it a multiple of {share}"
        )
    if model.moe is None and (layout.ep > 1 or layout.etp != layout.tp):
        exit_with_error(
            f"--ep {layout.ep} and --etp {layout.etp} spread experts over ranks, but there are none; give "
            f"--experts, or leave both out"
        )
    if flags.optimizer == "plain" and (flags.overlap_grad_reduce or flags.overlap_param_gather):
        exit_with_error(
            "--overlap-grad-reduce and --overlap-param-gather are for --optimizer=distributed; leave them out"
        )
    if layout.vpp > 1 and flags.micro_batches % layout.pp:
        exit_with_error(
            f"--micro-batches {flags.micro_batches} is not a multiple of --pp {layout.pp}, which the "
            f"interleaved schedule of --vpp {layout.vpp} needs; make it one"
        )
    if flags.sequence_parallel and flags.seq_length % (layout.tp * layout.cp):
        sizes = f"--tp {layout.tp}" if layout.cp == 1 else f"--tp {layout.tp} x --cp {layout.cp}"
        exit_with_error(
            f"--sequence-parallel needs a --seq-length that is a multiple of {sizes}, not {flags.seq_length}"
        )
    if flags.ckpt is None and (flags.exit_signal or flags.save_signal):
        exit_with_error("--exit-signal and --save-signal ask for a checkpoint; give --ckpt")
    if flags.export_to is not None and flags.ckpt is None:
        exit_with_error("--export-to writes the last checkpoint as a folder; give --ckpt")
    if flags.export_to is not None and flags.huggingface_config is None and model.moe is not None:
        exit_with_error(
            f"--export-to writes experts as Mixtral's, and no family of Hugging Face has them with "
            f"{', '.join(flags_unlike_mixtral(model.moe))}; leave out what is listed, or take a whole model "
            f"with --model or --init-from"
        )
    for flag in ("--ckpt", "--export-to"):
        if isinstance(_value(flags, flag), Path):
            _check_directory(flag, _value(flags, flag))
    if flags.metrics is not None:
        _check_directory("--metrics", flags.metrics.parent)
        if flags.metrics.is_dir():
            exit_with_error(f"--metrics {flags.metrics} is a directory; give the name of a file")


def _when_schedule_differs(flags: argparse.Namespace) -> WhenDifferent:
    if flags.override_schedule and flags.use_checkpoint_schedule:
        exit_with_error(
            "--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler exclude each other"
        )
    if flags.override_schedule:
        return "given"
    return "checkpoint" if flags.use_checkpoint_schedule else "error"


def _check_directory(flag: str, directory: Path) -> None:
    """Exit if a path is no directory, or one that this process cannot make or write to."""
    nearest = next(p for p in (directory, *directory.absolute().parents) if os.path.exists(p))
    if not nearest.is_dir():
        exit_with_error(f"{flag}: {nearest} is a file; give another directory")
    if not os.access(nearest, os.W_OK | os.X_OK):
        exit_with_error(f"{flag}: no permission to write to {nearest}; give another directory")
