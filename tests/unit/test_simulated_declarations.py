"""What simulated ranks hold is what real models and optimizers declare."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import numpy as np
import pytest
import torch

from megackpt.engine.expand import expand
from megackpt.geometry import rectangles_of
from megackpt.mapping.describe import describe
from megackpt.metadata import DeclaredChunks
from megackpt.optim import DistributedOptimizer
from megackpt.parallel import ParallelGroups, ParallelLayout
from megackpt.simulation import JobLayout, ModelSizes, build_model, job_arrays, replica_groups
from megackpt.simulation.replicas import boxes_of, joined
from megackpt.simulation.sizes import Experts
from megackpt.validation import check_coverage
from models.config import GPTConfig
from models.gpt import GPT

BUCKET = 20_000  # elements: several parameters in some buckets, one in others

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "num_layers": 3,
    "num_heads": 4,
    "ffn_size": 192,
    "query_groups": 2,
}


def rows_of(declared: DeclaredChunks) -> list[tuple[Any, ...]]:
    table = declared.table
    return sorted(
        (
            astuple(table.arrays[int(table.array[row])]),
            table.describe(row),
            int(table.nbytes[row]),
            bool(declared.main[row]),
            bool(declared.resizable[row]),
        )
        for row in range(len(declared))
        if table.nbytes[row]
    )


def real(sizes: dict[str, Any], layout: JobLayout, rank: int, dtype: torch.dtype) -> DeclaredChunks:
    kwargs = {("ffn_hidden_size" if k == "ffn_size" else k): v for k, v in sizes.items()}
    kwargs = {("num_query_groups" if k == "query_groups" else k): v for k, v in kwargs.items()}
    groups = ParallelGroups.offline(ParallelLayout(tp=layout.tp, pp=layout.pp, dp=layout.dp), rank)
    model = GPT(GPTConfig(**kwargs, params_dtype=dtype), groups)
    optimizer = DistributedOptimizer(
        model.parameters(), lambda g: torch.optim.AdamW(g), groups, bucket_size=BUCKET
    )
    state = model.sharded_state_dict()
    expanded = expand(
        {"model": state, "optimizer": optimizer.sharded_state_dict(state)}, rank=rank, ranks=layout.world
    )
    return describe(expanded.entities, rank=rank)


def simulated(sizes: ModelSizes, layout: JobLayout) -> DeclaredChunks:
    """All ranks."""
    model = build_model(sizes)
    arrays = job_arrays(model, tp=layout.tp)
    held = [h for stage in replica_groups(model, layout, arrays, bucket_size=BUCKET) for h in stage]
    return joined([h.declare(arrays, np.arange(len(h.ranks))) for h in held])


@pytest.mark.parametrize("layout", ["tp2,pp2,dp2", "pp3,dp1", "tp1,dp3", "tp2,dp4"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_simulated_ranks_declare_what_real_ones_do(layout: str, tied: bool, dtype: str) -> None:
    where = JobLayout.parse(layout)
    sizes = {**SIZES, "tied_embeddings": tied, "linear_bias": tied}
    everyone = simulated(ModelSizes(**sizes, dtype=dtype), where)
    for rank in range(where.world):
        mine = everyone.take(everyone.rank == rank)
        assert rows_of(mine) == rows_of(real(sizes, where, rank, getattr(torch, dtype)))
        assert sorted(mine.slot.tolist()) == list(range(len(mine)))


@pytest.mark.parametrize("layout", ["tp2,pp2,dp4,ep2", "tp1,pp3,dp4,ep4", "pp1,dp2"])
def test_experts_are_held_once_by_each_group_that_shares_them(layout: str) -> None:
    experts = Experts(count=8, ffn_size=48, shared_ffn_size=16, dense_layers=1, router_bias=True)
    sizes = ModelSizes(**SIZES, experts=experts)
    where = JobLayout.parse(layout)
    declared = simulated(sizes, where)
    check_coverage(declared)
    table = declared.table
    of_expert = np.array([".experts." in spec.key and "optimizer" not in spec.key for spec in table.arrays])
    held = of_expert[table.array] & (declared.rank == where.world - 1)
    numbers = set(table.start[held, 1].tolist())
    assert numbers == set(range(8 - 8 // where.ep, 8))
    boxes = [(int(a), *map(int, s)) for a, s in zip(table.array[held], table.start[held, :2], strict=True)]
    copies = of_expert[table.array] & (table.array == boxes[0][0])
    copies &= (table.start[:, :2] == boxes[0][1:3]).all(axis=1)
    assert copies.sum() == where.tp * where.dp // where.ep


def test_the_flat_ranges_of_a_group_tile_its_boxes() -> None:
    sizes = ModelSizes(**SIZES)
    layout = JobLayout.parse("tp2,dp5")
    model = build_model(sizes)
    arrays = job_arrays(model, tp=2)
    (stage,) = replica_groups(model, layout, arrays, bucket_size=BUCKET)
    boxes, declared = boxes_of(stage[:1], arrays).table, stage[0].declare(arrays, np.arange(5)).table
    states = np.array([spec.key.startswith("optimizer.state.exp_avg.") for spec in arrays.specs])
    cut = rectangles_of(declared.shape, declared.flat_start, declared.flat_stop)
    covered = np.bincount(declared.array[cut.row], cut.shape.prod(axis=1), minlength=len(states))
    whole = np.bincount(boxes.array, boxes.shape.prod(axis=1), minlength=len(states))
    assert states.any()
    assert covered[states].tolist() == whole[states].tolist()
