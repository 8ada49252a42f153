"""Compares two stored arrays of one checkpoint, byte by byte."""

from __future__ import annotations

import numpy as np
import torch

from megackpt.engine.data.read import read_tensors
from megackpt.entities import ShardedTensor
from megackpt.entities.describe import describe, torch_dtype
from megackpt.formats.contents import Contents
from megackpt.options import LoadOptions
from megackpt.plans.planning import plan_load

_OPTIONS = LoadOptions(threads=2)
_ELEMENTS = 4 * 1024 * 1024


def have_equal_bytes(contents: Contents, first: str, second: str, *, where: str) -> bool:
    """Return whether two arrays have one dtype, one shape and equal bytes. Local.

    Args:
        contents: the checkpoint.
        first: key of an array.
        second: key of the other one.
        where: names the checkpoint in errors.

    Raises:
        IntegrityError, FormatError, StorageError: they are damaged, or cannot be read.
    """
    ours, theirs = (contents.arrays[key] for key in (first, second))
    if (ours.dtype, ours.global_shape) != (theirs.dtype, theirs.global_shape):
        return False
    dtype, shape = torch_dtype(ours.dtype), ours.global_shape
    for start in range(0, ours.numel, _ELEMENTS):
        part = slice(start, min(start + _ELEMENTS, ours.numel))
        read = []
        for key in (first, second):
            data = torch.empty(part.stop - part.start, dtype=dtype)
            start_of_box = (0,) * len(shape)
            entity = ShardedTensor(key, data, dtype, shape, shape, start_of_box, flattened_range=part)
            request = describe([entity], rank=0)
            chunks = contents.chunks_for([request.table])
            read_tensors(chunks, plan_load(request, chunks.table, where=where), [entity], _OPTIONS)
            read.append(data.view(torch.uint8).numpy())
        # As bytes: NaN is not equal to itself as a number.
        if not np.array_equal(read[0], read[1]):
            return False
    return True
