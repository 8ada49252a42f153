"""Makes the headers of safetensors files; `safetensors_header` reads and checks them.

A safetensors file is the length of its header (8 bytes, little-endian), the header (JSON), and data.
Source: https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from megackpt.errors import FormatError
from megackpt.plans.metadata import DTYPES

LENGTH_BYTES = 8
"""Bytes before the header: its length."""

METADATA = "__metadata__"
"""The entry of a header that is no tensor, but a dict of strings."""

# Those that a native data file stores as raw bytes have codes of their own since version 0.6 of safetensors.
_LATER_CODES = {
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "complex64": "C64",
}

DTYPE_CODES: dict[str, str] = {
    **{name: info.safetensors for name, info in DTYPES.items() if info.safetensors != "U8"},
    "uint8": "U8",
    **_LATER_CODES,
}
"""The code of each dtype in a header, by its torch name; dtypes that safetensors lacks are not in it."""

DTYPE_NAMES: dict[str, str] = {code: name for name, code in DTYPE_CODES.items()}
"""The torch name of each dtype, by its code in a header."""


def encode_header(
    tensors: Iterable[tuple[str, str, Sequence[int], int]], *, metadata: Mapping[str, str], alignment: int
) -> bytes:
    """Return the first bytes of a safetensors file that holds these tensors in this order, without gaps.

    Args:
        tensors: name, code of the dtype, shape and size in bytes of each tensor.
        metadata: strings for `__metadata__`; left out if there are none.
        alignment: data begins at a multiple of this, in bytes.

    Raises:
        FormatError: a name is `__metadata__` or occurs twice.
    """
    header: dict[str, object] = {METADATA: dict(metadata)}
    position = 0
    for name, dtype, shape, nbytes in tensors:
        if name in header:
            reason = "is reserved in safetensors files" if name == METADATA else "occurs twice in one file"
            raise FormatError(f"The tensor name {name!r} {reason}. Give the tensor another name.", key=name)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + nbytes]}
        position += nbytes
    if not metadata:
        del header[METADATA]
    text = json.dumps(header, separators=(",", ":")).encode()
    # Safetensors has no gap between header and data, so spaces at the end of the header align the data.
    padded = -(-(LENGTH_BYTES + len(text)) // alignment) * alignment - LENGTH_BYTES
    return padded.to_bytes(LENGTH_BYTES, "little") + text.ljust(padded)
