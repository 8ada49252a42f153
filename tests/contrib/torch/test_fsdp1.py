"""FSDP version 1: torch's ShardedTensors as leaves, saved and loaded, also as DTensors, bit for bit."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, init_from_local_shards
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType
from torch.distributed.fsdp.api import ShardedOptimStateDictConfig, ShardedStateDictConfig, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import megackpt
from megackpt.testing.ranks import RankPool
from tests.contrib.torch.worlds import (
    COMPUTES,
    Block,
    Transformer,
    full,
    make,
    same,
    set_state,
    state_of,
    train_step,
)

pytestmark = [
    pytest.mark.skipif(not COMPUTES, reason="this torch does not run FSDP on the CPU"),
    pytest.mark.filterwarnings("ignore:Please use DTensor instead"),
]

BLOCKS = frozenset({Block})
WHOLE = torch.arange(7 * 6, dtype=torch.float32).reshape(7, 6)


def build(
    kind: str,
    seed: int,
    *,
    module: type[nn.Module] = Transformer,
    wrapped: frozenset[type[nn.Module]] = BLOCKS,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model in FSDP version 1, over all ranks or halves of them, and its AdamW. Collective."""
    warnings.filterwarnings("ignore", message="Please use DTensor instead")
    torch.manual_seed(seed)
    groups: dict[str, Any] = {}
    if kind == "hybrid":
        shard = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
        replicate = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
        rank = dist.get_rank()
        groups["process_group"] = shard[rank // 2], replicate[rank % 2]
        groups["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD
    model = FSDP(
        module(),
        auto_wrap_policy=ModuleWrapPolicy(wrapped),
        device_id=torch.device("cpu"),
        use_orig_params=kind != "flat",
        **groups,
    )
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def sharded(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the sharded state dict of both. Collective."""
    configs = ShardedStateDictConfig(), ShardedOptimStateDictConfig()
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, *configs):
        return {"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, optimizer)}


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return every leaf of both by its path, as whole tensors. Collective.

    Shards are put together here: where FSDP.optim_state_dict of torch 2.13 gathers the full state on the CPU,
    it gives the values of exp_avg_sq for exp_avg.
    """
    state = sharded(model, optimizer)
    return _gathered({"model": state["model"], "optimizer": state["optimizer"]["state"]})


def _gathered(state: Any, path: str = "") -> dict[str, Any]:
    if isinstance(state, dict):
        return {k: v for key, child in state.items() for k, v in _gathered(child, f"{path}/{key}").items()}
    if not isinstance(state, ShardedTensor):
        return {path: state}
    shards: list[Any] = [None] * dist.get_world_size()
    local_shards = [
        (shard.metadata.shard_offsets, shard.tensor.detach().clone()) for shard in state.local_shards()
    ]
    dist.all_gather_object(shards, local_shards)
    result = torch.full(tuple(state.size()), float("nan"), dtype=state.dtype)
    for offsets, tensor in (shard for of_rank in shards for shard in of_rank):
        result[tuple(slice(o, o + n) for o, n in zip(offsets, tensor.shape, strict=True))] = tensor
    return {path: result}


def put(model: nn.Module, optimizer: torch.optim.Optimizer, loaded: dict[str, Any]) -> None:
    """Put a sharded state dict back. Collective."""
    configs = ShardedStateDictConfig(), ShardedOptimStateDictConfig()
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, *configs):
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, loaded["optimizer"]))


def _save(kind: str, path: str) -> dict[str, Any]:
    model, optimizer = build(kind, 1)
    for seed in range(2):
        train_step(model, optimizer, seed=seed)
    state = sharded(model, optimizer)
    assert isinstance(state["model"]["embed.weight"], ShardedTensor)
    assert isinstance(state["optimizer"]["state"]["embed.weight"]["exp_avg"], ShardedTensor)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Please use DTensor instead")
        megackpt.save(state, path)
    return whole(model, optimizer)


def load_fsdp1(kind: str, path: str, expected: dict[str, Any]) -> list[str]:
    model, optimizer = build(kind, 2)
    train_step(model, optimizer, seed=7)  # makes the optimizer's state
    asked = sharded(model, optimizer)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Please use DTensor instead")
        loaded = megackpt.load(asked, path)
    assert loaded["model"]["embed.weight"] is asked["model"]["embed.weight"]
    put(model, optimizer, loaded)
    return same(whole(model, optimizer), expected)


