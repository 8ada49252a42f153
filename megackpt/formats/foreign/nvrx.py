"""Reads local checkpoints of nvidia-resiliency-ext, without that package and without running their pickles.

Each rank saves a file of its own, `<root>/<session>/<rank>/iter_0000100_<rank>_local.pt`, on a disk of its
node; with replication also those of other ranks. A file of Megatron-Core's state dict has the shards with
their places in the global arrays. So the files of all ranks are a checkpoint for any layout.

Source: nvidia-resiliency-ext 0.4.1 `checkpointing/local`, Megatron-Core 0.16.1
`dist_checkpointing/tensor_aware_state_dict.py`.
"""

from __future__ import annotations

import math
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from torch import Tensor

from megackpt.codec.pickled import ForeignObject
from megackpt.errors import FormatError, NotACheckpointError, UnsupportedError
from megackpt.formats.file_names import NVRX
from megackpt.formats.foreign.mapped_files import load_mapped_file, record_checksums
from megackpt.formats.foreign.state import (
    CollectedArray,
    ForeignState,
    SourcePart,
    plain_part,
)
from megackpt.formats.foreign.strategy import ForeignLoadStrategy
from megackpt.formats.strategy import Format


class NvrxLoadStrategy(ForeignLoadStrategy):
    """Reads the newest whole step of a folder with local checkpoints."""

    backend = "nvrx"
    file_names = NVRX

    def read(self, path: str, *, checks_bytes: bool) -> ForeignState:
        """Return what the files hold. The folder is the manager's, or has copies of those of all nodes."""
        iteration, files = _newest_step(path)
        shards, common = _Shards(), {}
        for rank in sorted(files, reverse=True):  # common state is that of the first rank
            state = _state_of(files[rank], checks_bytes=checks_bytes)
            common = state["common"]
            for entity in _entities(state["sharded_state_dict"], files[rank]):
                shards.add(entity, files[rank])
        left_out = [f"{key} (an object of each rank, not an array)" for key in sorted(shards.objects)]
        return ForeignState(
            arrays=tuple(array.whole() for array in shards.arrays.values()),
            common=plain_part(common, "common state", left_out),
            origin={
                "imported_from": f"local checkpoint of nvidia-resiliency-ext, {len(files)} ranks",
                "iteration": iteration,
            },
            left_out=tuple(left_out),
        )


FORMAT = Format(backend="nvrx", version=1, load=NvrxLoadStrategy)

_FILE = re.compile(r"iter_(\d{7,9})_(\d{1,6})_local\.pt")
_MAX_DEPTH = 100
_INVALID = (-1,)


