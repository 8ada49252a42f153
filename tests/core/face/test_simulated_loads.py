"""A simulated load counts what the planner of a real one asks for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megackpt.metadata import DIGEST_BLOCK_BYTES, ArraySpec, ChunkTable, DeclaredChunks
from megackpt.planning import plan_load, plan_reads
from megackpt.planning.exchange import plan_exchange
from megackpt.planning.overlaps import search_order, with_bounding_boxes
from megackpt.planning.read_sizes import copied_nbytes, read_nbytes, read_ratio
from megackpt.simulation import (
    ModelSizes,
    StoredCheckpoint,
    build_model,
    job_arrays,
    open_stored,
    parse_layout,
    replica_groups,
    simulate_load,
    simulate_save,
)
from megackpt.simulation.layout import replica_ranks
from megackpt.simulation.outcome import LoadOutcome
from megackpt.simulation.replica_group import joined
from megackpt.simulation.sizes import Experts
from tests.support.checkpoints import BUCKET, TIED, save_for_real

WIDE = {"vocab_size": 512, "hidden_size": 512, "num_layers": 4, "num_heads": 8, "ffn_size": 2048}


def planned(
    sizes: ModelSizes,
    source: str,
    target: str,
    *,
    ranks_planned: int | None = None,
    states: tuple[str, ...] | None = None,
) -> tuple[LoadOutcome, StoredCheckpoint, list[DeclaredChunks]]:
    """Return the outcome of a load, what it loads from, and what each rank asks for."""
    model, layout = build_model(sizes), parse_layout(target)
    _, plan = simulate_save(model, parse_layout(source), bucket_size=BUCKET, states=states)
    stored = StoredCheckpoint(plan.table, plan.writer, DIGEST_BLOCK_BYTES, "the checkpoint")
    outcome = simulate_load(
        model, layout, stored, bucket_size=BUCKET, ranks_planned=ranks_planned, states=states
    )
    arrays = job_arrays(model, tp=layout.tp, states=states)
    groups = [g for stage in replica_groups(model, layout, arrays, bucket_size=BUCKET) for g in stage]
    everyone = joined([g.declare(arrays, np.arange(len(g.ranks))) for g in groups])
    return outcome, stored, [everyone.take(everyone.rank == rank) for rank in range(layout.world_size)]


EXPERTS = Experts(count=4, ffn_size=256, dense_layers=1)


@pytest.mark.parametrize(
    ("source", "target", "experts"),
    [
        ("tp4,pp2,dp2", "tp2,pp4,dp4", None),
        ("tp2,dp3", "tp8,dp2", None),
        ("tp2,pp2,dp4,ep2", "tp4,pp1,dp4,ep4", EXPERTS),
    ],
)
def test_bytes_of_ranks_are_those_of_the_real_plans(
    source: str, target: str, experts: Experts | None
) -> None:
    outcome, stored, requests = planned(ModelSizes(**WIDE, experts=experts), source, target)
    assert outcome.planned.tolist() == list(range(len(requests)))
    for rank, requested in enumerate(requests):
        copies = plan_load(requested, stored.table, where="x")
        location = np.arange(len(stored.table))
        reads = plan_reads(copies, stored.table, position=location, block_bytes=DIGEST_BLOCK_BYTES)
        asked = int((reads.stop - reads.start).sum())
        # A block at the border of two reads is read by both; a simulated one counts it once.
        assert outcome.read[rank] <= asked <= 1.02 * outcome.read[rank]
        assert outcome.needed[rank] == copied_nbytes(copies, stored.table)
        assert outcome.files[rank] == len(set(stored.file[copies.stored].tolist()))


@pytest.mark.parametrize("states", [None, ()])
def test_a_group_reads_and_sends_what_an_exchange_would(states: tuple[str, ...] | None) -> None:
    outcome, stored, requests = planned(ModelSizes(**WIDE), "tp4,pp2,dp2", "tp2,pp1,dp4", states=states)
    layout, sent = outcome.layout, 0
    for tp in range(layout.tp):
        plan = plan_exchange(
            [requests[rank] for rank in replica_ranks(layout, tp=tp, pp=0).tolist()],
            stored.table,
            position=np.arange(len(stored.table)),
            block_bytes=DIGEST_BLOCK_BYTES,
            mode="all_to_all",
            buffer_bytes=1 << 26,
            where="x",
        )
        assert int(plan.read_nbytes().sum()) == outcome.shared_read[tp]
        to_others = plan.deliveries.rank != plan.parts.reader[plan.deliveries.part]
        sent += int(plan.deliveries.nbytes[to_others].sum())
    if states is None:  # parts hold shards of several ranks, one of which reads all of it
        assert outcome.exchanged <= sent < outcome.total_needed
    else:
        assert outcome.exchanged == sent


def test_a_sample_of_ranks_stands_for_all() -> None:
    every, _, _ = planned(ModelSizes(**WIDE), "tp2,pp2,dp2", "tp2,pp1,dp8")
    some, _, _ = planned(ModelSizes(**WIDE), "tp2,pp2,dp2", "tp2,pp1,dp8", ranks_planned=5)
    assert some.planned.tolist() == [0, 3, 6, 9, 12]
    assert some.needed.tolist() == every.needed[some.planned].tolist()
    assert some.read.tolist() == every.read[some.planned].tolist()
    assert some.shared_read.tolist() == every.shared_read.tolist()
    assert 0.9 < some.total_needed / every.total_needed < 1.1


def test_a_load_at_the_same_layout_reads_what_it_needs() -> None:
    outcome, _, _ = planned(ModelSizes(**WIDE), "tp2,pp2,dp2", "tp2,pp2,dp2")
    assert outcome.over_read == 1.0
    assert outcome.shared_over_read == 1.0


def test_the_states_of_a_checkpoint_are_those_of_its_model(tmp_path: Path) -> None:
    layout = parse_layout("tp2,pp3,dp2")
    save_for_real(TIED, layout, tmp_path)
    outcome, stored, model, states = open_stored(tmp_path)
    simulated, plan = simulate_save(build_model(TIED), layout, bucket_size=BUCKET)
    assert outcome.nbytes.tolist() == simulated.nbytes[simulated.nbytes > 0].tolist()
    assert outcome.index_nbytes == simulated.index_nbytes
    assert set(states) == {"fp32_param", "exp_avg", "exp_avg_sq"}
    assert model.layers == 3
    weights = {weight.key: weight for weight, _ in model.weights()}
    for weight, _ in build_model(TIED).weights():
        weight_of_key = weights[weight.key]
        assert (weight_of_key.inner, weight_of_key.tp_dim, weight_of_key.dtype) == (
            weight.inner,
            weight.tp_dim,
            weight.dtype,
        )
        assert weight_of_key.is_vocabulary or weight_of_key.parts == weight.parts
    target = parse_layout("tp2,pp1,dp2")
    load = simulate_load(model, target, stored, states=states, bucket_size=BUCKET)
    same = simulate_load(
        build_model(TIED),
        target,
        StoredCheckpoint(plan.table, plan.writer, DIGEST_BLOCK_BYTES, "x"),
        bucket_size=BUCKET,
    )
    # The order of parameters in the optimizer's buffers is not stored, so ranks may differ, sums do not. The
    # vocabulary of the checkpoint is padded for tp 2.
    assert load.total_needed == pytest.approx(same.total_needed, rel=1e-3)
    assert int(load.unique.sum()) == int(same.unique.sum())


BOXES = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@given(shape=BOXES, data=st.data())
def test_a_bounding_box_holds_the_same_elements_in_the_same_order(
    shape: list[int], data: st.DataObject
) -> None:
    numel = int(np.prod(shape))
    low = data.draw(st.integers(0, numel))
    high = data.draw(st.integers(low, numel))
    start = [data.draw(st.integers(0, 3)) for _ in shape]
    whole = ArraySpec("w", "float32", tuple(a + n for a, n in zip(start, shape, strict=True)))
    ones = np.array([0], np.int64)
    table = ChunkTable(
        (whole,),
        ones,
        np.array([start]),
        np.array([shape]),
        ones + low,
        ones + high,
        ones + 4 * (high - low),
    )
    messages = with_bounding_boxes(table)
    assert elements(messages) == elements(table)
    if low < high:  # and no smaller box does
        inside = np.array(elements(table))
        assert messages.start[0].tolist() == inside.min(axis=0).tolist()
        assert messages.shape[0].tolist() == (inside.max(axis=0) - inside.min(axis=0) + 1).tolist()


def elements(table: ChunkTable) -> list[tuple[int, ...]]:
    """The elements of a table's one chunk, in order."""
    shape, low, high = table.shape[0].tolist(), int(table.flat_start[0]), int(table.flat_stop[0])
    index = list(np.ndindex(*shape))[low:high]
    return [tuple(i + a for i, a in zip(at, table.start[0].tolist(), strict=True)) for at in index]


