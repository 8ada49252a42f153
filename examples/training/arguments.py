"""The flags of pretrain_gpt.py, and checks of their values and combinations.

Invalid flags are one line of text on rank 0 and exit code 2, before any rank waits for another.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NoReturn

import torch

from megackpt import CheckpointConfig, CheckpointError, StrictHandling
from megackpt.parallel import ParallelLayout
from megackpt.training_state import WhenDifferent
from models import GPTConfig
from training.text import VOCAB_SIZE

EXCHANGES = ("all_to_all", "broadcast", "gather_rounds", "gather_object")
EXIT_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP")
BUSY = ("wait", "queue", "skip")
SAVE_SIGNALS = ("SIGUSR1", "SIGUSR2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The checked flags of pretrain_gpt.py.

    Attributes:
        layout: tp and pp of the flags; the remaining ranks are data-parallel.
        model: the configuration of the model.
        exit_after: the step after which this process ends; `steps` by default.
        ckpt: the directory of the checkpoints, or its URL; None: no checkpoints are made.
        knobs: how checkpoints are made and loaded.
        when_schedule_differs: what to do if a checkpoint was trained with another schedule.
        metrics: the file for metrics; None for a file in `ckpt`, if that is a directory.
    """

    layout: ParallelLayout
    model: GPTConfig
    micro_batches: int
    global_batch_size: int
    sequence_parallel: bool
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
    ckpt: Path | str | None
    knobs: CheckpointConfig
    when_schedule_differs: WhenDifferent
    metrics: Path | None
    log_samples: bool


def exit_with_error(message: str) -> NoReturn:
    """Print the message on rank 0, in one line, and exit with code 2.

    With several machines the first rank of each prints it: a file may be missing on one of them only.
    """
    if int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0"))) == 0:
        print(f"pretrain_gpt.py: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(2)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        exit_with_error(f"{message} (see --help)")


def parse_arguments(argv: list[str] | None = None, *, world_size: int | None = None) -> Arguments:
    """Parse and check the flags. Local; exits if they are invalid, see `exit_with_error`.

    Args:
        argv: the flags; None for those of the process.
        world_size: the number of ranks; None for the one that torchrun sets.
    """
    flags = _parser().parse_args(argv)
    world_size = int(os.environ.get("WORLD_SIZE", "1")) if world_size is None else world_size
    try:
        layout = ParallelLayout.infer(world_size, tp=flags.tp, pp=flags.pp)
        model = GPTConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=flags.hidden_size,
            num_layers=flags.num_layers,
            num_heads=flags.num_heads,
            num_query_groups=flags.num_query_groups,
            ffn_hidden_size=flags.ffn_hidden_size,
            seq_length=flags.seq_length,
            dropout=flags.dropout,
            tied_embeddings=not flags.untie_embeddings,
            make_vocab_divisible=1,
            params_dtype=torch.bfloat16 if flags.bf16 else torch.float32,
        )
        model.check_layout(layout)
        knobs = CheckpointConfig(
            **{field.name: getattr(flags, field.name) for field in fields(CheckpointConfig)}
        )
        knobs.save_strategy()
    except CheckpointError as error:
        exit_with_error(str(error))
    if flags.exit_after is None:
        flags.exit_after = flags.steps
    _check(flags, layout)
    flags.when_schedule_differs = _when_schedule_differs(flags)
    others = {name: getattr(flags, name) for name in Arguments.__slots__ if hasattr(flags, name)}
    return Arguments(layout=layout, model=model, knobs=knobs, **others)


def _check(flags: argparse.Namespace, layout: ParallelLayout) -> None:
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
    if flags.sequence_parallel and flags.seq_length % layout.tp:
        exit_with_error(
            f"--sequence-parallel needs a --seq-length that is a multiple of --tp {layout.tp}, not "
            f"{flags.seq_length}"
        )
    if flags.ckpt is None and (flags.exit_signal or flags.save_signal):
        exit_with_error("--exit-signal and --save-signal ask for a checkpoint; give --ckpt")
    if isinstance(flags.ckpt, Path):
        _check_directory("--ckpt", flags.ckpt)
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


def _path_or_url(text: str) -> Path | str:
    """Return a directory as a path, and a URL unchanged."""
    return text if "://" in text else _path(text)


def _path(text: str) -> Path:
    """Return a path, in which `~` is the home directory."""
    return Path(text).expanduser()