def _newest_step(path: str) -> tuple[int, dict[int, str]]:
    """Return the newest iteration that has a file of every rank, and its files by rank."""
    steps: dict[int, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for folder, _, names in sorted(os.walk(path)):
        for name in sorted(names):
            if (match := _FILE.fullmatch(name)) is not None:
                steps[int(match[1])][int(match[2])].append(os.path.join(folder, name))
    ranks = {rank for files in steps.values() for rank in files}
    if not ranks:
        raise NotACheckpointError(
            f"{path} has no file 'iter_*_local.pt' of nvidia-resiliency-ext. Name the folder that was given "
            f"to LocalCheckpointManager, with the files of all nodes.",
            path=path,
        )
    # A rank without a file of any iteration is missing, too.
    count = max(ranks) + 1
    whole = [iteration for iteration, files in steps.items() if len(files) == count]
    if not whole:
        newest = max(steps)
        missing = ", ".join(map(str, islice((r for r in range(count) if r not in steps[newest]), 8)))
        raise NotACheckpointError(
            f"{path} has no iteration with the files of all {count} ranks: of iteration {newest}, those "
            f"of ranks {missing} are missing. Copy the files of all nodes into one folder.",
            path=path,
        )
    files = steps[max(whole)]
    for replicas in files.values():
        _check_replicas(replicas)
    return max(whole), {rank: replicas[0] for rank, replicas in files.items()}


def _check_replicas(files: Sequence[str]) -> None:
    """Check that the files of one rank, which several nodes have, hold equal tensors.

    Raises:
        FormatError: their records have other checksums.
    """
    if len(files) < 2:
        return
    checksums = [record_checksums(file) for file in files]
    for file, of_file in zip(files, checksums, strict=True):
        if of_file != checksums[0]:
            raise FormatError(
                f"{file}: it is of the same rank and iteration as {files[0]}, and has other tensors. The "
                f"files are of different runs. Copy those of one run into one folder.",
                path=file,
            )


def _state_of(file: str, *, checks_bytes: bool) -> Mapping[str, Any]:
    """Return the attributes of Megatron-Core's state dict in a file."""
    value = load_mapped_file(file, checks_bytes=checks_bytes)
    if _is_of_megatron(value, "MCoreTensorAwareStateDict"):
        state = value.state
        # Megatron-Core takes the tensors out of a hollow state dict, to save or send them by themselves.
        if isinstance(state.get("common"), dict) and not state.get("_is_hollow"):
            return state  # type: ignore[no-any-return]
        raise FormatError(f"{file}: its tensors are not in it. Import another iteration.", path=file)
    name = value.qualname if isinstance(value, ForeignObject) else type(value).__name__
    raise UnsupportedError(
        f"{file} has a {name}, which does not say where a rank's tensors are in the global arrays. Load it "
        f"with nvidia-resiliency-ext at the layout that saved it."
    )


def _is_of_megatron(value: Any, name: str) -> bool:
    is_object = isinstance(value, ForeignObject) and value.qualname == name
    return is_object and isinstance(value.state, dict)


def _entities(state: Any, file: str, depth: int = 0) -> Iterator[ForeignObject]:
    if depth > _MAX_DEPTH:
        raise FormatError(f"{file}: values are nested too deep. It is damaged.", path=file)
    if isinstance(state, (dict, list, tuple)):
        for part in state.values() if isinstance(state, dict) else state:
            yield from _entities(part, file, depth + 1)
    elif isinstance(state, ForeignObject):
        yield state


@dataclass(slots=True)
class _Shards:
    """The shards of all ranks. Replicas are compared, and each shard is kept once.

    Attributes:
        arrays: the shards of each global array, by key.
        objects: keys of what is not an array.
    """

    arrays: dict[str, CollectedArray] = field(default_factory=dict)
    objects: set[str] = field(default_factory=set)

    def add(self, entity: ForeignObject, file: str) -> None:
        """Add a shard; one without data is stored by another rank."""
        if _is_of_megatron(entity, "ShardedObject"):
            self.objects.add(str(entity.state.get("key")))
            return
        if not _is_of_megatron(entity, "ShardedTensor"):
            raise UnsupportedError(f"{file} has a {entity.qualname:.80} among its shards. It cannot be read.")
        if entity.state.get("data") is None:
            return
        shape, part = _part(entity.state, file)
        key, dtype = entity.state["key"], part.data.dtype
        array = self.arrays.setdefault(key, CollectedArray(key, dtype, shape, file))
        array.check(dtype, shape, file)
        array.add(part, file)


def _part(state: Mapping[str, Any], file: str) -> tuple[tuple[int, ...], SourcePart]:
    """Return the shape of a shard's global array, and the shard."""
    key, data = state.get("key"), state["data"]
    shape, start, local = (
        _ints(state.get(name)) for name in ("global_shape", "global_offset", "local_shape")
    )
    box = (1,) * (len(shape) - len(local)) + local  # axes over layers are in front, and not in the data
    flat = state.get("flattened_range")
    flat_range = (flat.start, flat.stop) if isinstance(flat, slice) else (0, math.prod(box))
    # Of any other value, a range that ends before it begins: the check of its length fails.
    first, last = _ints(flat_range) if _ints(flat_range) != _INVALID else (1, 0)
    is_inside = len(start) == len(box) == len(shape) and all(
        offset + length <= size for offset, length, size in zip(start, box, shape, strict=True)
    )
    is_typed = isinstance(key, str) and isinstance(data, Tensor) and _INVALID not in (shape, start, local)
    if is_typed and is_inside and last <= math.prod(box) and last - first == data.numel():
        return shape, SourcePart(data, start, box, first)
    raise FormatError(
        f"{file}: the place of {key!r:.200} in its global array is damaged, or contradicts its data. Copy "
        f"the file again from its node.",
        path=file,
    )


def _ints(value: Any) -> tuple[int, ...]:
    """Return a tuple of numbers that are not negative; `_INVALID` for any other value."""
    is_valid = isinstance(value, (tuple, list)) and all(type(n) is int and n >= 0 for n in value)
    return tuple(value) if is_valid else _INVALID
