"""Megatron-Core 0.16.1 trains, saves and resumes over megackpt: by Megatron-LM's calls, and by its program.

Megatron-LM's pretrain_gpt.py needs a checkout with its dependencies, which no package has: name it in
MEGATRON_PATHS. The helpers of its data sets have to be built in it, or be copied from the wheel of the same
version.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contrib.megatron.megatron_pretrain import pretrain
from tests.contrib.megatron.megatron_trainer import Run, losses_of
from tests.contrib.megatron.test_installing import MEGATRONS, needs_megatron
from tests.support.effort import with_all

CHECKOUTS = [path for path in MEGATRONS if (Path(path) / "pretrain_gpt.py").exists()]


def _values(losses: dict[str, str]) -> list[float]:
    return [float.fromhex(loss) for loss in losses.values()]


def _late(losses: dict[str, str]) -> dict[str, str]:
    return {number: loss for number, loss in losses.items() if int(number) > 3}


@needs_megatron
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


@needs_megatron
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
