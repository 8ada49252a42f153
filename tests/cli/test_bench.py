"""`megackpt bench`: every row is there, every load is verified, and what is wrong is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megackpt.bench import Report, Row
from megackpt.bench.report import RAW_NAME
from megackpt.bench.state import GridLayout, as_bytes, first_difference, make_model, make_state, spoil
from megackpt.bench.tracing import Tracer, traced_load, traced_store, traced_strategy
from megackpt.cli import main
from megackpt.formats.registry import save_strategies, save_strategy
from megackpt.storage import LocalStore

RANKS = 2
OURS = {
    "megackpt" if backend == "megackpt" else f"megackpt:{backend}"
    for backend in {strategy.backend for strategy in save_strategies()}
}
SAME_LAYOUT = ("save", "load, cold", "load, warm")
RESHARDED = ("TP2 to DP2", "PP2 to TP2")
FLAT = "flat optimizer, DP2 to TP2"
BEHIND = ("async, stall", "async, total")
RAW = ("write, direct", "write, buffered", "read, direct", "read, cold", "read, warm")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One tiny run, as a user starts it; everything that it writes, by kind."""
    place = tmp_path_factory.mktemp("bench")
    files = {kind: place / f"out.{kind}" for kind in ("json", "svg", "trace")}
    arguments = ["--ranks", str(RANKS), "--size", "3MiB", "--repeats", "1", "--vs", "dcp,torch"]
    outputs = ["--json", files["json"], "--chart", files["svg"], "--profile", files["trace"]]
    code = main(["bench", "--dir", str(place / "dir"), *arguments, *map(str, outputs)])
    left = [path.name for path in (place / "dir").iterdir()]
    return {
        "code": code,
        "left": left,
        "report": json.loads(files["json"].read_text()),
        "chart": files["svg"].read_text(),
        "trace": json.loads(files["trace"].read_text()),
    }


@pytest.mark.multiprocess
def test_the_json_has_a_row_for_every_case_and_contender(results: dict[str, Any]) -> None:
    found = {(row["case"], row["who"]) for row in results["report"]["rows"]}
    both = {*OURS, "dcp", "torch"}
    wanted = {(case, RAW_NAME) for case in RAW}
    wanted |= {(case, who) for case in (*SAME_LAYOUT, *RESHARDED, FLAT) for who in both}
    wanted |= {(case, who) for case in BEHIND for who in {*OURS, "dcp"}}
    assert found == wanted


@pytest.mark.multiprocess
def test_every_row_was_measured_and_verified_or_says_why_not(results: dict[str, Any]) -> None:
    assert results["code"] == 0
    for row in results["report"]["rows"]:
        name = (row["case"], row["who"])
        if row["refused"]:
            is_allowed = row["who"] == RAW_NAME or row["case"] == "load, cold"
            assert is_allowed or name in {(FLAT, "dcp"), *((c, "torch") for c in (*RESHARDED, FLAT))}, name
            assert row["seconds"] == []
        else:
            assert len(row["seconds"]) == 1, name
            assert row["median_s"] > 0, name
            assert row["verified"] is (None if row["who"] == RAW_NAME else True), name


@pytest.mark.multiprocess
def test_nothing_is_left_in_the_directory_and_the_chart_names_the_contenders(results: dict[str, Any]) -> None:
    assert results["left"] == []
    assert "<svg" in results["chart"]


@pytest.mark.multiprocess
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
    ("arguments", "said"),
    [
        (["--ranks", "3"], "ranks is 3"),
        (["--size", "many"], "'many' is no size"),
        (["--vs", "zip"], "'zip' is no peer"),
        (["--repeats", "0"], "repeats is 0"),
    ],
)
def test_bad_settings_are_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main(["bench", "--dir", str(tmp_path / "dir"), *arguments]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "dir").exists()