def test_plans_by_bounding_boxes_are_the_plans_by_boxes() -> None:
    _, stored, requests = planned(ModelSizes(**WIDE), "tp4,pp2,dp3", "tp2,pp1,dp5")
    messages = with_bounding_boxes(stored.table)
    order = search_order(messages)
    for requested in requests:
        plain = plan_load(requested, stored.table, where="x")
        bounded = DeclaredChunks(
            with_bounding_boxes(requested.table),
            requested.main,
            requested.resizable,
            requested.rank,
            requested.entity,
        )
        fast = plan_load(bounded, messages.take(order), where="x")
        columns = ("entity", "source_first", "target_first")

        def rows(copies: object, stored_rows: np.ndarray, columns: tuple[str, ...] = columns) -> list[object]:
            plain_columns = [getattr(copies, name).tolist() for name in columns]
            shapes = [tuple(row) for row in copies.shape.tolist()]  # type: ignore[attr-defined]
            return sorted(zip(stored_rows.tolist(), *plain_columns, shapes, strict=True))

        assert rows(plain, plain.stored) == rows(fast, order[fast.stored])


def chunk(shape: tuple[int, ...], *, of: ArraySpec) -> ChunkTable:
    """The first box of this shape."""
    ones, numel = np.zeros(1, np.int64), int(np.prod(shape))
    start = np.zeros((1, len(shape)), np.int64)
    return ChunkTable((of,), ones, start, np.array([shape]), ones, ones + numel, ones + 4 * numel)


