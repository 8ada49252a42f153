"""Reads are bounded and hold what is copied out of them, however requests lie in a stored chunk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megackpt import ShardedTensor, load, save
from megackpt.engine.data.read import with_target_strides
from megackpt.mapping.describe import describe
from megackpt.metadata import DIGEST_BLOCK_BYTES, StoredChunks, block_counts
from megackpt.metadata.merge import merge_declarations
from megackpt.planning import plan_load, plan_main_replicas, plan_reads
from megackpt.planning.read_plan import MAX_BLOCK_BYTES, READ_BYTES


def stored_as(shape: tuple[int, ...], dtype: torch.dtype) -> StoredChunks:
    """One chunk that is a whole array, without its data."""
    meta = ShardedTensor.from_rank_offsets("w", torch.empty(shape, dtype=dtype, device="meta"))
    plan = plan_main_replicas(merge_declarations([describe([meta], rank=0)]))
    start = plan.offset_bytes
    digests = torch.zeros(int(block_counts(plan.table.nbytes).sum()), dtype=torch.uint64).numpy()
    return StoredChunks(plan.table, plan.writer, start + 4096, start, digests, ("file",))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_read_is_whole_blocks_within_bounds_and_holds_its_copies(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 3000)), data.draw(st.integers(1, 3000))
    dtype = data.draw(st.sampled_from([torch.int8, torch.float32, torch.float64]))
    stored = stored_as((rows, columns), dtype)
    asked = []
    for _ in range(data.draw(st.integers(1, 4))):
        top, left = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
        shape = (data.draw(st.integers(1, rows - top)), data.draw(st.integers(1, columns - left)))
        target = torch.empty(shape, dtype=dtype, device="meta")
        asked.append(ShardedTensor("w", target, dtype, shape, (rows, columns), (top, left)))
    copies = plan_load(describe(asked, rank=0), stored.table, where="here")
    placed = with_target_strides(copies, asked, [t.data for t in asked if t.data is not None])
    reads = plan_reads(placed, stored.table, position=np.arange(len(stored)), block_bytes=DIGEST_BLOCK_BYTES)
    nbytes = int(stored.table.nbytes[0])
    copied = 0
    for read, (start, stop) in enumerate(zip(reads.start.tolist(), reads.stop.tolist(), strict=True)):
        assert 0 < stop - start <= READ_BYTES
        assert start % DIGEST_BLOCK_BYTES == 0
        assert stop % DIGEST_BLOCK_BYTES == 0 or stop == nbytes
        for copy in reads.copies([read])[0]:
            assert start <= copy.source * dtype.itemsize
            last = copy.source + sum((n - 1) * s for n, s in zip(copy.shape, copy.source_stride, strict=True))
            assert (last + 1) * dtype.itemsize <= stop
            copied += copy.numel
    assert copied == sum(t.data.numel() for t in asked if t.data is not None)


@pytest.mark.parametrize("parts", [2, 4])
def test_a_large_array_loads_as_several_columns_of_one_rank_and_twice(tmp_path: Path, parts: int) -> None:
    array = torch.randint(0, 2**31, (3000, 1024), dtype=torch.int32)  # 12 MiB, more than one read
    save({"w": ShardedTensor.from_rank_offsets("w", array)}, tmp_path / "c")
    columns = [torch.zeros(3000, 1024 // parts, dtype=torch.int32) for _ in range(parts)]
    asked = [ShardedTensor.from_rank_offsets("w", c, (1, i, parts)) for i, c in enumerate(columns)]
    whole = [torch.zeros_like(array), torch.zeros_like(array)]
    load(
        {"columns": asked, "twice": [ShardedTensor.from_rank_offsets("w", w) for w in whole]}, tmp_path / "c"
    )
    assert torch.equal(torch.cat(columns, dim=1), array)
    assert torch.equal(whole[0], array)
    assert torch.equal(whole[1], array)


def test_blocks_that_are_longer_than_a_read_raise_an_error() -> None:
    stored = stored_as((4, 4), torch.float32)
    whole = ShardedTensor.from_rank_offsets("w", torch.empty((4, 4)))
    copies = plan_load(describe([whole], rank=0), stored.table, where="here")
    for block_bytes in (0, MAX_BLOCK_BYTES + 1):
        with pytest.raises(ValueError, match=r"block_bytes is .*; a format gives 1 to"):
            plan_reads(copies, stored.table, position=np.zeros(1, np.int64), block_bytes=block_bytes)
