"""ShardedTensor.narrow: a part of every rank's block as an array of its own."""

from __future__ import annotations

import re

import pytest
import torch

from megackpt.errors import DeclarationError
from megackpt.mapping import ShardedTensor


def test_narrow_scales_the_array_of_all_ranks_and_views_the_data() -> None:
    data = torch.arange(12.0).reshape(6, 2)
    tensor = ShardedTensor.from_rank_offsets(
        "w", data, (0, 3, 8), (1, 1, 2), prepend_axis_num=1, replica_id=1, allow_shape_mismatch=True
    )
    (part,) = tensor.narrow(0, 4, 2)
    assert (part.local_shape, part.global_shape, part.global_offset) == ((2, 2), (8, 4, 2), (3, 2, 0))
    assert part.axis_fragmentations == (8, 2, 1)
    assert (part.key, part.replica_id, part.allow_shape_mismatch) == ("w", 1, True)
    assert part.data is not None
    part.data.fill_(-1)
    assert data.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7], [-1, -1], [-1, -1]]


def test_narrow_does_not_change_the_tensor_it_is_asked_of() -> None:
    tensor = ShardedTensor.from_rank_offsets("w", torch.zeros(6, 2), (0, 1, 2))
    tensor.narrow(0, 4, 2)
    assert (tensor.local_shape, tensor.global_shape) == ((6, 2), (12, 2))


def test_narrow_works_without_data() -> None:
    tensor = ShardedTensor.from_rank_offsets("w", torch.zeros(6, 2), (0, 1, 2)).without_data()
    assert [n.data for n in tensor.narrow(1, 0, 1)] == [None]


def test_a_flat_shard_narrowed_along_its_first_dim_stays_flat_as_in_megatron() -> None:
    # Local block [3, 4], of which elements 5 to 9 are held; row 1 is elements 4 to 7.
    data = torch.arange(5.0, 10.0)
    tensor = ShardedTensor.from_rank_offsets_flat("w", data, (3, 4), (0, 1, 2), flattened_range=slice(5, 10))
    (row,) = tensor.narrow(0, 1, 1)
    assert row.flattened_range == slice(1, 4)
    assert (row.local_shape, row.global_shape, row.global_offset) == ((1, 4), (2, 4), (1, 0))
    assert row.data is not None
    assert row.data.tolist() == [5, 6, 7]
    assert row.data.data_ptr() == data.data_ptr()


def test_a_flat_shard_that_holds_nothing_of_the_part_gives_nothing() -> None:
    tensor = ShardedTensor.from_rank_offsets_flat("w", torch.zeros(3), (3, 4), flattened_range=slice(5, 8))
    assert tensor.narrow(0, 0, 1) == []
    assert tensor.narrow(1, 0, 1) == []


@pytest.mark.parametrize(("dim", "start", "length"), [(0, 1, 2), (1, 0, 2), (1, 1, 2), (2, 1, 3), (2, 0, 0)])
def test_narrowed_flat_shards_make_up_the_narrowed_array(dim: int, start: int, length: int) -> None:
    shape = (3, 3, 4)
    blocks = torch.arange(72).reshape(2, *shape)  # two ranks of an array [6, 3, 4]
    actual = torch.full((6, 3, 4), -1).narrow(dim, 0, 2 * length if dim == 0 else length).clone()
    for rank, block in enumerate(blocks):
        for low, high in ((0, 7), (7, 20), (20, 36)):
            flat = ShardedTensor.from_rank_offsets_flat(
                "w", block.reshape(-1)[low:high], shape, (0, rank, 2), flattened_range=slice(low, high)
            )
            for part in flat.narrow(dim, start, length):
                assert part.global_shape == tuple(actual.shape)
                assert part.data is not None
                assert part.data.untyped_storage().data_ptr() == blocks.untyped_storage().data_ptr()
                index = tuple(torch.from_numpy(axis) for axis in part.global_coordinates())
                assert bool((actual[index] == -1).all())
                actual[index] = part.data.reshape(-1)
    assert torch.equal(actual, torch.cat([block.narrow(dim, start, length) for block in blocks]))


@pytest.mark.parametrize(
    ("dim", "start", "length"), [(2, 0, 1), (-1, 0, 1), (0, 4, 3), (0, -1, 2), (0, 2, -1)]
)
def test_narrow_rejects_what_is_no_part_of_the_block(dim: int, start: int, length: int) -> None:
    tensor = ShardedTensor.from_rank_offsets("w", torch.zeros(6, 2))
    text = (
        f"'w': [{start}:{start + length}) of dim {dim} is no part of local_shape (6, 2). Count dims without"
    )
    with pytest.raises(DeclarationError, match=re.escape(text)):
        tensor.narrow(dim, start, length)


@pytest.mark.parametrize(("offset", "whole"), [(3, 9), (4, 9), (2, 8)])
def test_narrow_of_a_box_of_an_irregular_grid_is_an_error(offset: int, whole: int) -> None:
    tensor = ShardedTensor("w", torch.zeros(4, 2), torch.float32, (4, 2), (whole, 2), (offset, 0))
    with pytest.raises(
        DeclarationError, match=rf"the box of extent 4 at {offset} is not one of equal fragments of {whole}"
    ):
        tensor.narrow(0, 0, 2)
