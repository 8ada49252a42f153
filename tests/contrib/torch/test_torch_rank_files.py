"""Files that the ranks of FSDP2 saved with torch.save become whole arrays, which load at another layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import megackpt
from megackpt.testing.ranks import RankPool
from tests.support.effort import sampled


def _model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))


def _save_files(folder: Path) -> None:
    """Train under FSDP2, and save a file for each rank; rank 0 saves the whole state as well."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = dist.init_device_mesh("cpu", (2, 2))
    model = _model()
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (4,)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    weights, states = get_state_dict(model, optimizer)
    both = torch.arange(36.0).view(4, 9)
    cuts = {
        "both": distribute_tensor(both, mesh, [Shard(0), Shard(1)]),
        "columns": distribute_tensor(both, mesh, [Replicate(), Shard(1)]),
    }
    rank = dist.get_rank()
    torch.save({"model": weights, "optimizer": states, "cuts": cuts}, folder / f"rank_{rank}.pt")
    weights, states = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    if rank == 0:
        whole = {"model": weights, "optimizer": states, "cuts": {"both": both, "columns": both}}
        torch.save(whole, folder.parent / "whole.pt")


def _change_columns(path: Path, change: Callable[[Any], Any]) -> None:
    """Change the local part of the replicated DTensor in a rank's file."""
    from torch.distributed.tensor import DTensor

    saved = torch.load(path, weights_only=False)
    columns = saved["cuts"]["columns"]
    spec = columns._spec
    local = change(columns._local_tensor)
    meta = spec.tensor_meta._replace(dtype=local.dtype)
    spec = dataclasses.replace(spec, tensor_meta=meta)
    saved["cuts"]["columns"] = DTensor(local, spec, requires_grad=False)
    torch.save(saved, path)


def _flattened(value: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {path: value}
    items = {}
    for key, member in value.items():
        items |= _flattened(member, f"{path}/{key}")
    return items


@sampled(2)
def test_files_of_fsdp2_ranks_become_whole_arrays(rank_pool: RankPool, tmp_path: Path) -> None:
    folder = tmp_path / "ranks"
    folder.mkdir()
    rank_pool.run(_save_files, 4, folder)
    report = megackpt.import_torch(folder, tmp_path / "imported")
    assert report.left_out == ()
    whole = _flattened(torch.load(tmp_path / "whole.pt"))
    loaded = _flattened(megackpt.load({}, tmp_path / "imported"))
    assert loaded.keys() == whole.keys()
    for path, value in whole.items():
        is_equal = (
            torch.equal(loaded[path], value) if isinstance(value, torch.Tensor) else loaded[path] == value
        )
        assert is_equal, path
    _change_columns(folder / "rank_3.pt", lambda columns: columns.add_(1))
    with pytest.raises(megackpt.FormatError, match=r"'cuts.columns' has other bits than in .*rank_1"):
        megackpt.import_torch(folder, tmp_path / "differing")
    _change_columns(folder / "rank_3.pt", lambda columns: columns.double())
    with pytest.raises(megackpt.FormatError, match=r"'cuts.columns' is torch.float64 .*, and torch.float32"):
        megackpt.import_torch(folder, tmp_path / "differing")
    assert not (tmp_path / "differing").exists()
    (folder / "rank_3.pt").unlink()
    with pytest.raises(megackpt.CoverageError, match="no rank"):
        megackpt.import_torch(folder, tmp_path / "incomplete")
    assert not (tmp_path / "incomplete").exists()
