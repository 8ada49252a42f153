"""However often a run changes its number of data-parallel ranks, each epoch has every sample once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megackpt import DeclarationError, MismatchError, load, save
from megackpt.storage import MemoryStore
from megackpt.testing.world import SimulatedWorld
from megackpt.training.parallel import ParallelGroups, ParallelLayout
from megackpt.training.parallel.layout import Coordinates
from megackpt.training.state import (
    DataPosition,
    RankPosition,
    SampleOrder,
    SequenceReader,
    ShardedData,
    ShardReader,
    ShuffleBuffer,
)
from tests.support.effort import few

# The other axes, whose ranks read the same samples as the first rank of their dp.
OTHER_AXES = st.sampled_from(
    [
        {},
        {"tp": 2},
        {"cp": 2},
        {"cp": 2, "pp": 2},
        {"tp": 2, "cp": 2, "ep": 4, "etp": 1},
        {"cp": 2, "ep": 2, "etp": 1},
    ]
)
LAYOUTS = st.builds(lambda dp, axes: ParallelLayout(dp=dp, **axes), st.integers(1, 4), OTHER_AXES)
# Phases of a run: layout, steps, samples of a global batch.
PHASES = st.lists(st.tuples(LAYOUTS, st.integers(0, 5), st.integers(1, 9)), min_size=1, max_size=5)
SHARDS = st.lists(st.integers(1, 7), min_size=4, max_size=8)


@settings(max_examples=few(40, of=100), deadline=None)
@given(samples=st.integers(1, 300), seed=st.integers(0, 2**40), epoch=st.integers(0, 2**20))
def test_an_epoch_is_a_permutation_and_a_function_of_the_index(samples: int, seed: int, epoch: int) -> None:
    order = SampleOrder(samples=samples, seed=seed)
    whole = order.numbers(range(epoch * samples, (epoch + 1) * samples))
    assert sorted(whole.tolist()) == list(range(samples))
    numbers = SampleOrder(samples=samples, seed=seed).numbers([epoch * samples + samples // 2])
    assert numbers.tolist() == [whole[samples // 2]]


def test_orders_of_other_seeds_and_epochs_are_others_and_none_ever_changes() -> None:
    first, second = SampleOrder(samples=1000, seed=1).numbers(range(2000)).reshape(2, 1000)
    other = SampleOrder(samples=1000, seed=2).numbers(range(1000))
    # A random permutation has one fixed point on average; three in the same place as in another: likewise.
    assert all((a == b).sum() < 10 for a, b in [(first, second), (first, other), (first, np.arange(1000))])
    assert abs(np.corrcoef(first, np.arange(1000))[0, 1]) < 0.15
    assert first[:6].tolist() == PINNED  # another value would reorder the data of every run
    assert SampleOrder(samples=3, shuffle=False).numbers(range(7)).tolist() == [0, 1, 2, 0, 1, 2, 0]
    with pytest.raises(DeclarationError, match="data set of 0 samples"):
        SampleOrder(samples=0)


PINNED = [774, 204, 140, 431, 664, 666]


def one_of_each_dp(of_ranks: list[Any], layout: ParallelLayout) -> list[Any]:
    """Return what the ranks of dp have read; ranks that differ along other axes have read the same."""
    of_dp = [of_ranks[layout.rank_at(Coordinates(dp=dp))] for dp in range(layout.dp)]
    assert of_ranks == [of_dp[layout.coordinates(rank).dp] for rank in range(layout.world_size)]
    return of_dp


@given(samples=st.integers(1, 40), phases=PHASES)
@settings(max_examples=few(10, of=25), deadline=None)
def test_every_sample_comes_once_an_epoch_in_the_same_order_at_any_sequence_of_layouts(
    samples: int, phases: list[tuple[ParallelLayout, int, int]]
) -> None:
    order = SampleOrder(samples=samples, seed=3)
    store = MemoryStore("run")
    visited: list[int] = []
    for phase, (layout, steps, batch) in enumerate(phases):

        def run(
            group: Any,
            phase: int = phase,
            layout: ParallelLayout = layout,
            steps: int = steps,
            batch: int = batch,
        ) -> list[list[int]]:
            data, dp = DataPosition(order.to_json()), ParallelGroups.offline(layout, group.rank).dp
            if phase:
                data.resume(load({"d": data.sharded_state_dict()}, store, group=group)["d"], step=phase)
            own_samples = [
                order.numbers(data.take(batch, dp_rank=dp.rank, dp_size=dp.size)).tolist()
                for _ in range(steps)
            ]
            save({"d": data.sharded_state_dict()}, store, group=group)
            return own_samples

        of_ranks = one_of_each_dp(SimulatedWorld(layout.world_size).run(run), layout)
        visited += [
            number for step in range(steps) for own_samples in of_ranks for number in own_samples[step]
        ]

    assert visited == order.numbers(range(len(visited))).tolist()
    whole, rest = divmod(len(visited), samples)
    counts = Counter(visited)
    assert set(counts.values()) <= {whole, whole + 1}
    assert sum(count == whole + 1 for count in counts.values()) == rest


def open_shard(lengths: dict[str, int], buffer: int) -> Any:
    """Return what opens a shard whose samples are (name, number)."""

    def opened(name: str, epoch: int) -> ShardReader:
        reader = SequenceReader([(name, number) for number in range(lengths[name])])
        return ShuffleBuffer(reader, size=buffer, seed=100 * epoch + len(name)) if buffer else reader

    return opened


def read_shards(
    store: MemoryStore, lengths: dict[str, int], buffer: int, phase: int, layout: ParallelLayout, draws: int
) -> list[list[tuple[str, int]]]:
    """Resume what there is, read on each rank, save; return what the ranks of dp have read."""

    def run(group: Any) -> list[tuple[str, int]]:
        location = RankPosition.of(ParallelGroups.offline(layout, group.rank))
        data = ShardedData(list(lengths), open_shard(lengths, buffer), location)
        if phase:
            loaded = load({"d": data.sharded_state_dict("d.")}, store, group=group)
            assert data.resume(loaded["d"], step=phase) == ""
        drawn = [next(data) for _ in range(draws)]
        assert {name for name, _ in drawn} <= set(data.my_shards)
        assert data.my_shards == tuple(sorted(lengths))[location.index("dp") :: layout.dp]
        save({"d": data.sharded_state_dict("d.")}, store, group=group)
        return drawn

    return one_of_each_dp(SimulatedWorld(layout.world_size).run(run), layout)


@given(shards=SHARDS, phases=PHASES, buffer=st.sampled_from([0, 1, 3]))
@settings(max_examples=few(7, of=15), deadline=None)
def test_shards_that_change_their_readers_lose_and_repeat_nothing(
    shards: list[int], phases: list[tuple[ParallelLayout, int, int]], buffer: int
) -> None:
    lengths = {f"{'s' * n}": length for n, length in enumerate(shards, start=1)}
    store = MemoryStore("run")
    read: dict[str, list[int]] = {name: [] for name in lengths}
    for phase, (layout, draws, _) in enumerate(phases):
        for drawn in read_shards(store, lengths, buffer, phase, layout, draws):
            for name, number in drawn:
                read[name].append(number)

    for name, numbers in read.items():
        reader, epoch, expected = open_shard(lengths, buffer)(name, 0), 0, []
        while len(expected) < len(numbers):
            try:
                expected.append(next(reader)[1])
            except StopIteration:
                epoch += 1
                reader = open_shard(lengths, buffer)(name, epoch)
        assert numbers == expected
        assert set(Counter(numbers).values()) <= {
            len(numbers) // lengths[name],
            -(-len(numbers) // lengths[name]),
        }


@given(
    shards=SHARDS,
    dp=st.integers(1, 4),
    axes=st.tuples(OTHER_AXES, OTHER_AXES),
    until=st.integers(0, 20),
    buffer=st.sampled_from([0, 3]),
)
@settings(max_examples=few(5, of=10), deadline=None)
def test_at_the_same_dp_sharded_data_goes_on_as_if_it_had_not_stopped(
    shards: list[int], dp: int, axes: tuple[dict[str, int], dict[str, int]], until: int, buffer: int
) -> None:
    lengths = {f"{'s' * n}": length for n, length in enumerate(shards, start=1)}
    before, after = (ParallelLayout(dp=dp, **other) for other in axes)
    whole = read_shards(MemoryStore("whole"), lengths, buffer, 0, before, 25)
    store = MemoryStore("parts")
    first = read_shards(store, lengths, buffer, 0, before, until)
    second = read_shards(store, lengths, buffer, 1, after, 25 - until)
    assert [a + b for a, b in zip(first, second, strict=True)] == whole


def test_a_rank_visits_all_samples_of_its_shards_before_any_of_the_next_epoch() -> None:
    lengths = {"a": 5, "b": 1, "c": 3}
    (read,) = read_shards(MemoryStore("run"), lengths, 0, 0, ParallelLayout(), 18)
    assert len(set(read[:9])) == len(set(read[9:])) == 9
    assert read[:3] == [("a", 0), ("b", 0), ("c", 0)]


def test_other_shards_are_an_error_that_names_them(tmp_path: Path) -> None:
    def data(**lengths: int) -> ShardedData:
        return ShardedData(list(lengths), open_shard(lengths, 0), RankPosition.single_process())

    save(data(a=2, b=3).sharded_state_dict(), tmp_path / "c")
    for other in (data(a=2, c=3), data(a=2, b=3, c=3)):
        loaded = load(other.sharded_state_dict(), tmp_path / "c")
        with pytest.raises(MismatchError, match=r"saved for 2 shards(.|\n)*'c' is new\nResume with the same"):
            other.resume(loaded, step=1)
    shorter = data(a=1, b=3)
    with pytest.raises(MismatchError, match=r"had 2 samples when its position was saved, and has 1 now"):
        shorter.resume(load(shorter.sharded_state_dict(), tmp_path / "c"), step=1)


def test_fewer_shards_than_ranks_and_empty_shards_are_errors() -> None:
    location = RankPosition(layout={"dp": 4}, coordinates={"dp": 0})
    with pytest.raises(DeclarationError, match=r"4 data-parallel ranks share 3 shards.*Use at most 3"):
        ShardedData(["a", "b", "c"], open_shard({"a": 1}, 0), location)
    with pytest.raises(DeclarationError, match="named twice"):
        ShardedData(["a", "a"], open_shard({"a": 1}, 0), RankPosition.single_process())
    with pytest.raises(DeclarationError, match="Shard 'a' has no samples"):
        next(ShardedData(["a"], open_shard({"a": 0}, 0), RankPosition.single_process()))
    with pytest.raises(DeclarationError, match="buffer of 0 samples"):
        ShuffleBuffer(SequenceReader([]), size=0, seed=1)
