"""Reads the ShardedTensors of FSDP version 1 from the files that each rank has saved with torch.save.

The file of a rank has its own shards, and the boxes of all shards of the array. So the arrays are put
together without torch.distributed, and every box is checked against those of the other files.

Source: torch 2.13 `torch.distributed._shard.sharded_tensor.ShardedTensor.__getstate__`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megackpt.codec.pickled import ForeignObject, ForeignShardedTensor
from megackpt.entities.tree import Steps, dotted
from megackpt.errors import FormatError, UnsupportedError, rank_list
from megackpt.formats.foreign.state import CollectedArray, ForeignArray, SourcePart, mixed_files
from megackpt.plans.geometry import Ints
from megackpt.plans.geometry.tiling import Rectangles, uncovered_regions

_MAX_DEPTH = 100
_MAX_DIMS = 64
_MAX_EXTENT = 2**62
_FLAT_PARAMETER = "_flat_param"

Box = tuple[tuple[int, ...], tuple[int, ...]]  # start and shape


@dataclass(frozen=True, slots=True, eq=False)
class StoredShards:
    """What the file of one rank has of a ShardedTensor.

    Attributes:
        file: its path.
        rank: which rank of the job saved it.
        ranks: how many ranks the job had.
        dtype: of the array.
        shape: of the array.
        boxes: start and shape of the shards on all ranks, sorted and without empty ones, `[n, 2, dims]`.
        parts: the shards in this file, without empty ones.
    """

    file: str
    rank: int
    ranks: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: Ints
    parts: tuple[SourcePart, ...]


def replace_shards(value: Any, file: str, steps: Steps = ()) -> None:
    """Replace each ShardedTensor in nested dicts and lists by `StoredShards`, in place.

    This happens before the next file is read: the metadata of each tensor grow with the number of ranks.

    Raises:
        FormatError: a ShardedTensor contradicts itself, or values are nested more than 100 levels deep.
    """
    if len(steps) > _MAX_DEPTH:
        raise FormatError(f"{file}: values are nested too deep. It is damaged.", path=file)
    if isinstance(value, dict):
        items = list(value.items())
    else:
        items = list(enumerate(value)) if isinstance(value, list) else []
    for name, member in items:
        if isinstance(member, ForeignShardedTensor):
            value[name] = _stored_shards(dotted((*steps, name)), member, file)
        else:
            replace_shards(member, file, (*steps, name))


def _stored_shards(key: str, sharded: ForeignShardedTensor, file: str) -> StoredShards:
    try:
        return _read(sharded.state, file)
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        what = f" ({str(error)[:300]})" if isinstance(error, ValueError) else ""
        raise FormatError(
            f"{file}: the ShardedTensor {key!r} contradicts itself{what}. The file is damaged; copy it again "
            f"from where it was saved.",
            key=key,
            path=file,
        ) from error


def _read(state: Any, file: str) -> StoredShards:
    local_shards, metadata, group, *_ = state
    of_group = _attributes(group, "ShardedTensor.ProcessGroupState")
    of_array = _attributes(metadata, "ShardedTensorMetadata")
    shape = _extents(of_array["size"])
    dtype = of_array["tensor_properties"].state[0]
    rank, ranks = _extents((of_group["global_rank"], of_group["global_world_size"]))
    if not isinstance(dtype, torch.dtype) or rank >= ranks:
        raise ValueError("its dtype or rank is malformed")
    # With this bound, corners of boxes fit into int64.
    if not shape or math.prod(shape) >= _MAX_EXTENT:
        raise ValueError(f"no ShardedTensor has shape {shape}")
    boxes = {_box(box, shape) for box in of_array["shards_metadata"]}
    parts = [_part(_attributes(shard, "Shard"), shape, dtype) for shard in local_shards]
    for part in parts:
        if (part.start, part.shape) not in boxes:
            raise ValueError(f"its metadata lack the shard of shape {part.shape} at {part.start}")
    return StoredShards(
        file,
        rank,
        ranks,
        dtype,
        shape,
        # In one order for all files, so that they can be compared at once.
        np.array(sorted(box for box in boxes if 0 not in box[1]), np.int64).reshape(-1, 2, len(shape)),
        tuple(part for part in parts if part.data.numel()),
    )


def _attributes(value: Any, name: str) -> Mapping[str, Any]:
    """Return the attributes of an object of torch's, with or without slots."""
    if not isinstance(value, ForeignObject) or value.qualname != name:
        raise ValueError(f"it has no {name}")
    # With slots, a state is a pair: None, and a dict of the slots.
    state = value.state
    attributes: Mapping[str, Any] = state[1] if isinstance(state, tuple) else state
    return attributes


def _extents(values: Any) -> tuple[int, ...]:
    """Return sizes or offsets."""
    if not isinstance(values, list | tuple) or len(values) > _MAX_DIMS:
        raise ValueError("sizes or offsets are malformed")
    if not all(type(n) is int and 0 <= n < _MAX_EXTENT for n in values):
        raise ValueError("sizes or offsets are malformed")
    return tuple(values)


