"""Reading a checkpoint in the names of another family: any part of any of its arrays, in bounded memory.

The caller gives memory, as tensors that declare which part of an array of the other family they are. Each is
filled from the stored chunks that hold its elements, wherever these lie and however they are cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from megackpt.entities import ShardedTensor
from megackpt.entities.describe import dtype_name, torch_dtype
from megackpt.errors import MapError, truncated_list
from megackpt.formats.contents import Chunks, Contents, Part
from megackpt.maps import MappedArray, RegionMap
from megackpt.maps.requests import MappedTensor, mapped_tensors
from megackpt.plans.metadata import OBJECT, ArraySpec, ChunkTable, pad_shapes
from megackpt.whole.stored_adapters import StoredAdapters
from megackpt.whole.windows import Segment, read_parts, request_of


@dataclass(frozen=True, slots=True)
class MappedCheckpoint:
    """An opened checkpoint, and a map to the names to read it by. Safe for many threads.

    Attributes:
        contents: the checkpoint.
        map: the names in which it is read on the left, its own on the right.
        where: its location, for errors.
        adapters: merged into the weights that are read; None for the weights as they are stored.
    """

    contents: Contents
    map: RegionMap
    where: str
    adapters: StoredAdapters | None = None

    def read(self, tensors: Sequence[ShardedTensor]) -> None:
        """Fill tensors, whose keys are on the left of the map. Local.

        Stored elements of another dtype are converted as torch does it: to the nearest, ties to even.

        Raises:
            IntegrityError, FormatError, StorageError: the bytes are damaged, or cannot be read.
        """
        parts = []
        for tensor in tensors:
            of_tensor = list(mapped_tensors(tensor, tensor.key, self.map))
            # The map is proved. Without this, elements that it lacks would be those of any memory.
            assert tensor.data is not None
            assert sum(math.prod(p.theirs.local_shape) for p in of_tensor) == tensor.data.numel(), tensor.key
            parts += of_tensor
        requests = [self._request(part) for part in parts]
        read_parts(self.contents, requests, where=self.where)
        if self.adapters is not None:
            self.adapters.merge_into(request for request in requests if self._is_changed(request.key))
        for part, request in zip(parts, requests, strict=True):
            if request is not part.theirs:
                assert part.theirs.data is not None
                assert request.data is not None
                part.theirs.data.copy_(request.data + part.added)

    def dtypes(self, dtype: str | None) -> dict[str, str]:
        """Return the name of the dtype to write each left array in, by key. Pure.

        Args:
            dtype: that of floating-point arrays; None keeps the stored one. Arrays that keep their dtype by
                the map have the stored one, too.

        Raises:
            MapError: parts of an array are stored in different dtypes, and none was chosen.
        """
        stored: dict[str, set[str]] = {}
        for pair in self.map.pairs:
            stored.setdefault(pair.left.key, set()).add(self.contents.arrays[pair.right.key].dtype)
        return {
            key: self._dtype_of(key, sorted(stored[key]), None if array.keeps_dtype else dtype)
            for key, array in self.map.left.items()
        }

    def _dtype_of(self, key: str, stored: Sequence[str], dtype: str | None) -> str:
        if len(stored) > 1 and (dtype is None or not all(map(is_floating, stored))):
            raise MapError(
                f"{self.where}: {key!r} is made of arrays of the dtypes {', '.join(stored)}. Choose one with "
                f"dtype=.",
                key=key,
                path=self.where,
            )
        return dtype if dtype is not None and is_floating(stored[0]) else stored[0]

    def _is_changed(self, key: str) -> bool:
        return self.adapters is not None and key in self.adapters.changed_keys

    def _request(self, part: MappedTensor) -> ShardedTensor:
        """Return what is read for a part: the part, or memory of another dtype for what is added to it.

        Adapters are added in float32, and other sums are those of the stored dtype. They are rounded after.
        """
        request = part.theirs
        if self._is_changed(request.key):
            dtype = torch.float32
        elif part.added:
            dtype = torch_dtype(self.contents.arrays[request.key].dtype)
        else:
            return request
        return replace(request, data=torch.empty(request.local_shape, dtype=dtype), dtype=dtype)


class MappedChunks(Chunks):
    """The arrays of the other family, each as one chunk, computed from the stored chunks.

    Args:
        source: the checkpoint, and the map.
        arrays: the arrays, sorted by key.
    """

    block_bytes = 16  # a multiple of the width of every dtype

    def __init__(self, source: MappedCheckpoint, arrays: Sequence[ArraySpec]) -> None:
        self._source = source
        self.table = _whole_arrays(arrays)
        self.position = self.table.array
        # The map may split dims of an array. Its elements keep their order, and so their bytes.
        viewed = [replace(spec, global_shape=source.map.left[spec.key].viewed) for spec in arrays]
        self._viewed = _whole_arrays(viewed)

    def describe(self, row: int) -> str:
        """Return which array it is."""
        return f"{self.table.describe(row)} of {self._source.where}"

    def read_into(self, row: int, start: int, out: memoryview, *, verify: bool) -> None:
        """Fill out with bytes of an array."""
        self.read_parts([Part(row, start, start + len(out))], [out])

    def read_parts(self, parts: Sequence[Part], outs: Sequence[memoryview]) -> None:
        """Fill each of outs with a part of an array, in one plan."""
        data = (np.frombuffer(out, np.uint8) for out in outs)
        rows = (Segment(part.row, part.start, part.stop, 0) for part in parts)
        self._source.read([request_of(self._viewed, row, d) for row, d in zip(rows, data, strict=True)])


def _whole_arrays(arrays: Sequence[ArraySpec]) -> ChunkTable:
    """Return a chunk for each array."""
    number = np.arange(len(arrays))
    dims = max((len(spec.global_shape) for spec in arrays), default=1) or 1
    shape = pad_shapes([spec.global_shape for spec in arrays], dims, fill=1)
    return ChunkTable(
        tuple(arrays),
        array=number,
        start=np.zeros((len(arrays), dims), np.int64),
        shape=shape,
        flat_start=np.zeros(len(arrays), np.int64),
        flat_stop=shape.prod(axis=1),
        nbytes=np.array([spec.nbytes for spec in arrays], np.int64),
    )


def mapped_contents(
    source: MappedCheckpoint, dtype: str | None, *, metadata: Mapping[str, object] | None = None
) -> Contents:
    """Return a checkpoint with the names of another family, and no common state but content metadata.

    Args:
        source: the checkpoint, and the map; its left side has the new names.
        dtype: that of floating-point arrays; None keeps the stored one.
        metadata: the content metadata.
    """
    dtypes = source.dtypes(dtype)
    arrays = {
        key: ArraySpec(key, dtypes[key], source.map.left[key].stored) for key in sorted(source.map.left)
    }

    def chunks(keys: Iterable[str]) -> Chunks:
        return MappedChunks(source, [arrays[key] for key in sorted(set(keys))])

    return Contents(
        arrays=arrays,
        chunks=chunks,
        common=lambda: {"state_dict": {}, "content_metadata": metadata},
        decode_object=source.contents.decode_object,
        identity=source.contents.identity,
        names_save=source.contents.names_save,
    )


def check_fits(
    expected: Mapping[str, MappedArray], stored: Mapping[str, ArraySpec], *, name: str, where: str
) -> None:
    """Check that a map has exactly the arrays of a checkpoint, in their shapes. Pure.

    Args:
        expected: the arrays of the map.
        stored: those of the checkpoint which the map should have.
        name: of the map, for the error.
        where: the checkpoint, for the error.

    Raises:
        MapError: arrays are missing, additional, or of other shapes; the text lists them.
    """
    faults = sorted(_faults(expected, stored))
    if faults:
        raise MapError(
            f"{where} does not fit the map {name}:\n{truncated_list([text for _, text in faults])}\nGive the "
            f"config.json and the map of the model that was saved, and its prefix if its keys have one.",
            key=faults[0][0],
            path=where,
        )


def _faults(
    expected: Mapping[str, MappedArray], stored: Mapping[str, ArraySpec]
) -> Iterator[tuple[str, str]]:
    """Yield each key at which the arrays differ, and in what."""
    for key, array in expected.items():
        spec = stored.get(key)
        if spec is None or spec.dtype == OBJECT:
            yield key, f"{key!r} {array.stored} is missing"
        elif not _has_shape(spec.global_shape, array):
            yield key, f"{key!r} has the shape {spec.global_shape}, and by the map {array.stored}"
    for key in stored.keys() - expected:
        yield key, f"{key!r} {stored[key].global_shape} is additional"


def is_floating(dtype: str) -> bool:
    """Return whether a dtype of this name holds floating-point numbers. Pure."""
    return dtype != OBJECT and bool(torch_dtype(dtype).is_floating_point)


def checked_dtype(dtype: torch.dtype | str | None) -> str | None:
    """Return the name of a floating-point dtype that is given as such, by name, or not at all. Pure.

    Raises:
        MapError: it is no floating-point dtype.
    """
    if dtype is None:
        return None
    chosen = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(chosen, torch.dtype) or not chosen.is_floating_point:
        raise MapError(f"dtype is {dtype!r}. Give a floating-point dtype, such as 'bfloat16', or None.")
    return dtype_name(chosen)


def _has_shape(shape: tuple[int, ...], array: MappedArray) -> bool:
    if array.is_padded and len(shape) == len(array.stored):
        return shape[0] >= array.stored[0] and shape[1:] == array.stored[1:]
    return shape == array.stored
