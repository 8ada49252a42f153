"""Declarations of one rank: tensors, parts of them, and what is kept whole."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from megackpt import (
    FormatError,
    convert,
    load,
    load_common_state_dict,
    load_plain_tensors,
    save,
)
from megackpt.entities import ShardedTensor
from megackpt.errors import CheckpointingException, DeclarationError
from megackpt.storage import LocalStore
from tests.support.dcp_alone import ALONE

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
def test_fields_that_contradict_each_other_raise_an_error_with_the_key_also_when_they_change_later(
    change: dict[str, Any], text: str
) -> None:
    with pytest.raises(DeclarationError, match=re.escape(text)) as caught:
        ShardedTensor(**{**FIELDS, **change})
    key = {**FIELDS, **change}["key"]
    assert str(caught.value).startswith(f"{key!r}: ")
    assert caught.value.key == (key if isinstance(key, str) else None)
    assert isinstance(caught.value, CheckpointingException)
    tensor = ShardedTensor(**FIELDS)
    for name, value in change.items():
        setattr(tensor, name, value)
    with pytest.raises(DeclarationError, match=re.escape(text)):
        tensor.with_data(tensor.data)


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
    message = r"'w': with flattened_range=slice\(2, 5.*from_rank_offsets_flat"
    with pytest.raises(DeclarationError, match=message):
        ShardedTensor.from_rank_offsets("w", torch.zeros(3), (0, 1, 2), flattened_range=slice(2, 5))


def test_narrow_scales_the_array_of_all_ranks_and_views_the_data() -> None:
    data = torch.arange(12.0).reshape(6, 2)
    tensor = ShardedTensor.from_rank_offsets(
        "w", data, (0, 3, 8), (1, 1, 2), prepend_axis_num=1, replica_id=1, allow_shape_mismatch=True
    )
    (part,) = tensor.narrow(0, 4, 2)
    assert (tensor.local_shape, tensor.global_shape) == ((6, 2), (8, 12, 2))  # as before
    assert (part.local_shape, part.global_shape, part.global_offset) == ((2, 2), (8, 4, 2), (3, 2, 0))
    assert part.axis_fragmentations == (8, 2, 1)
    assert (part.key, part.replica_id, part.allow_shape_mismatch) == ("w", 1, True)
    assert part.data is not None
    part.data.fill_(-1)
    assert data.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7], [-1, -1], [-1, -1]]


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
    message = rf"the box of extent 4 at {offset} is not one of equal fragments of {whole}"
    with pytest.raises(DeclarationError, match=message):
        tensor.narrow(0, 0, 2)


pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is (disabled|unavailable)",
    "ignore:.*ComplexHalf",
    "ignore:Detected an existing checkpoint",
)


def tensor(key: str) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, torch.arange(4.0))


@pytest.fixture
def with_complex32(tmp_path: Path) -> Path:
    state = {"w": torch.arange(4.0), "z": torch.zeros(3, dtype=torch.complex32)}
    dcp.save(state, checkpoint_id=tmp_path / "c", **ALONE)
    return tmp_path / "c"


def test_an_array_of_a_dtype_that_cannot_be_loaded_is_no_missing_key(with_complex32: Path) -> None:
    assert torch.equal(load({"w": tensor("w")}, with_complex32)["w"], torch.arange(4.0))
    with pytest.raises(FormatError, match=r"'z' is stored as complex32, which cannot be loaded"):
        load({"w": tensor("w"), "z": tensor("z")}, with_complex32)
    with pytest.raises(FormatError, match=r"'z' is stored as complex32"):
        load_plain_tensors(with_complex32)


def test_a_conversion_that_would_leave_an_array_out_raises_an_error(
    with_complex32: Path, tmp_path: Path
) -> None:
    source, target = LocalStore(with_complex32), LocalStore(tmp_path / "new")
    with pytest.raises(FormatError, match=r"'z' is stored as complex32"):
        convert(source, target, ("megackpt", 1))
    assert not (tmp_path / "new/metadata.json").exists()


def test_common_state_of_the_save_before_is_not_that_of_what_dcp_saved_over_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save({"w": tensor("w"), "step": 1}, tmp_path, sharded_strategy=("torch_dist", 1))
    assert load_common_state_dict(tmp_path)["step"] == 1
    dcp.save({"w": torch.ones(4)}, checkpoint_id=tmp_path, **ALONE)
    with caplog.at_level(logging.WARNING):
        assert load_common_state_dict(tmp_path) == {}
    assert "written with another .metadata" in caplog.text
    assert torch.equal(load({"w": tensor("w")}, tmp_path)["w"], torch.ones(4))
