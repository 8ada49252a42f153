"""`megackpt bench` and `bench_peers.py`: every row is there, loads are verified, bad settings are errors."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt.cli import main
from megackpt.cli.benchmark import page_cache
from megackpt.cli.benchmark.measure import BenchProgress
from megackpt.cli.benchmark.raw import RawFiles
from megackpt.cli.benchmark.report import RAW, RAW_BUFFERED, RAW_DIRECT, Report, Row
from megackpt.cli.benchmark.state import (
    GridLayout,
    as_bytes,
    fingerprints,
    first_difference,
    make_model,
    make_state,
    spoil,
)
from megackpt.errors import DeclarationError
from megackpt.formats.registry import save_strategy
from megackpt.storage import LocalStore, block_digests
from tests.benchmarks.goals import goals_of
from tests.benchmarks.peers import counters, names
from tests.benchmarks.peers.digests import _no_digests
from tests.benchmarks.peers.run import Figure, PeerReport, PeerSettings
from tests.benchmarks.peers.states import invert, make_small_model
from tests.benchmarks.peers.tracing import Tracer, traced_load, traced_store, traced_strategy
from tests.benchmarks.peers.world import run_peers
from tests.support.counting import CountingStore
from tests.support.docs import ROOT
from tests.support.effort import tries_all, with_all

RANKS = 2
OURS = {"megackpt", "megackpt:torch_dist"}
RESHARDED = ("TP2 to DP2", "PP2 to DP2", "PP2 to TP2")
FLAT = ("flat optimizer, DP2 to PP2", "flat optimizer, DP2 to TP2")
COLD = {"load, cold", *(f"{case}, cold" for case in (*RESHARDED, *FLAT))}
ASYNC_TOTAL = ("async, stall", "async, total")
SMALL = ("small state, save", "small state, load")
SCALING_CASES = tuple(
    f"{case}, {ranks}" for case in ("save", "load, warm") for ranks in ("1 rank", "2 ranks")
)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One tiny run, as a person starts it; all that it writes, by kind. Plain tests run three cases."""
    directory = tmp_path_factory.mktemp("bench")
    files = {kind: directory / f"out.{kind}" for kind in ("svg", "trace", "json")}
    arguments = ["--ranks", str(RANKS), "--size", "2MiB", "--repeats", "1", "--vs", "dcp,torch"]
    arguments += ["--formats", "torch_dist"]
    arguments += ["--scaling", "2", "--long-run", "4"] if tries_all() else ["--cases", "save,load,reshard"]
    outputs = ["--json", files["json"], "--chart", files["svg"], "--profile", files["trace"]]
    command = [sys.executable, "tests/benchmarks/bench_peers.py", "--dir", str(directory / "dir")]
    run = subprocess.run(
        [*command, *arguments, *map(str, outputs)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    left = [path.name for path in (directory / "dir").iterdir()]
    return {
        "code": run.returncode,
        "stderr": run.stderr,
        "left": left,
        "report": json.loads(files["json"].read_text()),
        "stdout": run.stdout,
        "chart": files["svg"].read_text(),
        "trace": json.loads(files["trace"].read_text()),
    }


@with_all("the other tests run three cases")
def test_the_json_has_a_row_for_every_case_and_contender(results: dict[str, Any]) -> None:
    measured = {(row["case"], row["who"]) for row in results["report"]["rows"]}
    both, leaders = {*OURS, "dcp", "torch"}, {"megackpt", "dcp", "torch"}
    wanted = {(case, who) for case in ("save", "load, cold", "load, warm", *RESHARDED, *FLAT) for who in both}
    wanted |= {(case, who) for case in SMALL for who in leaders}
    wanted |= {(case, who) for case in ASYNC_TOTAL for who in ("megackpt", "dcp")}
    wanted |= {(f"digests: {c}", w) for c in ("save", "load, warm") for w in ("megackpt", names.UNCHECKED)}
    wanted |= {(case, "megackpt") for case in SCALING_CASES}
    wanted |= {(case, RAW_DIRECT) for case in ("save", "load, cold", "save, 1 rank", "save, 2 ranks")}
    wanted |= {(case, RAW_BUFFERED) for case in ("save", "load, cold", "load, warm", *RESHARDED, *FLAT)}
    if results["report"]["machine"]["has_cold_files"]:
        wanted |= {("digests: load, cold", who) for who in ("megackpt", names.UNCHECKED)}
        wanted |= {(c, w) for c in COLD - {"load, cold"} for w in ("megackpt", *RAW)}
        wanted |= {(f"{case}, cold", "dcp") for case in RESHARDED}
    assert measured == wanted


def test_every_row_was_measured_and_verified_or_reports_why_not(results: dict[str, Any]) -> None:
    assert results["code"] == 0
    unable = {*((case, "dcp") for case in FLAT), *((case, "torch") for case in (*RESHARDED, *FLAT))}
    for row in results["report"]["rows"]:
        name = (row["case"], row["who"])
        if row["unsupported"]:
            assert row["who"] in RAW or row["case"] in COLD or name in unable, name
            assert row["seconds"] == []
        else:
            assert len(row["seconds"]) == _runs(row), name
            assert row["median_s"] > 0, name
            is_compared = row["who"] not in RAW and row["case"] not in (
                "digests: save",
                "digests: load, cold",
            )
            assert row["verified"] is (True if is_compared else None), name


def _runs(row: dict[str, Any]) -> int:
    if row["case"] in SMALL:
        return 3 if row["who"] == "megackpt" else 2
    return 2 if row["case"].startswith("digests: ") else 1


def test_resharded_loads_count_what_they_read_and_have_a_limit_of_their_own(results: dict[str, Any]) -> None:
    rows = {(row["case"], row["who"]): row for row in results["report"]["rows"]}
    for case in (*RESHARDED, *FLAT):
        row, raw = rows[case, "megackpt"], rows[case, RAW_BUFFERED]
        # At least what is needed, and no more than everything for each of two ranks, with the index.
        assert row["nbytes"] <= row["read_nbytes"] < 2.5 * row["nbytes"]
        assert raw["nbytes"] == row["nbytes"]
        assert row["ratios"]["raw"] == pytest.approx(raw["median_s"] / row["median_s"])


@with_all("the other tests run three cases")
def test_every_goal_is_measured_but_those_against_a_peer_that_took_no_part(results: dict[str, Any]) -> None:
    goals = goals_of(PeerReport.from_json(results["report"]))
    unmeasured = {goal.what for goal in goals if goal.measured is None}
    against_others = {goal.what for goal in goals if "mcore" in goal.of}
    raw_unsupported = {r["case"] for r in results["report"]["rows"] if r["unsupported"] and r["who"] in RAW}
    assert unmeasured <= against_others | raw_unsupported
    figures = {(f["name"], f["who"]): f["value"] for f in results["report"]["figures"]}
    assert figures[names.DESCRIPTORS, "megackpt"] == 0
    assert figures[names.COLLECTIVES, "megackpt"] >= 1
    assert figures[f"{names.MEMORY}, save", "dcp"] >= 0


def test_nothing_is_left_in_the_directory_and_the_chart_names_the_contenders(results: dict[str, Any]) -> None:
    assert results["left"] == []
    assert "<svg" in results["chart"]
    assert "vs dcp" in results["stdout"]


def test_progress_names_each_case_and_round_where_stderr_is_a_file(results: dict[str, Any]) -> None:
    lines = [re.sub(r"\d:\d\d:\d\d", "TIME", line) for line in results["stderr"].splitlines()]
    assert [line for line in lines if not line.startswith("bench: ")] == [], "warnings of other libraries"
    others = ("async", "digests", "memory", "small", "planning", "scaling") if tries_all() else ()
    for case in ("same layout", "reshard", *others):
        assert any(re.match(rf"bench: {case} \(\d+ of \d+\): begins, TIME spent", line) for line in lines), (
            case
        )
    assert any(re.match(r"bench: reshard \(\d+ of \d+\): round 1 of 1, TIME spent, ", line) for line in lines)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_one_line_names_the_case_and_the_time_left() -> None:
    terminal = _Terminal()
    progress = BenchProgress(terminal, 2)
    progress.begin("same layout")
    progress.show("round 1 of 1", 0.5)
    progress.begin("reshard")
    progress.end()
    shown = re.sub(r"\d:\d\d:\d\d", "TIME", terminal.getvalue()).split("\r\x1b[K")
    assert shown == [
        "",
        "bench: same layout (1 of 2): begins, TIME spent",
        "bench: same layout (1 of 2): round 1 of 1, TIME spent, about TIME left",
        "bench: reshard (2 of 2): begins, TIME spent, about TIME left",
        "",
    ]


def test_the_time_left_counts_the_parts_of_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, now = io.StringIO(), [0.0]
    monkeypatch.setattr("megackpt.cli.benchmark.measure.time.perf_counter", lambda: now[0])
    progress = BenchProgress(stream, 1)
    progress.begin("reshard")
    now[0] = 90.0
    progress.begin_part("TP4 to TP2xDP2", 1, 2)
    progress.show("round 1 of 1", 0.5)
    assert stream.getvalue().splitlines()[1:] == [
        "bench: reshard (1 of 1): TP4 to TP2xDP2, 0:01:30 spent, about 0:01:30 left",
        "bench: reshard (1 of 1): round 1 of 1, 0:01:30 spent, about 0:00:30 left",
    ]


def test_the_trace_has_the_phases_of_both_on_every_rank(results: dict[str, Any]) -> None:
    events = [event for event in results["trace"]["traceEvents"] if event["ph"] == "X"]
    of_save = {"plan", "copy", "digest", "write", "sync"}
    for rank in range(RANKS):
        assert {e["name"] for e in events if e["pid"] == 2 * rank} >= of_save
        assert {e["name"] for e in events if e["pid"] == 2 * rank + 1} >= {"open", "plan", "read", "digest"}
    assert {e["name"] for e in events if e["pid"] == 0} >= {"index", "commit"}
    assert all(event["dur"] >= 0 for event in events)
    assert results["report"]["phases"]["save"][0]["all"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "3"], "ranks is 3"),
        (["--size", "many"], "'many' is not a size"),
        (["--repeats", "0"], "repeats is 0"),
        (["--cases", "save,nap"], "'nap' is no case"),
        (["--cases", "save,small"], "'small' is no case"),
        (["--formats", "zip"], "'zip' is no format"),
    ],
)
def test_bad_settings_raise_an_error_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["bench", "--dir", str(tmp_path / "dir"), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "dir").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peers": ("zip",)}, "'zip' is no peer"),
        ({"peers": ("no.such.module:Peer",)}, "The peer 'no.such.module:Peer' cannot be imported"),
        ({"cases": ("save", "nap")}, "'nap' is no case"),
        ({"ranks": 3}, "ranks is 3"),
        ({"scaling": 5}, "scaling is 5"),
        ({"long_run": 2}, "long_run is 2"),
    ],
)
def test_bad_settings_of_a_comparison_raise_an_error_before_anything_starts(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(DeclarationError, match=message):
        run_peers(PeerSettings(directory=str(tmp_path / "dir"), **settings))
    assert not (tmp_path / "dir").exists()


def test_the_command_measures_raw_files_and_our_formats(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megackpt.cli", "bench", "--dir", str(tmp_path / "dir"), "--json", "-q"]
    command += ["--ranks", "2", "--size", "1MiB", "--repeats", "1", "--formats", "torch_dist"]
    command += ["--cases", "save", "--chart", str(tmp_path / "chart.svg")]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    report = Report.from_json(json.loads(run.stdout))
    assert {row.who for row in report.rows if row.case == "load, warm"} == {*OURS, RAW_BUFFERED}
    assert {row.verified for row in report.rows if not row.is_raw and row.seconds} == {True}
    assert "<svg" in (tmp_path / "chart.svg").read_text()
    assert list((tmp_path / "dir").iterdir()) == []


@pytest.mark.parametrize("layout", [GridLayout(tp=4), GridLayout(pp=4), GridLayout(tp=2, dp=2)])
def test_the_blocks_of_all_ranks_tile_the_same_arrays(layout: GridLayout) -> None:
    model = make_model(1 << 20, ranks=4, dtype=torch.bfloat16)
    (whole,) = [make_state(model, GridLayout(), 0, torch.bfloat16)]
    of_key = {shard.key: shard.data for shard in whole.shards}
    seen: dict[str, int] = {}
    for rank in range(4):
        tp_rank = layout.coordinates_of(rank)[0]
        for shard in make_state(model, layout, rank, torch.bfloat16).shards:
            axis = shard.tp_axis
            right = of_key[shard.key] if axis is None else of_key[shard.key].chunk(layout.tp, axis)[tp_rank]
            assert torch.equal(as_bytes(shard.data), as_bytes(right.contiguous()))
            seen[shard.key] = seen.get(shard.key, 0) + (shard.data.numel() if shard.replica == (0, 0) else 0)
    assert seen == {key: data.numel() for key, data in of_key.items()}


def test_flat_ranges_of_a_stage_hold_every_element_of_the_optimizer_once() -> None:
    model, layout = (make_model(1 << 20, ranks=4, dtype=torch.bfloat16), GridLayout(tp=2, dp=2, is_flat=True))
    seen: dict[str, int] = {}
    for rank in range(4):
        for shard in make_state(model, layout, rank, torch.bfloat16).shards:
            if shard.replica == (0, 0):
                seen[shard.key] = seen.get(shard.key, 0) + shard.data.numel()
    assert seen == {
        key: array.numel
        for array in model
        for key in (array.key, *(f"optimizer.{s}.{array.key}" for s in ("master", "exp_avg", "exp_avg_sq")))
    }


def test_one_wrong_bit_is_a_difference_with_its_key() -> None:
    model = make_model(1 << 20, ranks=2, dtype=torch.float32)
    wrong = make_state(model, GridLayout(tp=2), 1, torch.float32)
    right = fingerprints(wrong)
    assert first_difference(wrong, right) is None
    as_bytes(wrong.shards[3].data)[-1] ^= 1
    assert first_difference(wrong, right) == wrong.shards[3].key
    spoil(wrong)
    assert first_difference(wrong, right) == wrong.shards[0].key


def test_a_state_that_is_inverted_differs_everywhere_and_twice_is_as_before() -> None:
    state = make_state(make_small_model(), GridLayout(dp=2), 1, torch.float32)
    right = fingerprints(state)
    invert(state)
    assert not set(fingerprints(state)) & set(right)
    invert(state)
    assert first_difference(state, right) is None


def test_a_report_survives_json_and_its_ratios_are_those_of_medians() -> None:
    rows = (
        Row(case="save", who=RAW_DIRECT, nbytes=100, seconds=(1.0,)),
        Row(case="save", who=RAW_BUFFERED, nbytes=100, seconds=(2.0,)),
        Row(case="save", who="megackpt", nbytes=100, seconds=(2.0, 9.0, 1.0), verified=True),
        Row(case="save", who="dcp", nbytes=100, seconds=(5.0,), verified=False, differing="w"),
    )
    report = _report(rows, (Figure(name="a", who="megackpt", value=1.5, unit="ms"),))
    assert PeerReport.from_json(json.loads(json.dumps(report.to_json()))) == report
    assert report.ratios(rows[2]) == {"raw": 0.5, "dcp": 2.5}
    assert report.limit("async, total") == 100
    assert not report.is_verified


def _report(
    rows: tuple[Row, ...], figures: tuple[Figure, ...] = (), *, has_cold_files: bool = True
) -> PeerReport:
    machine = {"has_cold_files": has_cold_files, "scaling_ranks": 8, "spent_s": {"small": 1.0}}
    command = {"peers": ["dcp"], "ranks": 2}
    return PeerReport(command=command, machine=machine, state={"nbytes": 100}, rows=rows, figures=figures)


def test_a_goal_is_met_at_its_bound_and_not_beyond() -> None:
    rows = (
        Row(case="save", who=RAW_DIRECT, nbytes=90, seconds=(1.0,)),
        Row(case="save", who="megackpt", nbytes=90, seconds=(1.0625,)),
        Row(case="save", who="dcp", nbytes=90, seconds=(1.9125,)),
        Row(case="TP4 to DP4", who="megackpt", nbytes=100, seconds=(1.0,), read_nbytes=111),
    )
    figures = (
        Figure(name=f"{names.MEMORY}, save", who="megackpt", value=64.0, unit="MiB"),
        Figure(name=f"{names.MEMORY}, load", who="megackpt", value=64.1, unit="MiB"),
        Figure(name=f"save, {names.SCALING.format(ranks=8)}", who="megackpt", value=0.95, unit=""),
    )

    def verdicts(report: PeerReport) -> dict[tuple[str, str], bool | None]:
        return {(goal.what, goal.of): goal.is_met for goal in goals_of(report)}

    on_disk, in_memory = (verdicts(_report(rows, figures, has_cold_files=cold)) for cold in (True, False))
    assert on_disk["save", "raw"] is in_memory["save", "raw"] is True
    assert on_disk["save", "x as fast as dcp"] is False
    assert in_memory["save", "x as fast as dcp"] is True
    assert on_disk["load, cold", "raw"] is None
    assert ("load, cold", "raw") not in in_memory
    assert on_disk["TP4 to DP4", "x what is needed read"] is False
    assert on_disk[f"{names.MEMORY}, save", "MiB a rank"] is True
    assert on_disk[f"{names.MEMORY}, load", "MiB a rank"] is False
    assert on_disk["save, throughput of 8 ranks to that of 1", ""] is True


def test_the_system_counts_as_read_what_the_store_was_asked_for(tmp_path: Path) -> None:
    state = {"w": megackpt.ShardedTensor.from_rank_offsets("w", torch.arange(1 << 21))}
    megackpt.save(state, tmp_path)
    half = torch.zeros(1 << 20, dtype=torch.int64)
    for _ in range(2):  # the first load imports modules, which are files too
        store = CountingStore(tmp_path)
        before = page_cache.read_bytes()
        megackpt.load({"w": megackpt.ShardedTensor.from_rank_offsets("w", half, (0, 1, 2))}, store)
        after = page_cache.read_bytes()
    assert before is not None
    assert after is not None
    assert store.nbytes >= half.nbytes
    assert store.nbytes <= after - before < 1.02 * store.nbytes


def test_a_goal_within_noise_of_its_bound_is_neither_met_nor_missed() -> None:
    of_save = f"{names.DIGESTS}, save"
    figures = (
        Figure(name=of_save, who="megackpt", value=6.0, unit="%"),
        Figure(name=of_save + names.DOUBT, who="megackpt", value=2.0, unit="%"),
    )
    (goal,) = [goal for goal in goals_of(_report((), figures)) if goal.what == of_save]
    assert (goal.is_met, goal.measurement, goal.verdict) == (None, "6 % +- 2", "too close to tell")
    assert replace(goal, doubt=0.5).verdict == "NOT MET"
    assert replace(goal, measured=None).verdict == "not measured"


def test_the_peak_of_memory_is_that_of_the_work_and_not_an_earlier_one() -> None:
    assert counters.peak_above(lambda: bytearray(64 << 20)) >= 60 << 20
    assert counters.peak_above(lambda: bytearray(8 << 20)) < 32 << 20


def test_raw_files_are_read_around_the_ring(tmp_path: Path) -> None:
    files = [RawFiles(tmp_path / "raw", 40_000, rank=rank, ranks=2) for rank in range(2)]
    for file in files:
        file.write(direct=False)
    sizes = [path.stat().st_size for path in sorted((tmp_path / "raw").iterdir())]
    assert sizes == [20_480, 20_480]
    before = page_cache.read_bytes()
    files[1].read(30_000, direct=False)
    after = page_cache.read_bytes()
    assert before is not None
    assert after is not None
    assert 32_768 <= after - before < 33_500
    (tmp_path / "raw" / "rank-0").unlink()
    files[1].read(direct=False)
    with pytest.raises(FileNotFoundError, match="rank-0"):
        files[1].read(30_000, direct=False)


def test_digests_are_left_out_while_asked_to_and_only_then() -> None:
    data = memoryview(b"abcde")
    right = block_digests(data, 4).tolist()
    with _no_digests() as hashes:
        assert block_digests(data, 4).tolist() == [0, 0]
        assert hashes.calls > 0
    assert block_digests(data, 4).tolist() == right


def test_a_traced_save_writes_what_an_untraced_one_does(tmp_path: Path) -> None:
    state = {"w": megackpt.ShardedTensor.from_rank_offsets("w", torch.arange(3000.0))}
    tracer = Tracer()
    store = traced_store(LocalStore(tmp_path), tracer)
    megackpt.save(state, store, traced_strategy(save_strategy(None), tracer))
    with traced_load(tracer):
        loaded = megackpt.load({"w": megackpt.ShardedTensor.from_rank_offsets("w", torch.zeros(3000))}, store)
    assert torch.equal(loaded["w"], torch.arange(3000.0))
    assert {"plan", "copy", "digest", "write", "sync", "index", "commit", "read"} <= set(tracer.seconds())