def _check_directory(flag: str, directory: Path) -> None:
    """Exit if a path is no directory, or one that this process cannot make or write to."""
    nearest = next(p for p in (directory, *directory.absolute().parents) if os.path.exists(p))
    if not nearest.is_dir():
        exit_with_error(f"{flag}: {nearest} is a file; give another directory")
    if not os.access(nearest, os.W_OK | os.X_OK):
        exit_with_error(f"{flag}: no permission to write to {nearest}; give another directory")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="pretrain_gpt.py",
        description="Pre-train a GPT on text; resumes by itself from the newest checkpoint, at any layout.",
        allow_abbrev=False,  # a mistyped flag is an error, not the abbreviation of another
    )
    _add_layout(parser.add_argument_group("layout"))
    _add_model(parser.add_argument_group("model"))
    _add_training(parser.add_argument_group("training"))
    _add_data(parser.add_argument_group("data"))
    _add_checkpoints(parser.add_argument_group("checkpoints and reports"))
    _add_format(parser.add_argument_group("how checkpoints are made and loaded"))
    return parser


def _add_layout(group: argparse._ArgumentGroup) -> None:
    _count(group, "--tp", 1, "tensor-parallel ranks")
    _count(group, "--pp", 1, "pipeline stages; what --tp and --pp leave of the ranks is data-parallel")
    _switch(
        group, "--sequence-parallel", "split activations along the sequence between tensor-parallel blocks"
    )
    _count(group, "--micro-batches", 1, "micro-batches per step and data-parallel rank")
    _count(group, "--global-batch-size", 8, "samples per step, over all ranks")


def _add_model(group: argparse._ArgumentGroup) -> None:
    _count(group, "--num-layers", 4, "transformer layers, over all stages")
    _count(group, "--hidden-size", 128, "width")
    _count(group, "--num-heads", 8, "query heads")
    _count(group, "--num-query-groups", 4, "key and value heads")
    _count(group, "--ffn-hidden-size", None, "width inside of the MLP; if not given, about 8/3 of the width")
    _count(group, "--seq-length", 128, "tokens of a sample")
    _number(group, "--dropout", 0.0, "dropout probability")
    _switch(group, "--untie-embeddings", "give the output layer weights of its own")
    _switch(group, "--bf16", "bfloat16 parameters with float32 master weights")


def _add_training(group: argparse._ArgumentGroup) -> None:
    _count(group, "--steps", 100, "steps of the whole run, the end of the learning-rate schedule")
    _count(group, "--exit-after", None, "save and end once this step is done; if not given, at --steps")
    group.add_argument(
        "--optimizer",
        choices=("distributed", "plain"),
        default="distributed",
        help="distributed: each data-parallel rank keeps its share of AdamW's state; plain: each keeps all "
        "(default: %(default)s; a checkpoint of either loads into both)",
    )
    _number(group, "--lr", 1e-3, "peak learning rate")
    _number(group, "--min-lr", 1e-4, "learning rate at the end")
    _count(group, "--warmup-steps", 10, "steps of linear warm-up")
    _number(group, "--weight-decay", 0.1, "weight decay of matrices; norms and biases have none")
    fields = "--lr, --min-lr, --warmup-steps, --steps and --weight-decay"
    group.add_argument(
        "--override-opt_param-scheduler",
        "--override-schedule",
        action="store_true",
        dest="override_schedule",
        help=f"on resuming, follow {fields} if the checkpoint was trained with others; without a flag that "
        "is an error",
    )
    group.add_argument(
        "--use-checkpoint-opt_param-scheduler",
        action="store_true",
        dest="use_checkpoint_schedule",
        help=f"on resuming, follow the checkpoint instead of {fields}",
    )
    _number(group, "--clip-grad", 1.0, "largest norm of the gradient; 0 does not clip")
    _count(group, "--seed", 1234, "of weights, dropout and the order of the data")


def _add_data(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--data",
        type=_path,
        nargs="+",
        default=(),
        metavar="FILE",
        help="text to train on; if not given, the sources of Python's own standard library",
    )


