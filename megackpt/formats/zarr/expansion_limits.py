"""How large the bytes of a chunk may become, told before anything is decoded.

Owns the limits: a compressed chunk that becomes more than its array says it holds, and chunks that are far
larger than what can be read of them, are refused. tensorstore decodes first and compares lengths afterwards,
so a few kilobytes could take all memory. What codecs do otherwise is left to it.
"""

from __future__ import annotations

import bz2
import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from megackpt.errors import FormatError
from megackpt.formats.zarr.array_documents import ZarrArray
from megackpt.metadata import DTYPES
from megackpt.storage import Store

LARGE_BYTES = 512 * 1024 * 1024
"""Chunks that become no more than this are taken whatever their array and file are."""

_MOST_RATIO = 64  # of a large chunk to its file; of compressors, only what holds nothing reaches more
_MOST_UNUSED = 4  # of a large chunk to its array
_SLACK_BYTES = 1024 * 1024  # for headers, and for compressors that make more of what they cannot compress
_PIECE_BYTES = 1024 * 1024
_ENTRY_BYTES = 16  # of the index of a shard, for each chunk
_MISSING = 2**64 - 1
_ZSTD_FRAME = 0xFD2FB528
_ZSTD_SKIPPED = range(0x184D2A50, 0x184D2A60)
_ZSTD_BLOCK_BYTES = 128 * 1024  # a compressed block becomes no more


@dataclass(frozen=True, slots=True)
class ChunkEncoding:
    """How the chunks of an array are packed.

    Attributes:
        compressor: name of the one compressor; None if there is none.
        chunk_nbytes: what a chunk becomes: of those inside, where files are shards.
        chunks_per_file: how many chunks lie in a file, 0 if it is one itself, without an index.
        index_at_end: whether the index of a shard is its end, else its beginning.
        index_nbytes: length of that index; None if its own codecs leave that open.
    """

    compressor: str | None
    chunk_nbytes: int
    chunks_per_file: int = 0
    index_at_end: bool = True
    index_nbytes: int | None = None


