"""What simulated ranks hold is what real models and optimizers declare."""

from __future__ import annotations

from dataclasses import astuple, replace
from typing import Any

import numpy as np
import pytest

from megackpt.geometry import rectangles_of
from megackpt.mapping.describe import describe
from megackpt.mapping.flatten import flatten_state
from megackpt.metadata import DeclaredChunks
from megackpt.parallel import ParallelLayout
from megackpt.simulation import ModelSizes, build_model, job_arrays, parse_layout, replica_groups
from megackpt.simulation.replica_group import boxes_of, joined
from megackpt.simulation.sizes import Experts
from megackpt.validation import check_coverage
from tests.support.checkpoints import BUCKET, SIZES, TIED, real_state


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


def simulated(sizes: ModelSizes, layout: ParallelLayout) -> DeclaredChunks:
    """All ranks."""
    model = build_model(sizes)
    arrays = job_arrays(model, tp=layout.tp)
    owned = [h for stage in replica_groups(model, layout, arrays, bucket_size=BUCKET) for h in stage]
    return joined([h.declare(arrays, np.arange(len(h.ranks))) for h in owned])


@pytest.mark.parametrize("layout", ["tp2,pp2,dp2", "pp3,dp1", "tp1,dp3", "tp2,dp4"])
@pytest.mark.parametrize("sizes", [SIZES, TIED])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_simulated_ranks_declare_what_real_ones_do(layout: str, sizes: ModelSizes, dtype: str) -> None:
    check_declarations(replace(sizes, dtype=dtype), parse_layout(layout))


@pytest.mark.parametrize(
    "layout", ["dp4,ep4", "tp2,pp2,dp2,ep2", "tp2,dp2,ep4,etp1", "cp2,dp2,ep2,etp2", "pp2,vpp2,dp2,ep2"]
)
@pytest.mark.parametrize("dense_layers", [0, 1])
def test_experts_are_declared_as_real_layers_do(layout: str, dense_layers: int) -> None:
    experts = Experts(count=8, ffn_size=48, shared_ffn_size=16, dense_layers=dense_layers, router_bias=True)
    sizes = replace(SIZES, num_layers=4, experts=experts, dtype="bfloat16")
    check_declarations(sizes, parse_layout(layout))


def check_declarations(sizes: ModelSizes, where: ParallelLayout) -> None:
    everyone = simulated(sizes, where)
    for rank in range(where.world_size):
        declared = everyone.take(everyone.rank == rank)
        flattened = flatten_state(real_state(sizes, where, rank), rank=rank, ranks=where.world_size)
        assert rows_of(declared) == rows_of(describe(flattened.entities, rank=rank))
        assert sorted(declared.entity.tolist()) == list(range(len(declared)))


@pytest.mark.parametrize(("layout", "query_groups"), [("tp4,pp2,dp2", 2), ("tp4,dp3", 1), ("tp2,dp2", 1)])
def test_fewer_key_heads_than_ranks_of_tp_are_declared_as_real_layers_do(
    layout: str, query_groups: int
) -> None:
    sizes = replace(TIED, query_groups=query_groups)
    check_declarations(sizes, parse_layout(layout))
    check_coverage(simulated(sizes, parse_layout(layout)))


@pytest.mark.parametrize(
    "layout",
    ["tp2,pp2,dp4,ep2", "tp1,pp3,dp4,ep4", "pp1,dp2", "tp2,dp4,ep4,etp1", "tp1,cp2,dp2,ep2,etp2", "pp2,vpp2"],
)
@pytest.mark.parametrize("dense_layers", [0, 1])
def test_each_rank_has_its_share_of_the_experts(layout: str, dense_layers: int) -> None:
    experts = Experts(count=8, ffn_size=48, shared_ffn_size=16, dense_layers=dense_layers, router_bias=True)
    sizes, where = replace(SIZES, num_layers=4, experts=experts), parse_layout(layout)
    declared = simulated(sizes, where)
    check_coverage(declared)
    table = declared.table
    keys = np.array([spec.key for spec in table.arrays])
    of_expert = np.array([".experts." in key and "optimizer" not in key for key in keys])
    axis = 0 if dense_layers else 1  # behind that of the layers, where there is one
    for rank in range(where.world_size):
        owned = of_expert[table.array] & (declared.rank == rank)
        ep, count = where.expert_coordinates(rank).ep, 8 // where.ep
        assert set(table.start[owned, axis].tolist()) == {ep * count}
        assert set(table.shape[owned, axis].tolist()) == {count}
    # edp ranks have each slice of the gate.
    gate = of_expert[table.array] & np.char.endswith(keys, "fc1.weight.gate")[table.array]
    boxes = np.column_stack([table.array[gate], table.start[gate]])
    assert set(np.unique(boxes, axis=0, return_counts=True)[1].tolist()) == {where.edp}


def test_the_flat_ranges_of_a_group_tile_its_boxes() -> None:
    layout = parse_layout("tp2,dp5")
    model = build_model(SIZES)
    arrays = job_arrays(model, tp=2)
    (stage,) = replica_groups(model, layout, arrays, bucket_size=BUCKET)
    boxes, declared = boxes_of(stage[:1], arrays).table, stage[0].declare(arrays, np.arange(5)).table
    states = np.array([spec.key.startswith("optimizer.state.exp_avg.") for spec in arrays.specs])
    cut = rectangles_of(declared.shape, declared.flat_start, declared.flat_stop)
    covered = np.bincount(declared.array[cut.row], cut.shape.prod(axis=1), minlength=len(states))
    whole = np.bincount(boxes.array, boxes.shape.prod(axis=1), minlength=len(states))
    assert states.any()
    assert covered[states].tolist() == whole[states].tolist()
