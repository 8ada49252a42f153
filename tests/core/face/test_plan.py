"""megackpt plan: tables, JSON and a picture of a job that is not there, and times on other hardware."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megackpt.cli.simulation import Cluster, advise, estimate, parse_layout
from megackpt.cli.simulation.estimate import slowest
from megackpt.cli.simulation.outcome import LoadOutcome, SaveOutcome
from megackpt.errors import DeclarationError
from megackpt.training.parallel import ParallelLayout
from tests.support.checkpoints import SIZES, save_for_real
from tests.support.command_line import CommandLine

BANDWIDTHS = ["--write-gbps", "2", "--read-gbps", "2", "--network-gbps", "20", "--mtbf-hours", "24"]

KEYS = {
    "schema": 2,
    "save": {
        "layout", "arrays", "chunks", "files", "total_bytes", "bytes_by_rank", "balance", "stage_balance",
        "index_bytes", "plan_bytes", "planning",
    },
    "load": {
        "layout", "ranks_planned", "needed_bytes", "needed_bytes_by_rank", "files_by_rank", "direct",
        "exchange", "planning", "index_rows_bytes",
    },
    "estimate_s": {
        "first_save", "later_save", "writing", "async_stall", "load_direct", "load_exchange", "interval",
    },
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A file with the sizes of a small model."""
    path = tmp_path / "small.json"
    path.write_text(json.dumps(SIZES.to_json()))
    return str(path)


def test_the_json_has_the_content_of_the_tables(model: str, cli: CommandLine) -> None:
    arguments = [model, "--from", "tp2,pp3,dp2", "--to", "tp1,dp4", *BANDWIDTHS]
    message = cli.json("plan", *arguments)
    text = cli.out("plan", *arguments)
    assert set(message) == {"subject", "parameters", "host_memory_bytes", "advice", *KEYS}
    for part in ("save", "load", "estimate_s"):
        assert set(message[part]) == KEYS[part], part
    assert message["save"]["layout"] == {
        "tp": 2, "cp": 1, "pp": 3, "vpp": 1, "dp": 2, "ep": 1, "etp": 2, "world": 12
    }  # fmt: skip
    assert message["load"]["ranks_planned"] == message["load"]["layout"]["world"] == 4
    assert message["save"]["files"] == 12
    # Seconds of bandwidth alone, as both fit into one machine of 8 ranks, or two.
    assert message["estimate_s"]["later_save"] > message["save"]["total_bytes"] / (2 * 2e9)
    assert message["estimate_s"]["load_direct"] > message["load"]["direct"]["read_bytes"] / 2e9
    interval = message["estimate_s"]["interval"]
    assert interval["young"] == pytest.approx((2 * message["estimate_s"]["later_save"] * 86400) ** 0.5)
    assert "- of the first alone, planning and proof" in text
    assert text.splitlines()[-1].startswith("Save every ")
    assert f"{message['parameters']:,} parameters" in text
    assert "TP2 PP3 DP2" in text
    assert f"{message['save']['balance']:.3f}" in text


def test_without_a_target_the_load_is_at_the_layout_of_the_save(model: str, cli: CommandLine) -> None:
    message = cli.json("plan", model, "--from", "tp2,dp2", "--weights-only")
    assert message["load"]["layout"] == message["save"]["layout"]
    assert message["load"]["direct"]["over_read"] == 1.0
    # Rows of the vocabulary, twice 300, are padded to 512 each.
    assert message["save"]["total_bytes"] == 2 * (message["parameters"] + 2 * 212 * 64)
    assert message["estimate_s"] == dict.fromkeys(KEYS["estimate_s"])


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_the_chart_is_a_picture(model: str, tmp_path: Path, ending: str, cli: CommandLine) -> None:
    chart = tmp_path / f"plan.{ending}"
    layouts = ["--from", "tp2,dp2", "--to", "pp3,dp2"]
    cli.run("plan", model, *layouts, "--chart", chart, "--ranks-planned", "3")
    start = chart.read_bytes()[:2000]
    assert (b"<svg" in start) if ending == "svg" else start.startswith(b"\x89PNG")


