"""torch.distributed.checkpoint over megackpt: planners, directions, saves in the background, and errors."""

from __future__ import annotations

import io
import json
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import safetensors.numpy
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import megackpt
from megackpt.contrib.dcp import (
    MegackptLoadPlanner,
    MegackptSavePlanner,
    MegackptStorageReader,
    MegackptStorageWriter,
)
from megackpt.testing.ranks import RankPool
from tests.contrib.torch.worlds import (
    RANKS,
    arguments_of,
    full,
    load_by,
    make,
    same,
    save_by,
    set_state,
    six_sharded,
    state_of,
    train_step,
)
from tests.support.checkpoints import flip
from tests.support.effort import sampled
from tests.support.states import filled

LIBRARIES = ("stock", "own", "megackpt")


def _save_model(mesh: str, root: str) -> dict[str, Any]:
    model, optimizer = make(mesh, seed=0)
    train_step(model, optimizer, seed=1)
    state = {**state_of(model, optimizer), "epoch": 3, "schedule": {"milestones": [1, 2], "name": "cosine"}}
    for by in LIBRARIES:
        save_by(state, f"{root}/{by}", by)
    return full(state)


def _load_model(mesh: str, root: str, expected: dict[str, Any]) -> list[str]:
    wrong = []
    for saved_by in LIBRARIES:
        for loaded_by in LIBRARIES:
            model, optimizer = make(mesh, seed=4)
            state = {**state_of(model, optimizer), "epoch": 0, "schedule": {"milestones": [], "name": ""}}
            loaded = load_by(state, f"{root}/{saved_by}", loaded_by)
            differing = same(full(loaded), expected)
            set_state(model, optimizer, loaded)
            again = full(state_of(model, optimizer))
            differing += same(again, {path: expected[path] for path in again})
            wrong += [f"{saved_by} to {loaded_by}: {path}" for path in differing]
    return wrong


@sampled(4)
@pytest.mark.parametrize(("source", "target"), [("fsdp2xtp2", "fsdp2"), ("fsdp2", "hsdp2x2")])
def test_what_is_saved_by_either_library_is_loaded_by_either(
    source: str, target: str, rank_pool: RankPool, tmp_path: Path
) -> None:
    expected = rank_pool.run(_save_model, RANKS[source], source, str(tmp_path))[0]
    for wrong in rank_pool.run(_load_model, RANKS[target], target, str(tmp_path), expected):
        assert wrong == []
    for saved_by in LIBRARIES:
        arrays = megackpt.load_tensors_metadata(tmp_path / saved_by)
        assert "optimizer.state.layers.0.up.weight.exp_avg" in arrays
        assert megackpt.load_common_state_dict(tmp_path / saved_by)["schedule"]["milestones"] == [1, 2]
        _check_that_files_hold_no_pickle(tmp_path / saved_by)


def _check_that_files_hold_no_pickle(checkpoint: Path) -> None:
    """Every file is whole as JSON or as safetensors, so there is no room for anything else."""
    files = [file for file in checkpoint.rglob("*") if file.is_file()]
    assert any(file.parent.name == "data" for file in files)
    for file in files:
        if file.suffix == ".json":
            json.loads(file.read_text())
        else:
            safetensors.numpy.load(file.read_bytes())


