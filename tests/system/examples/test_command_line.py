"""pretrain_gpt.py under torchrun: killed in a save, it goes on by itself; what it prints and leaves."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.support.effort import with_all
from tests.system.examples.command_line import run_torchrun, start_torchrun
from tests.system.examples.training_runs import SMALL_MODEL, write_text

RANKS = 2


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 100
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.02)


def kill_in_the_save_of(step_directory: str, watched: Path, flags: list[str]) -> None:
    """Run until all of a step but its commit is written, then kill every rank with SIGKILL."""
    script = Path(__file__).parent / "stop_before_commit.py"
    agent = start_torchrun(RANKS, script, flags, {"WATCHED": str(watched), "STOP_AT": step_directory})
    try:
        wait_for(watched / "stopped")
        for rank in range(RANKS):
            os.kill(int((watched / f"rank-{rank}").read_text()), signal.SIGKILL)
        assert agent.wait(60) != 0
    finally:
        agent.kill()
        agent.wait()


@with_all("tests/faults kills saves at many moments")
def test_a_run_killed_in_a_save_goes_on_from_the_step_before_at_another_layout(tmp_path: Path) -> None:
    ckpt = tmp_path / "ckpt"
    flags = [*SMALL_MODEL, f"--data={write_text(tmp_path / 'text')}", f"--ckpt={ckpt}", "--steps=6"]
    (tmp_path / "watched").mkdir()
    kill_in_the_save_of("iter_0000004", tmp_path / "watched", [*flags, "--tp=2", "--save-every=2"])
    assert sorted(entry.name for entry in ckpt.iterdir()) == [
        "iter_0000002",
        "iter_0000004",
        "latest_checkpointed_iteration.txt",
        "metrics.jsonl",
    ]
    assert list((ckpt / "iter_0000004").rglob("*.safetensors"))  # incomplete, and not empty

    resumed = run_torchrun(RANKS, [*flags, "--save-every=3", "--keep-last=2"])
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stdout == ""
    warning, what, *saves, losses, last = resumed.stderr.splitlines()
    assert warning == (
        f"{ckpt}/iter_0000004 is not committed (its save did not finish) and is ignored; the newest "
        f"committed step is 2."
    )
    assert what == (
        f"resumed step 2 from {ckpt}/iter_0000002, saved at tp2 pp1 dp1, now at tp1 pp1 dp2; random streams "
        f"are fresh: they were saved at cp 1, dp 1, pp 1, tp 2, and this run is at cp 1, dp 2, pp 1, tp 1"
    )
    assert [re.sub(r"\d+\.\d+", "X", line) for line in saves] == [
        f"step {step}: loss X, checkpoint saved in X s" for step in (3, 6)
    ]
    assert re.fullmatch(r"loss: ([\d.]+ at step \d, ){3}[\d.]+ at step 6; [\d.]+ s a step", losses)
    assert last == f"step 6 is done; checkpoint: {ckpt}/iter_0000006, metrics: {ckpt}/metrics.jsonl"

    # --keep-last 2 and the removal of the incomplete step by the save of step 3
    assert sorted(entry.name for entry in ckpt.iterdir()) == [
        "iter_0000003",
        "iter_0000006",
        "latest_checkpointed_iteration.txt",
        "metrics.jsonl",
    ]
    assert (ckpt / "iter_0000003" / "metadata.json").is_file()
    lines = [json.loads(line) for line in (ckpt / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "event" not in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 3, 4, 5, 6]
    for first, again in zip(steps[2:4], steps[4:6], strict=True):  # same samples, another order of sums
        assert again["samples"] == first["samples"]
        assert again["loss"] == pytest.approx(first["loss"], rel=1e-5)
    starts = [line for line in lines if line.get("event") == "start"]
    assert [(start["step"], start["layout"]) for start in starts] == [
        (0, {"tp": 2, "pp": 1, "dp": 1}),
        (2, {"tp": 1, "pp": 1, "dp": 2}),
    ]


@with_all("a plain run gives wrong flags to one process")
def test_torchrun_shows_one_line_of_ours_for_bad_flags() -> None:
    rejected = run_torchrun(RANKS, ["--tp=3"])
    assert rejected.returncode != 0
    ours = [line for line in rejected.stderr.splitlines() if line.startswith("pretrain_gpt.py:")]
    assert len(ours) == 1
    assert "2 ranks cannot be divided among model replicas of tp=3 x pp=1" in ours[0]
    assert rejected.stderr.count("exitcode  : 2") >= 1  # torchrun's own report
