"""Files that the ranks of FSDP version 1 saved with torch.save become whole arrays, which load elsewhere."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType
from torch.distributed.fsdp.api import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalStateDictConfig,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import megackpt
from megackpt.testing.ranks import RankPool
from tests.contrib.torch.test_fsdp1 import build, load_fsdp1, load_fsdp2, sharded, whole
from tests.contrib.torch.worlds import COMPUTES, Block, Transformer, same, train_step
from tests.support.effort import sampled, with_all

pytestmark = [
    pytest.mark.skipif(not COMPUTES, reason="this torch does not run FSDP on the CPU"),
    pytest.mark.filterwarnings("ignore:Please use DTensor instead"),
]


class WithScale(Transformer):
    """The transformer, with a parameter of two rows: some ranks have no shard of it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * self.scale.sum()


def _trained(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a trained model in nested FSDP modules, and its optimizer. Collective."""
    warnings.filterwarnings("ignore", message="Please use DTensor instead")
    torch.manual_seed(1)
    groups: dict[str, Any] = {}
    if kind == "hybrid":
        shard = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
        replicate = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
        groups["process_group"] = shard[dist.get_rank() // 2], replicate[dist.get_rank() % 2]
        groups["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD
    # Modules in wrapped modules are wrapped, too, and the norms of a block belong to the block.
    model = FSDP(
        WithScale(),
        auto_wrap_policy=ModuleWrapPolicy({Block, nn.Linear}),
        device_id=torch.device("cpu"),
        use_orig_params=kind != "flat",
        **groups,
    )
    # Adam has two arrays for each parameter, and a step. For SGD, torch gathers the whole state correctly.
    optimizer: torch.optim.Optimizer
    if kind == "momentum":
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
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


def _flattened(value: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {path: value}
    return {k: v for key, child in value.items() for k, v in _flattened(child, f"{path}/{key}").items()}


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
    assert same(_flattened(arrays), expected) == []
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


def _save_small(folder: Path) -> dict[str, Any]:
    """Save files of the model of test_fsdp1.py. Collective."""
    model, optimizer = build("full", 1)
    for seed in range(2):
        train_step(model, optimizer, seed=seed)
    torch.save(sharded(model, optimizer), folder / f"rank{dist.get_rank()}.pth")
    return whole(model, optimizer)


@with_all("a plain run compares one set of files, and test_fsdp1.py loads at other layouts")
@pytest.mark.parametrize("target", ["fsdp1", "fsdp2"])
def test_training_resumes_from_imported_files_at_another_layout(
    target: str, rank_pool: RankPool, tmp_path: Path
) -> None:
    folder = tmp_path / "ranks"
    folder.mkdir()
    expected = rank_pool.run(_save_small, 2, folder)[0]
    path = str(tmp_path / "imported")
    megackpt.import_torch(folder, path)
    if target == "fsdp1":
        assert rank_pool.run(load_fsdp1, 4, "hybrid", path, expected) == [[]] * 4
    else:
        assert rank_pool.run(load_fsdp2, 4, path, expected) == [[]] * 4


def _save_flat(folder: Path) -> str:
    """Save flat parameters; return the key of one. Collective."""
    model, _ = _trained("flat")
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT, LocalStateDictConfig()):
        state = model.state_dict()
    torch.save({"model": state}, folder / f"rank_{dist.get_rank()}.pt")
    return next(iter(state))


@with_all("a plain run rejects a crafted flat parameter")
def test_flat_parameters_are_rejected_with_advice(rank_pool: RankPool, tmp_path: Path) -> None:
    folder = tmp_path / "ranks"
    folder.mkdir()
    key = rank_pool.run(_save_flat, 2, folder)[0]
    with pytest.raises(megackpt.UnsupportedError, match=r"rank_0.pt: .*flat parameter") as raised:
        megackpt.import_torch(folder, tmp_path / "new")
    assert raised.value.key == f"model.{key}"
    assert "SHARDED_STATE_DICT" in str(raised.value)
    assert not (tmp_path / "new").exists()
