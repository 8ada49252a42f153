"""Files that the ranks of FSDP saved with torch.save become whole arrays, which load elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType, fully_shard
from torch.distributed.fsdp.api import FullOptimStateDictConfig, FullStateDictConfig
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import megackpt
from megackpt.testing.ranks import RankPool
from tests.contrib.torch.test_fsdp1 import BLOCKS, build, sharded, whole
from tests.contrib.torch.worlds import COMPUTES, Transformer, full, same, train_step
from tests.support.effort import sampled

pytestmark = pytest.mark.filterwarnings("ignore:Please use DTensor instead")
computes = pytest.mark.skipif(not COMPUTES, reason="this torch does not run FSDP on the CPU")


class WithScale(Transformer):
    """The transformer, with a parameter of two rows: some ranks have no shard of it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * self.scale.sum()


def _trained(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a trained model in nested FSDP modules, and its optimizer. Collective."""
    # Modules in wrapped modules are wrapped, too, and the norms of a block belong to the block.
    model, optimizer = build(kind, 1, module=WithScale, wrapped=BLOCKS | {nn.Linear})
    # Adam has two arrays for each parameter, and a step. For SGD, torch gathers the whole state correctly.
    if kind == "momentum":
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    for seed in range(2):
        train_step(model, optimizer, seed=seed)
    return model, optimizer


def _gathered_by_torch(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the full state dicts of torch itself, by path. Collective."""
    configs = FullStateDictConfig(), FullOptimStateDictConfig(rank0_only=False)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, *configs):
        weights, states = model.state_dict(), FSDP.optim_state_dict(model, optimizer)["state"]
        arrays = {f"/model/{name}": value.clone() for name, value in weights.items()}
    for name, state in states.items():
        arrays |= {f"/optimizer/{name}/{part}": value.clone() for part, value in state.items()}
    return arrays


def _save_files(kind: str, folder: Path) -> dict[str, Any]:
    model, optimizer = _trained(kind)
    rank = dist.get_rank()
    state = {**sharded(model, optimizer), "step": 2, "seed of this rank": rank}
    if kind == "kinds":
        torch.save(state["model"], folder / f"model_{rank}.pt")
        torch.save(state["optimizer"], folder / f"optimizer_{rank}.pt")
    else:
        torch.save(state, folder / f"rank_{rank}.pt")
    shards = state["model"]["scale"].local_shards()
    assert len(shards) == (rank % (2 if kind == "hybrid" else 4) < 2)
    return _gathered_by_torch(model, optimizer) if kind == "momentum" else whole(model, optimizer)


@computes
@sampled(5)
@pytest.mark.parametrize(
    ("kind", "ranks"), [("orig", 3), ("flat", 4), ("hybrid", 4), ("momentum", 3), ("kinds", 4)]
)
def test_files_of_fsdp1_ranks_become_whole_arrays(
    kind: str, ranks: int, rank_pool: RankPool, tmp_path: Path
) -> None:
    folder = tmp_path / "ranks"
    folder.mkdir()
    expected = rank_pool.run(_save_files, ranks, kind, folder)[0]
    report = megackpt.import_torch(folder, tmp_path / "imported")
    if kind != "kinds":
        others = list(range(1, ranks))
        assert report.left_out == (f"seed of this rank of ranks {others} (differs from that of rank 0)",)
    loaded = megackpt.load({}, tmp_path / "imported")
    arrays = {"model": loaded["model"], "optimizer": loaded["optimizer"]["state"]}
    assert same(full(arrays), expected) == []
    assert {"/model/scale", "/model/layers.0.up.weight"} <= expected.keys()
    assert loaded["optimizer"]["param_groups"][0]["lr"] == 1e-2

    for file in folder.glob(f"*_{ranks - 1}.pt"):
        file.unlink()
    if kind == "hybrid":  # the other group of ranks has all shards, and state outside of arrays is rank 0's
        assert megackpt.import_torch(folder, tmp_path / "again").arrays == report.arrays
        (folder / "rank_2.pt").unlink()
        (folder / "rank_1.pt").unlink()
    with pytest.raises(megackpt.FormatError, match=r"\.pt: .*are missing"):
        megackpt.import_torch(folder, tmp_path / "incomplete")
    assert not (tmp_path / "incomplete").exists()


def _small_model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))


def _save_files_of_fsdp2(folder: Path) -> None:
    """Train under FSDP2, and save a file for each rank; rank 0 saves the whole state as well."""
    mesh = dist.init_device_mesh("cpu", (2, 2))
    model = _small_model()
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


@sampled(2)
def test_files_of_fsdp2_ranks_become_whole_arrays(rank_pool: RankPool, tmp_path: Path) -> None:
    folder = tmp_path / "ranks"
    folder.mkdir()
    rank_pool.run(_save_files_of_fsdp2, 4, folder)
    report = megackpt.import_torch(folder, tmp_path / "imported")
    assert report.left_out == ()
    assert same(full(megackpt.load({}, tmp_path / "imported")), full(torch.load(tmp_path / "whole.pt"))) == []
    state = torch.load(folder / "rank_3.pt", weights_only=False)
    state["cuts"]["columns"]._local_tensor.add_(1)  # rank 1 has a copy of it
    torch.save(state, folder / "rank_3.pt")
    with pytest.raises(megackpt.FormatError, match=r"'cuts.columns' has other bits than in .*rank_1"):
        megackpt.import_torch(folder, tmp_path / "differing")
    assert not (tmp_path / "differing").exists()
    (folder / "rank_3.pt").unlink()
    with pytest.raises(megackpt.CoverageError, match="no rank"):
        megackpt.import_torch(folder, tmp_path / "incomplete")
    assert not (tmp_path / "incomplete").exists()
