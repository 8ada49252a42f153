"""The dtypes that a checkpoint can hold: their names, element sizes and names in safetensors.

A dtype that stock safetensors lacks is stored as raw bytes (`U8`). Its true name is in the index.
"""

from __future__ import annotations

from typing import NamedTuple


class DtypeInfo(NamedTuple):
    """Size of an element in bytes and the dtype string in a safetensors header."""

    itemsize: int
    safetensors: str


DTYPES: dict[str, DtypeInfo] = {
    "float64": DtypeInfo(8, "F64"),
    "float32": DtypeInfo(4, "F32"),
    "float16": DtypeInfo(2, "F16"),
    "bfloat16": DtypeInfo(2, "BF16"),
    "float8_e4m3fn": DtypeInfo(1, "F8_E4M3"),
    "float8_e5m2": DtypeInfo(1, "F8_E5M2"),
    "float8_e4m3fnuz": DtypeInfo(1, "U8"),
    "float8_e5m2fnuz": DtypeInfo(1, "U8"),
    "float8_e8m0fnu": DtypeInfo(1, "U8"),
    "int64": DtypeInfo(8, "I64"),
    "int32": DtypeInfo(4, "I32"),
    "int16": DtypeInfo(2, "I16"),
    "int8": DtypeInfo(1, "I8"),
    "uint64": DtypeInfo(8, "U64"),
    "uint32": DtypeInfo(4, "U32"),
    "uint16": DtypeInfo(2, "U16"),
    "uint8": DtypeInfo(1, "U8"),
    "bool": DtypeInfo(1, "BOOL"),
    "complex64": DtypeInfo(8, "U8"),
    "complex128": DtypeInfo(16, "U8"),
}
"""Every dtype by its torch name without the `torch.` prefix."""

OBJECT = "object"
"""The dtype name of an array of encoded Python objects. Each element has a length of its own."""
