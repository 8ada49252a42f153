"""The import of tensorstore, an optional dependency (extra `zarr`), and opening arrays with it."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from megackpt.errors import FormatError, MissingExtraError
from megackpt.formats.zarr.array_documents import ZarrArray


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
