# ruff: noqa: D102 - the name of a test is its claim
"""What every format must do, as tests: subclass `FormatConformance` and give it a `format` fixture.

The claims hold for all formats: a load gives what was saved, a save is all or nothing, and damage is an error
and no wrong value. What only one format promises (its bytes, its other readers) has tests of its own.

    class TestMyFormat(FormatConformance):
        @pytest.fixture
        def format(self) -> Format:
            return my_package.FORMAT
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megackpt.comm import Group
from megackpt.engine.checkpoint.manifest import is_committed
from megackpt.engine.checkpoint.opening import open_checkpoint
from megackpt.engine.data.tensor_bytes import as_bits, byte_view
from megackpt.entities import ShardedObject, ShardedStateDict, ShardedTensor
from megackpt.errors import CheckpointError, DeclarationError, FormatError, UnserializableError
from megackpt.formats.strategy import MANIFEST, Format, SaveStrategy
from megackpt.options import Exchange, LoadOptions, SaveOptions
from megackpt.plans.metadata import DTYPES
from megackpt.run.collective import load, save
from megackpt.run.local import (
    load_content_metadata,
    load_sharded_metadata,
    load_tensors_metadata,
    remove_sharded_tensors,
)
from megackpt.storage import LocalStore, Store
from megackpt.testing.faulty_store import FaultyStore
from megackpt.testing.format_trials import (
    StrategyOfPartsGivenOnce,
    bytes_of,
    cut_file,
    data_of,
    declared_chunks,
    loaded_number,
    numbered_state,
    remove_file,
    whole,
)
from megackpt.testing.identical import difference
from megackpt.testing.layouts import arrays, owned_chunks
from megackpt.testing.world import SimulatedWorld

RANKS = 2
_numbers = itertools.count()


def spoiled(wanted: list[ShardedTensor]) -> list[ShardedTensor]:
    """Fill tensors with something that is not the answer."""
    for tensor in wanted:
        as_bits(data_of(tensor)).fill_(1)
    return wanted


class FormatConformance:
    """The tests. The fixture `format` gives a format that is both saved and loaded.

    Attributes:
        examples: how many pairs of layouts are tried, and twice as many as ways to exchange.
    """

    examples = 60

    @pytest.fixture
    def format(self) -> Format:
        """Return the format under test."""
        raise NotImplementedError("A subclass of FormatConformance gives the fixture `format`.")

    @pytest.fixture
    def new_store(self, tmp_path: Path) -> Callable[[], Store]:
        """Return what makes an empty store; a format that needs another kind gives its own."""
        return lambda: LocalStore(tmp_path / f"store-{next(_numbers)}")

    @pytest.fixture
    def strategy(self, format: Format) -> SaveStrategy:
        """Return the strategy that saves."""
        assert format.save is not None
        return format.save()

    def test_any_layout_loads_what_any_other_saved(
        self, strategy: SaveStrategy, new_store: Callable[[], Store]
    ) -> None:
        @settings(max_examples=self.examples, deadline=None, suppress_health_check=list(HealthCheck))
        @given(data=st.data(), array=arrays(), source_ranks=st.integers(1, 3), target_ranks=st.integers(1, 3))
        def check(data: st.DataObject, array: torch.Tensor, source_ranks: int, target_ranks: int) -> None:
            source = data.draw(owned_chunks(tuple(array.shape), ranks=source_ranks), label="source")
            target = data.draw(owned_chunks(tuple(array.shape), ranks=target_ranks), label="target")
            store = new_store()

            def save_rank(group: Group) -> None:
                save({"shards": declared_chunks(source, array, group.rank)}, store, strategy, group=group)

            def load_rank(group: Group) -> list[ShardedTensor]:
                wanted = spoiled(declared_chunks(target, array, group.rank))
                load({"shards": wanted}, store, group=group)
                return wanted

            SimulatedWorld(source_ranks).run(save_rank)
            for rank, loaded in enumerate(SimulatedWorld(target_ranks).run(load_rank)):
                for got, expected in zip(loaded, declared_chunks(target, array, rank), strict=True):
                    assert bytes_of(got) == bytes_of(expected)
            store.close()

        check()

    def test_any_way_to_exchange_loads_what_direct_reading_loads(
        self, strategy: SaveStrategy, new_store: Callable[[], Store]
    ) -> None:
        ways: st.SearchStrategy[Exchange] = st.sampled_from(("direct", "all_to_all", "two_stage"))

        @settings(max_examples=self.examples // 2, deadline=None, suppress_health_check=list(HealthCheck))
        @given(data=st.data(), array=arrays(), ranks=st.integers(2, 4), way=ways)
        def check(data: st.DataObject, array: torch.Tensor, ranks: int, way: Exchange) -> None:
            source = data.draw(owned_chunks(tuple(array.shape), ranks=ranks), label="source")
            target = data.draw(owned_chunks(tuple(array.shape), ranks=ranks), label="target")
            store = new_store()
            options = LoadOptions(exchange=way, exchange_bytes=data.draw(st.sampled_from([1, 1 << 20])))

            def run(group: Group) -> list[ShardedTensor]:
                thing = ShardedObject("thing", 7, (1,), (0,), group.rank)
                state = {"shards": declared_chunks(source, array, group.rank), "thing": thing}
                save(state, store, strategy, group=group)
                wanted = spoiled(declared_chunks(target, array, group.rank))
                thing = ShardedObject("thing", None, (1,), (0,), group.rank)
                loaded = load({"shards": wanted, "thing": thing}, store, options=options, group=group)
                assert loaded["thing"] == 7
                return wanted

            for rank, loaded in enumerate(SimulatedWorld(ranks).run(run)):
                for got, expected in zip(loaded, declared_chunks(target, array, rank), strict=True):
                    assert bytes_of(got) == bytes_of(expected)
            store.close()

        check()

    @pytest.mark.parametrize("part_bytes", [64, 1 << 20])
    def test_parts_are_not_read_when_they_are_no_longer_valid(
        self, strategy: SaveStrategy, new_store: Callable[[], Store], part_bytes: int
    ) -> None:
        values = {f"w{i}": torch.rand(20, 30)[:, i:] for i in range(5)}
        store = new_store()
        fleeting = cast(SaveStrategy, StrategyOfPartsGivenOnce(strategy))
        save(
            {k: whole(k, v) for k, v in values.items()},
            store,
            fleeting,
            options=SaveOptions(part_bytes=part_bytes),
        )
        loaded = load({k: whole(k, torch.zeros_like(v)) for k, v in values.items()}, store)
        assert difference(loaded, values) is None

    # An older torch lacks some.
    @pytest.mark.parametrize("dtype", [name for name in DTYPES if hasattr(torch, name)])
    def test_every_dtype_keeps_its_bits(
        self, strategy: SaveStrategy, new_store: Callable[[], Store], dtype: str
    ) -> None:
        kind: torch.dtype = getattr(torch, dtype)
        noise = torch.from_numpy(np.random.default_rng(0).integers(0, 256, 24 * kind.itemsize, np.uint8))
        values = torch.rand(4, 6) < 0.5 if kind == torch.bool else noise.view(kind).reshape(4, 6)
        store = new_store()
        save({"w": whole("w", values)}, store, strategy)
        loaded = load({"w": whole("w", torch.zeros_like(values))}, store)
        assert difference(loaded["w"], values) is None

    @pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0), (1, 1, 1, 1), (2, 3, 4, 5)])
    def test_every_shape_comes_back(
        self, strategy: SaveStrategy, new_store: Callable[[], Store], shape: tuple[int, ...]
    ) -> None:
        store = new_store()
        values = torch.rand(shape)
        save({"w": whole("w", values)}, store, strategy)
        loaded = load({"w": whole("w", torch.zeros(shape))}, store)
        assert difference(loaded["w"], values) is None
        assert load_tensors_metadata(store)["w"].global_shape == shape

    def test_objects_and_common_state_come_back(
        self, strategy: SaveStrategy, new_store: Callable[[], Store]
    ) -> None:
        store = new_store()
        common = {"step": 7, "lr": [1e-3, -0.0], "name": "a", "nothing": None, "rng": torch.arange(3)}

        def state(group: Group, filled: bool) -> ShardedStateDict:
            value = {"rank": group.rank, "list": [1, "two", 3.0]} if filled else None
            here = ShardedObject("loader/state", value, (RANKS,), (group.rank,))
            return {"loader": here, **(common if filled else {})}

        world = SimulatedWorld(RANKS)
        world.run(lambda g: save(state(g, True), store, strategy, content_metadata={"v": 1}, group=g))
        for rank, loaded in enumerate(world.run(lambda g: load(state(g, False), store, group=g))):
            assert loaded.pop("loader") == {"rank": rank, "list": [1, "two", 3.0]}
            assert set(loaded) == set(common)
            assert all(difference(loaded[k], common[k], path=k) is None for k in common)
        assert load_content_metadata(store) == {"v": 1}

    def test_an_object_that_it_cannot_store_raises_an_error_with_its_path(
        self, strategy: SaveStrategy, new_store: Callable[[], Store]
    ) -> None:
        store = new_store()
        with pytest.raises(UnserializableError, match="handle"):
            save({"o": ShardedObject("handle", lambda: 0, (1,), (0,))}, store, strategy)
        assert not is_committed(store)

    @pytest.mark.parametrize("where", ["state", "content_metadata"])
    def test_common_state_that_it_cannot_store_raises_an_error_before_anything_is_written(
        self, strategy: SaveStrategy, new_store: Callable[[], Store], where: str
    ) -> None:
        store = new_store()
        bad = {"f": lambda: 0}  # no format holds a function
        state, content = (bad, None) if where == "state" else ({}, bad)
        strategy.check_common({"state_dict": {}, "content_metadata": None})
        with pytest.raises(UnserializableError):
            strategy.check_common({"state_dict": state, "content_metadata": content})
        with pytest.raises(UnserializableError):
            save({"w": whole("w", torch.zeros(3)), **state}, store, strategy, content_metadata=content)
        assert store.names() == []

    @pytest.mark.parametrize("key", ["a/b", "a.b-c_d", "with space", "ключ", "a" * 150, "metadata.json", "0"])
    def test_a_key_is_kept_or_raises_an_error(
        self, strategy: SaveStrategy, new_store: Callable[[], Store], key: str
    ) -> None:
        store = new_store()
        values = torch.arange(6.0)
        error_text = None
        try:
            save({"w": whole(key, values), "x": whole("other", values + 1)}, store, strategy)
        except (DeclarationError, UnserializableError) as error:
            error_text = str(error)
        if error_text is not None:
            assert key in error_text
            assert not is_committed(store)
            return
        loaded = load({"w": whole(key, torch.zeros(6)), "x": whole("other", torch.zeros(6))}, store)
        assert torch.equal(loaded["w"], values)
        assert torch.equal(loaded["x"], values + 1)

    def test_a_second_save_replaces_the_first(
        self, strategy: SaveStrategy, new_store: Callable[[], Store]
    ) -> None:
        store = new_store()
        save(numbered_state(1), store, strategy)
        first = set(store.names())
        save(numbered_state(2), store, strategy)
        assert loaded_number(store) == 2
        save(numbered_state(3), store, strategy)
        assert loaded_number(store) == 3
        assert len(store.names()) <= len(first) + 1, "files of earlier saves were left behind"

    def test_a_save_that_fails_anywhere_leaves_the_old_checkpoint_or_the_new(
        self, strategy: SaveStrategy, new_store: Callable[[], Store]
    ) -> None:
        counting = FaultyStore(new_store())
        save(numbered_state(1), counting, strategy)
        before = len(counting.operations)
        save(numbered_state(2), counting, strategy)
        first = self._saved(strategy, new_store())
        files = {name: first.read(name, max_bytes=1 << 30) for name in first.names()}
        for failing in range(len(counting.operations) - before):
            inner = new_store()
            inner.create()
            for name, data in files.items():
                inner.write(name, data)
            faulty = FaultyStore(inner, fail_at=failing)
            with contextlib.suppress(CheckpointError):
                save(numbered_state(2), faulty, strategy)
            assert is_committed(inner), "the old checkpoint is gone"
            assert loaded_number(inner) in (1, 2)
            save(numbered_state(3), inner, strategy)
            assert loaded_number(inner) == 3

    def test_missing_and_cut_files_are_errors_and_never_wrong_values(
        self, strategy: SaveStrategy, new_store: Callable[[], Store]
    ) -> None:
        names = self._saved(strategy, new_store()).names()
        assert names
        for damage in (cut_file, remove_file):
            for position in range(len(names)):
                store = self._saved(strategy, new_store())
                damage(store, store.names()[position])
                store.close()
                try:
                    value = loaded_number(store)
                except CheckpointError:
                    continue
                assert value == 1

    @pytest.mark.parametrize("damaged", [b"", b"{", b"[]", b"null", b"\xff"])
    def test_a_damaged_manifest_is_an_error_of_ours_to_whoever_loads_or_saves(
        self, strategy: SaveStrategy, new_store: Callable[[], Store], damaged: bytes
    ) -> None:
        store = self._saved(strategy, new_store())
        store.replace(MANIFEST, damaged)
        with pytest.raises(FormatError, match=MANIFEST):
            loaded_number(store)
        with contextlib.suppress(CheckpointError):  # it may raise an error, or replace what is damaged
            save(numbered_state(2), store, strategy)
            assert loaded_number(store) == 2
        store.close()

    def test_any_range_of_a_chunk_can_be_read(
        self, strategy: SaveStrategy, new_store: Callable[[], Store]
    ) -> None:
        store = new_store()
        values = torch.arange(300_000, dtype=torch.int32).reshape(300, 1000)
        save({"w": whole("w", values)}, store, strategy)
        chunks = open_checkpoint(store).chunks(["w"])
        table, block = chunks.table, chunks.block_bytes
        assert sorted(chunks.position.tolist()) == sorted(set(chunks.position.tolist()))
        for row in range(min(len(table), 4)):
            nbytes = int(table.nbytes[row])
            box = tuple(
                slice(a, a + n)
                for a, n in zip(table.start[row].tolist(), table.shape[row].tolist(), strict=True)
            )
            expected = bytes(byte_view(values[box].contiguous()))
            for start, stop in ((0, nbytes), (0, min(block, nbytes)), (nbytes // 2 // block * block, nbytes)):
                out = bytearray(stop - start)
                chunks.read_into(row, start, memoryview(out), verify=True)
                assert bytes(out) == expected[start:stop]
            assert store.location in chunks.describe(row) or chunks.describe(row)

    def test_arrays_can_be_taken_out(self, strategy: SaveStrategy, new_store: Callable[[], Store]) -> None:
        store = new_store()
        save(
            {"a": whole("model.a", torch.ones(3)), "b": whole("opt.b", torch.full((3,), 2.0))},
            store,
            strategy,
        )
        self.remove(store, "opt.")
        assert set(load_sharded_metadata(store)) == {"model.a"}
        assert torch.equal(load({"a": whole("model.a", torch.zeros(3))}, store)["a"], torch.ones(3))

    def test_all_ranks_agree_on_the_number_of_rounds(
        self, strategy: SaveStrategy, new_store: Callable[[], Store]
    ) -> None:
        seen: list[int] = []
        rounds = strategy.rounds

        @SaveStrategy.register
        class Watched:
            def __getattr__(self, name: str) -> Any:
                return getattr(strategy, name)

            def rounds(self, plan: Any, rank: int) -> Any:
                answer = rounds(plan, rank)
                rows = np.concatenate(answer) if answer else np.zeros(0)
                assert sorted(rows.tolist()) == sorted(plan.rows_of(rank).tolist())
                seen.append(len(answer))
                return answer

        def part(rank: int) -> ShardedTensor:
            data = torch.full((5,), float(rank))
            return ShardedTensor.from_rank_offsets("w", data, (0, rank, 3))

        store, watched = new_store(), cast(SaveStrategy, Watched())
        SimulatedWorld(3).run(lambda g: save({"w": part(g.rank)}, store, watched, group=g))
        assert len(set(seen)) == 1

    def remove(self, store: Store, prefix: str) -> None:
        """Take arrays out of the checkpoint in a store."""
        remove_sharded_tensors(store, prefix)

    def _saved(self, strategy: SaveStrategy, store: Store) -> Store:
        save(numbered_state(1), store, strategy)
        return store
