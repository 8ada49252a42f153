"""Long chunks cut for a copy: each part is one range of the bytes, and all of them are the chunk."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megackpt import ShardedObject, ShardedTensor
from megackpt.mapping.describe import describe
from megackpt.metadata import ChunkTable
from megackpt.metadata.merge import merge_declarations
from megackpt.planning import plan_main_replicas
from megackpt.planning.long_chunks import split_long_chunks
from megackpt.testing.layouts import arrays, owned_chunks


def numbers_of(table: ChunkTable, row: int) -> np.ndarray:
    """Places of a chunk's elements in its array, in the order of its bytes: the slow way."""
    shape = table.arrays[int(table.array[row])].global_shape
    dims = len(shape)
    locations = np.arange(int(np.prod(shape))).reshape(shape)
    box = tuple(
        slice(a, a + n)
        for a, n in zip(table.start[row, :dims].tolist(), table.shape[row, :dims].tolist(), strict=True)
    )
    return locations[box].reshape(-1)[int(table.flat_start[row]) : int(table.flat_stop[row])]


@settings(deadline=None)
@given(
    data=st.data(), array=arrays(max_extent=9), ranks=st.integers(1, 4), most=st.sampled_from([1, 16, 40, 99])
)
def test_parts_follow_each_other_in_the_bytes_of_their_chunk(
    data: st.DataObject, array: torch.Tensor, ranks: int, most: int
) -> None:
    owned = data.draw(owned_chunks(tuple(array.shape), ranks=ranks))
    declared = [describe([h.declare("a", array) for h in owned if h.rank == r], rank=r) for r in range(ranks)]
    table = plan_main_replicas(merge_declarations(declared)).table
    cut, of, start = split_long_chunks(table, most=most)
    width = array.element_size()
    assert (cut.nbytes <= max(most, width)).all()
    for row in range(len(table)):
        parts_of_row = np.flatnonzero(of == row)
        parts_of_row = parts_of_row[np.argsort(start[parts_of_row])]
        assert start[parts_of_row].tolist() == [0, *np.cumsum(cut.nbytes[parts_of_row]).tolist()][:-1]
        parts = [numbers_of(cut, part) for part in parts_of_row.tolist()]
        assert [len(p) * width for p in parts] == cut.nbytes[parts_of_row].tolist()
        assert np.array_equal(np.concatenate(parts), numbers_of(table, row))


def test_chunks_of_a_grid_are_cut_into_a_grid_and_objects_stay_whole() -> None:
    tensors = [
        ShardedTensor.from_rank_offsets("w", torch.zeros(60, 10), (0, rank, 3), prepend_axis_num=0)
        for rank in range(3)
    ]
    objects = [ShardedObject("o", None, (1,), (0,))]
    declared = describe([*tensors, *objects], rank=0, object_nbytes=[10**6])
    table = plan_main_replicas(declared).table
    cut, of, _ = split_long_chunks(table, most=25 * 40)  # 60 rows: of 25 rows at most, 20 divide them
    whole = [i for i, a in enumerate(cut.arrays) if a.key == "o"]
    is_object = np.isin(cut.array, whole)
    assert cut.nbytes[is_object].tolist() == [10**6]
    assert sorted(cut.start[~is_object, 0].tolist()) == list(range(0, 180, 20))
    assert len(of) == 10
