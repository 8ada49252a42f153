"""Programs that call torch.distributed.checkpoint with entities, as Megatron-Core lets them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

import megackpt
from megackpt.compat.megatron.dist_checkpointing import serialization
from megackpt.compat.megatron.dist_checkpointing.mapping import ShardedTensor
from megackpt.compat.megatron.dist_checkpointing.strategies.checkpointable import (
    CheckpointableShardedTensor,
    LocalShardsContainer,
)
from megackpt.compat.megatron.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)
from megackpt.compat.megatron.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    TorchDistSaveShardedStrategy,
)
from megackpt.errors import DeclarationError, MismatchError, MissingKeyError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, about a save by one process


def _uneven(fill: torch.Tensor, rows: int = 7) -> list[ShardedTensor]:
    """Three shards of an array of `rows` x 2 at rows 0, 1 and 4: no regular grid."""
    ends = (0, 1, 4, rows)
    return [
        ShardedTensor("w", part, part.dtype, tuple(part.shape), (rows, 2), (begin, 0), None)
        for begin, part in zip(ends, torch.tensor_split(fill, ends[1:-1]), strict=False)
    ]


def _container(shards: list[ShardedTensor]) -> LocalShardsContainer:
    return LocalShardsContainer([CheckpointableShardedTensor.from_sh_ten(shard) for shard in shards])


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    values = torch.arange(14.0).reshape(7, 2)
    layers = torch.arange(6, dtype=torch.int32)
    layer = [
        ShardedTensor.from_rank_offsets("layers", part, (0, i, 2), prepend_axis_num=1)
        for i, part in enumerate((layers[:3], layers[3:]))
    ]
    state = {"w": _container(_uneven(values)), "layers": _container(layer)}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path))
    return tmp_path


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
    narrow = ShardedTensor("w", target, target.dtype, (4, 2), (7, 2), (2, 0), None)
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


def test_the_load_planner_compares_global_shapes(saved: Path) -> None:
    stored = torch.arange(14.0).reshape(7, 2)
    assert torch.equal(_load(saved, 7, shapes_validation_sharded_tensors=list), stored)
    with pytest.raises(
        CheckpointException, match=r"has the shape \(7, 2\) in the checkpoint, and \(8, 2\) here"
    ):
        _load(saved, 8, shapes_validation_sharded_tensors=list)
    longer = _load(saved, 9, allow_shape_mismatch_sharded_tensors=lambda shards: {"w": shards[0]})
    assert torch.equal(longer[:7], stored)
    assert (longer[7:] == -1).all()
    shorter = _load(saved, 6, allow_shape_mismatch_sharded_tensors=lambda shards: {"w": shards[0]})
    assert torch.equal(shorter, stored[:6])


def test_shapes_can_be_compared_without_a_load(saved: Path) -> None:
    metadata = dcp.FileSystemReader(saved).read_metadata()
    planner = MCoreLoadPlanner()
    planner._validate_global_shapes(metadata, _uneven(torch.zeros(7, 2)))
    with pytest.raises(MismatchError, match="set allow_shape_mismatch"):
        planner._validate_global_shapes(metadata, _uneven(torch.zeros(8, 2), 8))
    absent = ShardedTensor.from_rank_offsets("absent", torch.zeros(1))
    with pytest.raises(MissingKeyError, match="'absent' is not stored"):
        planner._validate_global_shapes(metadata, [absent])


def test_what_dcp_cannot_take_is_an_error() -> None:
    flat = ShardedTensor.from_rank_offsets_flat("f", torch.zeros(2), (4,), flattened_range=slice(1, 3))
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


@pytest.mark.parametrize("kind", ["pair", "class", "default", "wrapped"])
def test_the_face_writes_no_copies_of_values_for_dcp(kind: str, tmp_path: Path) -> None:
    strategies: dict[str, Any] = {
        "pair": ("torch_dist", 1),
        "class": TorchDistSaveShardedStrategy(),
        "default": serialization.get_default_save_sharded_strategy("torch_dist"),
        "wrapped": FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy()),
    }
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(2)), "step": 3}
    serialization.save(state, str(tmp_path / "a"), strategies[kind])
    listed = dcp.FileSystemReader(tmp_path / "a").read_metadata().state_dict_metadata
    assert list(listed) == ["w"]  # Megatron-Core's strict modes cannot read an entry of the name `step`
    megackpt.save(state, tmp_path / "b", ("torch_dist", 1))
    listed = dcp.FileSystemReader(tmp_path / "b").read_metadata().state_dict_metadata
    assert sorted(listed) == ["step", "w"]
