"""Simulated jobs: models by their sizes, and ranks that declare, save and load what real ones do."""

from __future__ import annotations

import json
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megackpt.cli.simulation import (
    PRESETS,
    ModelSizes,
    StoredCheckpoint,
    build_model,
    check_layout,
    job_arrays,
    open_stored,
    parse_layout,
    read_sizes,
    replica_groups,
    simulate_load,
    simulate_save,
)
from megackpt.cli.simulation.layout import layers_of_stages, replica_ranks
from megackpt.cli.simulation.outcome import LoadOutcome
from megackpt.cli.simulation.replica_group import joined
from megackpt.cli.simulation.stored import model_of
from megackpt.cli.simulation.transformer import Experts, sizes_from_json
from megackpt.entities.describe import describe
from megackpt.entities.flatten import flatten_state
from megackpt.errors import DeclarationError
from megackpt.plans.metadata import DIGEST_BLOCK_BYTES, ArraySpec, ChunkTable, DeclaredChunks, pad_shapes
from megackpt.plans.planning import plan_load, plan_reads, plan_save
from megackpt.plans.planning.exchange import plan_exchange
from megackpt.plans.planning.load_plan import (
    copied_nbytes,
    read_nbytes,
    read_ratio,
    with_bounding_boxes,
)
from megackpt.plans.validation import check_coverage
from megackpt.training.parallel import ParallelLayout
from tests.support.checkpoints import BUCKET, SIZES, TIED, real_state, save_for_real

# Exact totals of the weights that were published, and what the papers round them to.
TOTALS = {
    "llama3-8b": 8_030_261_248,  # meta-llama/Meta-Llama-3-8B
    "llama3-70b": 70_553_706_496,  # meta-llama/Meta-Llama-3-70B
    "llama3-405b": 405_853_388_800,  # meta-llama/Llama-3.1-405B; "405B"
    "llama3-1b": 1_235_814_400,  # meta-llama/Llama-3.2-1B
    "mixtral-8x7b": 46_702_792_704,  # mistralai/Mixtral-8x7B-v0.1; "47B"
    "deepseek-v3": 671_026_419_200,  # "671B"; the module for further tokens is not among them
    # Not published; "175.0B" and "125M". 12 L h^2 + 13 L h + (V + positions) h + 2 h, sizes of table 2.1.
    "gpt3-175b": 174_604_259_328,
    "gpt-125m": 125_226_240,
}


def test_presets_have_the_published_numbers_of_parameters() -> None:
    assert {name: build_model(sizes).numel for name, sizes in PRESETS.items()} == TOTALS


def test_an_optimizer_adds_twelve_bytes_for_each_parameter_of_two() -> None:
    sizes = PRESETS["llama3-8b"]  # no padding at tp 1: 128256 rows are a multiple of 128
    arrays = job_arrays(build_model(sizes), tp=1)
    counts = 4 * sum(spec.numel for spec in arrays.specs if ".step." in spec.key)
    assert counts == 4 * (32 * 6 + 3)
    assert arrays.nbytes == 14 * TOTALS["llama3-8b"] + counts


def test_vocabularies_are_padded_to_what_tp_divides() -> None:
    shapes = {s.key: s.global_shape for s in job_arrays(build_model(PRESETS["llama3-8b"]), tp=8).specs}
    assert shapes["output_layer.weight"] == (129024, 4096)
    assert shapes["optimizer.state.exp_avg.output_layer.weight"] == (129024, 4096)


