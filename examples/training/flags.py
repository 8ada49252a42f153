"""The flags of pretrain_gpt.py: names, defaults and help texts."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import NoReturn

from megackpt import StrictHandling

EXCHANGES = ("all_to_all", "broadcast", "gather_rounds", "gather_object")
EXIT_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP")
BUSY = ("wait", "queue", "skip")
SAVE_SIGNALS = ("SIGUSR1", "SIGUSR2")
LATER_S = 5.0
"""How much later than the first rank of a machine the others end on invalid flags."""

MODEL_FLAGS = (
    "--num-layers",
    "--hidden-size",
    "--num-heads",
    "--num-query-groups",
    "--ffn-hidden-size",
    "--untie-embeddings",
    "--experts",
    "--top-k",
    "--expert-ffn-hidden-size",
    "--shared-experts",
    "--moe-layer-freq",
    "--router-score",
    "--balance-loss",
    "--z-loss",
    "--expert-bias-rate",
    "--capacity-factor",
)
"""Flags of what --init-from and --model give."""


def exit_with_error(message: str) -> NoReturn:
    """Print the message on rank 0, in one line, and exit with code 2.

    With several machines the first rank of each prints it: a file may be missing on one of them only.
    """
    if int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0"))) == 0:
        print(f"pretrain_gpt.py: {' '.join(message.split())}", file=sys.stderr)
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        # torchrun kills all ranks when one ends: give the first the time to start and to print.
        time.sleep(LATER_S)
    raise SystemExit(2)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        exit_with_error(f"{message} (see --help)")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all flags; it ends the process with one line if one is invalid."""
    parser = _Parser(
        prog="pretrain_gpt.py",
        description="Pre-train a GPT on text; resumes by itself from the newest checkpoint, at any layout.",
        allow_abbrev=False,  # a mistyped flag is an error, not the abbreviation of another
    )
    _add_layout(parser.add_argument_group("layout"))
    _add_model(parser.add_argument_group("model"))
    _add_experts(parser.add_argument_group("mixture of experts"))
    _add_training(parser.add_argument_group("training"))
    _add_data(parser.add_argument_group("data"))
    _add_checkpoints(parser.add_argument_group("checkpoints and reports"))
    _add_format(parser.add_argument_group("how checkpoints are made and loaded"))
    return parser


def _add_layout(group: argparse._ArgumentGroup) -> None:
    _count(group, "--tp", 1, "tensor-parallel ranks")
    _count(group, "--pp", 1, "pipeline stages; what --tp, --cp and --pp leave of the ranks is data-parallel")
    _count(group, "--cp", 1, "context-parallel ranks, which each have a part of every sequence")
    _count(group, "--ep", 1, "expert-parallel ranks, which each have some of the experts of every layer")
    _count(
        group,
        "--etp",
        None,
        "expert-tensor-parallel ranks, which each have a slice of every expert; default: --tp",
    )
    _count(
        group,
        "--vpp",
        None,
        "model chunks of each pipeline stage (interleaved schedule); if not given, what --pipeline-layout "
        "has, or 1",
    )
    group.add_argument(
        "--pipeline-layout",
        metavar="TEXT",
        help="layers of each stage, as Megatron-LM's --pipeline-model-parallel-layout: E embedding, t layer, "
        "L loss, | ends a stage, as in 'Et|(tt|)*2tL'; if not given, layers are split evenly",
    )
    _switch(
        group, "--sequence-parallel", "split activations along the sequence between tensor-parallel blocks"
    )
    _count(group, "--micro-batches", 1, "micro-batches per step and data-parallel rank")
    _switch(group, "--overlap-grad-reduce", "reduce gradients while the backward pass goes on")
    _switch(group, "--overlap-param-gather", "gather parameters while the next forward pass begins")
    _count(group, "--global-batch-size", 8, "samples per step, over all ranks")


def _add_model(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--model",
        dest="model_from",
        metavar="FILE",
        help="a file like the config.json of a Hugging Face folder, or the name of one in examples/presets; "
        "it takes the place of the flags for sizes and experts",
    )
    _count(group, "--num-layers", 4, "transformer layers, over all stages")
    _count(group, "--hidden-size", 128, "width")
    _count(group, "--num-heads", 8, "query heads")
    _count(group, "--num-query-groups", 4, "key and value heads")
    _count(group, "--ffn-hidden-size", None, "width inside of the MLP; if not given, about 8/3 of the width")
    _count(
        group,
        "--seq-length",
        None,
        "tokens of a sample; if not given, 128, or what the model of --init-from or --model takes",
    )
    _number(group, "--dropout", 0.0, "dropout probability")
    _switch(group, "--untie-embeddings", "give the output layer weights of its own")
    _switch(group, "--bf16", "bfloat16 parameters with float32 master weights")


def _add_experts(group: argparse._ArgumentGroup) -> None:
    _count(group, "--experts", None, "experts of a layer; if not given, layers have one MLP")
    _count(group, "--top-k", 2, "experts of each token")
    _count(
        group, "--expert-ffn-hidden-size", None, "width inside of an expert; if not given, --ffn-hidden-size"
    )
    _count(group, "--shared-experts", 0, "experts that every token goes to, joined into one of their width")
    _count(group, "--moe-layer-freq", 1, "layers 0, N, 2N, ... have experts, the others one MLP")
    group.add_argument(
        "--router-score",
        choices=("softmax", "sigmoid"),
        default="softmax",
        help="what makes scores of the router's outputs (default: %(default)s)",
    )
    _number(group, "--balance-loss", 0.01, "coefficient of the load-balancing loss")
    _number(group, "--z-loss", 0.0, "coefficient of the loss on large outputs of the router")
    group.add_argument(
        "--expert-bias-rate",
        type=float,
        metavar="X",
        help="balance the load by a bias of each expert that changes by this much per step; default: no bias",
    )
    group.add_argument(
        "--capacity-factor",
        type=float,
        metavar="X",
        help="drop tokens above this multiple of an even load; default: no token is dropped",
    )


def _add_training(group: argparse._ArgumentGroup) -> None:
    _count(group, "--steps", 100, "steps of the whole run, the end of the learning-rate schedule")
    _count(group, "--exit-after", None, "save and end once this step is done; if not given, at --steps")
    group.add_argument(
        "--optimizer",
        choices=("distributed", "plain"),
        default="distributed",
        help="distributed: ranks with equal parameters share AdamW's state; plain: each has all of it "
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
    group.add_argument(
        "--init-from",
        type=_path_or_url,
        metavar="DIR",
        help="a Hugging Face folder, a directory or s3://bucket/prefix: its config.json describes the model, "
        "and a run without a checkpoint begins with its weights",
    )
    group.add_argument(
        "--export-to",
        type=_path_or_url,
        metavar="DIR",
        help="write the last checkpoint as a Hugging Face folder, a directory or s3://bucket/prefix",
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
    """Add the knobs of Megatron-LM, under its names; see docs/megatron-compat.md."""
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
        help="accepted for Megatron-LM's sake: each name means all_to_all",
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


def _path_or_url(text: str) -> Path | str:
    """Return a directory as a path, and a URL unchanged."""
    return text if "://" in text else _path(text)


def _path(text: str) -> Path:
    """Return a path, in which `~` is the home directory."""
    return Path(text).expanduser()


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