def _entities(*, filled: bool) -> dict[str, Any]:
    """What only megackpt can declare, cut evenly over as many ranks as there are, which divide 4."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    scale = 1.0 if filled else 0.0
    whole = torch.arange(1.0, 57.0).reshape(8, 7) * scale
    rows = 8 // ranks
    local = whole[rank * rows : (rank + 1) * rows]
    flat = slice(rank * 56 // ranks + (rank > 0), (rank + 1) * 56 // ranks + (rank < ranks - 1))
    return {
        "flat": megackpt.ShardedTensor.from_rank_offsets_flat(
            "flat", whole.flatten()[flat].clone(), (8, 7), flattened_range=flat
        ),
        "stacked": [
            megackpt.ShardedTensor.from_rank_offsets(
                "stacked", torch.full((3,), scale * (layer + 1)), (0, layer, 4), prepend_axis_num=1
            )
            for layer in range(rank, 4, ranks)
        ],
        "mlp": megackpt.ShardedLayout.split(
            "mlp.fc1", torch.cat([local, -local]), 0, {"gate": rows, "up": rows}, (0, rank, ranks)
        ),
        "made": megackpt.ShardedTensorFactory(
            "made",
            local.clone(),
            lambda key, data, replica, flat_range: [
                megackpt.ShardedTensor.from_rank_offsets(key, data, (0, rank, ranks), replica_id=replica)
            ],
            lambda built: built[0] + 0,
        ),
        "layer_seeds": {
            layer: megackpt.ShardedObject("layer_seeds", scale * layer, (4,), (layer,))
            for layer in range(rank, 4, ranks)
        },
        "seed": megackpt.PerRankValue("seed", scale * rank, elsewhere="keep"),
        "stream": megackpt.ShardedObject("stream", scale * rank, (ranks, 1), (rank, 0), elsewhere="keep"),
        "tokenizer": megackpt.ReplicatedValue("tokenizer", {"size": scale}),
        "here": megackpt.LocalNonpersistentObject("local"),
        "plain": torch.full((5,), scale, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 2),
        "epoch": int(3 * scale),
    }


def _expected(*, same_ranks: bool) -> dict[str, Any]:
    """The leaves of what `_entities` declares, loaded."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    state = _entities(filled=True)
    local = torch.arange(1.0, 57.0).reshape(8, 7)[rank * 8 // ranks : (rank + 1) * 8 // ranks]
    return full(
        {
            **state,
            "flat": state["flat"].data,
            "stacked": [entity.data for entity in state["stacked"]],
            "mlp": state["mlp"].data,
            "made": local,
            "layer_seeds": {layer: entity.data for layer, entity in state["layer_seeds"].items()},
            "seed": float(rank) if same_ranks else 0.0,
            "stream": float(rank) if same_ranks else 0.0,
            "tokenizer": {"size": 1.0},
            "here": "local",
        }
    )


def _save_entities(root: str) -> None:
    save_by(_entities(filled=True), f"{root}/own", "own")
    save_by(_entities(filled=True), f"{root}/megackpt", "megackpt")
    dcp.save(_entities(filled=True), checkpoint_id=f"{root}/files", planner=MegackptSavePlanner())


def _load_entities(root: str, saved_on: int) -> list[str]:
    expected = _expected(same_ranks=saved_on == dist.get_world_size())
    wrong = []
    for saved_by in ("own", "megackpt"):
        for loaded_by in ("own", "megackpt"):
            loaded = load_by(_entities(filled=False), f"{root}/{saved_by}", loaded_by)
            wrong += [f"{saved_by} to {loaded_by}: {path}" for path in same(full(loaded), expected)]
    state = _entities(filled=False)
    dcp.load(state, checkpoint_id=f"{root}/files", planner=MegackptLoadPlanner())
    return wrong + [f"files: {path}" for path in same(full(state), expected)]


@sampled(4)
@pytest.mark.parametrize("loaded_on", [1, 2, 4])
@pytest.mark.parametrize("saved_on", [1, 4])
def test_entities_go_through_dcp_to_any_number_of_ranks(
    saved_on: int, loaded_on: int, rank_pool: RankPool, tmp_path: Path
) -> None:
    """Stored by megackpt's writer, by megackpt itself, and by DCP's own files."""
    rank_pool.run(_save_entities, saved_on, str(tmp_path))
    assert rank_pool.run(_load_entities, loaded_on, str(tmp_path), saved_on) == [[]] * loaded_on


def test_values_reach_a_stock_planner_without_a_pickle_from_the_file(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    """What it unpickles was pickled in this process, of what the codec has read."""
    assert rank_pool.run(_values_through_stock_planners, 1, str(tmp_path / "step")) == [True]


def _values_through_stock_planners(path: str) -> bool:
    values = {"text": "a", "bytes": b"\x80\x04.", "nested": {"tuple": (1, None), "complex": 1j}, "io": [2.5]}
    dcp.save(values, storage_writer=MegackptStorageWriter(path, content_metadata={"kind": "values"}))
    seen: list[io.BytesIO] = []

    class Planner(DefaultLoadPlanner):
        def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
            seen.append(value)
            super().load_bytes(read_item, value)

    asked = {"text": "", "bytes": b"", "nested": {"tuple": (), "complex": 0}, "io": []}
    dcp.load(asked, storage_reader=MegackptStorageReader(path), planner=Planner())
    assert megackpt.load_content_metadata(path) == {"kind": "values"}
    return asked == values and len(seen) == 5


def _save_in_background(root: str) -> list[tuple[list[float], int, list[float]]]:
    results = []
    of_rank = (0, dist.get_rank(), dist.get_world_size())
    for by in ("stock", "own"):
        planner = DefaultSavePlanner() if by == "stock" else MegackptSavePlanner()
        state, entity = six_sharded(1.0), torch.full((2,), 1.0)
        if by == "own":
            state["e"] = megackpt.ShardedTensor.from_rank_offsets("e", entity, of_rank)
        writer = MegackptStorageWriter(f"{root}/{by}")
        future = dcp.async_save(state, storage_writer=writer, planner=planner)
        with torch.no_grad():
            state["w"].to_local().zero_()  # training goes on
        entity.zero_()
        future.result()
        asked = megackpt.ShardedTensor.from_rank_offsets("e", torch.full((2,), 1.0), of_rank)
        loaded = megackpt.load({**six_sharded(0.0), **({"e": asked} if by == "own" else {})}, f"{root}/{by}")
        results.append((loaded["w"].full_tensor().tolist(), loaded["epoch"], asked.data.tolist()))
    return results


def test_a_save_in_the_background_stores_the_state_at_the_call(rank_pool: RankPool, tmp_path: Path) -> None:
    assert rank_pool.run(_save_in_background, 2, str(tmp_path)) == [[([1.0] * 6, 1, [1.0, 1.0])] * 2] * 2


def _save_from_another_process(path: str, rendezvous: str) -> None:
    """Runs in a process of its own: those of the pool must not have children."""
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1)
    state = six_sharded(1.0)
    future = dcp.async_save(
        state,
        storage_writer=MegackptStorageWriter(path),
        planner=MegackptSavePlanner(),
        async_checkpointer_type=state_dict_saver.AsyncCheckpointerType.PROCESS,
    )
    state["w"].to_local().zero_()
    future.result()
    dist.destroy_process_group()


@pytest.mark.skipif(
    not hasattr(state_dict_saver, "AsyncCheckpointerType"), reason="this torch saves in threads only"
)
def test_a_save_in_a_process_of_its_own_stores_the_state_at_the_call(tmp_path: Path) -> None:
    path = str(tmp_path / "step")
    process = get_context("spawn").Process(
        target=_save_from_another_process, args=(path, str(tmp_path / "store"))
    )
    process.start()
    process.join(timeout=120)
    assert process.exitcode == 0
    assert torch.equal(megackpt.load_plain_tensors(path)["w"], torch.ones(6))


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


def _save_wrongly(path: str, kind: str) -> None:
    """Save well, then wrongly to the same place."""
    if not Path(path).exists():
        save_by(six_sharded(1.0), path, "stock")
        dist.barrier()
    own, options = MegackptSavePlanner(), {"use_collectives": False} if kind == "alone" else {}
    added: dict[str, tuple[dict[str, Any], Any]] = {
        "lost": ({}, _LosesAnItem()),
        "rank 1": ({}, _FailsOnRankOne()),
        "no codec": ({"epoch": object()}, None),
        "in the background": ({"epoch": object()}, None),
        "no codec, own": ({"epoch": object()}, own),
        "bytes": ({}, _GivesBytesOnly()),
        "converts": ({}, _ConvertsSilently()),
        "entity": ({"e": megackpt.PerRankValue("e", 1)}, None),
        "unequal": ({"epoch": dist.get_rank()}, own),
        "twice": ({"t": megackpt.ShardedTensor.from_rank_offsets("t", torch.zeros(2))}, own),
        "alone": ({}, None),
    }
    state, planner = {**six_sharded(2.0), **added[kind][0]}, added[kind][1]
    writer = MegackptStorageWriter(path)
    if kind == "in the background":
        dcp.async_save(state, storage_writer=writer, planner=planner).result()
    else:
        dcp.save(state, storage_writer=writer, planner=planner, **options)


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
        ("in the background", "epoch: A value of type object has no codec"),
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
    assert len({f"data/{file.name}".split("-")[-2][:16] for file in Path(path, "data").iterdir()}) == 1


def _save_again(path: str) -> tuple[list[float], int]:
    save_by(six_sharded(3.0), path, "stock")
    return _what_is_there(path)


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
    reader = MegackptStorageReader(f"{path}-nothing" if kind == "nothing" else path)
    states: dict[str, Any] = {
        "dtype": {"w": distribute_tensor(torch.zeros(6, dtype=torch.float64), mesh, [Shard(0)])},
        "shape": {"w": distribute_tensor(torch.zeros(7), mesh, [Shard(0)])},
        "absent": {"v": torch.zeros(2)},
        "value": {"w": 3},
    }
    state = states.get(kind.partition(",")[0], six_sharded())
    if kind == "pickles, own":
        dcp.save(six_sharded(), checkpoint_id=f"{path}-dcp")
        dcp.load(six_sharded(), checkpoint_id=f"{path}-dcp", planner=own)
    elif kind.startswith("damaged"):
        if dist.get_rank() == 0:
            (file, *_) = sorted(Path(path, "data").iterdir())
            flip(file, -1)
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
