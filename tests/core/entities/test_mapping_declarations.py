"""Fields of the entities: what each combination means, and which contradict each other."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from megackpt.errors import CheckpointingException, DeclarationError
from megackpt.mapping import ShardedTensor

FIELDS: dict[str, Any] = {
    "key": "w",
    "data": None,
    "dtype": torch.float32,
    "local_shape": (2, 3),
    "global_shape": (4, 3),
    "global_offset": (2, 0),
    "axis_fragmentations": (2, 1),
}

CONTRADICTIONS = {
    "empty key": ({"key": ""}, "the key of a ShardedTensor must be a non-empty string"),
    "no string as key": ({"key": 3}, "3: the key of a ShardedTensor must be a non-empty string"),
    "no dtype": ({"dtype": "float32"}, "dtype must be a torch.dtype, not 'float32'"),
    "fractional shape": ({"local_shape": (2.0, 3)}, r"local_shape (2.0, 3) must be a sequence of ints"),
    "no shape": ({"global_shape": 4}, "global_shape 4 must be a sequence of ints"),
    "negative shape": ({"local_shape": (2, -3)}, "local_shape (2, -3) must not be negative"),
    "negative offset": ({"global_offset": (-2, 0)}, "global_offset (-2, 0) must not be negative"),
    "short offset": (
        {"global_offset": (2,)},
        "global_offset (2,) and global_shape (4, 3) differ in length. Give one offset per global axis",
    ),
    "axes do not match": (
        {"prepend_axis_num": 1},
        "local_shape (2, 3) plus prepend_axis_num 1 makes 3 axes, but global_shape (4, 3) has 2",
    ),
    "negative prepended axes": ({"prepend_axis_num": -1}, "prepend_axis_num -1 must be an int >= 0"),
    "outside": (
        {"global_offset": (3, 0)},
        "the box at global_offset (3, 0) of shape (2, 3) does not lie inside the global shape (4, 3)",
    ),
    "fragments of another rank": (
        {"axis_fragmentations": (2,)},
        "axis_fragmentations (2,) must give one number >= 1 for each axis of (4, 3)",
    ),
    "no fragments": ({"axis_fragmentations": (2, 0)}, "must give one number >= 1 for each axis"),
    "off the grid": (
        {"global_shape": (8, 3), "global_offset": (1, 0), "axis_fragmentations": (4, 1)},
        "global_offset (1, 0) is not a multiple of the box (2, 3), so it is not on a regular grid. Set "
        "axis_fragmentations=None for an uneven split",
    ),
    "fragments do not make up the array": (
        {"axis_fragmentations": (3, 1)},
        "(3, 1) fragments of the box (2, 3) do not make up the global shape (4, 3), so it is not on a "
        "regular grid. Set axis_fragmentations=None",
    ),
    "replica id of another type": (
        {"replica_id": (0, "dp")},
        "replica_id (0, 'dp') must be an int or a tuple of ints",
    ),
    "flat range with a step": (
        {"flattened_range": slice(0, 4, 2)},
        "flattened_range slice(0, 4, 2) must be slice(start, stop) without a step, inside the 6 elements of "
        "local_shape (2, 3)",
    ),
    "flat range without an end": ({"flattened_range": slice(2, None)}, "must be slice(start, stop)"),
    "flat range outside": ({"flattened_range": slice(2, 7)}, "inside the 6 elements"),
    "flat range reversed": ({"flattened_range": slice(4, 2)}, "must be slice(start, stop)"),
    "flat range as a tuple": ({"flattened_range": (2, 4)}, "must be slice(start, stop)"),
    "data of another class": ({"data": np.zeros((2, 3))}, "data must be a torch.Tensor or None, not ndarray"),
    "data of another dtype": (
        {"data": torch.zeros(2, 3, dtype=torch.int8)},
        "dtype torch.float32 is declared but data has torch.int8",
    ),
    "data of another shape": (
        {"data": torch.zeros(3, 2)},
        "data has shape (3, 2) but local_shape means (2, 3)",
    ),
    "flat data of another length": (
        {"data": torch.zeros(3), "flattened_range": slice(1, 5)},
        "data has shape (3,) but flattened_range 1:5 means (4,)",
    ),
    "flat data that is not 1-D": (
        {"data": torch.zeros(2, 2), "flattened_range": slice(1, 5)},
        "data has shape (2, 2) but flattened_range 1:5 means (4,)",
    ),
}


@pytest.mark.parametrize(("change", "text"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_fields_that_contradict_each_other_raise_an_error_with_the_key(
    change: dict[str, Any], text: str
) -> None:
    with pytest.raises(DeclarationError, match=re.escape(text)) as caught:
        ShardedTensor(**{**FIELDS, **change})
    key = {**FIELDS, **change}["key"]
    assert str(caught.value).startswith(f"{key!r}: ")
    assert caught.value.key == (key if isinstance(key, str) else None)
    assert isinstance(caught.value, CheckpointingException)


def test_the_unchanged_fields_are_accepted() -> None:
    tensor = ShardedTensor(**FIELDS)
    assert tensor.has_regular_grid
    assert tensor.local_chunk_offset_in_global() == (1, 0)


def test_shapes_of_any_integer_sequence_become_tuples_of_ints() -> None:
    tensor = ShardedTensor(
        **{
            **FIELDS,
            "local_shape": torch.Size([2, 3]),
            "global_shape": [4, 3],
            "global_offset": np.array([2, 0]),
        }
    )
    assert (tensor.local_shape, tensor.global_shape, tensor.global_offset) == ((2, 3), (4, 3), (2, 0))
    assert all(type(n) is int for n in tensor.global_offset)


def test_an_irregular_grid_may_have_a_block_anywhere_and_has_no_chunk_position() -> None:
    uneven = ShardedTensor(
        **{**FIELDS, "global_shape": (7, 3), "global_offset": (3, 0), "axis_fragmentations": None}
    )
    assert not uneven.has_regular_grid
    assert uneven.global_slice() == (slice(3, 5), slice(0, 3))
    for ask in (uneven.local_chunk_offset_in_global, uneven.max_allowed_chunks):
        with pytest.raises(DeclarationError, match=r"'w': an irregular grid .* Use global_offset"):
            ask()


def test_an_empty_block_may_stand_anywhere_on_a_regular_grid() -> None:
    ShardedTensor(**{**FIELDS, "local_shape": (0, 3), "global_offset": (1, 0)})


def test_a_padded_array_need_not_be_made_up_of_its_fragments() -> None:
    padded = ShardedTensor(**{**FIELDS, "global_shape": (5, 3), "allow_shape_mismatch": True})
    assert padded.max_allowed_chunks() == (2, 3)


def test_prepended_axes_lead_the_global_shape_and_are_ints_in_the_slice() -> None:
    tensor = ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), (0, 5, 8), (2, 1, 4), prepend_axis_num=1)
    assert tensor.global_shape == (8, 2, 12)
    assert tensor.global_offset == (5, 0, 3)
    assert tensor.axis_fragmentations == (8, 1, 4)
    assert tensor.box_shape == (1, 2, 3)
    assert tensor.global_slice() == (5, slice(0, 2), slice(3, 6))
    assert tensor.local_chunk_offset_in_global() == (5, 0, 1)
    assert tensor.max_allowed_chunks() == (1, 2, 3)


@pytest.mark.parametrize("offset", [(3, 0, 2), (-1, 0, 2), (0, 2, 2), (0, -1, 2), (0, 0, 0)])
def test_rank_offsets_outside_of_the_array_raise_an_error(offset: tuple[int, int, int]) -> None:
    with pytest.raises(DeclarationError, match=r"'w': invalid rank offset .* with 0 <= index < fragments"):
        ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), offset)


def test_an_axis_that_is_given_twice_raises_an_error() -> None:
    with pytest.raises(DeclarationError, match=r"Give each axis of 0\.\.1 at most once"):
        ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), (0, 0, 2), (0, 1, 2))


def test_a_flat_shard_of_rank_offsets_has_the_position_of_its_block() -> None:
    tensor = ShardedTensor.from_rank_offsets_flat(
        "w", torch.zeros(4), (2, 3), (1, 1, 2), flattened_range=slice(1, 5), replica_id=(0, 0, 1)
    )
    assert (tensor.local_shape, tensor.global_shape, tensor.global_offset) == ((2, 3), (2, 6), (0, 3))
    assert tensor.replica_id == (0, 0, 1)
    assert [a.tolist() for a in tensor.local_coordinates()] == [[0, 0, 1, 1], [1, 2, 0, 1]]
    assert [a.tolist() for a in tensor.global_coordinates()] == [[0, 0, 1, 1], [4, 5, 3, 4]]


def test_coordinates_index_the_elements_of_data_with_prepended_axes() -> None:
    whole = torch.arange(48.0).reshape(4, 3, 4)
    tensor = ShardedTensor.from_rank_offsets("w", whole[2, :, 2:], (0, 2, 4), (2, 1, 2), prepend_axis_num=1)
    index = tuple(torch.from_numpy(axis) for axis in tensor.global_coordinates())
    assert torch.equal(whole[index], whole[2, :, 2:].reshape(-1))


def test_init_data_allocates_the_local_or_the_flat_shape_by_the_given_function() -> None:
    block = ShardedTensor(**FIELDS)
    block.init_data("cpu", init_fn=torch.ones)
    assert torch.equal(block.data, torch.ones(2, 3))  # type: ignore[arg-type]
    flat = ShardedTensor(**{**FIELDS, "flattened_range": slice(1, 5), "dtype": torch.bfloat16})
    flat.init_data("meta")
    assert flat.data is not None
    assert (flat.data.shape, flat.data.dtype, flat.data.device.type) == ((4,), torch.bfloat16, "meta")


def test_init_data_keeps_the_data_there_is() -> None:
    data = torch.zeros(2, 3)
    tensor = ShardedTensor(**{**FIELDS, "data": data})
    tensor.init_data("cpu", init_fn=torch.ones)
    assert tensor.data is data


def test_without_data_keeps_the_declaration() -> None:
    tensor = ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), (0, 1, 2), replica_id=3)
    bare = tensor.without_data()
    assert bare.data is None
    assert (bare.global_shape, bare.replica_id, bare.dtype) == ((4, 3), 3, torch.float32)


@pytest.mark.parametrize(("change", "text"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_fields_changed_after_an_entity_was_made_are_checked_with_other_data(
    change: dict[str, Any], text: str
) -> None:
    tensor = ShardedTensor(**FIELDS)
    for name, value in change.items():
        setattr(tensor, name, value)
    with pytest.raises(DeclarationError, match=re.escape(text)):
        tensor.with_data(tensor.data)


def test_other_data_is_checked_where_no_field_has_changed() -> None:
    data = torch.zeros(2, 3)
    tensor = ShardedTensor(**{**FIELDS, "data": data})
    owned = tensor.with_data(data)
    assert (owned.data, owned.local_shape, owned.replica_id) == (data, (2, 3), 0)
    assert owned is not tensor
    data.resize_(3, 3)
    with pytest.raises(DeclarationError, match=re.escape("data has shape (3, 3) but local_shape means")):
        tensor.with_data(data)


def test_a_replica_id_in_a_list_is_checked_again_since_lists_change() -> None:
    tensor = ShardedTensor(**{**FIELDS, "replica_id": [0, 1]})
    tensor.replica_id[1] = "dp"  # type: ignore[index]
    with pytest.raises(DeclarationError, match="must be an int or a tuple of ints"):
        tensor.with_data(None)


def test_a_flattened_range_without_the_shape_of_its_box_is_an_error() -> None:
    tensor = ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), (0, 1, 2), flattened_range=None)
    assert tensor.flattened_range is None
    with pytest.raises(
        DeclarationError, match=r"'w': with flattened_range=slice\(2, 5.*from_rank_offsets_flat"
    ):
        ShardedTensor.from_rank_offsets("w", torch.zeros(3), (0, 1, 2), flattened_range=slice(2, 5))
