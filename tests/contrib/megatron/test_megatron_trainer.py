"""Megatron-Core 0.16.1 trains, saves and resumes over megackpt, by the calls that Megatron-LM makes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.contrib.megatron.megatron_trainer import Run, losses_of
from tests.support.effort import with_all

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None,
        reason="Megatron-Core is not installed: pip install megatron-core==0.16.1",
    ),
]


def _values(losses: dict[str, str]) -> list[float]:
    return [float.fromhex(loss) for loss in losses.values()]


def _late(losses: dict[str, str]) -> dict[str, str]:
    return {number: loss for number, loss in losses.items() if int(number) > 3}


@with_all("tests/compat loads and saves in Megatron-Core's models")
def test_a_run_resumes_where_it_was_and_at_another_tensor_parallel_size(tmp_path: Path) -> None:
    path, queued = str(tmp_path / "iter_3"), str(tmp_path / "queued")
    runs = [Run(save=path), Run(save=queued, is_async=True), Run(load=path), Run(load=queued), Run(2, path)]
    whole, again, resumed, from_queued, at_tp2 = losses_of(runs, tmp_path / "ours", megackpt=True)
    before, after = _values(whole)[:3], _values(whole)[3:]
    assert all(late < early for early, late in zip(before, after, strict=True)), "the same data, learnt"
    assert again == whole
    assert resumed == from_queued == _late(whole), "not the bits of the run that was not interrupted"
    assert _values(at_tp2) == pytest.approx(_values(_late(whole)), rel=0.02), "bfloat16, summed otherwise"


@with_all("the plain run trains over megackpt alone, and the interop matrix compares every value")
def test_megatron_and_megackpt_resume_each_other_s_checkpoints_with_equal_losses(tmp_path: Path) -> None:
    ours, theirs, queued = (str(tmp_path / name) for name in ("ours_3", "theirs_3", "queued_3"))
    made = [Run(save=theirs), Run(load=theirs), Run(2, theirs)]
    whole, resumed, at_tp2 = losses_of(made, tmp_path / "theirs", megackpt=False)
    runs = [Run(save=ours), Run(save=queued, is_async=True), Run(load=ours), Run(load=theirs)]
    losses = losses_of([*runs, Run(2, ours), Run(2, theirs)], tmp_path / "ours", megackpt=True)
    assert losses == [whole, whole, resumed, resumed, at_tp2, at_tp2]
    back = [Run(load=ours), Run(load=queued), Run(2, ours)]
    assert losses_of(back, tmp_path / "back", megackpt=False) == [resumed, resumed, at_tp2]
