"""Files of chunks: encoding elements to bytes and decoding them, a whole file at a time.

tensorstore's codecs are used on files in memory. The store writes the bytes, so that they become durable, and
names are checked, as in every other format.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from megackpt.errors import FormatError
from megackpt.formats.zarr.array_documents import ZarrArray
from megackpt.formats.zarr.library import open_array, tensorstore

Elements = npt.NDArray[Any]

_DIRECTORY = "array/"


class ArrayCodec:
    """Encodes and decodes the files of one array. Used by one thread at a time."""

    def __init__(self, array: ZarrArray) -> None:
        ts = tensorstore()
        self.array = array
        # All memory stores of one context share their content, so each codec needs its own.
        context = ts.Context()
        self._memory = ts.KvStore.open(f"memory://{_DIRECTORY}", context=context).result()
        self.handle = open_array(array, {"driver": "memory", "path": _DIRECTORY}, context=context)
        self.dtype: np.dtype[Any] = self.handle.dtype.numpy_dtype

    def encode(self, cell: Sequence[int], elements: Elements) -> bytes | memoryview:
        """Return the file of a cell with these elements, which have the shape of `array.region(cell)`.

        If the file has the same bytes as the elements in memory, they are not copied.
        """
        if self.array.is_raw and elements.shape == self.array.grid.chunk and elements.flags.c_contiguous:
            return elements.reshape(-1).view(np.uint8).data
        # The elements may be referenced, not copied: the result is awaited before they can change.
        self.handle[self.array.region(cell)].write(
            elements, can_reference_source_data_indefinitely=True
        ).result()
        leaf = self.array.leaf(cell)
        data: bytes = self._memory[leaf]
        del self._memory[leaf]  # or every file of the array would stay in memory
        return data

    # tensorstore has no type stubs: what it returns is Any.
    def handle_of(self, cell: Sequence[int], data: bytes) -> Any:
        """Return a handle of the array, in whose memory the file of one cell is kept."""
        self._memory[self.array.leaf(cell)] = data
        return self.handle

    def decode(self, cell: Sequence[int], data: bytes) -> Elements:
        """Return the elements in the file of a cell.

        Raises:
            FormatError: the codecs cannot decode the bytes.
        """
        leaf = self.array.leaf(cell)
        self._memory[leaf] = data
        try:
            elements: Elements = self.handle[self.array.region(cell)].read().result()
        except ValueError as error:
            raise decoding_error(self.array, leaf, error) from error
        finally:
            del self._memory[leaf]
        return elements


def decoding_error(array: ZarrArray, leaf: str, error: Exception) -> FormatError:
    """Return the error for a file that tensorstore cannot decode, or that lacks a chunk."""
    reason = str(error).partition(" [source locations=")[0].partition(" [tensorstore_spec=")[0]
    return FormatError(
        f"{array.spec.key!r}: chunk {leaf!r} in {array.path!r} cannot be read: {reason}. The file is damaged "
        f"or cut short; restore it, or load another checkpoint.",
        key=array.spec.key,
        path=f"{array.path}{leaf}",
    )
