"""torch.distributed.checkpoint in a process without ranks, with each version of torch."""

from __future__ import annotations

import inspect
import shutil
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

ALONE: dict[str, bool] = {"no_dist": True} if "no_dist" in inspect.signature(dcp.save).parameters else {}
"""For `dcp.save` and `dcp.load`. Older versions lack the argument, and find out by themselves."""


def two_that_look_like_one_save(directory: Path) -> tuple[Path, Path]:
    """Save twice; the first lacks its data, and the second has its `.metadata`, as of older releases."""
    first, second = directory / "it", directory / "other"
    for location, value in ((first, 1.0), (second, 2.0)):
        dcp.save({"w": torch.full((4,), value)}, checkpoint_id=location, **ALONE)
    (first / "__0_0.distcp").unlink()
    shutil.copy(first / ".metadata", second / ".metadata")
    return first, second
