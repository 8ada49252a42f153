"""Megatron-Core loads our torch_dist checkpoints, strictly where no values are listed for DCP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megackpt import ShardedTensor, save
from megackpt.formats.torch_dist import TorchDistSaveStrategy


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_megatron_loads_it_strictly_where_no_values_are_listed(tmp_path: Path) -> None:
    theirs = pytest.importorskip("megatron.core.dist_checkpointing")

    def wanted() -> dict[str, Any]:
        return {"w": theirs.ShardedTensor.from_rank_offsets("w", torch.zeros(3))}

    state = {"step": 7, "w": ShardedTensor.from_rank_offsets("w", torch.arange(3.0))}
    save(state, tmp_path / "both", "torch_dist")
    save(state, tmp_path / "megatron", TorchDistSaveStrategy(values_for_dcp=False))
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        for name, strict in [("both", "assume_ok_unexpected"), ("megatron", "raise_all")]:
            loaded = theirs.load(wanted(), str(tmp_path / name), strict=strict)
            assert loaded["step"] == 7
            assert torch.equal(loaded["w"], torch.arange(3.0))
        with pytest.raises(ValueError, match="unpack"):  # as the documents say
            theirs.load(wanted(), str(tmp_path / "both"), strict="raise_all")
    finally:
        dist.destroy_process_group()
