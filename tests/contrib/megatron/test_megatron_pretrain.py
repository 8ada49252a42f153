"""Megatron-LM's pretrain_gpt.py trains, saves and resumes under `install()` as it does without.

It needs a checkout of Megatron-LM with its dependencies, which no package has: name it in MEGATRON_PATHS. The
helpers of its data sets have to be built in it, or be copied from the wheel of the same version.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.contrib.megatron.megatron_pretrain import pretrain

PATHS = [path for path in os.environ.get("MEGATRON_PATHS", "").split(os.pathsep) if path]
CHECKOUTS = [path for path in PATHS if (Path(path) / "pretrain_gpt.py").exists()]


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
