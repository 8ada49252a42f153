"""Strategies that a user wrote against Megatron-Core's base classes, given to save and load.

Those at the top are whole, small, and know nothing of megackpt.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megackpt
from megackpt.contrib.megatron import dist_checkpointing
from megackpt.contrib.megatron.dist_checkpointing import mapping, serialization, validation
from megackpt.contrib.megatron.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megackpt.contrib.megatron.dist_checkpointing.strategies import async_utils, base, common, fully_parallel
from megackpt.contrib.megatron.dist_checkpointing.strategies import torch as torch_dist
from megackpt.errors import CheckpointingException, UnsupportedError
from megackpt.testing.ranks import RankPool
from tests.contrib.megatron.small_state import halves, small_state

S = mapping.ShardedTensor
MAY_WRITE = threading.Event()
"""For tests that change tensors before an asynchronous save has read them."""
MAY_WRITE.set()


def write_shards(shards: list[Any], path: Path) -> None:
    """Write one rank's shards; also the function of an asynchronous request."""
    assert MAY_WRITE.wait(60)
    torch.save(shards, path)


def own_shards(sharded_state_dict: Any) -> list[Any]:
    """Return what this rank writes of its tensors."""
    tensors = [t for t in nested_values(sharded_state_dict) if isinstance(t, S)]
    mains = [t for t in tensors if mapping.is_main_replica(t.replica_id)]
    return [(t.key, t.global_shape, t.global_offset, t.data) for t in mains]


class FilePerRank(base.SaveShardedStrategy):
    """Writes the tensors of each rank to a file of its own."""

    def __init__(self, backend: str = "file_per_rank", version: int = 1) -> None:
        super().__init__(backend, version)
        self.handed: Any = None

    def save(self, sharded_state_dict: Any, checkpoint_dir: Path) -> None:
        self.handed = sharded_state_dict
        for tensor in nested_values(sharded_state_dict):
            assert isinstance(tensor, S), tensor
        write_shards(own_shards(sharded_state_dict), checkpoint_dir / f"rank_{dist.get_rank()}.pt")
        dist.barrier()


class AsyncFilePerRank(base.AsyncSaveShardedStrategy):
    """The same, later."""

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Path) -> async_utils.AsyncRequest:
        path = checkpoint_dir / f"rank_{dist.get_rank()}.pt"
        return async_utils.AsyncRequest(write_shards, (own_shards(sharded_state_dict), path), [])


class LoadFilePerRank(base.LoadShardedStrategy):
    """Fills tensors from all files that hold something of them."""

    def load(self, sharded_state_dict: Any, checkpoint_dir: Path) -> Any:
        def loaded(tensor: Any) -> Any:
            whole = torch.full(tensor.global_shape, -1.0, dtype=tensor.dtype)
            for key, _, offset, data in self._stored(checkpoint_dir):
                if key == tensor.key:
                    stored = zip(offset, data.shape, strict=True)
                    whole[tuple(slice(start, start + extent) for start, extent in stored)] = data
            into = whole[tensor.global_slice()].clone()
            assert (into != -1).all(), tensor.key
            return into

        return dict_list_map_outplace(loaded, sharded_state_dict)

    def load_tensors_metadata(self, checkpoint_dir: Path) -> Any:
        return {
            key: S.from_rank_offsets(key, torch.empty(shape, device="meta")).without_data()
            for key, shape, _, _ in self._stored(checkpoint_dir)
        }

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        if loaded_backend != "file_per_rank":
            raise NotImplementedError

    def check_version_compatibility(self, loaded_version: int) -> None:
        if loaded_version != 1:
            raise NotImplementedError

    @staticmethod
    def _stored(checkpoint_dir: Path) -> Iterator[Any]:
        for name in sorted(os.listdir(checkpoint_dir)):
            if name.startswith("rank_"):
                yield from torch.load(os.path.join(checkpoint_dir, name))


class OneFileCommon(base.SaveCommonStrategy):
    """Writes common state, and objects, under names of its own."""

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True

    def save_common(self, common_state_dict: Any, checkpoint_dir: Any) -> None:
        if dist.get_rank() == 0:
            torch.save(common_state_dict, os.path.join(checkpoint_dir, "mine.common"))

    def save_sharded_objects(self, sharded_objects_state_dict: Any, checkpoint_dir: Any) -> None:
        for entity in nested_values(sharded_objects_state_dict):
            if mapping.is_main_replica(entity.replica_id):
                name = entity.unique_key.replace("/", "__") + ".object"
                torch.save(entity.data, os.path.join(checkpoint_dir, name))