def _save_fsdp2(path: str) -> dict[str, Any]:
    model, optimizer = make("fsdp2", seed=3)
    train_step(model, optimizer, seed=0)
    state = state_of(model, optimizer)
    megackpt.save(state, path)
    return full({"model": state["model"], "optimizer": state["optimizer"]["state"]})


def load_fsdp2(path: str, expected: dict[str, Any]) -> list[str]:
    model, optimizer = make("fsdp4", seed=4)
    set_state(model, optimizer, megackpt.load(state_of(model, optimizer), path))
    state = state_of(model, optimizer)
    return same(full({"model": state["model"], "optimizer": state["optimizer"]["state"]}), expected)


def test_fsdp1_loads_at_other_sizes_and_into_fsdp2(rank_pool: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "v1")
    expected = rank_pool.run(_save, 2, "full", path)[0]
    assert any(key.endswith("exp_avg") for key in expected)
    for ranks, kind in ((2, "full"), (4, "full"), (4, "hybrid")):
        assert rank_pool.run(load_fsdp1, ranks, kind, path, expected) == [[]] * ranks
    assert rank_pool.run(load_fsdp2, 4, path, expected) == [[]] * 4
    stored = megackpt.load_plain_tensors(path)
    assert torch.equal(stored["model.embed.weight"], expected["/model/embed.weight"])


def test_fsdp2_loads_into_fsdp1(rank_pool: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "v2")
    expected = rank_pool.run(_save_fsdp2, 2, path)[0]
    assert rank_pool.run(load_fsdp1, 4, "full", path, expected) == [[]] * 4


def test_copies_of_hybrid_sharding_are_stored_once(rank_pool: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "hybrid")
    expected = rank_pool.run(_save, 4, "hybrid", path)[0]
    assert rank_pool.run(load_fsdp1, 2, "full", path, expected) == [[]] * 2
    arrays = sum(t.nbytes for key, t in expected.items() if not key.endswith("step"))
    files = [f.stat().st_size for f in Path(path).iterdir() if f.suffix not in (".json", ".idx")]
    assert arrays <= sum(files) < 1.7 * arrays


def _several(root: str) -> list[Any]:
    """Several shards on one rank, none on others, columns and rows; and which shards raise an error."""
    rank = dist.get_rank()
    rows = {0: [slice(0, 2), slice(5, 7)], 2: [slice(2, 5)]}

    def made(of: torch.Tensor) -> ShardedTensor:
        local_shards = [
            Shard.from_tensor_and_offsets(of[r].clone(), [r.start, 0], rank) for r in rows.get(rank, [])
        ]
        return init_from_local_shards(local_shards, 7, 6)

    def columns(of: torch.Tensor) -> ShardedTensor:
        local_shards = of[:, 2 * rank : 2 * rank + 2].clone()
        shards = [Shard.from_tensor_and_offsets(local_shards, [0, 2 * rank], rank)] if rank < 3 else []
        return init_from_local_shards(shards, 7, 6)

    results = []
    for i, source in enumerate((made, columns)):
        megackpt.save({"w": [source(WHOLE)]}, f"{root}/{i}")
        for target in (made, columns):
            asked = target(torch.zeros_like(WHOLE))
            loaded = megackpt.load({"w": [asked]}, f"{root}/{i}")["w"][0]
            pairs = zip(loaded.local_shards(), target(WHOLE).local_shards(), strict=True)
            results.append(loaded is asked and all(torch.equal(a.tensor, b.tensor) for a, b in pairs))

    spec = ChunkShardingSpec(0, [f"rank:{r}/cpu" for r in range(4)])
    bare = ShardedTensor.__new__(
        ShardedTensor, spec, 7, 6, dtype=None, layout=torch.strided, pin_memory=False, requires_grad=False
    )
    sparse = columns(WHOLE)
    for shard in sparse.local_shards():
        shard.tensor = shard.tensor.to_sparse()
    inside = {"tuple": (columns(WHOLE),)}
    for state in ({"bare": bare}, {"sparse": sparse}, inside):
        for call in (megackpt.save, megackpt.load):
            try:
                call(state, f"{root}/0" if call is megackpt.load else f"{root}/rejected")
            except megackpt.CheckpointError as error:
                results.append(str(error))
    return results


def test_any_shards_load_into_any_others_and_what_has_none_raises_an_error(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    for output in rank_pool.run(_several, 4, str(tmp_path)):
        assert output[:4] == [True] * 4
        texts = ["never initialised"] * 2 + ["layout torch.sparse_coo"] * 2 + ["inside of a tuple"] * 2
        assert len(output) == 4 + len(texts)
        for text, error in zip(texts, output[4:], strict=True):
            assert text in error
