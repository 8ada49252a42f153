"""What zarr saves write: any layout and stock readers load it, and no two ranks share a file in a round."""

from __future__ import annotations

import itertools
import json
import math
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megackpt import ShardedTensor, load, load_plain_tensors, save
from megackpt.comm import Group
from megackpt.engine.data.tensor_bytes import as_bits
from megackpt.entities.describe import describe
from megackpt.errors import DeclarationError, MissingExtraError
from megackpt.formats.zarr.rounds import Grid, GridRules, choose_grids, find_touched_files, plan_rounds
from megackpt.formats.zarr.version_3 import ZarrV3SaveStrategy
from megackpt.plans.geometry import Box
from megackpt.plans.metadata import DTYPES, ArraySpec
from megackpt.plans.metadata.merge import merge_declarations
from megackpt.plans.planning import SavePlan, plan_save
from megackpt.storage import LocalStore, MemoryStore, Store
from megackpt.testing.format_trials import bytes_of, declared_chunks
from megackpt.testing.layouts import OwnedChunk, arrays, owned_chunks
from megackpt.testing.world import SimulatedWorld
from tests.support.effort import few, sampled
from tests.support.states import bits, random_bits, save_on_ranks, sharded
from tests.support.zarr_v1 import save_zarr_v1

# Files and chunks of a few elements, so that small arrays have many of them and ranks share some.
TINY = [GridRules(file_bytes=64, inner_bytes=16), GridRules(file_bytes=24, inner_bytes=8, files_per_row=1)]


def check_law(data: st.DataObject, array: torch.Tensor, version: int, rules: GridRules, store: Store) -> None:
    source_ranks, target_ranks = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    source = data.draw(owned_chunks(tuple(array.shape), ranks=source_ranks), label="source")
    target = data.draw(owned_chunks(tuple(array.shape), ranks=target_ranks), label="target")

    def load_rank(group: Group) -> list[ShardedTensor]:
        wanted = declared_chunks(target, array, group.rank)
        for tensor in wanted:
            as_bits(tensor.data).fill_(1)  # something that is not the answer
        load({"shards": wanted}, store, group=group)
        return wanted

    if version == 1:
        save_zarr_v1({"whole": sharded("array", array)}, store)
    else:
        save_on_ranks(
            source_ranks,
            lambda rank: {"shards": declared_chunks(source, array, rank)},
            store,
            ZarrV3SaveStrategy(rules),
        )
    for rank, loaded in enumerate(SimulatedWorld(target_ranks).run(load_rank)):
        for got, expected in zip(loaded, declared_chunks(target, array, rank), strict=True):
            assert bytes_of(got) == bytes_of(expected)


@pytest.mark.parametrize("store", [MemoryStore, LocalStore])
@pytest.mark.parametrize("version", [1, 3])
def test_any_layout_loads_what_any_other_saved_as_zarr(version: int, store: type[Store]) -> None:
    number = few(25, of=100) if store is MemoryStore else few(6, of=20)

    # Bounds on time are off: the machine that runs this may be busy.
    @settings(max_examples=number, deadline=None, suppress_health_check=list(HealthCheck))
    @given(data=st.data(), array=arrays(), rules=st.sampled_from([*TINY, GridRules()]))
    def check(data: st.DataObject, array: torch.Tensor, rules: GridRules) -> None:
        with tempfile.TemporaryDirectory() as directory:
            check_law(data, array, version, rules, store(directory))

    check()


RULES = st.builds(
    GridRules,
    file_bytes=st.sampled_from([16, 64, 4096]),
    inner_bytes=st.sampled_from([8, 32]),
    files_per_row=st.integers(1, 4),
)


def plan_of(layouts: list[tuple[torch.Tensor, list[OwnedChunk]]], *, ranks: int) -> SavePlan:
    declared = []
    for rank in range(ranks):
        entities: list[ShardedTensor] = [
            owned.declare(f"array {i}", array)
            for i, (array, layout) in enumerate(layouts)
            for owned in layout
            if owned.rank == rank
        ]
        declared.append(describe(entities, rank=rank))
    return plan_save(merge_declarations(declared), ranks=ranks)


@st.composite
def plans(draw: st.DrawFn) -> tuple[SavePlan, int]:
    ranks = draw(st.integers(1, 5))
    layouts = []
    for _ in range(draw(st.integers(1, 3))):
        array = draw(arrays(max_dims=3))
        layouts.append((array, draw(owned_chunks(tuple(array.shape), ranks=ranks))))
    return plan_of(layouts, ranks=ranks), ranks


def elements_of(plan: SavePlan, row: int, spec: ArraySpec) -> set[tuple[int, ...]]:
    """All elements of a row, one by one: slow and obvious."""
    dims = len(spec.global_shape)
    start, shape = plan.table.start[row, :dims].tolist(), plan.table.shape[row, :dims].tolist()
    locations = list(itertools.product(*(range(a, a + n) for a, n in zip(start, shape, strict=True))))
    return set(locations[int(plan.table.flat_start[row]) : int(plan.table.flat_stop[row])])