class LoadOneFileCommon(base.LoadCommonStrategy):
    """Reads them."""

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True

    def load_common(self, checkpoint_dir: Any) -> Any:
        return torch.load(os.path.join(checkpoint_dir, "mine.common"), weights_only=False)

    def load_sharded_objects(self, sharded_objects_state_dict: Any, checkpoint_dir: Any) -> Any:
        def loaded(entity: Any) -> Any:
            name = entity.unique_key.replace("/", "__") + ".object"
            return torch.load(os.path.join(checkpoint_dir, name))

        return dict_list_map_outplace(loaded, sharded_objects_state_dict)

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """Take any."""

    def check_version_compatibility(self, loaded_version: int) -> None:
        """Take any."""


def state(value: float = 1.0, *, swapped: bool = False) -> dict[str, Any]:
    """A state of every kind of leaf; swapped cuts one tensor along another axis."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    fused = torch.full((4,), value)
    fused[2:] += 1
    whole = value * torch.arange(16.0).reshape(4, 4)
    part = whole[2 * rank : 2 * rank + 2] if not swapped else whole[:, 2 * rank : 2 * rank + 2]
    return {
        "model": {
            "w": S.from_rank_offsets("w", part.contiguous(), (int(swapped), rank, ranks)),
            "same": S.from_rank_offsets("same", torch.full((3,), value), replica_id=rank),
            "fused": mapping.ShardedTensorFactory("fused", fused, halves, torch.cat, replica_id=rank),
            "extra": mapping.ShardedObject("extra", {"of": (value, rank)}, (ranks,), (rank,)),
            "names": ["a", "b"],
        },
        "local": mapping.LocalNonpersistentObject("mine"),
        "step": int(value),
    }


def check(path: Path, value: float = 1.0, **arguments: Any) -> None:
    """Load at another layout, and compare everything."""
    expected = state(value, swapped=True)
    loaded = dist_checkpointing.load(state(0.0, swapped=True), str(path), **arguments)
    model = loaded["model"]
    for key in ("w", "same"):
        assert torch.equal(model[key], expected["model"][key].data), key
    assert model["fused"].tolist() == [value, value, value + 1, value + 1]
    assert model["extra"] == {"of": (value, dist.get_rank())}
    assert (model["names"], loaded["local"], loaded["step"]) == (["a", "b"], "mine", int(value))


def manifest(path: Path) -> Any:
    return json.loads((path / "metadata.json").read_text())


def together(kind: type[BaseException], match: str, call: Any) -> None:
    """Every rank raises the same kind of error."""
    with pytest.raises(kind, match=match):
        call()
    dist.barrier()


def save_and_load(root: Path) -> None:
    strategy, saved = FilePerRank(), state(3.0)
    before = {id(entity) for entity in saved["model"].values()}
    dist_checkpointing.save(saved, str(root), strategy, content_metadata={"kind": "test"})
    assert {id(entity) for entity in saved["model"].values()} == before, "the state dict stays as it is"
    assert strategy.handed["model"]["w"] is not saved["model"]["w"]
    assert [part.key for part in strategy.handed["model"]["fused"]] == ["fused.0", "fused.1"]
    assert set(strategy.handed) == {"model"}
    assert manifest(root) == {
        "sharded_backend": "file_per_rank",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    check(root, 3.0, sharded_strategy=LoadFilePerRank())
    assert dist_checkpointing.load_content_metadata(str(root)) == {"kind": "test"}
    assert dist_checkpointing.load_common_state_dict(str(root))["step"] == 3
    metadata = serialization.load_sharded_metadata(str(root), LoadFilePerRank())
    assert {entity.key for entity in metadata.values()} == {"w", "same", "fused.0", "fused.1", "extra"}
    together(CheckpointingException, "'file_per_rank'", lambda: dist_checkpointing.load({}, str(root)))
    base.register_default_strategy(base.StrategyAction.LOAD_SHARDED, "file_per_rank", 1, LoadFilePerRank())
    base.register_default_strategy(base.StrategyAction.SAVE_SHARDED, "torch_dist", 1, strategy)
    try:
        check(root, 3.0)
        assert set(dist_checkpointing.load_tensors_metadata(str(root))) == {"w", "same", "fused.0", "fused.1"}
        plain = dist_checkpointing.load_plain_tensors(str(root))
        assert torch.equal(plain["w"], 3 * torch.arange(16.0).reshape(4, 4))
        assert set(plain) == {"w", "same", "fused.0", "fused.1"}
        dist_checkpointing.save(state(4.0), str(root))
        assert manifest(root)["sharded_backend"] == "file_per_rank"
        check(root, 4.0)
    finally:
        for registered in base.default_strategies.values():
            registered.clear()


def compare_keys(root: Path) -> None:
    reader: Any = LoadFilePerRank()
    dist_checkpointing.save(state(), str(root), FilePerRank())
    wanted = {"w": state()["model"]["w"], "new": S.from_rank_offsets("new", torch.zeros(2))}
    loaded, missing, unexpected = dist_checkpointing.load(wanted, str(root), reader, strict="return_all")
    assert (missing, unexpected) == ({"same", "fused.0", "fused.1", "extra"}, {"new"})
    assert set(loaded) == {"w", "model", "step"}

    def load(strict: str) -> Any:
        return dist_checkpointing.load(wanted, str(root), reader, strict=strict)

    together(megackpt.MissingKeyError, "'new'", lambda: load("raise_unexpected"))
    del wanted["new"]
    together(megackpt.MissingKeyError, "no rank asks for", lambda: load("raise_all"))


def fail_on_all_ranks(root: Path) -> None:
    class Failing(FilePerRank):
        def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
            if dist.get_rank() == 1:
                raise OSError("no room for rank 1")

    class LoadNothing(LoadFilePerRank):
        def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
            return {} if dist.get_rank() == 1 else super().load(sharded_state_dict, checkpoint_dir)

    def save(saved: Any, strategy: Any, **options: Any) -> Any:
        return dist_checkpointing.save(saved, str(root), strategy, **options)

    strategy, rank = FilePerRank(), dist.get_rank()
    save(state(1.0), strategy)
    holed = state(2.0)
    if rank == 1:
        del holed["model"]["w"]
    together(megackpt.CoverageError, "'w'", lambda: save(holed, strategy))
    mixed = state(2.0) | {"list": [S.from_rank_offsets("l", torch.ones(1), replica_id=rank), 5]}
    together(CheckpointingException, "positions would be lost", lambda: save(mixed, strategy))
    check(root, 1.0, sharded_strategy=LoadFilePerRank())  # what was there stays
    together(
        CheckpointingException,
        r"[Rr]ank 1.*returned nothing for it",
        lambda: dist_checkpointing.load(state(), str(root), LoadNothing()),
    )
    failed = r"Rank 1 failed.*no room for rank 1"
    together(megackpt.CheckpointError, failed, lambda: save(state(2.0), Failing()))
    assert not (root / "metadata.json").exists()
    later = {"async_sharded_save": True}
    together(UnsupportedError, "has no async_save", lambda: save(state(), strategy, **later))


def save_later(root: Path) -> None:
    queue = async_utils.AsyncCallsQueue()
    done: list[int] = []
    for number, wrap in enumerate([lambda s: s, fully_parallel.FullyParallelSaveStrategyWrapper]):
        path, saved = root / f"iter_{number}", state(float(number + 1))
        chosen = wrap(AsyncFilePerRank("file_per_rank", 1))
        request = dist_checkpointing.save(saved, str(path), chosen, async_sharded_save=True)
        assert request is not None
        request.add_finalize_fn(
            lambda path=path, number=number: done.append(number) if manifest(path) else None
        )
        MAY_WRITE.clear()
        queue.schedule_async_request(request)
        for key in ("w", "same"):
            saved["model"][key].data.fill_(-1)  # training goes on
        assert not (path / "metadata.json").exists()
        MAY_WRITE.set()
    assert queue.maybe_finalize_async_calls(blocking=True) == done == [0, 1]
    queue.close()
    for number in range(2):
        check(root / f"iter_{number}", number + 1.0, sharded_strategy=LoadFilePerRank())
    chosen = AsyncFilePerRank("file_per_rank", 1)
    dist_checkpointing.save(state(7.0), str(root / "now"), chosen)
    check(root / "now", 7.0, sharded_strategy=LoadFilePerRank())


def spread(root: Path) -> None:
    """The wrapper spreads what both ranks hold over them, and leaves the user's entities as they are."""
    tensors = {
        f"t{i}": S.from_rank_offsets(f"t{i}", torch.ones(8), replica_id=dist.get_rank()) for i in range(6)
    }
    wrapped = fully_parallel.FullyParallelSaveStrategyWrapper(FilePerRank(), dist.group.WORLD, True)
    for _ in range(2):
        dist_checkpointing.save(dict(tensors), str(root), wrapped)
        assert len(torch.load(root / f"rank_{dist.get_rank()}.pt")) == 3
    assert all(tensor.replica_id == dist.get_rank() for tensor in tensors.values())
    loaded = dist_checkpointing.load(dict(tensors), str(root), LoadFilePerRank())
    assert all(torch.equal(loaded[key], torch.ones(8)) for key in tensors)


