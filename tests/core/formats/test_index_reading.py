"""A rank reads its own part of an index, and that gives what was saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import torch

import megackpt
from megackpt import LoadOptions, ShardedObject, ShardedTensor
from megackpt.errors import IntegrityError
from megackpt.formats import index_reader
from megackpt.formats.index_file import WholeIndex, read_index, write_index
from megackpt.formats.partial_index import PartialIndex
from megackpt.metadata import ArraySpec, ChunkTable, StoredChunks, block_counts
from megackpt.storage import MemoryStore
from megackpt.testing.world import SimulatedWorld
from tests.support.states import box, damaged, small, stack


class CountingStore(MemoryStore):
    """Counts what is read."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[int] = []

    def read(self, name: str, *, max_bytes: int) -> bytes:
        """Count a whole file."""
        data = super().read(name, max_bytes=max_bytes)
        self.requests.append(len(data))
        return data

    def read_into(self, name: str, offset_bytes: int, out: memoryview) -> None:
        """Count a range."""
        self.requests.append(out.nbytes)
        super().read_into(name, offset_bytes, out)


def test_a_rank_reads_a_small_part_of_a_large_index() -> None:
    stored, store = stack(8, 128, 256), CountingStore()
    message = {"index": write_index(store, "index", stored)}
    nbytes = message["index"]["nbytes"]
    assert nbytes / len(stored) < 100
    assert message["index"]["head"]["nbytes"] < 0.01 * nbytes
    index = index_reader.open_index(store, message)
    assert isinstance(index, PartialIndex)
    chunks = index.of_boxes([box(stored, k, (64, 0, 0), (2, 256, 300_000)) for k in (2, 3)])
    assert len(chunks) == 2 * 2 * 256
    assert sum(store.requests) < 0.05 * nbytes
    assert len(store.requests) < 50


def test_a_small_index_is_one_request() -> None:
    stored, store = stack(2, 4, 4), CountingStore()
    message = {"index": write_index(store, "index", stored)}
    index = index_reader.open_index(store, message)
    assert len(index.of_boxes([box(stored, 1, (1, 0, 0), (1, 4, 300_000))])) == 16
    assert store.requests == [message["index"]["nbytes"]]


def test_an_index_without_a_head_is_read_whole() -> None:
    store, message, stored = small()
    del message["index"]["head"]
    index = index_reader.open_index(store, message, whole_bytes=0)
    assert isinstance(index, WholeIndex)
    assert len(index.of_keys([stored.table.arrays[2].key])) == 64


def test_an_index_is_these_bytes() -> None:
    _, message, _ = small()
    assert message["index"] == {
        "file": "index",
        "nbytes": 15352,
        "xxh3_128": "f5e8b7634cd5d501cca020db7adc2683",
        "head": {
            "nbytes": 3064,
            "xxh3_128": "923c2dae738e949087c81f4edd864bbb",
            "block_rows": 16,
            "block_digests": 8,
        },
    }


def test_other_programs_open_an_index(tmp_path: Path) -> None:
    store, message, stored = small()
    (tmp_path / "index").write_bytes(store.read("index", max_bytes=message["index"]["nbytes"]))
    with safetensors.safe_open(tmp_path / "index", "pt") as file:
        assert torch.equal(file.get_tensor("start"), torch.from_numpy(stored.table.start.astype(np.uint32)))
        assert torch.equal(file.get_tensor("digest"), torch.from_numpy(stored.digests))


@pytest.mark.parametrize("first", [2**32 - 2, 2**32 - 1, 2**32])
def test_a_chunk_is_found_wherever_it_begins(first: int) -> None:
    column = np.array([0, first])
    ones, zeros = np.ones(2, np.int64), np.zeros(2, np.int64)
    shape = np.array([first, 1])
    table = ChunkTable(
        (ArraySpec("w", "int8", (first + 1,)),), zeros, column[:, None], shape[:, None], zeros, shape, shape
    )
    digests = np.zeros(int(block_counts(shape).sum()), np.uint64)
    stored = StoredChunks(table, zeros, column, np.array([0, len(digests) - 1]), digests, ("data/0",))
    store = MemoryStore()
    message = {"index": write_index(store, "index", stored)}
    index = index_reader.open_index(store, message, whole_bytes=0)
    assert index.of_keys(["w"]).table.start[:, 0].tolist() == column.tolist()
    last = ChunkTable(
        table.arrays, zeros[:1], column[1:, None], ones[:1, None], zeros[:1], ones[:1], ones[:1]
    )
    assert first in index.of_boxes([last]).table.start


def state(rank: int, ranks: int) -> dict[str, Any]:
    """Tensors that are cut along another dim by other numbers of ranks, a flat one, and objects."""
    values = torch.arange(48 * 24, dtype=torch.int32).reshape(48, 24)
    rows, dim = (48 // ranks, 0) if ranks % 2 else (24 // ranks, 1)
    part = values.narrow(dim, rank * rows, rows).contiguous()
    numel = 48 * 24 // ranks
    flat = values.reshape(-1)[rank * numel : (rank + 1) * numel].clone()
    return {
        "w": ShardedTensor.from_rank_offsets("w", part, (dim, rank, ranks)),
        "m": ShardedTensor(
            key="m",
            data=flat,
            dtype=flat.dtype,
            local_shape=(48, 24),
            global_shape=(48, 24),
            global_offset=(0, 0),
            flattened_range=slice(rank * numel, (rank + 1) * numel),
        ),
        "o": ShardedObject("o", {"rank": rank}, (ranks,), (rank,)),
    }


@pytest.mark.parametrize("exchange", ["direct", "all_to_all", "two_stage"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_load_by_parts_of_the_index_gives_what_was_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: Any, ranks: int
) -> None:
    SimulatedWorld(3).run(lambda group: megackpt.save(state(group.rank, 3), tmp_path, group=group))
    opened = []

    def open_by_parts(*args: Any) -> PartialIndex:
        opened.append(index_reader.open_index(*args, whole_bytes=0))
        return opened[-1]

    monkeypatch.setattr("megackpt.formats.native.load.open_index", open_by_parts)
    options = LoadOptions(exchange=exchange, rename={"m": "n"})

    def load(group: Any) -> None:
        expected, asked = state(group.rank, ranks), state(group.rank, ranks)
        asked["m"].key = "n"
        for name in ("w", "m"):
            asked[name].data = torch.zeros_like(expected[name].data)
        if ranks != 3:
            del asked["o"]
        loaded = megackpt.load(asked, tmp_path, group=group, options=options)
        assert torch.equal(loaded["w"], expected["w"].data)
        assert torch.equal(loaded["m"], expected["m"].data)
        assert ranks != 3 or loaded["o"] == {"rank": group.rank}

    SimulatedWorld(ranks).run(load)
    assert opened
    assert all(isinstance(index, PartialIndex) for index in opened)
    assert len(megackpt.load_sharded_metadata(tmp_path)) == 5


def test_the_whole_index_of_a_head_is_still_read(tmp_path: Path) -> None:
    store, message, stored = small()
    whole = read_index(store, message)
    assert whole.table.start.tolist() == stored.table.start.tolist()
    damaged(store, message["index"]["nbytes"] - 1)
    with pytest.raises(IntegrityError, match="the digest does not match"):
        read_index(store, message)