def encoding_of(array: ZarrArray) -> ChunkEncoding:
    """Return how the chunks of an array are packed, by its document.

    Raises:
        FormatError: more than one compressor, or shards in shards.
    """
    nbytes = math.prod(array.grid.inner) * DTYPES[array.spec.dtype].itemsize
    if array.zarr_format == 2:
        said = array.document.get("compressor")
        return ChunkEncoding(str(said.get("id")) if isinstance(said, dict) and said else None, nbytes)
    codecs = _configurations(array.document.get("codecs"))
    if not codecs or codecs[0][0] != "sharding_indexed":
        return ChunkEncoding(_one_compressor(codecs, array), nbytes)
    sharding = codecs[0][1]
    count = math.prod(c // i for c, i in zip(array.grid.chunk, array.grid.inner, strict=True))
    index_codecs = [name for name, _ in _configurations(sharding.get("index_codecs"))]
    is_plain = index_codecs in (["bytes"], ["bytes", "crc32c"])
    return ChunkEncoding(
        _one_compressor([*codecs[1:], *_configurations(sharding.get("codecs"))], array),
        nbytes,
        count,
        sharding.get("index_location", "end") == "end",
        count * _ENTRY_BYTES + 4 * (len(index_codecs) - 1) if is_plain else None,
    )


def check_file(store: Store, array: ZarrArray, packing: ChunkEncoding, name: str, chunk: int) -> None:
    """Refuse to decode a chunk, by its number in the file, that becomes too much. Reads what it has to.

    Raises:
        FormatError: it does.
    """
    nbytes, decoded = store.size(name), packing.chunk_nbytes
    count = max(packing.chunks_per_file, 1)
    most = 2 * decoded + _SLACK_BYTES
    if nbytes > count * (most + _ENTRY_BYTES):
        raise _refused(store, array, name, f"it has {nbytes:,} bytes, and its elements {count * decoded:,}")
    needed = math.prod(array.spec.global_shape) * DTYPES[array.spec.dtype].itemsize
    if decoded > LARGE_BYTES and decoded > min(_MOST_UNUSED * needed, _MOST_RATIO * nbytes):
        reason = f"its {nbytes:,} bytes become {decoded:,}, of an array of {needed:,}"
        raise _refused(store, array, name, reason)
    if packing.compressor is None:
        return
    start, length = 0, nbytes
    if packing.chunks_per_file:
        start, length = _place_in_shard(store, array, packing, name, chunk, nbytes)
    if length > most:
        raise _refused(store, array, name, f"a chunk of {decoded:,} bytes takes {length:,} in it")
    data = bytearray(length)
    store.read_into(name, start, memoryview(data))
    expand = _EXPANDED.get(packing.compressor)
    if expand is None:
        raise _refused(store, array, name, f"compressor {packing.compressor!r:.80} is not known here")
    if any(total > most for total in expand(bytes(data))):
        raise _refused(store, array, name, f"a chunk of {decoded:,} bytes becomes more than {most:,}")


def _place_in_shard(
    store: Store, array: ZarrArray, packing: ChunkEncoding, name: str, chunk: int, nbytes: int
) -> tuple[int, int]:
    """Return where a chunk lies in its shard, and its length; 0 for one that is missing."""
    if packing.index_nbytes is None or packing.index_nbytes > nbytes:
        raise _refused(store, array, name, "the index of its chunks is compressed, or longer than it")
    begin = nbytes - packing.index_nbytes if packing.index_at_end else 0
    entry = np.zeros(2, "<u8")
    store.read_into(name, begin + chunk * _ENTRY_BYTES, entry.data.cast("B"))
    start, length = entry.tolist()
    if (start, length) == (_MISSING, _MISSING):
        return 0, 0  # tensorstore says so
    if start + length > nbytes:
        raise _refused(store, array, name, f"a chunk lies at {start:,} and has {length:,} bytes")
    return start, length


def _configurations(codecs: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return names and configurations; what is malformed is for tensorstore to refuse."""
    found = []
    for codec in codecs if isinstance(codecs, list) else ():
        said = codec if isinstance(codec, dict) else {"name": codec}
        configuration = said.get("configuration")
        found.append((str(said.get("name")), configuration if isinstance(configuration, dict) else {}))
    return found


_NO_COMPRESSORS = frozenset({"bytes", "endian", "crc32c", "transpose"})


def _one_compressor(codecs: Iterable[tuple[str, dict[str, Any]]], array: ZarrArray) -> str | None:
    found = [name for name, _ in codecs if name not in _NO_COMPRESSORS]
    if len(found) > 1 or "sharding_indexed" in found:
        raise FormatError(
            f"{array.spec.key!r}: the codecs {', '.join(found)[:200]} one after the other, or one in "
            f"another, cannot be loaded, as nobody can say what they expand to. Store the array with one "
            f"compressor at most.",
            key=array.spec.key,
            path=array.path,
        )
    return found[0] if found else None


def _inflated(data: bytes) -> Iterator[int]:
    """Yield how much was made of deflated data so far; ends where it makes no sense."""
    total = 0
    while data:
        decoder = zlib.decompressobj(wbits=47)  # of zlib or gzip, as its header says
        while not decoder.eof:
            try:
                made = len(decoder.decompress(data, _PIECE_BYTES))
            except zlib.error:
                return
            total += made
            yield total
            if not made and not decoder.unconsumed_tail:
                return
            data = decoder.unconsumed_tail or decoder.unused_data
        data = decoder.unused_data


def _unzipped(data: bytes) -> Iterator[int]:
    """The same of bzip2."""
    total = 0
    while data:
        decoder = bz2.BZ2Decompressor()
        piece = data
        while not decoder.eof:
            try:
                made = len(decoder.decompress(piece, _PIECE_BYTES))
            except (OSError, EOFError):
                return
            piece = b""
            total += made
            yield total
            if not made and decoder.needs_input:
                return
        data = decoder.unused_data


def _of_zstd(data: bytes) -> Iterator[int]:
    """Yield a bound of what Zstandard makes of data, from the headers of its blocks alone.

    Source: RFC 8878, sections 3.1.1 and 3.1.2.
    """
    total = at = 0
    while len(data) - at >= 8:
        magic = int.from_bytes(data[at : at + 4], "little")
        if magic in _ZSTD_SKIPPED:
            at += 8 + int.from_bytes(data[at + 4 : at + 8], "little")
            continue
        if magic != _ZSTD_FRAME:
            return
        descriptor = data[at + 4]
        is_single = descriptor >> 5 & 1
        size_bytes = (is_single, 2, 4, 8)[descriptor >> 6]
        at += 5 + (not is_single) + (0, 1, 2, 4)[descriptor & 3] + size_bytes
        is_last = False
        while not is_last and len(data) - at >= 3:
            header = int.from_bytes(data[at : at + 3], "little")
            is_last, kind, size = bool(header & 1), header >> 1 & 3, header >> 3
            total += size if kind in (0, 1) else _ZSTD_BLOCK_BYTES
            at += 3 + (1 if kind == 1 else size)
            yield total
        at += 4 * (descriptor >> 2 & 1)


def _of_blosc(data: bytes) -> Iterator[int]:
    """Yield what a header of blosc says. Source: README_CHUNK_FORMAT of c-blosc."""
    yield int.from_bytes(data[4:8], "little")


_EXPANDED: dict[str, Callable[[bytes], Iterator[int]]] = {
    "zlib": _inflated,
    "gzip": _inflated,
    "bz2": _unzipped,
    "zstd": _of_zstd,
    "blosc": _of_blosc,
}


def _refused(store: Store, array: ZarrArray, name: str, reason: str) -> FormatError:
    return FormatError(
        f"{array.spec.key!r}: {store.location}/{name} is not decoded: {reason}. The file is damaged or "
        f"forged; if neither, store the array in smaller chunks.",
        key=array.spec.key,
        path=f"{store.location}/{name}",
    )