def load_in_the_parallel_wrapper(root: Path) -> None:
    """Each rank gets its own values by the base strategy, whatever the group and the algorithm."""
    dist_checkpointing.save(state(3.0), str(root), FilePerRank())
    for group, algorithm in ((None, "broadcast"), (dist.group.WORLD, "gather_object")):
        wrapped = fully_parallel.FullyParallelLoadStrategyWrapper(LoadFilePerRank(), group, True, algorithm)
        for _ in range(2):
            check(root, 3.0, sharded_strategy=wrapped)
    with pytest.raises(CheckpointingException, match="is not a load strategy"):
        fully_parallel.FullyParallelLoadStrategyWrapper(FilePerRank())  # type: ignore[arg-type]


def common_state_by_functions(root: Path) -> None:
    """The functions of 0.17 write and read the file that the classes do."""
    root.mkdir(exist_ok=True)
    common.save_common({"iteration": 3, "names": ["a"]}, str(root))
    dist.barrier()
    assert common.load_common(root) == {"iteration": 3, "names": ["a"]}
    assert (root / "common.pt").exists()
    dist_checkpointing.save(state(2.0), str(root / "ours"))
    assert common.load_common(root / "ours")["step"] == 2


class Delegating(base.AsyncSaveShardedStrategy):
    """Hands everything to one of ours, as wrappers of frameworks do."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner.backend, inner.version)
        self.inner = inner

    @property
    def can_handle_sharded_objects(self) -> bool:
        return bool(self.inner.can_handle_sharded_objects)

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        self.inner.save(sharded_state_dict, checkpoint_dir)

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        return self.inner.async_save(sharded_state_dict, checkpoint_dir)


class Renaming(torch_dist.TorchDistSaveShardedStrategy):
    """A subclass of one of ours with a save of its own."""

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        for entity in sharded_state_dict["model"].values():
            if isinstance(entity, S):
                entity.key = entity.key.replace("same", "renamed")
        super().save(sharded_state_dict, checkpoint_dir)


class DelegatingLoad(LoadFilePerRank):
    """Hands a load to one of ours."""

    can_handle_sharded_objects = True

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        reader = serialization.get_default_load_sharded_strategy(str(checkpoint_dir))
        return reader.load(sharded_state_dict, checkpoint_dir)

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """Take any."""


def delegate(root: Path) -> None:
    queue = async_utils.AsyncCallsQueue()
    for backend in ("torch_dist", "megackpt"):
        path = root / backend
        strategy = Delegating(serialization.get_default_save_sharded_strategy(backend))
        dist_checkpointing.save(state(2.0), str(path), strategy, content_metadata={"kind": "inner"})
        check(path, 2.0)
        check(path, 2.0, sharded_strategy=DelegatingLoad())
        assert dist_checkpointing.load_content_metadata(str(path)) == {"kind": "inner"}
        request = dist_checkpointing.save(state(3.0), str(path), strategy, async_sharded_save=True)
        assert request is not None
        queue.schedule_async_request(request)
        queue.maybe_finalize_async_calls(blocking=True)
        check(path, 3.0)
    queue.close()
    dist_checkpointing.save(state(4.0), str(root / "renamed"), Renaming("torch_dist", 1))
    metadata = dist_checkpointing.load_tensors_metadata(str(root / "renamed"))
    assert set(metadata) == {"w", "renamed", "fused.0", "fused.1"}
    assert dist_checkpointing.load_common_state_dict(str(root / "renamed"))["step"] == 4


def store_common_state_otherwise(root: Path) -> None:
    common_strategy: Any = OneFileCommon("one_file", 2)
    reads = {"sharded_strategy": LoadFilePerRank(), "common_strategy": LoadOneFileCommon()}
    dist_checkpointing.save(state(2.0), str(root), FilePerRank(), common_strategy)
    assert (manifest(root)["common_backend"], manifest(root)["common_backend_version"]) == ("one_file", 2)
    assert sorted(name for name in os.listdir(root) if name.endswith((".common", ".object"))) == [
        "extra__shard_0_2.object",
        "extra__shard_1_2.object",
        "mine.common",
    ]
    check(root, 2.0, **reads)
    together(
        UnsupportedError,
        "would not be used",
        lambda: dist_checkpointing.save(state(2.0), str(root / "ours"), None, common_strategy),
    )

    class Counted(common.TorchCommonLoadStrategy):
        calls = 0

        def load_common(self, checkpoint_dir: Any) -> Any:
            Counted.calls += 1
            return super().load_common(checkpoint_dir) | {"added": "by the user"}

    dist_checkpointing.save(state(2.0), str(root / "ours"))
    check(root / "ours", 2.0, common_strategy=Counted())
    loaded = dist_checkpointing.load({}, str(root / "ours"), common_strategy=Counted())
    assert (loaded["added"], loaded["step"], Counted.calls) == ("by the user", 2, 2)


@pytest.mark.parametrize(
    "on_ranks",
    [
        save_and_load,
        compare_keys,
        fail_on_all_ranks,
        save_later,
        spread,
        load_in_the_parallel_wrapper,
        common_state_by_functions,
        delegate,
        store_common_state_otherwise,
    ],
)
def test_a_user_s_strategy_is_handed_what_is_sharded(
    rank_pool: RankPool, tmp_path: Path, on_ranks: Any
) -> None:
    rank_pool.run(on_ranks, 2, tmp_path)


def test_no_method_of_a_subclass_is_passed_over(tmp_path: Path) -> None:
    class Naming(torch_dist.TorchDistLoadShardedStrategy):
        def load_tensors_metadata(self, checkpoint_dir: Any) -> Any:
            return {"mine": checkpoint_dir}

    class Spreading(fully_parallel.FullyParallelSaveStrategyWrapper):
        def apply_saving_parallelization(self, sharded_state_dict: Any) -> None:
            """Do something of its own."""

    class Reading(fully_parallel.FullyParallelLoadStrategyWrapper):
        def apply_loading_parallelization(self, sharded_state_dict: Any) -> None:
            """Do something of its own."""

    path, ours = str(tmp_path / "c"), torch_dist.TorchDistSaveShardedStrategy("torch_dist", 1)
    dist_checkpointing.save(small_state(), path, ours)
    assert set(dist_checkpointing.load_tensors_metadata(path, Naming())) == {"mine"}
    metadata = serialization.load_sharded_metadata(path, Naming())
    assert {entity.key for entity in metadata.values()} == {"w", "fused.0", "fused.1", "extra"}
    with pytest.raises(
        UnsupportedError, match=r"Spreading\.apply_saving_parallelization would not be called"
    ):
        dist_checkpointing.save(small_state(), path, Spreading(ours))
    with pytest.raises(UnsupportedError, match=r"Reading\.apply_loading_parallelization would not be called"):
        dist_checkpointing.load(small_state(), path, Reading(Naming()))


def test_what_is_no_strategy_raises_an_error(tmp_path: Path) -> None:
    for wrong in (7, object(), LoadFilePerRank()):
        with pytest.raises(CheckpointingException, match="is not a save strategy"):
            dist_checkpointing.save(small_state(), str(tmp_path / "c"), wrong)  # type: ignore[arg-type]
    with pytest.raises(CheckpointingException, match="is not a load strategy"):
        dist_checkpointing.load({}, str(tmp_path / "c"), FilePerRank())  # type: ignore[arg-type]
    stranger = FilePerRank()
    with pytest.raises(CheckpointingException, match="can handle ShardedObjects"):
        validation.validate_sharded_objects_handling(stranger, stranger)
    assert list(tmp_path.iterdir()) == []
