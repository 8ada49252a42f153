"""The files of another tool as an opened checkpoint: chunks are tensors in mapped files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megackpt.entities.describe import dtype_name
from megackpt.errors import FormatError
from megackpt.formats.contents import Chunks, Contents
from megackpt.formats.foreign.state import ForeignArray, ForeignState, check_tensor, plain_elements
from megackpt.plans.metadata import ArraySpec, ChunkTable, pad_shapes
from megackpt.plans.planning.save_plan import index_order
from megackpt.storage import digest_of_parts


def contents_of(
    state: ForeignState,
    *,
    where: str,
    check_bytes: Callable[[], None] | None,
    check_unchanged: Callable[[], None],
) -> Contents:
    """Return what the files of another tool hold as the contents of a checkpoint. Local.

    Args:
        state: the arrays and values of the files.
        where: the location of the files, for messages.
        check_bytes: compares the checksums in the files, for which all bytes are read; None if there are
            none.
        check_unchanged: raises an error if the files are not those that were read.

    Raises:
        UnsupportedError: no checkpoint can hold a part of an array.
    """
    arrays = {array.key: (number, array) for number, array in enumerate(state.arrays)}
    whole = TensorChunks([arrays[key] for key in sorted(arrays)], where=where)
    table = whole.table
    columns = (table.array, table.start, table.shape, table.flat_start, table.flat_stop)
    # Names, shapes and places alone: elements would have to be read. So `names_save` is False.
    identity = [repr(table.arrays).encode(), *(column.tobytes() for column in columns)]

    def chunks(keys: Iterable[str]) -> Chunks:
        chosen = TensorChunks([arrays[key] for key in sorted(set(keys))], where=where)
        chosen.has_checksums = check_bytes is not None
        return chosen

    return Contents(
        arrays={spec.key: spec for spec in table.arrays},
        chunks=chunks,
        common=lambda: {"state_dict": state.common, "content_metadata": state.origin},
        decode_object=_reject_object,
        identity=digest_of_parts([memoryview(data) for data in identity]),
        names_save=False,
        origin=str(state.origin["imported_from"]),
        left_out=state.left_out,
        keeps_referenced_arrays=True,
        check_bytes=check_bytes,
        check_unchanged=check_unchanged,
    )


class TensorChunks(Chunks):
    """Chunks that are tensors. Elements of another dtype than that of their array are converted.

    Args:
        numbered: the arrays, sorted by key, each with its number in the order of the files.
        where: where they are stored, for messages.
    """

    block_bytes = 16  # a multiple of the width of every dtype: a read begins with an element

    def __init__(self, numbered: Sequence[tuple[int, ForeignArray]], *, where: str) -> None:
        arrays = [array for _, array in numbered]
        owned = [(n, part) for n, array in enumerate(arrays) for part in array.parts if part.data.numel()]
        # Here, before a load plans to copy these tensors into memory.
        for n, part in owned:
            check_tensor(part.data, arrays[n].key)
        dims = max((len(array.shape) for array in arrays), default=1) or 1
        number = np.array([n for n, _ in owned], np.int64)
        itemsize = np.array([array.dtype.itemsize for array in arrays], np.int64)
        numel = np.array([part.data.numel() for _, part in owned], np.int64)
        first = np.array([part.flat_start for _, part in owned], np.int64)
        table = ChunkTable(
            tuple(ArraySpec(array.key, dtype_name(array.dtype), array.shape) for array in arrays),
            array=number,
            start=pad_shapes([part.start for _, part in owned], dims, fill=0),
            shape=pad_shapes([part.shape for _, part in owned], dims, fill=1),
            flat_start=first,
            flat_stop=first + numel,
            nbytes=numel * itemsize[number],
        )
        rows = index_order(table)
        self.table = table.take(rows)
        # Parameters require gradients, and torch gives no numpy array of such a tensor.
        self._tensors = [plain_elements(owned[row][1].data) for row in rows.tolist()]
        self._dtypes = [array.dtype for array in arrays]
        self._where = where
        self._flat: tuple[int, Tensor] = (-1, torch.empty(0))
        # In the order in which the files name their tensors, which is that of their bytes. Not by addresses:
        # ranks divide the work by these numbers, and each rank maps the files to other addresses.
        in_files = np.array([order for order, _ in numbered], np.int64)[number][rows]
        self.position = np.empty(len(rows), np.int64)
        self.position[np.lexsort((rows, in_files))] = np.arange(len(rows))

    def describe(self, row: int) -> str:
        """Return where a chunk lies."""
        return f"{self.table.describe(row)} of {self._where}"

    def read_into(self, row: int, start: int, out: memoryview, *, verify: bool) -> None:
        """Fill out with bytes of a chunk."""
        dtype = self._dtypes[int(self.table.array[row])]
        first, count = start // dtype.itemsize, len(out) // dtype.itemsize
        elements = self._flattened(row)[first : first + count].to(dtype).contiguous()
        np.frombuffer(out, np.uint8)[:] = elements.view(torch.uint8).numpy()

    def mapped(self, row: int) -> memoryview | None:
        """Return the bytes of a tensor in its mapped file; None if its elements are not as in the array."""
        tensor = self._tensors[row]
        if tensor.dtype != self._dtypes[int(self.table.array[row])] or not tensor.is_contiguous():
            return None
        return tensor.reshape(-1).view(torch.uint8).numpy().data

    def _flattened(self, row: int) -> Tensor:
        """Return the elements of a chunk; one that is not contiguous is copied once."""
        kept, elements = self._flat
        if kept != row:
            elements = self._tensors[row].reshape(-1)
            # Another thread may put another tensor here at once, so the attribute is not read again.
            self._flat = row, elements
        return elements


def _reject_object(data: bytes, where: str) -> Any:
    raise FormatError(f"{where}: files of this tool have no objects.", path=where)