def test_a_checkpoint_is_looked_into_and_its_load_planned(tmp_path: Path, cli: CommandLine) -> None:
    directory = tmp_path / "checkpoint"
    save_for_real(SIZES, parse_layout("tp2,dp2"), directory)
    message = cli.json("plan", directory, "--to", "tp1,pp3,dp2")
    assert message["parameters"] is None
    assert message["save"]["layout"] is None
    assert message["save"]["files"] == len(list((directory / "data").iterdir()))
    assert message["load"]["layout"]["world"] == 6
    assert message["load"]["needed_bytes"] >= message["save"]["total_bytes"]
    of_directory = cli.json("plan", directory)
    assert of_directory["load"] is None
    assert of_directory["save"] == message["save"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("gpt-5 --from tp1", "'gpt-5' is no model, file or directory. Models are deepseek-v3, gpt"),
        ("gpt-125m", "--from is missing"),
        ("gpt-125m --from tp2,world7", "7 ranks cannot be divided so"),
        ("gpt-125m --from tp8", "num_heads 12 is not a multiple of tp=8"),
        ("gpt-125m --from tp2 --to tp2,pp13", "12 layers are fewer than pp=13"),
        ("gpt-125m --from tp2 --write-gbps 0", "write is 0.0; give a finite number above 0"),
        ("gpt-125m --from tp2 --chart plan.bmp", "suffixes .png, .svg, .pdf"),
        ("gpt-125m --from tp2 --ranks-planned 0", "0 is not in the range"),
        (". --from tp2", "which is a checkpoint and has been saved"),
        (". --to tp2", "is not a checkpoint"),
    ],
)
def test_what_cannot_be_planned_raises_an_error(
    arguments: str, message: str, cli: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code = 3 if message == "is not a checkpoint" else 2
    assert message in cli.err("plan", *arguments.split(), code=code)


GB = 10**9


def save_of(*nbytes: int) -> SaveOutcome:
    written = np.array(nbytes, np.int64)
    return SaveOutcome(
        layout=ParallelLayout(dp=len(nbytes)),
        nbytes=written,
        chunks=np.ones_like(written),
        arrays=1,
        index_nbytes=100,
        rank_s=np.zeros(len(nbytes)),
        describe_s=np.zeros(len(nbytes)),
        plan_s=1.0,
        prove_s=0.5,
    )


def load_of(*, planned: list[int], needed: list[int], read: list[int], **group: int) -> LoadOutcome:
    """A load of four ranks of one data-parallel group."""
    return LoadOutcome(
        layout=ParallelLayout(dp=4),
        planned=np.array(planned, np.int64),
        needed=np.array(needed, np.int64),
        read=np.array(read, np.int64),
        files=np.ones(len(planned), np.int64),
        plan_s=np.zeros(len(planned)),
        region_s=np.zeros(1),
        region_nbytes=0,
        unique=np.array([group["unique"]], np.int64),
        shared_read=np.array([group["shared_read"]], np.int64),
    )


def test_every_save_describes_the_state_and_the_first_one_plans() -> None:
    planned = {"describe_s": np.array([0.25]), "rank_s": np.array([8.0])}
    save = replace(save_of(4 * GB, 2 * GB), **planned)
    times = estimate(save, None, Cluster(ranks_per_node=1, write=2, stage=4))
    assert times.later_save == 2.25
    assert times.async_stall == 1.25
    assert times.first_save == 2.25 + 1.5 + 8
    assert (times.load_direct, times.load_exchange, times.interval) == (None, None, None)


def test_the_slowest_node_or_the_storage_as_a_whole_counts() -> None:
    nbytes = np.array([4, 4, 1, 1, 6], np.int64) * GB
    assert slowest(nbytes, 2, 2.0, None) == 4.0  # nodes have 8, 2 and 6 GB
    assert slowest(nbytes, 2, 2.0, 2.0) == 8.0  # all 16 GB through 2 GB/s
    assert slowest(nbytes, 2, 2.0, 100.0) == 4.0
    assert slowest(nbytes, 8, None, 4.0) == 4.0
    assert slowest(nbytes, 2, None, None) is None


def test_the_advice_is_about_later_saves_or_about_what_training_waits_for() -> None:
    saved = save_of(400 * GB, 200 * GB)
    times = estimate(saved, None, Cluster(ranks_per_node=1, write=2.0, mtbf_hours=3))
    assert times.interval == advise(200.0, mtbf_s=10800.0, restart_s=200.0)
    assert times.advice == (
        f"Save every {times.interval.daly / 60:.1f} min: training waits 200.0 s for a save, and "
        f"{times.interval.efficiency:.1%} of the time is progress."
    )
    # An asynchronous save stalls for the copy, and ends before the next begins.
    cluster = Cluster(ranks_per_node=1, write=2.0, stage=40.0, mtbf_hours=0.01)
    times = estimate(saved, None, cluster)
    assert times.async_stall == pytest.approx(10.0)
    assert times.interval is not None
    assert times.interval.daly == pytest.approx(200.0)


def test_an_exchange_takes_the_longer_of_reading_and_sending() -> None:
    load = load_of(
        planned=[0, 1, 2, 3], needed=[8 * GB] * 4, read=[10 * GB] * 4, unique=8 * GB, shared_read=12 * GB
    )
    message: dict[str, Any] = {"ranks_per_node": 1, "read": 1.0}
    assert estimate(save_of(1), load, Cluster(**message)).load_direct == pytest.approx(10.0)
    # Each reads a quarter of 12 GB, and receives what it needs but for the 2 GB that it read itself.
    assert estimate(save_of(1), load, Cluster(**message, network=3.0)).load_exchange == pytest.approx(3.0)
    assert estimate(save_of(1), load, Cluster(**message, network=1.0)).load_exchange == pytest.approx(6.0)
    assert estimate(save_of(1), load, Cluster(**message)).load_exchange == pytest.approx(3.0)


def test_ranks_that_were_not_planned_are_taken_for_their_neighbours() -> None:
    load = load_of(planned=[0, 2], needed=[GB, 2 * GB], read=[GB, 3 * GB], unique=GB, shared_read=GB)
    times = estimate(save_of(1), load, Cluster(ranks_per_node=2, read=1.0))
    assert times.load_direct == pytest.approx(6.0)
    assert load.total_needed == 6 * GB
    assert load.total_read == 8 * GB
    assert load.exchanged == 5 * GB


def test_advice_is_that_of_the_papers() -> None:
    advice = advise(300.0, mtbf_s=6 * 3600.0, restart_s=600.0)
    assert advice.young == pytest.approx((2 * 300 * 21600) ** 0.5)
    ratio = 300 / 43200
    assert advice.daly == pytest.approx(advice.young * (1 + ratio**0.5 / 3 + ratio / 9) - 300)
    # It is the best interval of Daly's model of the time to solution, to within a percent of an hour.
    best = min(range(600, 20000, 10), key=lambda t: slowdown(t, 300.0, 21600.0))
    assert abs(best - advice.daly) < 36
    assert 1 / advice.efficiency == pytest.approx(
        slowdown(advice.daly, 300.0, 21600.0) * math.exp(600 / 21600)
    )


def test_a_save_that_outlasts_the_machine_has_an_interval_and_no_progress() -> None:
    assert advise(7200.0, mtbf_s=3600.0, restart_s=0.0).daly == 3600.0
    assert advise(1e6, mtbf_s=60.0, restart_s=0.0).efficiency == 0.0


def slowdown(interval: float, save_s: float, mtbf_s: float) -> float:
    return mtbf_s * math.expm1((interval + save_s) / mtbf_s) / interval


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_bandwidth_that_cannot_be_raises_an_error(value: float) -> None:
    with pytest.raises(DeclarationError, match=r"network is .*; give a finite number above 0"):
        Cluster(network=value)
