"""Reading common state as a whole, with the tensors that a checkpoint stores as arrays.

Used where all of common state is needed at once: `load_common_state_dict`, comparison, and conversion to
formats that store it as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from megackpt.engine.checkpoint.common_arrays import array_references, with_tensors
from megackpt.engine.checkpoint.opening import check_arrays_complete, read_common, read_common_and_references
from megackpt.engine.data.read import read_tensors
from megackpt.entities import ShardedTensor
from megackpt.entities.describe import describe, torch_dtype
from megackpt.entities.tree import Steps
from megackpt.formats.contents import Contents
from megackpt.options import LoadOptions
from megackpt.plans.metadata import OBJECT
from megackpt.plans.planning import plan_load
from megackpt.storage import Store


def stored_references(common: Any, contents: Contents) -> dict[Steps, str]:
    """Return the keys of the stored arrays that common state refers to, by the steps of the references.

    References to arrays that `remove_sharded_tensors` has removed are left out.
    """
    return {
        steps: key
        for steps, key in array_references(common).items()
        if key in contents.arrays and contents.arrays[key].dtype != OBJECT
    }


def read_referenced(
    references: Mapping[Steps, str], contents: Contents, store: Store
) -> dict[Steps, torch.Tensor]:
    """Return the arrays that references name as whole tensors in host memory, by the steps of the references.

    Local.

    Raises:
        IntegrityError, FormatError, StorageError: an array is damaged, or cannot be read.
    """
    keys = sorted(set(references.values()))
    if not keys:
        return {}
    check_arrays_complete(store, contents.chunks(keys), keys)  # before memory is taken
    tensors = [_whole(key, contents) for key in keys]
    for tensor in tensors:
        tensor.init_data()
    requested = describe(tensors, rank=0)
    chunks = contents.chunks_for([requested.table])
    copies = plan_load(requested, chunks.table, where=store.location)
    read_tensors(chunks, copies, tensors, LoadOptions())
    data = {tensor.key: tensor.data for tensor in tensors if tensor.data is not None}
    return {steps: data[key] for steps, key in references.items()}


def read_whole_common(contents: Contents, store: Store) -> tuple[Any, Any]:
    """Return common state with all of its tensors, and content metadata. Local.

    Raises:
        IntegrityError, FormatError, StorageError: a file is damaged, or cannot be read.
    """
    common, content = read_common_and_references(contents, where=store.location)
    tensors = read_referenced(stored_references(common, contents), contents, store)
    return with_tensors(common, tensors), content


def without_referenced(contents: Contents, store: Store) -> Contents:
    """Return the contents of a checkpoint without the arrays that common state refers to. Local."""
    common, _ = read_common_and_references(contents, where=store.location)
    referenced = set(stored_references(common, contents).values())
    return replace(contents, arrays={k: spec for k, spec in contents.arrays.items() if k not in referenced})


def without_references(contents: Contents, *, where: str) -> Contents:
    """Return the contents of a checkpoint whose common state refers to no arrays. Local."""
    common, content = read_common(contents, where=where)
    return replace(contents, common=lambda: {"state_dict": common, "content_metadata": content})


def _whole(key: str, contents: Contents) -> ShardedTensor:
    spec = contents.arrays[key]
    shape, dtype = spec.global_shape, torch_dtype(spec.dtype)
    return ShardedTensor(key, None, dtype, shape, shape, (0,) * len(shape))