@pytest.mark.parametrize("block", [1, 64, 1 << 18])
@pytest.mark.parametrize(("columns", "is_far"), [(1 << 20, True), (1 << 17, False)])
def test_far_rows_are_read_one_by_one_and_near_ones_together(block: int, columns: int, is_far: bool) -> None:
    array = ArraySpec("w", "float32", (4, columns))
    stored, left_half = chunk((4, columns), of=array), chunk((4, columns // 2), of=array)
    no, zero = np.zeros(1, np.bool_), np.zeros(1, np.int64)
    copies = plan_load(DeclaredChunks(left_half, no, no, zero, zero), stored, where="x")
    half = 8 * columns  # bytes of a half, 4 rows of columns / 2
    nbytes = half if is_far else 2 * half - 2 * columns
    assert read_nbytes(copies, stored, block_bytes=block) == nbytes
    # A second entity of the same half is read with the first, and is a need of its own unless it is of
    # another kind, as the master of a parameter.
    twice = replace(copies.take(np.array([0, 0])), entity=np.array([0, 1]))
    for kinds, needed in ((np.array([0, 1]), half), (np.array([0, 0]), 2 * half)):
        assert read_ratio(twice, stored, block_bytes=block, kinds=kinds) == nbytes / needed
    nothing = copies.take(np.zeros(0, np.int64))
    assert read_ratio(nothing, stored, block_bytes=block, kinds=np.zeros(0, np.int64)) == 1.0
