"""torch.distributed.checkpoint over megackpt: stock and own planners, both directions."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.numpy
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

import megackpt
from megackpt.integrations.dcp import (
    MegackptLoadPlanner,
    MegackptSavePlanner,
    MegackptStorageReader,
    MegackptStorageWriter,
)
from megackpt.testing.ranks import RankPool
from tests.contrib.torch.worlds import (
    RANKS,
    full,
    load_by,
    make,
    same,
    save_by,
    set_state,
    state_of,
    train_step,
)
from tests.support.effort import sampled

SAVED_BY = ("stock", "own", "megackpt")
LOADED_BY = ("stock", "own", "megackpt")


def _save_model(mesh: str, root: str) -> dict[str, Any]:
    model, optimizer = make(mesh, seed=0)
    train_step(model, optimizer, seed=1)
    state = {**state_of(model, optimizer), "epoch": 3, "schedule": {"milestones": [1, 2], "name": "cosine"}}
    for by in SAVED_BY:
        save_by(state, f"{root}/{by}", by)
    return full(state)


def _load_model(mesh: str, root: str, expected: dict[str, Any]) -> list[str]:
    wrong = []
    for saved_by in SAVED_BY:
        for loaded_by in LOADED_BY:
            model, optimizer = make(mesh, seed=4)
            state = {**state_of(model, optimizer), "epoch": 0, "schedule": {"milestones": [], "name": ""}}
            loaded = load_by(state, f"{root}/{saved_by}", loaded_by)
            differing = same(full(loaded), expected)
            set_state(model, optimizer, loaded)
            again = {k: v for k, v in full(state_of(model, optimizer)).items()}
            differing += [
                path for path, value in again.items() if same({path: value}, {path: expected[path]})
            ]
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
    for saved_by in SAVED_BY:
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
