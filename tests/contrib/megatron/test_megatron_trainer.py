"""Megatron-Core 0.16.1 trains, saves and resumes over megackpt: by Megatron-LM's calls, and by its program.

Megatron-LM's pretrain_gpt.py needs a checkout with its dependencies, which no package has: name it in
MEGATRON_PATHS. The helpers of its data sets have to be built in it, or be copied from the wheel of the same
version.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.contrib.megatron.test_installing import MEGATRONS, ROOT, needs_megatron
from tests.support.effort import with_all

HERE = Path(__file__).parent
ITERATIONS, SAVE_AT = 6, 3
CHECKOUTS = [path for path in MEGATRONS if (Path(path) / "pretrain_gpt.py").exists()]


def run_ranks(program: str, *arguments: str, paths: Sequence[str] = (), **variables: str) -> str:
    """Run a program of this folder on new processes; return what they printed.

    Raises:
        RuntimeError: they did not end well.
    """
    python_path = os.pathsep.join([str(ROOT), *paths])
    environment = {**os.environ, "PYTHONPATH": python_path, "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(HERE / program), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    log = done.stdout + done.stderr
    if done.returncode:
        of_ranks = log.split("/torch/distributed/elastic/", 1)[0]  # without what its launcher adds
        raise RuntimeError(f"{program} ended with {done.returncode}:\n{of_ranks[-4000:]}")
    return log


def answers_of(program: str, folder: Path, *arguments: str) -> Any:
    """Run a program of this folder that calls `answer` of `megatron_stand_ins`; return what it answered."""
    run_ranks(program, str(folder), str(folder / "answers.json"), *arguments)
    return json.loads((folder / "answers.json").read_text())


@dataclass(frozen=True)
class Run:
    """One run of training, from the start or from a checkpoint, for six iterations in all.

    Attributes:
        tp: size of tensor parallelism; the rest of the two ranks is data parallelism.
        load: checkpoint to begin from; empty for none.
        save: where to save after the third iteration; empty for nowhere.
        is_async: save by a queue, while training goes on.
    """

    tp: int = 1
    load: str = ""
    save: str = ""
    is_async: bool = False


def losses_of(runs: list[Run], folder: Path, *, megackpt: bool) -> list[dict[str, str]]:
    """Return the losses of each run by iteration, every bit of them, from two new processes."""
    folder.mkdir()
    (folder / "runs.json").write_text(json.dumps([asdict(run) for run in runs]))
    losses: list[dict[str, str]] = answers_of(
        "megatron_trainer.py", folder, *(["--megackpt"] if megackpt else [])
    )
    return losses


def _values(losses: dict[str, str]) -> list[float]:
    return [float.fromhex(loss) for loss in losses.values()]


@needs_megatron
@with_all("tests/system/interop compares every value, and test_optimizer_ranges resumes optimizers")
def test_megatron_and_megackpt_resume_each_other_s_checkpoints_with_equal_losses(tmp_path: Path) -> None:
    ours, theirs, queued = (str(tmp_path / name) for name in ("ours_3", "theirs_3", "queued_3"))
    made = [Run(save=theirs), Run(load=theirs), Run(2, theirs)]
    whole, resumed, at_tp2 = losses_of(made, tmp_path / "theirs", megackpt=False)
    before, after = _values(whole)[:3], _values(whole)[3:]
    assert all(late < early for early, late in zip(before, after, strict=True)), "the same data, learnt"
    late = {number: loss for number, loss in whole.items() if int(number) > 3}
    assert resumed == late, "not the bits of the run that was not interrupted"
    assert _values(at_tp2) == pytest.approx(_values(late), rel=0.02), "bfloat16, summed otherwise"
    runs = [Run(save=ours), Run(save=queued, is_async=True)]
    runs += [Run(load=path) for path in (ours, theirs, queued)] + [Run(2, ours), Run(2, theirs)]
    losses = losses_of(runs, tmp_path / "ours", megackpt=True)
    assert losses == [whole, whole, resumed, resumed, resumed, at_tp2, at_tp2]
    back = [Run(load=ours), Run(load=queued), Run(2, ours)]
    assert losses_of(back, tmp_path / "back", megackpt=False) == [resumed, resumed, at_tp2]


ARGUMENTS = shlex.split("""
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16
    --micro-batch-size 2 --global-batch-size 8 --train-iters 6 --lr 1e-2 --min-lr 1e-3 --mock-data
    --tokenizer-type NullTokenizer --vocab-size 127 --transformer-impl local --distributed-backend gloo
    --use-cpu-initialization --no-gradient-accumulation-fusion --no-masked-softmax-fusion
    --no-bias-gelu-fusion --no-bias-dropout-fusion --no-rope-fusion --no-persist-layer-norm
    --attention-dropout 0 --hidden-dropout 0 --log-interval 1 --eval-iters 0 --eval-interval 1000
    --save-interval 3 --ckpt-format torch_dist --use-distributed-optimizer --bf16
    --attention-backend unfused --seed 5 --split 100,0,0 --dataloader-type single
    --no-create-attention-mask-in-dataloader --dist-ckpt-optim-fully-reshardable
