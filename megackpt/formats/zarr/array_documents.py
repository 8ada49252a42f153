"""Zarr arrays as their metadata documents describe them.

Our own `.zarray` (zarr v2) and `zarr.json` (zarr v3) are written here, and those of any writer are read, as
far as a checkpoint needs them. Everything in a document is checked before it is used. tensorstore applies the
codecs.

Source: https://zarr-specs.readthedocs.io (v2 and v3 core, the sharding_indexed and crc32c codecs).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megackpt.errors import FormatError
from megackpt.formats.strategy import Json
from megackpt.formats.zarr.names import is_unicode
from megackpt.formats.zarr.rounds import Grid, grid_extents
from megackpt.plans.metadata import DTYPES, ArraySpec
from megackpt.plans.metadata.chunk_table import MAX_NUMEL

V2_FILE, V2_ATTRIBUTES, V3_FILE = ".zarray", ".zattrs", "zarr.json"
OURS = "megackpt"
"""The attribute with what zarr v3 has no field for: the key, and the dtype if only its bits are stored."""

_V2_DTYPES = {
    "float64": "<f8", "float32": "<f4", "float16": "<f2",
    "int64": "<i8", "int32": "<i4", "int16": "<i2", "int8": "|i1",
    "uint64": "<u8", "uint32": "<u4", "uint16": "<u2", "uint8": "|u1",
    "bool": "|b1", "complex64": "<c8", "complex128": "<c16",
}  # fmt: skip
"""Names of numpy, with the byte order. Other dtypes have their own names, as Megatron-Core has bfloat16."""
_FROM_V2 = {text[1:]: name for name, text in _V2_DTYPES.items()}
_BITS_IN_V2 = {"float8_e8m0fnu": "|u1"}
"""Dtypes that not every supported tensorstore knows in zarr v2; the true one is in the attributes."""

_BITS_IN_V3 = {
    name: f"uint{8 * info.itemsize}"
    for name, info in DTYPES.items()
    if name == "bfloat16" or name.startswith("float8")
}
"""Dtypes that zarr-python lacks, and the integers their bits are stored as."""

_CODECS: list[Json] = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]


@dataclass(frozen=True, slots=True, kw_only=True)
class ZarrArray:
    """An array and where its chunks are.

    Attributes:
        spec: key, dtype and shape.
        path: its directory in the store, with a '/' at the end.
        grid: extents of files, and of the chunks in them.
        document: its metadata document.
        separator: text between the numbers in the names of chunks.
        prefix: text before these numbers ("c" in zarr v3).
        attributes: content of `.zattrs`; in zarr v3 attributes are a part of the document.
        is_raw: whether a file has the elements as they are in memory, in row-major order.
    """

    spec: ArraySpec
    path: str
    grid: Grid
    document: Json
    separator: str
    prefix: str
    is_raw: bool
    attributes: Json = field(default_factory=dict)

    @property
    def zarr_format(self) -> int:
        """2 or 3."""
        return 3 if self.document.get("zarr_format") == 3 else 2

    @property
    def file_extents(self) -> tuple[int, ...]:
        """Number of files along each dim."""
        return grid_extents(self.spec.global_shape, self.grid.chunk)

    @property
    def file_nbytes(self) -> int:
        """Length of every file; -1 if it depends on the content."""
        return math.prod(self.grid.chunk) * DTYPES[self.spec.dtype].itemsize if self.is_raw else -1

    @property
    def is_checked(self) -> bool:
        """Whether each chunk has a checksum."""
        return '"crc32c"' in json.dumps(self.document.get("codecs"))

    def leaf(self, cell: Sequence[int]) -> str:
        """Return the name of the file of a cell of the grid, in `path`.

        Source: chunk keys of zarr v2, and the default chunk key encoding of zarr v3.
        """
        numbers = [str(n) for n in cell]
        if self.prefix:
            return self.separator.join([self.prefix, *numbers])
        return self.separator.join(numbers) or "0"

    def region(self, cell: Sequence[int]) -> tuple[slice, ...]:
        """Return the region of the array that is in the file of a cell."""
        return tuple(
            slice(i * c, min((i + 1) * c, n))
            for i, c, n in zip(cell, self.grid.chunk, self.spec.global_shape, strict=True)
        )

    def documents(self) -> dict[str, bytes]:
        """Return the files, by full name, that describe the array."""
        if self.zarr_format == 3:
            return {self.path + V3_FILE: _encoded(self.document)}
        files = {self.path + V2_FILE: _encoded(self.document)}
        return files | ({self.path + V2_ATTRIBUTES: _encoded(self.attributes)} if self.attributes else {})


def array_v2(spec: ArraySpec, grid: Grid) -> ZarrArray:
    """Return a zarr v2 array like those of Megatron-Core: raw bytes, no fill value.

    Source: Megatron-Core 0.12 `dist_checkpointing/strategies/zarr.py`.
    """
    # Without a fill value, no reader can take a missing chunk for zeros.
    document = {
        "chunks": list(grid.chunk),
        "compressor": None,
        "dtype": _BITS_IN_V2.get(spec.dtype) or _V2_DTYPES.get(spec.dtype, spec.dtype),
        "fill_value": None,
        "filters": None,
        "order": "C",
        "shape": list(spec.global_shape),
        "zarr_format": 2,
    }
    return ZarrArray(
        spec=spec,
        path=f"{spec.key}/",
        grid=grid,
        document=document,
        separator=".",
        prefix="",
        is_raw=True,
        attributes={OURS: {"dtype": spec.dtype}} if spec.dtype in _BITS_IN_V2 else {},
    )


def array_v3(spec: ArraySpec, grid: Grid, *, directory: str, name: str) -> ZarrArray:
    """Return a zarr v3 array: shards of inner chunks with a crc32c each, and one for the index."""
    ours = {"key": spec.key, "dtype": spec.dtype}
    sharding = {
        "chunk_shape": list(grid.inner),
        "codecs": _CODECS,
        "index_codecs": _CODECS,
        "index_location": "end",
    }
    # An array without dims is one element with its checksum; it needs no shard.
    codecs = [{"name": "sharding_indexed", "configuration": sharding}] if grid.chunk else _CODECS
    stored = _BITS_IN_V3.get(spec.dtype, spec.dtype)
    document = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(spec.global_shape),
        "data_type": stored,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(grid.chunk)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": _zero(stored),
        "codecs": codecs,
        "attributes": {OURS: ours},
    }
    path = f"{directory}{name}/"
    return ZarrArray(
        spec=spec, path=path, grid=grid, document=document, separator="/", prefix="c", is_raw=False
    )


def _zero(data_type: str) -> Any:  # a JSON scalar, or two of them
    if data_type == "bool":
        return False
    if data_type.startswith("complex"):
        return [0.0, 0.0]
    return 0.0 if data_type.startswith("float") else 0


def group_v3() -> bytes:
    """Return the document of a zarr v3 group, so that stock readers can list the arrays in it."""
    return _encoded({"zarr_format": 3, "node_type": "group", "attributes": {}})


def _encoded(document: Json) -> bytes:
    return json.dumps(document, indent=4).encode()


def parse_v2(document: Json, attributes: Json, *, key: str, path: str, where: str) -> ZarrArray:
    """Return the array that a `.zarray` describes; attributes are those of its `.zattrs`.

    Raises:
        FormatError: it does not describe an array, or one of a dtype that no tensor has.
    """
    text = document.get("dtype")
    if not isinstance(text, str):
        raise _unsupported(where, f"dtype {str(text)[:80]!r} is structured, and no tensor is")
    dtype = _dtype_v2(text, attributes)
    spec = _spec(key, dtype, text, document.get("shape"), where)
    chunk = _extents(document.get("chunks"), spec, where)
    separator = document.get("dimension_separator", ".")
    if separator not in (".", "/"):
        raise _unsupported(where, f"dimension separator {separator!r} is neither '.' nor '/'")
    # Only if a file has the elements as they are in memory can ranges of it be read into tensors.
    plain = not document.get("compressor") and not document.get("filters") and document.get("order") == "C"
    return ZarrArray(
        spec=spec,
        path=path,
        grid=Grid(chunk, chunk),
        document=document,
        separator=separator,
        prefix="",
        is_raw=plain and not (text.startswith(">") and DTYPES[dtype].itemsize > 1),
    )


def _dtype_v2(text: str, attributes: Json) -> str:
    """Return the dtype that a document names as `text`, "" if no tensor has it; attributes may say more.

    A dtype that numpy lacks has torch's name, as Megatron-Core writes it. For the others the byte order is
    dropped: tensorstore swaps bytes when it decodes, and `is_raw` excludes the other order.
    """
    ours = attributes.get(OURS)
    true = ours.get("dtype") if isinstance(ours, dict) else None
    if isinstance(true, str) and _BITS_IN_V2.get(true) == text:
        return true
    return text if text in DTYPES and text not in _V2_DTYPES else _FROM_V2.get(text.lstrip("<>|="), "")


def parse_v3(document: Json, *, name: str, path: str, where: str) -> ZarrArray:
    """Return the array that a `zarr.json` describes; name is its key unless the document says another.

    Raises:
        FormatError: it does not describe an array, or one of an unknown dtype or grid.
    """
    spec = _spec_v3(document, name, where)
    separator, prefix = _file_names_v3(document, where)
    return ZarrArray(
        spec=spec,
        path=path,
        grid=_grid_v3(document, spec, where),
        document=document,
        separator=separator,
        prefix=prefix,
        is_raw=False,
    )


def _spec_v3(document: Json, name: str, where: str) -> ArraySpec:
    attributes = document.get("attributes")
    ours = attributes.get(OURS) if isinstance(attributes, dict) else None
    ours = ours if isinstance(ours, dict) else {}
    text = document.get("data_type")
    dtype = ours.get("dtype", text)
    if not isinstance(dtype, str):
        raise _unsupported(where, f"dtype {str(dtype)[:80]!r} is no text")
    # Our attribute may rename the bits only to a dtype of the same width, or all sizes would be wrong.
    if dtype != text and (dtype not in _BITS_IN_V3 or _BITS_IN_V3[dtype] != text):
        raise _unsupported(where, f"dtype {str(dtype)[:80]!r} does not fit the data type {str(text)[:80]!r}")
    key = ours.get("key", name)
    if not isinstance(key, str) or not is_unicode(key):
        raise _unsupported(where, f"its key {str(key)[:80]!r} is no text")
    return _spec(key, dtype, text, document.get("shape"), where)


def _grid_v3(document: Json, spec: ArraySpec, where: str) -> Grid:
    regular = _configuration(document.get("chunk_grid"), "regular", where)
    chunk = _extents(regular.get("chunk_shape"), spec, where)
    codecs = document.get("codecs")
    inner = chunk
    first = codecs[0] if isinstance(codecs, list) and codecs else None
    if isinstance(first, dict) and first.get("name") == "sharding_indexed":
        sharding = _configuration(first, "sharding_indexed", where)
        inner = _extents(sharding.get("chunk_shape"), spec, where)
    # The number of a chunk in its shard is computed by division, which needs whole chunks along each dim.
    if any(c % i for c, i in zip(chunk, inner, strict=True)):
        raise _unsupported(where, f"shards of {chunk} are no multiples of chunks of {inner}")
    return Grid(chunk, inner)


def _file_names_v3(document: Json, where: str) -> tuple[str, str]:
    """Return the separator in the names of chunk files, and what they begin with."""
    encoding = document.get("chunk_key_encoding")
    style = encoding.get("name") if isinstance(encoding, dict) else None
    if style not in ("default", "v2"):
        raise _unsupported(where, f"chunk key encoding {str(style)[:80]!r} is not known")
    settings = _configuration(encoding, style, where)
    separator = settings.get("separator", "/" if style == "default" else ".")
    if separator not in (".", "/"):
        raise _unsupported(where, f"separator {str(separator)[:80]!r} is neither '.' nor '/'")
    return separator, "c" if style == "default" else ""


def _configuration(part: Any, name: str, where: str) -> Json:
    """Return the configuration of a named extension of zarr v3."""
    if not isinstance(part, dict) or part.get("name") != name:
        raise _unsupported(where, f"{str(part)[:80]} is not {name!r}")
    configuration = part.get("configuration", {})
    if not isinstance(configuration, dict):
        raise _unsupported(where, f"the configuration of {name!r} is no object")
    return configuration


def _spec(key: str, dtype: Any, text: Any, shape: Any, where: str) -> ArraySpec:
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise _unsupported(where, f"data type {str(text)[:80]!r} is none that a tensor can have")
    if not _are_sizes(shape, least=0) or max([0, *shape]) > MAX_NUMEL or math.prod(shape) > MAX_NUMEL:
        raise _unsupported(where, f"shape {str(shape)[:80]} is none that an array can have")
    return ArraySpec(key, dtype, tuple(shape))


def _extents(sizes: Any, spec: ArraySpec, where: str) -> tuple[int, ...]:
    if not _are_sizes(sizes, least=1) or len(sizes) != len(spec.global_shape):
        raise _unsupported(
            where, f"chunks of {str(sizes)[:80]} do not cut an array of shape {spec.global_shape}"
        )
    return tuple(sizes)


def _are_sizes(sizes: Any, *, least: int) -> bool:
    # `type`, as `true` in JSON would be an instance of int.
    return isinstance(sizes, list) and all(type(n) is int and least <= n < 2**62 for n in sizes)


def _unsupported(where: str, reason: str) -> FormatError:
    return FormatError(
        f"{where}: {reason}. The file is damaged, or of a kind of zarr array that cannot be loaded.",
        path=where,
    )