def files_of(plan: SavePlan, row: int, grids: list[Grid | None]) -> set[tuple[int, ...]]:
    number = int(plan.table.array[row])
    grid = grids[number]
    assert grid is not None
    locations = elements_of(plan, row, plan.table.arrays[number])
    return {(number, *(i // c for i, c in zip(location, grid.chunk, strict=True))) for location in locations}


@settings(max_examples=few(25, of=200), deadline=None, suppress_health_check=list(HealthCheck))
@given(plan_and_ranks=plans(), rules=RULES)
def test_each_row_is_in_one_round_none_is_empty_and_no_two_ranks_touch_one_file_in_one(
    plan_and_ranks: tuple[SavePlan, int], rules: GridRules
) -> None:
    plan, ranks = plan_and_ranks
    grids = choose_grids(plan.table, rules)
    touches = find_touched_files(plan.table, grids)
    rounds = plan_rounds(plan, touches)
    writers: dict[tuple[int, tuple[int, ...]], set[int]] = {}
    first: dict[tuple[int, ...], set[int]] = {}
    for row in range(len(plan.table)):
        files = files_of(plan, row, grids)
        assert len(files) == len(touches.files_of(row))
        for file in files:
            writers.setdefault((int(rounds.round[row]), file), set()).add(int(plan.writer[row]))
            first.setdefault(file, set()).add(int(rounds.round[row]))
    assert all(len(ranks) == 1 for ranks in writers.values())
    several = sorted(min(numbers) for numbers in first.values() if len(numbers) > 1)
    assert sorted(rounds.first_round.values()) == several
    assert rounds.count <= ranks * len(plan.table) + 1
    assert set(range(rounds.count)) == set(rounds.round.tolist()) | {0}


@settings(max_examples=few(25, of=200), deadline=None, suppress_health_check=list(HealthCheck))
@given(plan_and_ranks=plans(), rules=RULES)
def test_grids_are_valid_and_never_finer_than_rows_and_sizes_ask_for(
    plan_and_ranks: tuple[SavePlan, int], rules: GridRules
) -> None:
    plan, _ = plan_and_ranks
    for number, (spec, grid) in enumerate(
        zip(plan.table.arrays, choose_grids(plan.table, rules), strict=True)
    ):
        assert grid is not None
        assert all(c >= 1 and i >= 1 and c % i == 0 for c, i in zip(grid.chunk, grid.inner, strict=True))
        files = math.prod(-(-n // c) for n, c in zip(spec.global_shape, grid.chunk, strict=True))
        rows = int((plan.table.array == number).sum())
        most = max(rules.files_per_row * rows, spec.nbytes / rules.file_bytes, 1)
        # Extents are whole numbers, which may double the count along each dim.
        assert files <= most * 2 ** (len(spec.global_shape) + 1)


@settings(max_examples=few(20, of=100), deadline=None)
@given(
    parts=st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3),
    extent=st.sampled_from([12, 24]),
    rules=RULES,
)
def test_even_tensor_parallel_splits_take_one_round(parts: list[int], extent: int, rules: GridRules) -> None:
    shape = tuple(n * extent for n in parts)
    array = torch.zeros(shape)
    cells = list(itertools.product(*map(range, parts)))
    layout = [
        OwnedChunk(
            rank,
            (Box(tuple(i * extent for i in cell), (extent,) * len(parts)), 0, extent ** len(parts)),
            0,
            0,
            False,
        )
        for rank, cell in enumerate(cells)
    ]
    plan = plan_of([(array, layout)], ranks=len(cells))
    assert plan_rounds(plan, find_touched_files(plan.table, choose_grids(plan.table, rules))).count == 1


@settings(max_examples=few(20, of=100), deadline=None)
@given(ranks=st.integers(2, 16), rows=st.integers(60, 200), columns=st.integers(1, 50))
def test_optimizer_shards_of_equal_size_take_two_rounds_at_most_in_each_file(
    ranks: int, rows: int, columns: int
) -> None:
    numel = rows * columns
    ends = [numel * rank // ranks for rank in range(ranks + 1)]
    box = Box((0, 0), (rows, columns))
    layout = [OwnedChunk(rank, (box, ends[rank], ends[rank + 1]), 0, 0, False) for rank in range(ranks)]
    plan = plan_of([(torch.zeros(rows, columns), layout)], ranks=ranks)
    grids = choose_grids(plan.table, GridRules())
    # A shard of less than a row shares it with others whatever the grid.
    in_a_row = -(-columns // (numel // ranks)) + 1
    assert plan_rounds(plan, find_touched_files(plan.table, grids)).count <= max(3, in_a_row)


def test_many_optimizer_shards_of_one_array_take_two_rounds() -> None:
    ranks, shape = 511, (4099, 4096)  # both prime to each other: shards end in the middle of rows
    ends = np.linspace(0, shape[0] * shape[1], ranks + 1).astype(int).tolist()
    box = Box((0, 0), shape)
    layout = [OwnedChunk(rank, (box, ends[rank], ends[rank + 1]), 0, 0, False) for rank in range(ranks)]
    plan = plan_of([(torch.zeros(1).expand(shape), layout)], ranks=ranks)
    grids = choose_grids(plan.table, GridRules())
    assert plan_rounds(plan, find_touched_files(plan.table, grids)).count == 2


def group_of(directory: Path) -> Path:
    return directory / str(json.loads((directory / "metadata.json").read_text())["arrays"])


@pytest.fixture
def stock_zarr() -> Any:
    """The zarr package, which reads what we write and writes what we read."""
    return pytest.importorskip("zarr", minversion="3", reason="zarr 3 needs Python 3.11")


@sampled(3)
@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (0, 3), (2, 3, 5)])
def test_all_dtypes_and_shapes_are_read_by_stock_zarr_and_tensorstore(
    tmp_path: Path, stock_zarr: Any, dtype: str, shape: tuple[int, ...]
) -> None:
    if not hasattr(torch, dtype):
        pytest.skip(f"this torch has no {dtype}")
    data = random_bits(dtype, shape)
    state, rules = {"a": sharded("a", data)}, GridRules(file_bytes=32, inner_bytes=16)
    save_zarr_v1(state, tmp_path / "1")
    save(state, tmp_path / "3", ZarrV3SaveStrategy(rules))
    for version in (1, 3):
        directory = tmp_path / str(version)
        loaded = load_plain_tensors(directory)["a"]
        assert loaded.dtype == data.dtype
        assert loaded.shape == data.shape
        assert bits(loaded) == bits(data)
        if version == 1:
            driver, path = "zarr", directory / "a"
        else:
            driver, path = "zarr3", group_of(directory) / "a"
        opened = ts.open({"driver": driver, "kvstore": {"driver": "file", "path": f"{path}/"}}).result()
        assert opened.read().result().tobytes() == bits(data)
        if version == 1 and (dtype == "bfloat16" or dtype.startswith("float8")):
            continue  # the names that Megatron-Core and tensorstore use in zarr v2 are unknown to stock zarr
        array = stock_zarr.open_array(path, mode="r")
        assert array.shape == shape
        assert np.asarray(array[...]).tobytes() == bits(data)


def test_stock_zarr_lists_version_3_as_a_group_with_shards_and_true_dtypes(
    tmp_path: Path, stock_zarr: Any
) -> None:
    data = torch.randn(64, 32).bfloat16()
    rules = GridRules(file_bytes=2048, inner_bytes=256)
    save(
        {"a": sharded("layer.0/weight", data), "b": sharded("b", torch.ones(2))},
        tmp_path,
        sharded_strategy=ZarrV3SaveStrategy(rules),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        group = stock_zarr.open_group(group_of(tmp_path), mode="r")
        arrays = dict(group.arrays())
    assert sorted(arrays) == ["b", "layer.0%2Fweight"]
    array = arrays["layer.0%2Fweight"]
    assert array.attrs["megackpt"] == {"key": "layer.0/weight", "dtype": "bfloat16"}
    assert (array.shards, array.chunks) == ((32, 32), (4, 32))
    assert torch.equal(torch.from_numpy(array[...]).view(torch.bfloat16), data)


def test_keys_that_are_no_paths_are_encoded(tmp_path: Path) -> None:
    keys = [
        "../up", "/abs", "a//b", "a/../b", "metadata.json", "common.pt", "x/.zarray", ".megackpt-x",
        "w/0", "w", "nul\0", "back\\slash", "..", "zarr.json", "__reserved", "50%", "ünï",
    ]  # fmt: skip
    state = {key: sharded(key, torch.tensor([float(i)])) for i, key in enumerate(keys)}
    save(state, tmp_path / "3", sharded_strategy="zarr")
    loaded = load_plain_tensors(tmp_path / "3")
    assert {key: value.item() for key, value in loaded.items()} == {key: i for i, key in enumerate(keys)}
    assert list(tmp_path.iterdir()) == [tmp_path / "3"]
    with pytest.raises(DeclarationError, match=r"longer than 255 bytes"):
        save({"t": sharded("k" * 256, torch.ones(1))}, tmp_path / "3", sharded_strategy="zarr")


def test_a_save_without_validation_raises_an_error(tmp_path: Path) -> None:
    with pytest.raises(DeclarationError, match="validate_access_integrity"):
        save({"a": sharded("a", torch.ones(1))}, tmp_path, "zarr", validate_access_integrity=False)


def test_without_tensorstore_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"a": sharded("a", torch.ones(1))}
    save(state, tmp_path / "3", sharded_strategy="zarr")
    save_zarr_v1(state, tmp_path / "1")
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'megackpt\[zarr\]'"):
        save(state, tmp_path / "new", sharded_strategy="zarr")
    for version in ("1", "3"):
        with pytest.raises(MissingExtraError, match=r"pip install 'megackpt\[zarr\]'"):
            load(state, tmp_path / version)
    save(state, tmp_path / "native")
    load(state, tmp_path / "native")
