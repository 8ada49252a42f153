"""torch.distributed.checkpoint over megackpt: saves and loads that fail, and what raises an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import megackpt
from megackpt.integrations.dcp import (
    MegackptLoadPlanner,
    MegackptSavePlanner,
    MegackptStorageReader,
    MegackptStorageWriter,
)
from megackpt.testing.ranks import RankPool
from tests.contrib.torch.worlds import arguments_of, full, same, save_by, six_sharded
from tests.support.states import filled


class _LosesAnItem(DefaultSavePlanner):
    """Forgets what the last rank was to write."""

    def create_global_plan(self, all_plans: Any) -> Any:
        plans, metadata = super().create_global_plan(all_plans)
        plans[-1].items.clear()
        return plans, metadata


class _FailsOnRankOne(DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        if dist.get_rank() == 1:
            raise OSError("rank 1 cannot read its tensor")
        return super().resolve_data(write_item)


class _GivesBytesOnly(DefaultSavePlanner):
    lookup_object = None


class _ConvertsSilently(DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        data = super().resolve_data(write_item)
        return data.to(torch.float16) if isinstance(data, torch.Tensor) else data


def _save_wrongly(path: str, kind: str) -> list[float]:
    """Save well, then wrongly to the same place; return what is there in the end, and raise."""
    if not Path(path).exists():
        save_by(six_sharded(1.0), path, "stock")
        dist.barrier()
    state, planner, options = six_sharded(2.0), None, {}
    if kind == "lost":
        planner = _LosesAnItem()
    elif kind == "rank 1":
        planner = _FailsOnRankOne()
    elif kind == "no codec":
        state["epoch"] = object()
    elif kind == "no codec, own":
        state["epoch"], planner = object(), MegackptSavePlanner()
    elif kind == "bytes":
        planner = _GivesBytesOnly()
    elif kind == "converts":
        planner = _ConvertsSilently()
    elif kind == "entity":
        state["e"] = megackpt.PerRankValue("e", 1)
    elif kind == "unequal":
        state["epoch"], planner = dist.get_rank(), MegackptSavePlanner()
    elif kind == "twice":
        state["t"] = megackpt.ShardedTensor.from_rank_offsets("t", torch.zeros(2))
        planner = MegackptSavePlanner()
    elif kind == "alone":
        options["use_collectives"] = False
    dcp.save(state, storage_writer=MegackptStorageWriter(path), planner=planner, **options)
    return []


def _what_is_there(path: str) -> tuple[list[float], int]:
    state = six_sharded(0.0)
    dcp.load(state, storage_reader=MegackptStorageReader(path))
    return state["w"].full_tensor().tolist(), state["epoch"]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("lost", r"'w': elements \[3:6\] are saved by no rank"),
        ("rank 1", "rank 1 cannot read its tensor"),
        ("no codec", "epoch: A value of type object has no codec"),
        ("no codec, own", "epoch: A value of type object has no codec"),
        ("bytes", "_GivesBytesOnly gives only bytes for it.*use MegackptSavePlanner"),
        ("converts", r"planned are torch.float32 \(3,\), but the planner gives torch.float16"),
        ("entity", r"'e' is a megackpt PerRankValue.*planner=MegackptSavePlanner\(\)"),
        ("unequal", "Common state .* differs from rank 0's at:\n.*'epoch' on rank"),
        ("twice", r"'t': elements \[0:2\] are saved by more than one main replica \(ranks 0, 1\)"),
        ("alone", "use_collectives=False lets every rank commit by itself"),
    ],
)
def test_a_save_that_fails_raises_on_every_rank_and_leaves_the_checkpoint_before(
    kind: str, text: str, rank_pool: RankPool, tmp_path: Path
) -> None:
    path = str(tmp_path / "step")
    if kind == "alone" and "use_collectives" not in arguments_of(dcp.save):
        pytest.skip("this torch always exchanges")
    for outcome in rank_pool.outcomes(_save_wrongly, 2, path, kind):
        with pytest.raises((CheckpointException, megackpt.CheckpointError), match=f"(?s){text}"):
            raise outcome.error or AssertionError("it was saved")
    assert rank_pool.run(_what_is_there, 2, path) == [([1.0] * 6, 1)] * 2
    assert rank_pool.run(_save_again, 2, path) == [([3.0] * 6, 3)] * 2
    assert len({name.split("-")[-2 if "/" in name else -1][:16] for name in _data_files(path)}) == 1


def _save_again(path: str) -> tuple[list[float], int]:
    save_by(six_sharded(3.0), path, "stock")
    return _what_is_there(path)


def _data_files(path: str) -> list[str]:
    return [f"data/{file.name}" for file in Path(path, "data").iterdir()]


def _save_twice_with_a_kept_plan(root: str) -> None:
    planner = DefaultSavePlanner(enable_plan_caching=True)
    for step in range(2):
        dcp.save(six_sharded(), storage_writer=MegackptStorageWriter(f"{root}/{step}"), planner=planner)


@pytest.mark.skipif("enable_plan_caching" not in arguments_of(DefaultSavePlanner), reason="keeps no plans")
def test_plans_that_dcp_keeps_raise_an_error(rank_pool: RankPool, tmp_path: Path) -> None:
    for outcome in rank_pool.outcomes(_save_twice_with_a_kept_plan, 2, str(tmp_path)):
        assert "enable_plan_caching lets DCP use the plan of an earlier save" in str(outcome.error)
    assert not (tmp_path / "1" / "metadata.json").exists()


def _load_wrongly(path: str, kind: str) -> None:
    if not Path(path).exists():
        save_by(six_sharded(), path, "stock")
        dist.barrier()
    own = MegackptLoadPlanner() if kind.endswith("own") else None
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    reader = MegackptStorageReader(path)
    if kind.startswith("dtype"):
        state = {"w": distribute_tensor(torch.zeros(6, dtype=torch.float64), mesh, [Shard(0)])}
    elif kind.startswith("shape"):
        state = {"w": distribute_tensor(torch.zeros(7), mesh, [Shard(0)])}
    elif kind.startswith("absent"):
        state = {"v": torch.zeros(2)}
    elif kind.startswith("value"):
        state = {"w": 3}
    elif kind == "pickles, own":
        dcp.save(six_sharded(), checkpoint_id=f"{path}-dcp")
        dcp.load(six_sharded(), checkpoint_id=f"{path}-dcp", planner=own)
    elif kind == "nothing":
        reader = MegackptStorageReader(f"{path}-nothing")
        state = six_sharded()
    else:
        state = six_sharded()
        if dist.get_rank() == 0:
            (file, *_) = sorted(Path(path, "data").iterdir())
            content = bytearray(file.read_bytes())
            content[-1] ^= 1
            file.write_bytes(content)
        dist.barrier()
    dcp.load(state, storage_reader=reader, planner=own)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("dtype", "'w'.*float64"),
        ("dtype, own", "'w': stored as torch.float32, asked for as torch.float64"),
        ("shape, own", r"'w': the checkpoint has global shape \(6,\), asked for is \(7,\)"),
        ("absent, own", "The checkpoint has no 'v'.*allow_partial_load=True"),
        ("value, own", "'w' is stored as a tensor, and asked for as something else"),
        ("pickles, own", "value 'epoch'"),
        ("nothing", "is not a checkpoint"),
        ("damaged", "'w' .*digest differs"),
        ("damaged, own", "'w' .*digest differs"),
    ],
)
def test_a_load_that_fails_reports_why_on_every_rank(
    kind: str, text: str, rank_pool: RankPool, tmp_path: Path
) -> None:
    for outcome in rank_pool.outcomes(_load_wrongly, 2, str(tmp_path / "step"), kind):
        with pytest.raises(CheckpointException, match=f"(?s){text}"):
            raise outcome.error or AssertionError("it was loaded")


def _load_partly(path: str) -> dict[str, Any]:
    save_by(six_sharded(), path, "own")
    kept = filled(9.0, 2, key="more")
    state = {**six_sharded(0.0), "more": kept, "note": "mine"}
    planner = MegackptLoadPlanner(allow_partial_load=True)
    dcp.load(state, storage_reader=MegackptStorageReader(path), planner=planner)
    assert state.pop("more") is kept
    return full(state)


def test_what_the_checkpoint_lacks_stays_when_that_is_allowed(rank_pool: RankPool, tmp_path: Path) -> None:
    (results,) = rank_pool.run(_load_partly, 1, str(tmp_path / "step"))
    assert not same(results, {"/w": torch.ones(6), "/epoch": 1, "/note": "mine"})


@pytest.mark.parametrize(
    "options",
    [{"exclude": ("w",)}, {"rename": {"a": "b"}}, {"exchange": "all_to_all"}, {"load_on_device": False}],
)
def test_options_that_a_dcp_load_does_not_follow_raise_an_error(
    options: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(megackpt.DeclarationError, match=f"does not follow LoadOptions.{next(iter(options))}"):
        MegackptStorageReader(tmp_path, options=megackpt.LoadOptions(**options))