def _add_checkpoints(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--ckpt",
        type=_path_or_url,
        metavar="DIR",
        help="where checkpoints are, a directory or s3://bucket/prefix; if not given, none are made",
    )
    _count(
        group,
        "--save-interval",
        50,
        "steps between checkpoints; there is one at the end, too",
        also="--save-every",
    )
    group.add_argument(
        "--save-interval-seconds",
        type=float,
        metavar="X",
        help="save also when this many seconds have passed since the last checkpoint",
    )
    _count(
        group,
        "--keep-last",
        None,
        "the number of newest checkpoints that stay; without this and the next flag all stay",
    )
    _count(group, "--keep-every", None, "checkpoints of steps that this number divides stay as well")
    _switch(group, "--async-save", "train on while a checkpoint is written")
    group.add_argument(
        "--async-when-busy",
        choices=BUSY,
        default=BUSY[0],
        help="what happens to a checkpoint that is due while an earlier one is being written: it waits, is "
        "queued, or is skipped until the next step; the last one always waits (default: %(default)s)",
    )
    _count(
        group,
        "--async-staging-bytes",
        None,
        "memory of a rank for what is being written; if not given, as much as is needed",
    )
    group.add_argument(
        "--exit-signal",
        choices=EXIT_SIGNALS,
        help="signal at which a run ends its step, saves, and exits with 128 + its number; default: none",
    )
    group.add_argument(
        "--save-signal",
        choices=SAVE_SIGNALS,
        help="signal at which a run ends its step, saves, and goes on; default: none",
    )
    group.add_argument(
        "--on-save-error",
        choices=("raise", "warn"),
        default="raise",
        help="if the store rejects a checkpoint: end the run, or warn and go on (default: %(default)s)",
    )
    _switch(group, "--verify-after-save", "read each checkpoint again before older ones are removed")
    _count(group, "--timeout-s", 600, "seconds that a rank waits for the others while saving or loading")
    group.add_argument(
        "--metrics",
        type=_path,
        metavar="FILE",
        help="append one JSON line per step (a step trained again after a crash has a second one; the last "
        "counts); if not given, metrics.jsonl in --ckpt if that is a directory",
    )
    _switch(group, "--log-samples", "write the numbers of the samples of each step to the metrics")


def _add_format(group: argparse._ArgumentGroup) -> None:
    """Add the knobs of Megatron-LM, under its names; see docs/strategies.md."""
    group.add_argument(
        "--dist-ckpt-format",
        default="megackpt",
        metavar="NAME[:VERSION]",
        help="format of new checkpoints: megackpt, torch_dist, zarr, or one that another package adds "
        "(default: %(default)s); that of an old one is detected",
    )
    _choice(group, "--dist-ckpt-load-on-device", True, "load straight to the device, not to host memory")
    _choice(
        group, "--dist-ckpt-parallel-save", True, "spread replicated chunks over the ranks that have them"
    )
    _choice(group, "--dist-ckpt-parallel-save-within-dp", False, "but inside of data-parallel groups only")
    _choice(group, "--dist-ckpt-parallel-load", False, "read each byte once per data-parallel group")
    group.add_argument(
        "--dist-ckpt-exchange-algo",
        choices=EXCHANGES,
        default=EXCHANGES[0],
        help="how it is sent on then (default: %(default)s)",
    )
    _count(group, "--dist-ckpt-torch-dist-multiproc", 2, "files per rank in format torch_dist")
    group.add_argument(
        "--dist-ckpt-assume-constant-structure",
        "--ckpt-assume-constant-structure",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="reuse the plan of the last save without comparing digests",
    )
    _choice(
        group,
        "--dist-ckpt-parallel-dist-opt",
        True,
        "save the distributed optimizer's state as it is sharded, not gathered",
    )
    group.add_argument(
        "--dist-ckpt-load-strictness",
        choices=[mode.value for mode in StrictHandling if not mode.returns_keys],
        default=StrictHandling.ASSUME_OK_UNEXPECTED.value,
        help="what to do about keys that only the model or only the checkpoint has (default: %(default)s)",
    )


def _count(
    group: argparse._ArgumentGroup, flag: str, default: int | None, text: str, *, also: str | None = None
) -> None:
    names = [flag] if also is None else [flag, also]
    group.add_argument(*names, type=int, default=default, metavar="N", help=text + _default(default))


def _choice(group: argparse._ArgumentGroup, flag: str, default: bool, text: str) -> None:
    help_text = f"{text} (default: {'yes' if default else 'no'})"
    group.add_argument(flag, action=argparse.BooleanOptionalAction, default=default, help=help_text)


def _number(group: argparse._ArgumentGroup, flag: str, default: float, text: str) -> None:
    group.add_argument(flag, type=float, default=default, metavar="X", help=text + _default(default))


def _switch(group: argparse._ArgumentGroup, flag: str, text: str) -> None:
    group.add_argument(flag, action="store_true", help=text)


def _default(value: float | None) -> str:
    return "" if value is None else f" (default: {value})"
