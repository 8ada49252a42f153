"""Loads that ask for less, more or other than what is saved; `complete=True` proves that all is requested."""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import megackpt
from megackpt import (
    FormatError,
    KeyRule,
    LoadOptions,
    Policy,
    ShardedObject,
    ShardedTensor,
    load,
    save,
)
from megackpt.comm import Group
from megackpt.engine.checkpoint.opening import open_checkpoint
from megackpt.engine.data.read import read_chunk
from megackpt.entities import ShardedStateDict
from megackpt.errors import CheckpointError, CommonStateError, CoverageError, MismatchError, MissingKeyError
from megackpt.storage import MemoryStore, Store
from megackpt.testing.world import SimulatedRank, SimulatedWorld
from megackpt.training.parallel import (
    ExpertStack,
    GatedExperts,
    ParallelGroups,
    ParallelLayout,
    RowParallelLinear,
)
from tests.support.effort import few
from tests.support.states import sharded
from tests.support.worlds import error_of_all, loading, saving

MODES: tuple[Any, ...] = ("all_to_all", "two_stage")
SENTINEL = -7.0
Ends = tuple[tuple[int, int], ...]  # one range a dim


def tensor(box: Ends, shape: tuple[int, ...], flat: slice | None, data: torch.Tensor | None) -> ShardedTensor:
    local, offset = tuple(b - a for a, b in box), tuple(a for a, _ in box)
    return ShardedTensor("w", data, torch.float32, local, shape, offset, flattened_range=flat)


def a_box(rng: np.random.Generator, shape: tuple[int, ...]) -> Ends:
    ends = [sorted(rng.choice(n + 1, 2, replace=False).tolist()) for n in shape]
    return tuple((a, b) for a, b in ends)


def some_chunks(rng: np.random.Generator, shape: tuple[int, ...]) -> list[tuple[Ends, slice | None]]:
    """Slabs that tile the array, some of them moved, lost or cut into flat ranges; and other boxes."""
    edges = sorted({0, shape[0], *rng.integers(0, shape[0] + 1, rng.integers(0, 4)).tolist()})
    boxes: list[Ends] = [((a, b), *((0, n) for n in shape[1:])) for a, b in pairwise(edges)]
    chunks: list[tuple[Ends, slice | None]] = []
    for box in boxes:
        numel = math.prod(b - a for a, b in box)
        fate = rng.integers(0, 12)
        if fate == 0:
            continue
        if fate == 1:
            box = a_box(rng, shape)
            numel = math.prod(b - a for a, b in box)
        if fate in (2, 3, 4) and numel > 1:
            cuts = sorted({0, numel, *rng.integers(0, numel, 3).tolist()})
            ranges = list(pairwise(cuts))
            if fate == 4:
                low, high = ranges[rng.integers(len(ranges))]
                ranges[rng.integers(len(ranges))] = (max(0, low - int(rng.integers(2))), high)
            chunks += [(box, slice(a, b)) for a, b in ranges]
            continue
        chunks.append((box, None))
    chunks += [(a_box(rng, shape), None) for _ in range(rng.integers(0, 3))]
    return chunks


def saved(rng: np.random.Generator, shape: tuple[int, ...], strategy: str) -> MemoryStore:
    store, is_foreign = MemoryStore(), strategy == "foreign"
    strategy = "torch_dist" if is_foreign else strategy
    entities, value, starts = [], 0, set()
    chunks = some_chunks(rng, shape) or [(a_box(rng, shape), None)]
    for box, flat in chunks:
        if strategy == "torch_dist":  # knows boxes only, and one that begins at a place
            flat, start = None, tuple(a for a, _ in box)
            if start in starts:
                continue
            starts.add(start)
        numel = math.prod(b - a for a, b in box) if flat is None else flat.stop - flat.start
        data = torch.arange(value, value + numel, dtype=torch.float32)
        value += numel
        data = data if flat is not None else data.view([b - a for a, b in box])
        entities.append(tensor(box, shape, flat, data))
    save({"w": entities}, store, strategy, validate_access_integrity=False)
    if is_foreign:
        store.delete(store.names("megackpt-"))  # what we know more of it than `.metadata` says
    return store


