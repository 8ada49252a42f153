"""torch_dist across libraries, with real process groups: DTensors of stock DCP here, our shards there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from megackpt import ShardedObject, ShardedTensor, load, load_plain_tensors, save
from megackpt.testing.ranks import RankPool
from tests.support.states import bits

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn]


def whole(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A global array: the same in every process."""
    values = torch.rand(shape, generator=torch.Generator().manual_seed(seed))
    return (values > 0.5) if dtype == torch.bool else (values * 100).to(dtype)


PLACED: dict[str, tuple[tuple[int, ...], list[Any]]] = {
    "rows": ((8, 6), [Replicate(), Shard(0)]),
    "uneven": ((7, 3), [Shard(0), Shard(0)]),
    "columns": ((5, 4), [Shard(1), Replicate()]),
    "grid": ((6, 10), [Shard(0), Shard(1)]),
    "replicated": ((3, 3), [Replicate(), Replicate()]),
    "few": ((1, 4), [Shard(0), Replicate()]),
}


def dcp_saves(directory: Path) -> None:
    """Four ranks: DTensors in every placement, plain values and objects, nested."""
    mesh = init_device_mesh("cpu", (2, 2))
    model: dict[str, Any] = {
        key: distribute_tensor(whole(i, *shape), mesh, placements)
        for i, (key, (shape, placements)) in enumerate(PLACED.items())
    }
    plain = {"bias": whole(99, 5), "step": torch.tensor(7)}
    dcp.save({"model": model, "plain": plain, "epoch": 3}, checkpoint_id=directory)


def we_load(directory: Path) -> None:
    """Any number of ranks: each loads its share of the last dim, and a flat share of the whole."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for i, (key, (shape, _)) in enumerate(PLACED.items()):
        array = whole(i, *shape)
        cut = [shape[1] * r // ranks for r in (rank, rank + 1)]
        local = (shape[0], cut[1] - cut[0])
        columns = ShardedTensor(
            f"model.{key}", torch.zeros(local), torch.float32, local, shape, (0, cut[0]), None
        )
        flat = [array.numel() * r // ranks for r in (rank, rank + 1)]
        part = ShardedTensor(
            f"model.{key}", torch.zeros(flat[1] - flat[0]), torch.float32, shape, shape, (0, 0), (1, 1),
            flattened_range=slice(*flat),
        )  # fmt: skip
        loaded = load({"columns": columns, "flat": part}, directory)
        assert torch.equal(loaded["columns"], array[:, slice(*cut)]), key
        assert torch.equal(loaded["flat"], array.reshape(-1)[slice(*flat)]), key
    request = {
        "bias": ShardedTensor.from_rank_offsets("plain.bias", torch.zeros(5)),
        "step": ShardedTensor.from_rank_offsets("plain.step", torch.tensor(0)),
        "epoch": ShardedObject("epoch", None, (1,), (0,)),
    }
    loaded = load(request, directory)
    assert torch.equal(loaded["bias"], whole(99, 5))
    assert (int(loaded["step"]), loaded["epoch"]) == (7, 3)


def test_what_dcp_saves_from_dtensors_loads_at_any_layout(rank_pool: RankPool, tmp_path: Path) -> None:
    rank_pool.run(dcp_saves, 4, tmp_path / "c")
    for ranks in (1, 3):
        rank_pool.run(we_load, ranks, tmp_path / "c")
    loaded = load_plain_tensors(tmp_path / "c")
    for i, (key, (shape, _)) in enumerate(PLACED.items()):
        assert torch.equal(loaded[f"model.{key}"], whole(i, *shape)), key


def we_save(directory: Path) -> None:
    """Four ranks, TP 2 x DP 2: weights cut by rows, optimizer states flat over DP, objects, common state."""
    rank = dist.get_rank()
    tp, dp = rank % 2, rank // 2
    state: dict[str, Any] = {"step": 11, "rng": ShardedObject("rng", rank, (4,), (rank,))}
    for i, dtype in enumerate(DTYPES):
        array = whole(i, 6, 7, dtype=dtype)
        block = array[tp * 3 : tp * 3 + 3].clone()
        state[f"w{i}"] = ShardedTensor.from_rank_offsets(f"w{i}", block, (0, tp, 2), replica_id=dp)
        part = slice(0, 10) if dp == 0 else slice(10, 21)
        state[f"m{i}"] = ShardedTensor.from_rank_offsets_flat(
            f"m{i}", block.reshape(-1)[part].clone(), (3, 7), (0, tp, 2), flattened_range=part
        )
    save(state, directory, "torch_dist")


def placed(array: torch.Tensor, placement: Any) -> DTensor:
    """Return a DTensor over all ranks; one of float8 by way of bytes, which can be split."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    is_float8 = array.dtype == torch.float8_e4m3fn
    distributed = distribute_tensor(array.view(torch.uint8) if is_float8 else array, mesh, [placement])
    if not is_float8:
        return distributed
    local = distributed.to_local().view(array.dtype)
    return DTensor.from_local(
        local, mesh, [placement], run_check=False, shape=array.shape, stride=array.stride()
    )


def dcp_loads(directory: Path) -> None:
    """Any number of ranks: DTensors by columns, by rows and replicated, and plain tensors."""
    wanted = {f"{kind}{i}": whole(i, 6, 7, dtype=d) for i, d in enumerate(DTYPES) for kind in "wm"}
    for placement in (Shard(1), Shard(0), Replicate()):
        state = {key: placed(torch.zeros_like(array), placement) for key, array in wanted.items()}
        dcp.load(state, checkpoint_id=directory)
        for key, array in wanted.items():
            assert bits(state[key].to_local()) == bits(placed(array, placement).to_local()), (key, placement)
    plain = {key: torch.zeros_like(array) for key, array in wanted.items()}
    dcp.load(plain, checkpoint_id=directory)
    assert all(bits(plain[key]) == bits(array) for key, array in wanted.items())


def test_what_we_save_in_flat_shards_stock_dcp_loads_at_any_sharding(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    rank_pool.run(we_save, 4, tmp_path / "c")
    for ranks in (2, 3):
        rank_pool.run(dcp_loads, ranks, tmp_path / "c")