@pytest.mark.parametrize("layout", [GridLayout(tp=4), GridLayout(pp=4), GridLayout(tp=2, dp=2)])
def test_the_blocks_of_all_ranks_tile_the_same_arrays(layout: GridLayout) -> None:
    model = make_model(1 << 20, ranks=4, dtype=torch.bfloat16)
    (whole,) = [make_state(model, GridLayout(), 0, torch.bfloat16)]
    of_key = {piece.key: piece.data for piece in whole.pieces}
    seen: dict[str, int] = {}
    for rank in range(4):
        tp_rank = layout.place(rank)[0]
        for piece in make_state(model, layout, rank, torch.bfloat16).pieces:
            axis = piece.tp_axis
            right = of_key[piece.key] if axis is None else of_key[piece.key].chunk(layout.tp, axis)[tp_rank]
            assert torch.equal(as_bytes(piece.data), as_bytes(right.contiguous()))
            seen[piece.key] = seen.get(piece.key, 0) + (piece.data.numel() if piece.replica == (0, 0) else 0)
    assert seen == {key: data.numel() for key, data in of_key.items()}


def test_flat_ranges_of_a_stage_hold_every_element_of_the_optimizer_once() -> None:
    model, layout = (
        make_model(1 << 20, ranks=4, dtype=torch.bfloat16),
        GridLayout(tp=2, dp=2, is_flat=True),
    )
    seen: dict[str, int] = {}
    for rank in range(4):
        for piece in make_state(model, layout, rank, torch.bfloat16).pieces:
            if piece.replica == (0, 0):
                seen[piece.key] = seen.get(piece.key, 0) + piece.data.numel()
    assert seen == {
        key: array.numel
        for array in model
        for key in (array.key, *(f"optimizer.{s}.{array.key}" for s in ("master", "exp_avg", "exp_avg_sq")))
    }


def test_one_wrong_bit_is_a_difference_with_its_key() -> None:
    model = make_model(1 << 20, ranks=2, dtype=torch.float32)
    right, wrong = (make_state(model, GridLayout(tp=2), 1, torch.float32) for _ in range(2))
    assert first_difference(wrong, right) is None
    as_bytes(wrong.pieces[3].data)[-1] ^= 1
    assert first_difference(wrong, right) == wrong.pieces[3].key
    spoil(wrong)
    assert first_difference(wrong, right) == wrong.pieces[0].key


def test_a_report_survives_json_and_its_ratios_are_those_of_medians() -> None:
    rows = (
        Row(case="write, direct", who=RAW_NAME, nbytes=100, seconds=(1.0,)),
        Row(case="write, buffered", who=RAW_NAME, nbytes=100, seconds=(2.0,)),
        Row(case="save", who="megackpt", nbytes=100, seconds=(2.0, 9.0, 1.0), verified=True),
        Row(case="save", who="dcp", nbytes=100, seconds=(5.0,), verified=False, differing="w"),
    )
    report = Report(command={"peers": ["dcp"], "ranks": 2}, machine={}, state={"nbytes": 100}, rows=rows)
    assert Report.from_json(json.loads(json.dumps(report.to_json()))) == report
    assert report.ratios(rows[2]) == {"raw": 0.5, "dcp": 2.5}
    assert not report.is_verified


def test_a_traced_save_writes_what_an_untraced_one_does(tmp_path: Path) -> None:
    import megackpt

    state = {"w": megackpt.ShardedTensor.from_rank_offsets("w", torch.arange(3000.0))}
    tracer = Tracer()
    store = traced_store(LocalStore(tmp_path), tracer)
    megackpt.save(state, store, traced_strategy(save_strategy(None), tracer))
    with traced_load(tracer):
        loaded = megackpt.load({"w": megackpt.ShardedTensor.from_rank_offsets("w", torch.zeros(3000))}, store)
    assert torch.equal(loaded["w"], torch.arange(3000.0))
    assert {"plan", "copy", "digest", "write", "sync", "index", "commit", "read"} <= set(tracer.seconds())
