"""Data files: plain safetensors, one tensor a chunk.

Owns the header, which is known before a byte of data is written. A chunk that is a whole array is stored
under its key alone, so that a checkpoint of one process opens in any safetensors reader as one would expect.
"""

from __future__ import annotations

import json

from megackpt.metadata import DTYPES, OBJECT, ChunkTable

HEADER_ALIGNMENT = 4096
"""Data begins at a multiple of this, so that direct I/O and memory maps find it aligned."""


def header_of(chunks: ChunkTable) -> bytes:
    """Return the first bytes of a file that holds these chunks in this order.

    Source: the safetensors format, https://huggingface.co/docs/safetensors (8 bytes of header length,
    little-endian, then JSON, which may be padded with spaces).
    """
    entries: dict[str, object] = {"__metadata__": {"format": "megackpt", "version": "1"}}
    position = 0
    for row in range(len(chunks)):
        nbytes = int(chunks.nbytes[row])
        dtype, shape = _stored_as(chunks, row)
        entries[_unique(_tensor_name(chunks, row), entries)] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [position, position + nbytes],
        }
        position += nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    padded = -(-(8 + len(text)) // HEADER_ALIGNMENT) * HEADER_ALIGNMENT - 8
    return padded.to_bytes(8, "little") + text.ljust(padded)


def _tensor_name(chunks: ChunkTable, row: int) -> str:
    spec = chunks.arrays[int(chunks.array[row])]
    region = chunks.describe(row)
    whole = "[" + ", ".join(f"0:{n}" for n in spec.global_shape) + "]"
    return spec.key if region == whole and spec.dtype != OBJECT else f"{spec.key}{region}"


def _unique(name: str, taken: dict[str, object]) -> str:
    """Number a name that is taken: keys are free text, so one may look like another with a region."""
    candidate, number = name, 1
    while candidate in taken:
        candidate, number = f"{name}#{number}", number + 1
    return candidate


def _stored_as(chunks: ChunkTable, row: int) -> tuple[str, list[int]]:
    spec = chunks.arrays[int(chunks.array[row])]
    nbytes = int(chunks.nbytes[row])
    if spec.dtype == OBJECT:
        return "U8", [nbytes]
    itemsize, code = DTYPES[spec.dtype]
    if code == "U8" and itemsize > 1:  # a dtype that safetensors lacks: raw bytes
        return code, [nbytes]
    shape = chunks.shape[row, : len(spec.global_shape)].tolist()
    is_whole_box = chunks.flat_start[row] == 0 and chunks.flat_stop[row] == chunks.shape[row].prod()
    return code, shape if is_whole_box else [nbytes // itemsize]
