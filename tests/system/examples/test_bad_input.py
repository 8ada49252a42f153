"""Bad input ends in one line on rank 0 that says what is wrong and what to do, and in exit code 2.

Each case is a process of its own, which a rank that waited for others would keep from ending.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from training.arguments import parse_arguments

from megackpt import Checkpointer, ShardedTensor
from megackpt.testing.ranks import RankPool
from tests.support.checkpoints import flip
from tests.support.effort import sampled
from tests.system.examples.forked_runs import run_forked
from tests.system.examples.training_runs import SMALL_MODEL, train, write_text


@dataclass(frozen=True, slots=True)
class Case:
    """What a user types, with {root} for a directory of files, and a pattern of the line that answers."""

    flags: str
    message: str
    ranks: int = 1
    rank: int = 0


CASES = {
    "ranks": Case(
        "--tp=2 --pp=2",
        r"6 ranks cannot be divided among model replicas of tp=2 x pp=2 = 4 ranks each\. Start .*",
        ranks=6,
    ),
    "another rank": Case("--tp=3", "", ranks=2, rank=1),
    "heads": Case(
        "--tp=4 --num-heads=6 --num-query-groups=6 --hidden-size=48",
        r".*num_heads 6 is not a multiple of tp=4; num_query_groups 6 is neither .* tp=4.*Change either\.",
        ranks=4,
    ),
    "letters of the layout": Case(
        "--pp=2 --pipeline-layout=Ett|xtL",
        r"layout 'Ett\|xtL' has at position 4 'x', which is no letter .*",
        ranks=2,
    ),
    "interleaved micro-batches": Case(
        "--pp=2 --vpp=2 --micro-batches=1",
        r"--micro-batches 1 is not a multiple of --pp 2, which .* schedule of --vpp 2 needs; make .*",
        ranks=2,
    ),
    "chunks of one stage": Case("--vpp=2", r"vpp=2 interleaves .* but pp is 1\. Set vpp=1, .*"),
    "expert ranks": Case(
        "--tp=2 --ep=3", r"etp=2 x ep=3 = 6 does not divide the tp=2 x cp=1 x dp=2 = 4 ranks .*", ranks=4
    ),
    "no experts": Case(
        "--ep=2", r"--ep 2 and --etp 1 spread experts over ranks, but there are none; give .*", ranks=2
    ),
    "overlap without shards": Case(
        "--optimizer=plain --overlap-grad-reduce", r"--overlap-grad-reduce and .* are for .*leave them out"
    ),
    "format": Case(
        "--dist-ckpt-format=tar", r"No strategy saves format 'tar'\. Known are megackpt version 1.*"
    ),
    "missing text": Case(
        "--data {root}/none.txt",
        r"cannot read {root}/none\.txt: No such file or directory; give readable files.*",
    ),
    "empty text": Case(
        "--data {root}/empty",
        r"the text has 1 tokens, fewer than the 129 of one sample; give more text to --data.*",
    ),
    "batch": Case(
        "--global-batch-size=10 --micro-batches=2",
        r"--global-batch-size 10 does not split into dp=4 x --micro-batches=2; make it a multiple of 8",
        ranks=4,
    ),
    "sequence": Case(
        "--sequence-parallel --tp=4 --seq-length=30",
        r"--sequence-parallel needs .* multiple of --tp 4, not 30",
        ranks=4,
    ),
    "end": Case("--steps=10 --exit-after=20", r"--exit-after 20 is beyond the end of the run, --steps 10"),
    "no steps": Case("--steps=0", r"--steps is 0; give at least 1"),
    "file as directory": Case(
        "--ckpt {root}/text/run", r"--ckpt: {root}/text is a file; give another directory"
    ),
    "unknown flag": Case("--step=10", r"unrecognized arguments: --step=10 \(see --help\)"),
    "no number": Case("--steps=ten", r"argument --steps: invalid int value: 'ten' \(see --help\)"),
    "other model": Case(
        "{small} --data {root}/text --ckpt {root}/ckpt --hidden-size=64 --untie-embeddings",
        r"{root}/ckpt/iter_0000002 holds another model, with hidden_size 32 instead of 64, tied_embeddings "
        r"True instead of False; give the flags it was trained with, or another --ckpt",
    ),
    "other precision": Case(
        "{small} --data {root}/text --ckpt {root}/ckpt --bf16",
        r".*holds another model, with params_dtype torch\.float32 instead of torch\.bfloat16; give .*",
    ),
    "other text": Case(
        "{small} --data {root}/other --ckpt {root}/ckpt --steps=2",
        r"cannot resume {root}/ckpt/iter_0000002: .*samples in another order: text: '\w+' stored, '\w+' here "
        r"Give .*",
    ),
    "other schedule": Case(
        "{small} --data {root}/text --ckpt {root}/ckpt --steps=2 --lr=0.5 --weight-decay=0.3",
        r"cannot resume .*: The schedule .* not the one given: peak: 0\.003 stored, 0\.5 given "
        r"weight_decay: 0\.1 stored, 0\.3 given .*",
    ),
    "beyond a finished run": Case(
        "{small} --data {root}/text --ckpt {root}/ckpt --steps=20",
        r"--steps 20: the run in {root}/ckpt/iter_0000002 is finished: step 2 of 2, .* Give --steps 2; .*"
        r"--override-opt_param-scheduler.*--use-checkpoint-opt_param-scheduler.*",
    ),
    "no preset": Case(
        "--model nothing",
        r"--model nothing cannot be read: .*, or one of deepseek_v3, gpt_oss, mamba2, nemotron_h, "
        r"qwen3_next\.",
    ),
    "preset and sizes": Case(
        "--model deepseek_v3 --num-heads=2", r"--num-heads: the model is that of --model; leave them out\."
    ),
    "preset and folder": Case("--model gpt_oss --init-from {root}/llama", r"--model and --init-from both .*"),
    "no folder": Case("--init-from {root}/nothing", r"{root}/nothing is not a checkpoint: .*"),
    "folder without config": Case(
        "--init-from {root}/bare", r"{root}/bare has no config\.json, which has the sizes of the model\."
    ),
    "other family": Case("--init-from {root}/bert", r"config\.json: model_type 'bert' is not supported; .*"),
    "all faults of a folder": Case(
        "--init-from {root}/small --seq-length=65 --hidden-size=64 --experts=2",
        r"--hidden-size, --experts: the model is that of config\.json in --init-from; leave them out\. "
        r"config\.json has a vocabulary of 100, and the text one of 257: .* "
        r"--seq-length 65 is more than the 64 tokens of config\.json\. Give at most as many\.",
    ),
    "folder without weights": Case(
        "--init-from {root}/llama",
        r"cannot start from {root}/llama: .* lacks \d+ of the arrays .*",
    ),
    "export of no checkpoint": Case("--export-to {root}/out", r"--export-to writes the last .*; give --ckpt"),
    "export of experts": Case(
        "--export-to {root}/out --ckpt {root}/new --experts=2 --shared-experts=1 --router-score=sigmoid",
        r"--export-to .* with --router-score, --shared-experts; leave out .* --model or --init-from",
    ),
    "export to a file": Case(
        "--export-to {root}/text --ckpt {root}/new", r"--export-to: {root}/text is a file; give .*"
    ),
    "foreign": Case(
        "{small} --data {root}/text --ckpt {root}/foreign",
        r"{root}/foreign/iter_0000001 was not saved by pretrain_gpt\.py; give another --ckpt",
    ),
    "damaged": Case(
        "{small} --data {root}/text --ckpt {root}/damaged --steps=2",
        r"cannot resume .*{root}/damaged/iter_0000002.*",
    ),
}

Ends = Mapping[str, "subprocess.CompletedProcess[str]"]


LLAMA = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
FOLDERS = {"bare": None, "bert": {"model_type": "bert"}, "llama": LLAMA, "small": LLAMA | {"vocab_size": 100}}


def _write_folder(path: Path, config: dict[str, object] | None) -> None:
    """Write a Hugging Face folder with one norm and no other weights."""
    path.mkdir()
    save_file({"model.norm.weight": torch.ones(32)}, path / "model.safetensors")
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def root(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with texts and runs: a sound one, a damaged one, and one of another program."""
    root = tmp_path_factory.mktemp("bad-input")
    (root / "empty").touch()
    (root / "other").write_text("Another text. " * 100)
    text = write_text(root / "text")
    for name in ("ckpt", "damaged"):
        train(rank_pool, "1 rank", root / name, f"--data={text}", "--steps=2")
    for name, config in FOLDERS.items():
        _write_folder(root / name, config)
    Checkpointer(root / "foreign").save(1, {"weight": ShardedTensor.from_rank_offsets("w", torch.ones(2))})
    largest = max((root / "damaged").rglob("*.safetensors"), key=lambda path: path.stat().st_size)
    flip(largest, -1)
    return root