def test_first_and_last_stage_have_a_layer_less_where_the_ends_count() -> None:
    # Dubey et al. 2024, section 3.3.2.
    counts = [len(owned) for owned in layers_of_stages(126, ParallelLayout(pp=16), ends_count=True)]
    assert counts == [7] + [8] * 14 + [7]
    counts = [len(owned) for owned in layers_of_stages(126, ParallelLayout(pp=16), ends_count=False)]
    assert counts == [8] * 14 + [7] * 2
    assert [len(owned) for owned in layers_of_stages(5, ParallelLayout(), ends_count=True)] == [5]


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("tp8,pp16,dp128", ParallelLayout(tp=8, pp=16, dp=128)),
        ("TP8, PP16, world=16384", ParallelLayout(tp=8, pp=16, dp=128)),
        ("dp8,ep4", ParallelLayout(dp=8, ep=4)),
        ("world4", ParallelLayout(dp=4)),
        ("tp2,cp2,pp2,vpp2,ep4,etp1,world16", ParallelLayout(tp=2, cp=2, pp=2, dp=2, vpp=2, ep=4, etp=1)),
    ],
)
def test_layouts_are_read_as_they_are_written(text: str, layout: ParallelLayout) -> None:
    assert parse_layout(text) == layout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is not an axis"),
        ("tp8,xp2", "'xp2' is not an axis"),
        ("tp8,tp4", "names an axis twice"),
        ("tp0", "tp=0.*at least 1"),
        ("tp3,pp2,world16", r"16 ranks cannot be divided so; tp=3 x cp=1 x pp=2 x dp=2 are 12"),
        ("tp2,dp3,world8", "8 ranks cannot be divided"),
        ("dp6,ep4", "ep=4 = 4 does not divide"),
        ("tp8,pp512,dp128", "at most 131072"),
    ],
)
def test_a_layout_that_cannot_be_raises_an_error(text: str, message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        parse_layout(text)


@pytest.mark.parametrize(
    ("preset", "layout", "message"),
    [
        ("llama3-8b", "tp64", r"num_heads 32 is not a multiple of tp=64"),
        ("gpt3-175b", "tp64", r"num_heads 96 is not a multiple of tp=64"),
        ("llama3-8b", "pp64", r"32 layers are fewer than pp=64"),
        ("llama3-8b", "dp2,ep2", r"no experts to share by ep=2"),
        ("mixtral-8x7b", "dp16,ep16", r"8 experts cannot be shared by ep=16"),
        ("gpt-125m", "tp5", r"linear_fc1.weight has 3072 along the dim that tp=5 cuts"),
    ],
)
def test_a_layout_that_does_not_fit_a_model_raises_an_error(preset: str, layout: str, message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        check_layout(build_model(PRESETS[preset]), parse_layout(layout))


def test_query_groups_divide_tp_or_the_other_way_round() -> None:
    check_layout(build_model(PRESETS["llama3-8b"]), parse_layout("tp16"))
    sizes = ModelSizes(vocab_size=64, hidden_size=24, num_layers=2, num_heads=12, ffn_size=48, query_groups=4)
    with pytest.raises(DeclarationError, match="neither of query_groups 4 and tp=6 divides the other"):
        check_layout(build_model(sizes), parse_layout("tp6"))


def test_sizes_come_back_from_json(tmp_path: Path) -> None:
    for sizes in PRESETS.values():
        path = tmp_path / "model.json"
        path.write_text(json.dumps(sizes.to_json()))
        assert read_sizes(path) == sizes


SMALL = {"vocab_size": 64, "hidden_size": 8, "num_layers": 2, "num_heads": 2, "ffn_size": 16}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"hiden_size": 8}, r"unknown fields \['hiden_size'\]"),
        ({"ffn_size": None}, r"of another type \['ffn_size'\]"),
        ({"gated": "yes"}, r"of another type \['gated'\]"),
        ({"experts": {"count": 4}}, r"model, experts: .*missing ones \['ffn_size'\]"),
        ({"experts": 8}, r"another type \['experts'\]"),
        (
            {"experts": {"count": 4, "ffn_size": 8, "dense_layers": 3}},
            "dense_layers 3 is more than num_layers 2",
        ),
        ({"experts": {"count": 0, "ffn_size": 8}}, "Experts.count is 0"),
        ({"query_groups": 3}, "query_groups 3 does not divide num_heads 2"),
        ({"num_layers": 0}, "num_layers is 0"),
        ({"dtype": "bf16"}, "'bf16' is none of"),
    ],
)
def test_a_description_that_is_wrong_raises_an_error(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        sizes_from_json({**SMALL, **changed}, where="model")


def test_a_file_that_is_no_description_raises_an_error(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    for name in ("text", "absent"):
        with pytest.raises(DeclarationError, match=f"{name}: not a description of a model"):
            read_sizes(tmp_path / name)
    with pytest.raises(DeclarationError, match="a list where an object should be"):
        sizes_from_json([], where="model")


def arrays_of(*shapes: tuple[str, tuple[int, ...]]) -> ChunkTable:
    """Whole arrays of bfloat16 in one chunk each, as a single process saves them."""
    specs = tuple(ArraySpec(key, "bfloat16", shape) for key, shape in sorted(shapes))
    dims = max(len(spec.global_shape) for spec in specs)
    numel = np.array([spec.numel for spec in specs])
    return ChunkTable(
        specs,
        np.arange(len(specs)),
        np.zeros((len(specs), dims), np.int64),
        pad_shapes([spec.global_shape for spec in specs], dims, fill=1),
        np.zeros(len(specs), np.int64),
        numel,
        2 * numel,
    )


@pytest.mark.parametrize("preset", ["llama3-1b", "gpt-125m", "mixtral-8x7b", "deepseek-v3"])
@pytest.mark.parametrize("states", [None, ()])
def test_a_model_is_recognised_by_the_arrays_of_one_process(
    preset: str, states: tuple[str, ...] | None
) -> None:
    # A multiple of 128, so that no padding is taken for a part of the vocabulary.
    model = build_model(replace(PRESETS[preset], num_layers=5, vocab_size=1024))
    _, plan = simulate_save(model, ParallelLayout(), states=states)
    described, found_states = model_of(plan.table)
    assert described.layers == 5
    assert {w.key: (w, axes) for w, axes in described.weights()} == {
        # Without an optimizer nothing tells a buffer from a parameter.
        w.key: (replace(w, is_trained=w.is_trained or states == ()), axes)
        for w, axes in model.weights()
    }
    assert set(found_states) == (set() if states == () else {"fp32_param", "exp_avg", "exp_avg_sq"})


def test_layers_with_keys_of_their_own_are_recognised_by_their_numbers() -> None:
    layers = [
        array
        for i in range(3)
        for array in (
            (f"model.layers.{i}.mlp.down_proj.weight", (8, 32)),
            (f"model.layers.{i}.self_attn.q_proj.weight", (8, 8)),
            (f"model.layers.{i}.input_layernorm.weight", (8,)),
        )
    ]
    table = arrays_of(*layers, ("model.embed_tokens.weight", (64, 8)), ("lm_head.weight", (64, 8)))
    model, _ = model_of(table)
    cuts = {weight.key.rpartition(".layers.")[2]: weight.tp_dim for weight, _ in model.weights()}
    assert model.layers == 3
    assert cuts["2.mlp.down_proj.weight"] == 1
    assert cuts["0.self_attn.q_proj.weight"] == 0
    assert cuts["1.input_layernorm.weight"] is None
    assert cuts["model.embed_tokens.weight"] == cuts["lm_head.weight"] == 0
    stored = StoredCheckpoint(table, np.zeros(len(table), np.int64), 1, "x")
    load = simulate_load(model, parse_layout("tp2,pp3"), stored, states=())
    # Norms are needed on both tp ranks, all else once.
    assert load.total_needed == int(table.nbytes.sum()) + 2 * 3 * 8


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


def simulated(
    sizes: ModelSizes, layout: ParallelLayout, *, states: tuple[str, ...] | None = None
) -> DeclaredChunks:
    """All ranks."""
    model = build_model(sizes)
    arrays = job_arrays(model, tp=layout.tp, states=states)
    owned = [h for stage in replica_groups(model, layout, arrays, bucket_size=BUCKET) for h in stage]
    return joined([h.declare(arrays, np.arange(len(h.ranks))) for h in owned])


@pytest.mark.parametrize("layout", ["tp2,pp2,dp2", "pp3,dp1", "tp1,dp3", "tp2,dp4"])
@pytest.mark.parametrize("sizes", [SIZES, TIED])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_simulated_ranks_declare_what_real_ones_do(layout: str, sizes: ModelSizes, dtype: str) -> None:
    check_declarations(replace(sizes, dtype=dtype), parse_layout(layout))


@pytest.mark.parametrize(
    "layout",
    ["dp4,ep4", "tp2,pp2,dp2,ep2", "tp2,dp2,ep4,etp1", "cp2,dp2,ep2,etp2", "pp2,vpp2,dp2,ep2", "pp3"],
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


def data_nbytes(path: Path) -> int:
    header = int.from_bytes(path.read_bytes()[:8], "little")
    return path.stat().st_size - 8 - header


@pytest.mark.parametrize("text", ["tp2,pp2,dp2", "tp1,pp3,dp1", "tp2,dp3"])
def test_each_rank_writes_as_many_bytes_as_in_a_real_save(text: str, tmp_path: Path) -> None:
    layout = parse_layout(text)
    save_for_real(TIED, layout, tmp_path)
    outcome, _ = simulate_save(build_model(TIED), layout, bucket_size=BUCKET)
    real = np.zeros(layout.world_size, np.int64)
    for path in (tmp_path / "data").iterdir():
        real[int(path.stem.rpartition("-")[2])] = data_nbytes(path)
    assert outcome.nbytes.tolist() == real.tolist()
    assert outcome.files == len(list((tmp_path / "data").iterdir()))
    message = json.loads((tmp_path / "metadata.json").read_text())
    assert outcome.index_nbytes == message["index"]["nbytes"]


@pytest.mark.parametrize("tied", [True, False])
def test_lists_of_ranks_give_the_plan_of_all_their_rows(tied: bool) -> None:
    experts = Experts(count=4, ffn_size=48, dense_layers=1)
    sizes = replace(SIZES, num_layers=4, tied_embeddings=tied, experts=experts)
    model, layout = build_model(sizes), parse_layout("tp2,pp4,dp4,ep2")
    everyone = simulated(sizes, layout)
    order = np.argsort(everyone.rank, kind="stable")
    whole = plan_save(everyone.take(order), ranks=layout.world_size)
    _, plan = simulate_save(model, layout, bucket_size=BUCKET)
    for column in ("array", "start", "shape", "flat_start", "flat_stop", "nbytes"):
        assert getattr(plan.table, column).tolist() == getattr(whole.table, column).tolist()
    assert plan.writer.tolist() == whole.writer.tolist()
    assert plan.offset_bytes.tolist() == whole.offset_bytes.tolist()


@pytest.mark.parametrize(
    ("preset", "text"), [("llama3-70b", "tp8,pp4,dp8"), ("deepseek-v3", "tp2,pp2,dp8,ep8")]
)
def test_every_byte_is_written_once(preset: str, text: str) -> None:
    model, layout = build_model(replace(PRESETS[preset], num_layers=8)), parse_layout(text)
    outcome, plan = simulate_save(model, layout)  # it proves coverage on the way
    assert outcome.total_nbytes == job_arrays(model, tp=layout.tp).nbytes
    assert outcome.total_nbytes == int(plan.table.nbytes.sum())
    # 14 bytes for each parameter, those of padded vocabularies, and counts.
    buffers = sum(w.numel for w, _ in model.weights() if not w.is_trained)
    assert 14 * (model.numel - buffers) < outcome.total_nbytes < 14.05 * model.numel
    assert outcome.files == layout.world_size


def test_without_an_optimizer_there_are_weights_alone() -> None:
    model = build_model(PRESETS["llama3-8b"])
    outcome, _ = simulate_save(model, ParallelLayout(dp=4), states=())
    assert outcome.total_nbytes == 2 * model.numel


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
    everyone = simulated(sizes, layout, states=states)
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
            has_one_reader=False,
            buffer_bytes=1 << 26,
            where="x",
        )
        assert int(plan.read_nbytes().sum()) == outcome.shared_read[tp]
        to_others = plan.deliveries.rank != plan.parts.reader[plan.deliveries.part]
        sent += int(plan.deliveries.nbytes[to_others].sum())
    if states is None:  # parts hold shards of several ranks; one rank reads all of it
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
        stored_weight = weights[weight.key]
        for field in ("inner", "tp_dim", "dtype"):
            assert getattr(stored_weight, field) == getattr(weight, field)
        assert stored_weight.is_vocabulary or stored_weight.parts == weight.parts
    target = parse_layout("tp2,pp1,dp2")
    load = simulate_load(model, target, stored, states=states, bucket_size=BUCKET)
    written = StoredCheckpoint(plan.table, plan.writer, DIGEST_BLOCK_BYTES, "x")
    same = simulate_load(build_model(TIED), target, written, bucket_size=BUCKET)
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
        (whole,), ones, np.array([start]), np.array([shape]), ones + low, ones + high, ones + 4 * (high - low)
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
