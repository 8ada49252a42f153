"""Files of chunks: encoding elements to bytes and decoding them, a whole file at a time.

tensorstore's codecs are used on files in memory. The store writes the bytes, so that they become durable, and
names are checked, as in every other format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from megackpt.errors import FormatError, MissingExtraError
from megackpt.formats.zarr.array_documents import ZarrArray

# The import of tensorstore, an optional dependency (extra `zarr`), and opening arrays with it.


def tensorstore() -> ModuleType:
    """Return the module.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import tensorstore as module
    except ImportError as error:
        raise MissingExtraError(
            f"Checkpoints of format zarr need the package tensorstore, which cannot be imported ({error}). "
            f"Install it with: pip install 'megackpt[zarr]'"
        ) from error
    return module


# tensorstore has no type stubs: what it returns is Any.
def open_array(array: ZarrArray, kvstore: Mapping[str, Any], *, context: Any) -> Any:
    """Return the tensorstore handle of an array whose chunks are in `kvstore`.

    The document is taken from `array`: none is read or written. Chunks that are missing are errors, not fill
    values, and chunks that equal the fill value are written.

    Raises:
        FormatError: tensorstore does not accept the document.
    """
    spec = {
        "driver": "zarr" if array.zarr_format == 2 else "zarr3",
        "kvstore": dict(kvstore),
        "metadata": array.document,
        "store_data_equal_to_fill_value": True,
        "fill_missing_data_reads": False,
        # Files of a checkpoint do not change, so a cached chunk is not compared with its file again.
        "recheck_cached_data": "open",
    }
    try:
        return tensorstore().open(spec, context=context, open=True, assume_metadata=True).result()
    # OverflowError and TypeError come from values that C++ cannot hold.
    except (ValueError, OverflowError, TypeError, RuntimeError) as error:
        raise FormatError(
            f"{array.spec.key!r}: tensorstore rejects the document in {array.path!r}: {str(error)[:300]}. "
            f"The file is damaged, or of a kind of zarr array that cannot be loaded.",
            key=array.spec.key,
            path=array.path,
        ) from error


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