@pytest.fixture(scope="module")
def ends(root: Path, request: pytest.FixtureRequest) -> Ends:
    """Run one rank of each case that is not skipped, and return how they ended."""

    def run_of(case: Case) -> tuple[list[str], dict[str, str]]:
        flags = case.flags.format(root=root, small=" ".join(SMALL_MODEL)).split()
        return flags, {"RANK": str(case.rank), "WORLD_SIZE": str(case.ranks)} if case.ranks > 1 else {}

    names = [
        str(item.callspec.params["name"])
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.originalname == "test_bad_input_ends_in_one_line_and_exit_code_2"
        and item.get_closest_marker("skip") is None
    ]
    return dict(zip(names, run_forked([run_of(CASES[n]) for n in names], timeout_s=300), strict=True))


@sampled(5)
@pytest.mark.parametrize("name", CASES)
def test_bad_input_ends_in_one_line_and_exit_code_2(root: Path, ends: Ends, name: str) -> None:
    ended = ends[name]
    expected = CASES[name].message.replace("{root}", re.escape(str(root)))
    line = f"pretrain_gpt\\.py: {expected}\n" if expected else ""
    assert re.fullmatch(line, ended.stderr), ended.stderr
    assert ended.stdout == ""
    assert ended.returncode == 2


def test_a_directory_that_may_not_be_written_to_raises_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root, who may run tests, may write anywhere
    with pytest.raises(SystemExit, match="2"):
        parse_arguments([f"--metrics={tmp_path}/new/metrics"], world_size=1)
    expected = f"pretrain_gpt.py: --metrics: no permission to write to {tmp_path}; give another directory\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--override-opt_param-scheduler --use-checkpoint-opt_param-scheduler", "exclude each other"),
        ("--exit-signal=SIGTERM", "--exit-signal and --save-signal ask for a checkpoint; give --ckpt"),
        ("--keep-every=0", "keep_every is 0; give an int of at least 1, or None."),
        (
            "--save-interval-seconds=0",
            "save_interval_seconds is 0.0; give a finite number above 0, or None.",
        ),
    ],
)
def test_flags_that_make_no_sense_raise_an_error(
    flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_arguments(flags.split(), world_size=1)
    assert capsys.readouterr().err.endswith(f"{message}\n")
