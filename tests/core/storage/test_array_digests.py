"""The digest of an array is CRC-64/NVME of its bytes, whoever wrote which part of it, and in what order."""

from __future__ import annotations

import math
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megackpt import SaveOptions, ShardedTensor, save
from megackpt.comm import Group
from megackpt.engine.checkpoint.opening import open_checkpoint
from megackpt.engine.data.tensor_bytes import as_bits, byte_view
from megackpt.errors import MissingExtraError
from megackpt.formats.array_digests import ArrayDigester
from megackpt.plans.geometry import Box, box_ranges
from megackpt.plans.metadata import ArraySpec, ChunkTable
from megackpt.storage import MemoryStore
from megackpt.storage.crc64 import Crc64
from megackpt.testing.layouts import arrays, boxes, owned_chunks
from megackpt.testing.world import SimulatedWorld
from tests.support.effort import few

checksums = pytest.importorskip("awscrt.checksums", reason="the extra digests is not installed")

OPTIONS = SaveOptions(array_digests=True)


def digest_of(array: torch.Tensor) -> int:
    """The reference: all bytes at once."""
    crc: int = checksums.crc64nvme(bytes(byte_view(as_bits(array.contiguous()))))
    return crc


@settings(max_examples=few(25, of=400), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), array=arrays(), ranks=st.integers(1, 4), validates=st.booleans())
def test_a_save_at_any_layout_stores_the_digest_of_the_array(
    data: st.DataObject, array: torch.Tensor, ranks: int, validates: bool
) -> None:
    layout = data.draw(owned_chunks(tuple(array.shape), ranks=ranks), label="layout")
    store = MemoryStore()

    def save_rank(group: Group) -> None:
        shards = [owned.declare("array", array) for owned in layout if owned.rank == group.rank]
        save({"shards": shards}, store, options=OPTIONS, group=group, validate_access_integrity=validates)

    SimulatedWorld(ranks).run(save_rank)
    digests = open_checkpoint(store, allow_unsafe_pickle=False).array_digests
    assert digests == {"array": digest_of(array)}


def test_a_chunk_that_several_ranks_write_parts_of_counts_once() -> None:
    array, odd = torch.rand(6000, 1001), torch.rand(3, 5)  # cut into parts; written by one
    store = MemoryStore()

    def save_rank(group: Group) -> None:
        copies = {
            key: ShardedTensor.from_rank_offsets(key, tensor, replica_id=group.rank)
            for key, tensor in (("array", array), ("odd", odd))
        }
        save(copies, store, options=OPTIONS, group=group)

    SimulatedWorld(3).run(save_rank)
    contents = open_checkpoint(store, allow_unsafe_pickle=False)
    assert len(contents.chunks(["array"]).table) > 1
    assert contents.array_digests == {"array": digest_of(array), "odd": digest_of(odd)}


def test_an_array_with_gaps_has_no_digest() -> None:
    store = MemoryStore()
    whole = ShardedTensor.from_rank_offsets("whole", torch.ones(3))
    part = ShardedTensor.from_rank_offsets("part", torch.ones(3), (0, 1, 2))
    save({"state": [whole, part]}, store, options=OPTIONS, validate_access_integrity=False)
    assert set(open_checkpoint(store, allow_unsafe_pickle=False).array_digests) == {"whole"}


def table_of(boxes: list[tuple[Box, int, int]], shape: tuple[int, ...], itemsize: int) -> ChunkTable:
    """Chunks of one array, as flat ranges of boxes."""
    dims = max(len(shape), 1)
    extents = np.array([[*box.shape, *[1] * (dims - len(shape))] for box, _, _ in boxes])
    start = np.array([[*box.start, *[0] * (dims - len(shape))] for box, _, _ in boxes])
    low, high = (np.array([chunk[i] for chunk in boxes]) for i in (1, 2))
    dtype = {1: "uint8", 2: "bfloat16", 16: "complex128"}[itemsize]
    number = np.zeros(len(boxes), np.int64)
    return ChunkTable(
        (ArraySpec("array", dtype, shape),), number, start, extents, low, high, (high - low) * itemsize
    )