""")
LINE = re.compile(r"iteration +(\d+)/.*?lm loss: ([0-9.E+-]+).*?grad norm: ([0-9.]+)")


def pretrain(checkout: str, *arguments: str, megackpt: bool) -> dict[int, tuple[str, str]]:
    """Run pretrain_gpt.py; return the loss and the norm of the gradients, as logged, by iteration."""
    program = [*(["--megackpt"] if megackpt else []), str(Path(checkout) / "pretrain_gpt.py")]
    log = run_ranks(
        "megatron_pretrain.py",
        *program,
        *_known(checkout),
        *arguments,
        paths=(checkout,),
        CUDA_DEVICE_MAX_CONNECTIONS="1",
        TORCHDYNAMO_DISABLE="1",
    )
    return {int(number): (loss, norm) for number, loss, norm in LINE.findall(log)}


def _known(checkout: str) -> list[str]:
    """Return the arguments without the switches that this version does not have."""
    texts = [path.read_text() for path in (Path(checkout) / "megatron" / "training").rglob("*.py")]
    optional = "--dist-ckpt-optim-fully-reshardable"
    names = (optional, optional.removeprefix("--").replace("-", "_"))
    known = any(name in text for text in texts for name in names)
    return [argument for argument in ARGUMENTS if known or argument != optional]


@pytest.mark.skipif(not CHECKOUTS, reason="MEGATRON_PATHS names no checkout with a pretrain_gpt.py")
@pytest.mark.parametrize("checkout", CHECKOUTS)
def test_training_saves_and_resumes_with_equal_losses(checkout: str, tmp_path: Path) -> None:
    ours, theirs, later = (str(tmp_path / name) for name in ("ours", "theirs", "later"))
    whole = pretrain(checkout, "--save", theirs, megackpt=False)
    assert sorted(whole) == [1, 2, 3, 4, 5, 6]
    assert pretrain(checkout, "--save", ours, megackpt=True) == whole
    queued = ("--async-save", "--ckpt-assume-constant-structure", "--ckpt-fully-parallel-load")
    assert pretrain(checkout, "--save", later, *queued, megackpt=True) == whole
    for layout in ((), ("--tensor-model-parallel-size", "2")):
        resumed = pretrain(checkout, "--load", theirs, "--ckpt-step", "3", *layout, megackpt=False)
        assert sorted(resumed) == [4, 5, 6]
        for path, megackpt in ((ours, True), (theirs, True), (ours, False), (later, False)):
            losses = pretrain(checkout, "--load", path, "--ckpt-step", "3", *layout, megackpt=megackpt)
            assert losses == resumed, (
                f"{path} under {'megackpt' if megackpt else 'Megatron itself'}, {layout}"
            )