def stored_elements(store: Store, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Paint the stored chunks one after the other; NaN where there is none."""
    chunks = open_checkpoint(store, allow_unsafe_pickle=False).chunks(["w"])
    table, dims = chunks.table, len(shape)
    whole = np.full(shape, np.nan, np.float32)
    for row in range(len(table)):
        part = tuple(
            slice(a, a + n)
            for a, n in zip(table.start[row, :dims].tolist(), table.shape[row, :dims].tolist(), strict=True)
        )
        box = whole[part].copy()
        low, high = int(table.flat_start[row]), int(table.flat_stop[row])
        box.reshape(-1)[low:high] = np.frombuffer(read_chunk(chunks, row), np.float32)
        whole[part] = box
    return whole


def sum_of_chunks(store: Store) -> int:
    """How many elements a `.metadata` lists, places that are listed once more not counted."""
    metadata = pickle.loads(store.read(".metadata", max_bytes=2**20))
    chunks = {c.offsets: c.sizes for c in metadata.state_dict_metadata["w"].chunks}
    return sum(math.prod(size) for size in chunks.values())


def check_load(
    store: Store, whole: np.ndarray[Any, Any], rng: np.random.Generator, group: Group | None, mode: Any
) -> bool:
    """Ask for a box, or a flat range of one; return whether it was loaded."""
    box: Ends = tuple((0, n) for n in whole.shape) if rng.integers(2) else a_box(rng, whole.shape)
    expected = whole[tuple(slice(a, b) for a, b in box)]
    flat = None
    if rng.integers(3) == 0:
        low, high = sorted(rng.choice(expected.size + 1, 2, replace=False).tolist())
        flat = slice(low, high)
        expected = expected.reshape(-1)[flat]
    target = None if rng.integers(4) == 0 else torch.full(expected.shape, SENTINEL)
    asked = tensor(box, whole.shape, flat, target)
    error = None
    try:
        loaded = load({"w": asked}, store, options=LoadOptions(exchange=mode), group=group)["w"]
    except FormatError as raised:
        error = str(raised)
    if error is None:
        assert np.array_equal(loaded.numpy(), expected)
        return True
    assert np.isnan(expected).any() or group is not None  # or it was the other rank's
    assert "has no data for some elements" in error
    assert target is None or (target == SENTINEL).all(), "nothing was read"
    return False


@settings(max_examples=few(40, of=1000), deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(["megackpt", "megackpt", "torch_dist", "foreign"]))
def test_a_load_gives_what_is_stored_or_raises(seed: int, strategy: str) -> None:
    rng = np.random.default_rng(seed)
    shape = tuple(rng.integers(2, 8, rng.integers(1, 4)).tolist())
    store = saved(rng, shape, strategy)
    if strategy == "foreign" and sum_of_chunks(store) > math.prod(shape):
        with pytest.raises(FormatError, match="chunks overlap"):
            load({"w": tensor(tuple((0, n) for n in shape), shape, None, None)}, store)
        return
    whole = stored_elements(store, shape)
    for _ in range(4):
        check_load(store, whole, rng, None, "direct")
    mode = MODES[rng.integers(len(MODES))]

    def of_rank(group: Group) -> bool:
        return check_load(store, whole, np.random.default_rng([seed, group.rank]), group, mode)

    first, second = SimulatedWorld(2).run(of_rank)
    assert first == second


def saved_unproved(ranges: list[tuple[int, int]], length: int, strategy: str) -> MemoryStore:
    """One rank saves each of these ranges, and nobody validates."""

    def state_of(rank: int) -> ShardedStateDict:
        low, high = ranges[rank]
        return {"w": tensor(((low, high),), (length,), None, torch.full((high - low,), float(rank)))}

    store = MemoryStore()
    SimulatedWorld(len(ranges)).run(saving(state_of, store, strategy, validate_access_integrity=False))
    return store


@pytest.mark.parametrize("strategy", ["megackpt", "torch_dist"])
@pytest.mark.parametrize("ranges", [[(0, 4), (3, 7)], [(0, 5), (2, 7)], [(0, 4), (0, 4)]])
@pytest.mark.parametrize("with_data", [True, False])
def test_an_overlap_does_not_hide_a_gap(
    strategy: str, ranges: list[tuple[int, int]], with_data: bool
) -> None:
    length = sum(b - a for a, b in ranges)  # as many elements as are stored
    store = saved_unproved(ranges, length, strategy)
    for mode in ("direct", *MODES):
        targets = [torch.full((length,), SENTINEL) for _ in range(2)]

        def request_of(rank: int, targets: list[torch.Tensor] = targets) -> ShardedStateDict:
            data = targets[rank] if with_data else None
            return {"w": tensor(((0, length),), (length,), None, data)}

        load_rank = loading(request_of, store, options=LoadOptions(exchange=mode))
        error, stop = error_of_all(2, load_rank, FormatError), ranges[1][1]
        assert f"'w': [0:{length}], of which no stored chunk has [{stop}:{length}]" in str(error)
        assert all((target == SENTINEL).all() for target in targets)


def test_of_overlapping_chunks_the_last_is_loaded() -> None:
    store = saved_unproved([(3, 8), (0, 4), (2, 6)], 8, "megackpt")
    for mode in ("direct", *MODES):
        load_rank = loading(
            lambda rank: {"w": tensor(((0, 8),), (8,), None, torch.full((8,), SENTINEL))},
            store,
            options=LoadOptions(exchange=mode),
        )
        # In the order of the index they begin at 0, 2 and 3.
        for loaded in SimulatedWorld(2).run(load_rank):
            assert loaded["w"].tolist() == [1.0, 1.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0]


COMPLETE = LoadOptions(complete=True)
LAYOUT = ParallelLayout(dp=4, ep=4)  # experts 0 and 1 on rank 0, and so on
KINDS = {
    "stacked": lambda groups: GatedExperts(8, 6, 4, groups),
    "modules": lambda groups: ExpertStack(lambda index: RowParallelLinear(4, 6, groups.experts), 8, groups),
}
KEYS = {"stacked": "experts.linear_fc2.weight", "modules": "experts.weight"}


def _state(kind: str, rank: int) -> ShardedStateDict:
    return KINDS[kind](ParallelGroups.offline(LAYOUT, rank)).sharded_state_dict("experts.")


# What rank 2 declares: nothing, or the experts of rank 1.
FAULTS = {
    "lost": (None, r"elements \[4:6, .*\] are {} by no rank"),
    "twice": (1, r"elements \[2:4, .*\] are {} by more than one main replica \(ranks 1, 2\)"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_save_and_a_complete_load_name_the_experts(tmp_path: Path, kind: str, fault: str) -> None:
    declared_by_2, text = FAULTS[fault]

    def spoilt(rank: int) -> ShardedStateDict:
        experts_of = declared_by_2 if rank == 2 else rank
        return {} if experts_of is None else _state(kind, experts_of)

    error = error_of_all(4, saving(spoilt, tmp_path), CoverageError)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    SimulatedWorld(4).run(saving(partial(_state, kind), tmp_path))
    of_load = error_of_all(4, loading(spoilt, tmp_path, options=COMPLETE), CoverageError)
    for raised, verb in ((error, "saved"), (of_load, "requested")):
        assert KEYS[kind] in str(raised)
        assert re.search(text.format(verb), str(raised))


def declare(key: str, value: float, if_missing: Literal["error", "keep"]) -> ShardedTensor:
    data = torch.full((2,), value)
    return ShardedTensor(key, data, data.dtype, (2,), (2,), (0,), if_missing=if_missing)


@pytest.mark.parametrize("strict", ["assume_ok_unexpected", "raise_all", "raise_unexpected", "log_all"])
def test_a_missing_array_is_kept_where_it_is_declared_so(tmp_path: Path, strict: str) -> None:
    megackpt.save({"old": declare("old", 1.0, "error")}, tmp_path)
    request = {"old": declare("old", 5.0, "keep"), "new": declare("new", 7.0, "keep")}
    loaded = megackpt.load(request, tmp_path, strict=strict)
    assert loaded["old"].tolist() == [1.0, 1.0]
    assert loaded["new"].tolist() == [7.0, 7.0]


UNTOUCHED = -1.0


def rows(start: int, count: int = 1, *, replica: int = 0, key: str = "w", of: int = 4) -> ShardedTensor:
    """Declare rows of a `[of, 3]` array, filled with a value that a load would overwrite."""
    data = torch.full((count, 3), UNTOUCHED)
    return ShardedTensor(key, data, data.dtype, (count, 3), (of, 3), (start, 0), replica_id=replica)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    whole = sharded("w", torch.arange(12.0).view(4, 3))
    bias = sharded("b", torch.ones(2))
    save({"w": whole, "b": bias, "step": 3, "plain": torch.ones(2), "stages": "EttL"}, tmp_path / "c")
    return tmp_path / "c"


def bias(group: SimulatedRank) -> ShardedTensor:
    return sharded("b", torch.zeros(2), replica_id=group.rank)


def load_on_two_ranks(path: Path, state_of: Callable[[SimulatedRank], dict[str, Any]]) -> list[Any]:
    """Load on two ranks; check that an error is the same on both, and that nothing was read before it."""
    states: dict[int, dict[str, Any]] = {}

    def one_rank(group: SimulatedRank) -> dict[str, Any]:
        states[group.rank] = state_of(group)
        return load(states[group.rank], path, group=group, options=COMPLETE)

    outcomes = SimulatedWorld(2).outcomes(one_rank)
    if any(isinstance(outcome, Exception) for outcome in outcomes):
        assert len({(type(outcome), str(outcome)) for outcome in outcomes}) == 1
        for state in states.values():
            assert all(torch.all(t.data == UNTOUCHED) for name, t in state.items() if name.startswith("w"))
    return outcomes


def test_a_complete_load_is_a_load(checkpoint: Path) -> None:
    first, second = load_on_two_ranks(
        checkpoint,
        lambda group: {
            "w": rows(2 * group.rank, 2),
            "w_of_the_other": rows(2 - 2 * group.rank, 2, replica=1),
            "b": bias(group),
            "plain": torch.zeros(2),
            "step": 0,
            "stages": "Et|tL",
        },
    )
    assert torch.cat((first["w"], second["w"])).flatten().tolist() == list(range(12))
    assert torch.equal(first["w_of_the_other"], second["w"])
    assert first["plain"].tolist() == [1, 1]
    assert (first["step"], first["stages"]) == (3, "EttL")  # the stored ones


def test_flat_ranges_of_a_box_are_one_request_of_it(checkpoint: Path) -> None:
    def state_of(group: SimulatedRank) -> dict[str, Any]:
        flat = slice(0, 7) if group.rank == 0 else slice(7, 12)
        data = torch.full((flat.stop - flat.start,), UNTOUCHED)
        part = ShardedTensor("w", data, data.dtype, (4, 3), (4, 3), (0, 0), flattened_range=flat)
        return {"w": part, "b": bias(group)}

    first, second = load_on_two_ranks(checkpoint, state_of)
    assert torch.cat((first["w"], second["w"])).tolist() == list(range(12))


def test_plain_tensors_that_arrays_answer_are_whole_on_every_rank(checkpoint: Path) -> None:
    outcomes = load_on_two_ranks(checkpoint, lambda group: {"w": torch.zeros(4, 3), "b": bias(group)})
    assert all(outcome["w"].flatten().tolist() == list(range(12)) for outcome in outcomes)


WRONG: dict[str, tuple[Callable[[int], dict[str, Any]], type[CheckpointError], list[str]]] = {
    "rows that no rank requests": (
        lambda rank: {"w": rows(3 * rank)},
        CoverageError,
        ["'w': elements [1:3, 0:3] are requested by no rank (global shape (4, 3))", "Requested by no rank:"],
    ),
    "rows that two ranks request": (
        lambda rank: {"w": rows(rank, 3)},
        CoverageError,
        ["'w': elements [1:3, 0:3] are requested by more than one main replica (ranks 0, 1)"],
    ),
    "rows that only replicas request": (
        lambda rank: {"w": rows(0, 4, replica=1)},
        CoverageError,
        ["requested by no rank", "ranks 0, 1 declare replicas, but no rank has the main one"],
    ),
    "a key that no rank requests": (
        lambda rank: {"w": rows(2 * rank, 2), "b": None},
        MissingKeyError,
        ["'b'", "KeyRule(keys='b', missing=Policy.IGNORE)"],
    ),
    # The arrays are covered, but the ranks belong to different models.
    "common state of another model": (
        lambda rank: {"w": rows(0, 4, replica=rank), "stages": ["Ett|L", "Et|tL"][rank]},
        CommonStateError,
        ["'stages' on rank(s) 1"],
    ),
    "another number of layers": (
        lambda rank: {"w": rows(3 * rank, 3, of=6)},
        MismatchError,
        ["'w': stored as float32 (4, 3), asked for as float32 (6, 3)"],
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_complete_is_an_error_that_names_it(checkpoint: Path, name: str) -> None:
    state_of, error, texts = WRONG[name]

    def one_state(group: SimulatedRank) -> dict[str, Any]:
        state = {"b": bias(group), **state_of(group.rank)}
        return {name: entity for name, entity in state.items() if entity is not None}

    outcome = load_on_two_ranks(checkpoint, one_state)[0]
    assert isinstance(outcome, error)
    assert [text for text in texts if text not in str(outcome)] == []


def test_a_rule_leaves_keys_to_the_checkpoint(checkpoint: Path) -> None:
    options = LoadOptions(complete=True, rules=(KeyRule(keys="b", missing=Policy.IGNORE),))
    assert load({"w": rows(0, 4)}, checkpoint, options=options)["w"][3].tolist() == [9, 10, 11]


def test_excluded_arrays_are_not_proved(checkpoint: Path) -> None:
    options = LoadOptions(complete=True, exclude=("w",))
    state = load({"w": rows(0, 2), "b": sharded("b", torch.zeros(2))}, checkpoint, options=options)
    assert torch.all(state["w"] == UNTOUCHED)


def test_ranks_with_different_options_are_an_error(checkpoint: Path) -> None:
    def one_rank(group: SimulatedRank) -> dict[str, Any]:
        return load({"w": rows(0, 4)}, checkpoint, group=group, options=LoadOptions(complete=group.rank == 0))

    assert "LoadOptions.complete" in str(error_of_all(2, one_rank, MismatchError))


def test_objects_are_loaded_without_proof(tmp_path: Path) -> None:
    save({"o": ShardedObject("o", 5, (1,), (0,))}, tmp_path)
    load_rank = loading(lambda rank: {"o": ShardedObject("o", 0, (1,), (0,))}, tmp_path, options=COMPLETE)
    assert [state["o"] for state in SimulatedWorld(2).run(load_rank)] == [5, 5]
