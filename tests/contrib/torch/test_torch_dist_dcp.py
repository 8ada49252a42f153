"""torch_dist across libraries: what stock DCP saves loads here, and back; programs that give it entities."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import megackpt
from megackpt import ShardedObject, ShardedTensor, load, load_plain_tensors, save
from megackpt.contrib.megatron.dist_checkpointing import mapping, serialization
from megackpt.contrib.megatron.dist_checkpointing.strategies.checkpointable import (
    CheckpointableShardedTensor,
    LocalShardsContainer,
)
from megackpt.contrib.megatron.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)
from megackpt.contrib.megatron.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    TorchDistSaveShardedStrategy,
)
from megackpt.errors import DeclarationError
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


alone = pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, about a save by one process


def _uneven(fill: torch.Tensor, rows: int = 7) -> list[mapping.ShardedTensor]:
    """Three shards of an array of `rows` x 2 at rows 0, 1 and 4: no regular grid."""
    ends = (0, 1, 4, rows)
    return [
        mapping.ShardedTensor("w", part, part.dtype, tuple(part.shape), (rows, 2), (begin, 0), None)
        for begin, part in zip(ends, torch.tensor_split(fill, ends[1:-1]), strict=False)
    ]


def _container(shards: list[mapping.ShardedTensor]) -> LocalShardsContainer:
    return LocalShardsContainer([CheckpointableShardedTensor.from_sh_ten(shard) for shard in shards])


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    values = torch.arange(14.0).reshape(7, 2)
    layers = torch.arange(6, dtype=torch.int32)
    layer = [
        mapping.ShardedTensor.from_rank_offsets("layers", part, (0, i, 2), prepend_axis_num=1)
        for i, part in enumerate((layers[:3], layers[3:]))
    ]
    state = {"w": _container(_uneven(values)), "layers": _container(layer)}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path))
    return tmp_path


@alone
def test_entities_are_saved_and_loaded_by_dcp(saved: Path) -> None:
    metadata = dcp.FileSystemReader(saved).read_metadata().state_dict_metadata
    entry = metadata["w"]
    assert isinstance(entry, TensorStorageMetadata)
    assert (tuple(entry.size), entry.properties.dtype) == ((7, 2), torch.float32)
    assert [tuple(chunk.offsets) for chunk in entry.chunks] == [(0, 0), (1, 0), (4, 0)]
    plain = {"w": torch.zeros(7, 2), "layers": torch.zeros(2, 3, dtype=torch.int32)}
    dcp.load(plain, storage_reader=dcp.FileSystemReader(saved))
    assert torch.equal(plain["w"], torch.arange(14.0).reshape(7, 2))
    assert plain["layers"].flatten().tolist() == list(range(6))
    target = torch.zeros(4, 2)
    narrow = mapping.ShardedTensor("w", target, target.dtype, (4, 2), (7, 2), (2, 0), None)
    dcp.load(
        {"w": CheckpointableShardedTensor.from_sh_ten(narrow)}, storage_reader=dcp.FileSystemReader(saved)
    )
    assert torch.equal(target, torch.arange(4.0, 12.0).reshape(4, 2))


def _load(saved: Path, rows: int, **arguments: Any) -> torch.Tensor:
    target = torch.full((rows, 2), -1.0)
    shards = _uneven(target, rows)
    planner = MCoreLoadPlanner(**{name: make(shards) for name, make in arguments.items()})
    dcp.load({"w": _container(shards)}, storage_reader=dcp.FileSystemReader(saved), planner=planner)
    return target


@alone
def test_the_load_planner_compares_global_shapes(saved: Path) -> None:
    stored = torch.arange(14.0).reshape(7, 2)
    assert torch.equal(_load(saved, 7, shapes_validation_sharded_tensors=list), stored)
    text = r"has the shape \(7, 2\) in the checkpoint, and \(8, 2\) here.*set allow_shape_mismatch"
    with pytest.raises(CheckpointException, match=text):
        _load(saved, 8, shapes_validation_sharded_tensors=list)
    absent = mapping.ShardedTensor.from_rank_offsets("absent", torch.zeros(1))
    with pytest.raises(CheckpointException, match="'absent' is not stored"):
        _load(saved, 7, shapes_validation_sharded_tensors=lambda shards: [absent])
    longer = _load(saved, 9, allow_shape_mismatch_sharded_tensors=lambda shards: {"w": shards[0]})
    assert torch.equal(longer[:7], stored)
    assert (longer[7:] == -1).all()
    shorter = _load(saved, 6, allow_shape_mismatch_sharded_tensors=lambda shards: {"w": shards[0]})
    assert torch.equal(shorter, stored[:6])


def test_what_dcp_cannot_take_is_an_error() -> None:
    flat = mapping.ShardedTensor.from_rank_offsets_flat(
        "f", torch.zeros(2), (4,), flattened_range=slice(1, 3)
    )
    with pytest.raises(DeclarationError, match="'f' is a flat range, and DCP stores boxes only"):
        CheckpointableShardedTensor.from_sh_ten(flat)
    with pytest.raises(DeclarationError, match="'w' has no data"):
        CheckpointableShardedTensor.from_sh_ten(_uneven(torch.zeros(7, 2))[0].without_data())
    shards = _container(_uneven(torch.zeros(7, 2)))
    with pytest.raises(ValueError, match="no shard of this container begins at"):
        shards.__get_tensor_shard__(MetadataIndex("w", torch.Size([2, 0])))
    with pytest.raises(DeclarationError, match="belong to one array"):
        LocalShardsContainer([])
    with pytest.raises(NotImplementedError, match="Use the tensor of its ShardedTensor"):
        shards + 1


@alone
@pytest.mark.parametrize("kind", ["pair", "class", "default", "wrapped"])
def test_the_face_writes_no_copies_of_values_for_dcp(kind: str, tmp_path: Path) -> None:
    strategies: dict[str, Any] = {
        "pair": ("torch_dist", 1),
        "class": TorchDistSaveShardedStrategy(),
        "default": serialization.get_default_save_sharded_strategy("torch_dist"),
        "wrapped": FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy()),
    }
    state = {"w": mapping.ShardedTensor.from_rank_offsets("w", torch.zeros(2)), "step": 3}
    serialization.save(state, str(tmp_path / "a"), strategies[kind])
    listed = dcp.FileSystemReader(tmp_path / "a").read_metadata().state_dict_metadata
    assert list(listed) == ["w"]  # Megatron-Core's strict modes cannot read an entry of the name `step`
    megackpt.save(state, tmp_path / "b", ("torch_dist", 1))
    listed = dcp.FileSystemReader(tmp_path / "b").read_metadata().state_dict_metadata
    assert sorted(listed) == ["step", "w"]