@settings(max_examples=few(50, of=1000), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    data=st.data(),
    shape=st.lists(st.sampled_from([1, 2, 3, 7, 40, 150]), max_size=3).map(tuple),
    itemsize=st.sampled_from([1, 2, 16]),
    seed=st.integers(0, 99),
)
def test_parts_of_chunks_from_anywhere_and_of_any_length_make_up_the_digest(
    data: st.DataObject, shape: tuple[int, ...], itemsize: int, seed: int
) -> None:
    array = np.random.default_rng(seed).integers(0, 256, (*shape, itemsize), dtype=np.uint8)
    chunks = []
    for box in data.draw(boxes(shape)):
        cuts = data.draw(st.lists(st.integers(0, box.numel), max_size=2))
        ends = [0, *sorted(cuts), box.numel]
        chunks += [(box, a, b) for a, b in pairwise(ends) if b > a]
    digester = ArrayDigester(table_of(chunks, shape, itemsize))
    contributions = np.zeros(len(chunks), np.uint64)
    for row, (box, low, high) in enumerate(chunks):
        of_chunk = array[box.slices()].tobytes()[low * itemsize : high * itemsize]
        ends = sorted({0, len(of_chunk), *data.draw(st.lists(st.integers(1, len(of_chunk)), max_size=3))})
        steps = data.draw(st.sampled_from([1 << 20, 1000, 129]))
        for begin, end in pairwise(ends):
            part = digester.begin(row, start=begin)
            assert part is not None
            for at in range(begin, end, steps):
                part.update(memoryview(of_chunk)[at : min(at + steps, end)])
            contributions[row] ^= np.uint64(part.result())
    whole = digester.combine(contributions, {"array"})
    assert whole == {"array": checksums.crc64nvme(array.tobytes())}


@settings(max_examples=few(40, of=400), deadline=None)
@given(data=st.data(), shape=st.lists(st.integers(1, 6), max_size=4).map(tuple))
def test_runs_are_the_positions_of_the_bytes_of_a_box(data: st.DataObject, shape: tuple[int, ...]) -> None:
    location = np.arange(math.prod(shape) * 2).reshape(*shape, 2)
    for box in data.draw(boxes(shape)):
        if box.numel:
            runs = box_ranges(box.start, box.shape, shape, itemsize=2)
            begins = [runs.begin_of(run) for run in range(runs.count)]
            positions = [begin + at for begin in begins for at in range(runs.nbytes)]
            assert positions == location[box.slices()].reshape(-1).tolist()
            assert all(extent > 1 for extent in runs.extents)


pytest.importorskip("awscrt.checksums", reason="the extra digests is not installed")


def test_the_finished_value_is_that_of_the_catalogue() -> None:
    crc, data = Crc64(), b"123456789"
    value = crc.of(memoryview(data)[4:], crc.of(memoryview(data)[:4]))
    assert crc.finished(value, len(data)) == 0xAE8B14860A799888


def test_zeros_in_front_change_nothing_and_zeros_behind_are_a_shift() -> None:
    crc, data, zeros = Crc64(), b"some bytes", bytes(1000)
    value = crc.of(memoryview(data))
    assert crc.of(memoryview(zeros + data)) == value
    assert crc.of(memoryview(data + zeros)) == crc.shifted(value, 1000)
    assert crc.of(memoryview(zeros)) == 0


@pytest.mark.parametrize("nbytes", [1, 3, 8, 24, 127, 128, 1000])
@pytest.mark.parametrize("count", [0, 1, 5, 200])
def test_many_values_are_those_of_one_by_one(nbytes: int, count: int) -> None:
    crc = Crc64()
    data = np.random.default_rng(7).integers(0, 256, count * nbytes, dtype=np.uint8)
    parts = [memoryview(data.tobytes())[at : at + nbytes] for at in range(0, len(data), nbytes)]
    values = crc.of_each(memoryview(data.tobytes()), nbytes)
    assert values.tolist() == [crc.of(part) for part in parts]
    assert crc.shift(values, 77).tolist() == [crc.shifted(value, 77) for value in values.tolist()]


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 64), (70, 3), (5, 101)])
def test_rows_fold_to_the_value_of_their_bytes(shape: tuple[int, int]) -> None:
    crc, (rows, count) = Crc64(), shape
    data = np.random.default_rng(7).integers(0, 256, (rows, count, 10), dtype=np.uint8)
    values = np.array([crc.of_each(row.tobytes(), 10) for row in data])  # type: ignore[arg-type]
    assert crc.fold(values, 10).tolist() == [crc.of(memoryview(row.tobytes())) for row in data]


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "awscrt.checksums", None)
    with pytest.raises(MissingExtraError, match=r"package awscrt, .* pip install 'megackpt\[digests\]'"):
        Crc64()