def _box(metadata: Any, shape: tuple[int, ...]) -> Box:
    attributes = _attributes(metadata, "ShardMetadata")
    start, extents = _extents(attributes["shard_offsets"]), _extents(attributes["shard_sizes"])
    fits = len(start) == len(extents) == len(shape)
    if not fits or any(a + n > whole for a, n, whole in zip(start, extents, shape, strict=True)):
        raise ValueError(
            f"the shard of shape {extents} at {start} does not lie in the array of shape {shape}"
        )
    return start, extents


def _part(shard: Mapping[str, Any], shape: tuple[int, ...], dtype: torch.dtype) -> SourcePart:
    start, extents = _box(shard["metadata"], shape)
    data = shard["tensor"]
    if type(data) not in (Tensor, torch.nn.Parameter) or data.layout != torch.strided or data.is_meta:
        raise ValueError(f"the shard at {start} is no plain tensor")
    if tuple(data.shape) != extents or data.dtype != dtype:
        raise ValueError(
            f"the shard at {start} is a tensor of shape {tuple(data.shape)} and {data.dtype}, and its "
            f"metadata say {extents} and {dtype}"
        )
    if data.numel() * dtype.itemsize > data.untyped_storage().nbytes():
        raise ValueError(f"the shard at {start} repeats its elements")
    return SourcePart(data.detach(), start, extents)


def array_of_shards(key: str, values: Sequence[Any], files: Sequence[str]) -> ForeignArray:
    """Return the array that the ShardedTensors of all ranks are parts of.

    Args:
        key: of the array.
        values: what each file has under this key.
        files: their paths.

    Raises:
        UnsupportedError: it is a flat parameter.
        FormatError: a file is missing, files contradict each other, or shards overlap.
    """
    for value, file in zip(values, files, strict=True):
        if not isinstance(value, StoredShards):
            raise mixed_files("has no ShardedTensor here, and other files have one", file, key)
    _check_names(key, values[0].file)
    collected = CollectedArray(key, values[0].dtype, values[0].shape, values[0].file)
    _check_equal(collected, values)
    # All files describe the same boxes from here on, so the first stands for all.
    for value in values:
        for part in value.parts:
            collected.add(part, value.file)
    array = collected.whole()
    _check_missing(key, values, {(part.start, part.shape) for part in array.parts})
    _check_tiling(key, values[0])
    return array


def _error(key: str, file: str, what: str, advice: str) -> FormatError:
    return FormatError(f"{file}: {what} ({key!r}). {advice}", key=key, path=file)


def _check_names(key: str, file: str) -> None:
    if key.rpartition(".")[2] == _FLAT_PARAMETER:
        raise UnsupportedError(
            f"{file}: {key!r} is a flat parameter (StateDictType.LOCAL_STATE_DICT of FSDP version 1). Names "
            f"and shapes of the parameters in it are not in the files. Load it in the script that saved it, "
            f"and save with StateDictType.SHARDED_STATE_DICT or FULL_STATE_DICT.",
            key=key,
            path=file,
        )


def _check_equal(array: CollectedArray, values: Sequence[StoredShards]) -> None:
    """Check that the files are of different ranks of one job, and say the same of the array."""
    key, first = array.key, values[0]
    of_rank: dict[int, StoredShards] = {}
    for value in values:
        other = of_rank.setdefault(value.rank, value)
        if other is not value:
            raise mixed_files(f"is of rank {value.rank}, as in {other.file}", value.file, key)
        if value.ranks != first.ranks:
            what = f"was saved by {value.ranks} ranks, and by {first.ranks} in {first.file}"
            raise mixed_files(what, value.file, key)
        array.check(value.dtype, value.shape, value.file)
        if not np.array_equal(value.boxes, first.boxes):
            raise mixed_files(f"has other shards in its metadata than in {first.file}", value.file, key)


def _check_missing(key: str, values: Sequence[StoredShards], present: Set[Box]) -> None:
    """Check that each shard in the metadata is in a file."""
    first = values[0]
    boxes = ((tuple(start), tuple(shape)) for start, shape in first.boxes.tolist())
    missing = [f"shape {box[1]} at {box[0]}" for box in boxes if box not in present]
    if missing:
        ranks = rank_list(set(range(first.ranks)) - {value.rank for value in values})
        where = f"The files of ranks {ranks} of {first.ranks} are missing." if ranks else "Files are damaged."
        raise _error(
            key,
            first.file,
            f"neither it nor another file has shards that its metadata name, {', '.join(missing[:3])}",
            f"{where} Copy the files of all ranks of one step into one folder.",
        )


def _check_tiling(key: str, first: StoredShards) -> None:
    """Check that the shards have each element of the array once."""
    start, shape = first.boxes[:, 0], first.boxes[:, 1]
    rectangles = Rectangles(np.zeros(len(start), np.int64), start, start + shape)
    for regions in uncovered_regions(rectangles, np.array([first.shape], np.int64)):
        bounds = zip(regions.start[0].tolist(), regions.stop[0].tolist(), strict=True)
        region = ", ".join(f"{a}:{b}" for a, b in bounds)
        what = f"has elements [{region}] in no shard, or in several"
        raise _error(key, first.file, what, "It is damaged; copy it again from where it was saved.")
