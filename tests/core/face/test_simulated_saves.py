"""A simulated save is the real one: the same bytes by the same ranks, every byte once."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megackpt.parallel import ParallelLayout
from megackpt.planning import plan_save
from megackpt.simulation import PRESETS, build_model, job_arrays, parse_layout, simulate_save
from megackpt.simulation.replica_group import joined
from megackpt.simulation.replicas import replica_groups
from megackpt.simulation.sizes import Experts
from tests.support.checkpoints import BUCKET, SIZES, TIED, save_for_real


def data_nbytes(path: Path) -> int:
    header = int.from_bytes(path.read_bytes()[:8], "little")
    return path.stat().st_size - 8 - header


@pytest.mark.parametrize("text", ["tp2,pp2,dp2", "tp1,pp3,dp1", "tp2,dp3"])
def test_each_rank_writes_as_many_bytes_as_in_a_real_save(text: str, tmp_path: Path) -> None:
    layout = parse_layout(text)
    save_for_real(TIED, layout, tmp_path)
    outcome, _ = simulate_save(build_model(TIED), layout, bucket_size=BUCKET)
    real = np.zeros(layout.world_size, np.int64)
    for path in (tmp_path / "data").iterdir():
        real[int(path.stem.rpartition("-")[2])] = data_nbytes(path)
    assert outcome.nbytes.tolist() == real.tolist()
    assert outcome.files == len(list((tmp_path / "data").iterdir()))
    message = json.loads((tmp_path / "metadata.json").read_text())
    assert outcome.index_nbytes == message["index"]["nbytes"]


@pytest.mark.parametrize("tied", [True, False])
def test_lists_of_ranks_give_the_plan_of_all_their_rows(tied: bool) -> None:
    experts = Experts(count=4, ffn_size=48, dense_layers=1)
    sizes = replace(SIZES, num_layers=4, tied_embeddings=tied, experts=experts)
    model, layout = build_model(sizes), parse_layout("tp2,pp4,dp4,ep2")
    arrays = job_arrays(model, tp=2)
    groups = [g for stage in replica_groups(model, layout, arrays, bucket_size=BUCKET) for g in stage]
    everyone = joined([g.declare(arrays, np.arange(len(g.ranks))) for g in groups])
    order = np.argsort(everyone.rank, kind="stable")
    whole = plan_save(everyone.take(order), ranks=layout.world_size)
    _, plan = simulate_save(model, layout, bucket_size=BUCKET)
    for column in ("array", "start", "shape", "flat_start", "flat_stop", "nbytes"):
        assert getattr(plan.table, column).tolist() == getattr(whole.table, column).tolist()
    assert plan.writer.tolist() == whole.writer.tolist()
    assert plan.offset_bytes.tolist() == whole.offset_bytes.tolist()


@pytest.mark.parametrize(
    ("preset", "text"), [("llama3-70b", "tp8,pp4,dp8"), ("deepseek-v3", "tp2,pp2,dp8,ep8")]
)
def test_every_byte_is_written_once(preset: str, text: str) -> None:
    model, layout = build_model(replace(PRESETS[preset], num_layers=8)), parse_layout(text)
    outcome, plan = simulate_save(model, layout)  # it proves coverage on the way
    assert outcome.total_nbytes == job_arrays(model, tp=layout.tp).nbytes
    assert outcome.total_nbytes == int(plan.table.nbytes.sum())
    # 14 bytes for each parameter, those of padded vocabularies, and counts.
    buffers = sum(w.numel for w, _ in model.weights() if not w.is_trained)
    assert 14 * (model.numel - buffers) < outcome.total_nbytes < 14.05 * model.numel
    assert outcome.files == layout.world_size


def test_without_an_optimizer_there_are_weights_alone() -> None:
    model = build_model(PRESETS["llama3-8b"])
    outcome, _ = simulate_save(model, ParallelLayout(dp=4), states=())
    assert outcome.total_nbytes == 2 * model.numel
