"""Sharded entities as rows of a chunk table: from torch to columns of integers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch

from megackpt.entities.base import is_main_replica
from megackpt.entities.sharded_object import ShardedObject
from megackpt.entities.sharded_tensor import ShardedTensor
from megackpt.errors import DeclarationError, MismatchError, UnsupportedError
from megackpt.plans.metadata import (
    DTYPES,
    OBJECT,
    ArraySpec,
    ChunkTable,
    DeclaredChunks,
    itemsizes,
    pad_shapes,
)


def describe(
    entities: Sequence[ShardedTensor | ShardedObject], *, rank: int, object_nbytes: Sequence[int] = ()
) -> DeclaredChunks:
    """Return this rank's declarations; row i declares entity i. Local, pure.

    Args:
        entities: tensors and objects, with or without data.
        rank: number of this rank.
        object_nbytes: the encoded length of each object, in order; empty if nothing is to be written.

    Raises:
        MismatchError: two entities of this rank give one key different dtypes or global shapes.
        DeclarationError: a checkpoint cannot hold this dtype, or a key is not valid Unicode.
    """
    specs: dict[str, ArraySpec] = {}
    for entity in entities:
        spec = _spec_of(entity)
        known = specs.setdefault(spec.key, spec)
        if known is not spec and known != spec:
            raise MismatchError(
                f"{spec.key!r}: rank {rank} declares {spec.dtype} {spec.global_shape} and "
                f"{known.dtype} {known.global_shape} under this one key. Give each global array a key of its "
                f"own.",
                key=spec.key,
                rank=rank,
            )
    arrays = tuple(specs[k] for k in sorted(specs))
    table = _table(entities, arrays, list(object_nbytes))
    return DeclaredChunks(
        table,
        np.array([is_main_replica(e.replica_id) for e in entities], np.bool_),
        np.array([getattr(e, "allow_shape_mismatch", False) for e in entities], np.bool_),
        np.full(len(entities), rank, np.int64),
        np.arange(len(entities), dtype=np.int64),
    )


@cache
def dtype_name(dtype: object) -> str:
    """Return the name of a torch dtype without its module: `bfloat16`."""
    return str(dtype).removeprefix("torch.")


@cache
def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype of torch with a name, with which a checkpoint stores an array.

    Raises:
        UnsupportedError: this torch does not have it.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedError(
            f"An array is stored as {name}, which torch {torch.__version__} does not have. Install a newer "
            f"torch."
        )
    return dtype


def _spec_of(entity: ShardedTensor | ShardedObject) -> ArraySpec:
    if not entity.key.isascii():
        _check_unicode(entity.key)
    if not isinstance(entity, ShardedTensor):
        return ArraySpec(entity.key, OBJECT, entity.global_shape)
    name = dtype_name(entity.dtype)
    if name not in DTYPES:
        raise DeclarationError(
            f"{entity.key!r}: a checkpoint cannot hold dtype {entity.dtype}. Known are {', '.join(DTYPES)}.",
            key=entity.key,
        )
    return ArraySpec(entity.key, name, entity.global_shape)


def _check_unicode(key: str) -> None:
    try:
        key.encode()
    except UnicodeEncodeError as error:
        raise DeclarationError(
            f"{key!r}: a key must be valid Unicode, without lone surrogates, to be written to a file.",
            key=key,
        ) from error


def _table(
    entities: Sequence[ShardedTensor | ShardedObject], arrays: tuple[ArraySpec, ...], object_nbytes: list[int]
) -> ChunkTable:
    number = {spec.key: i for i, spec in enumerate(arrays)}
    dims = max([len(a.global_shape) for a in arrays], default=1) or 1
    shapes = [e.box_shape for e in entities]
    flats = [_flat_range(e, shape) for e, shape in zip(entities, shapes, strict=True)]
    array = np.array([number[e.key] for e in entities], np.int64)
    flat_start, flat_stop = (np.array([f[i] for f in flats], np.int64) for i in (0, 1))
    # The itemsize of objects is 0, and their encoded lengths are put in afterwards.
    nbytes = (flat_stop - flat_start) * (itemsizes(arrays)[array] if len(arrays) else 1)
    if object_nbytes:
        nbytes[[not isinstance(e, ShardedTensor) for e in entities]] = object_nbytes
    return ChunkTable(
        arrays,
        array,
        pad_shapes([e.global_offset for e in entities], dims, fill=0),
        pad_shapes(shapes, dims, fill=1),
        flat_start,
        flat_stop,
        nbytes,
    )


def _flat_range(entity: ShardedTensor | ShardedObject, shape: tuple[int, ...]) -> tuple[int, int]:
    if isinstance(entity, ShardedTensor) and entity.flattened_range is not None:
        return entity.flattened_range.start, entity.flattened_range.stop
    return 0, math.prod(shape)
