"""Checks, before a chunk is decoded, how many bytes it may expand to.

A compressed chunk that expands to more than its array needs is an error, and so is a chunk that is far larger
than its array or its file. tensorstore decodes first and compares lengths afterwards, so a few kilobytes
could take all memory. tensorstore reports other errors of codecs.
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
from megackpt.formats.zarr.rounds import grid_extents
from megackpt.plans.metadata import DTYPES
from megackpt.storage import Store

LARGE_BYTES = 512 * 1024 * 1024
"""Chunks that expand to no more than this are decoded whatever the sizes of their array and file are."""

_MAX_RATIO = 64  # of a large chunk to its file; compressors reach more only for empty data
_MAX_UNUSED = 4  # ratio of a large chunk to its array
_SLACK_BYTES = 1024 * 1024  # for headers, and for data that grow when they are compressed
_PART_BYTES = 1024 * 1024
ENTRY_BYTES = 16  # of the index of a shard, for each chunk
_MISSING = 2**64 - 1
_ZSTD_FRAME = 0xFD2FB528
_ZSTD_SKIPPED = range(0x184D2A50, 0x184D2A60)
_ZSTD_BLOCK_BYTES = 128 * 1024  # a compressed block expands to no more


@dataclass(frozen=True, slots=True)
class ChunkEncoding:
    """How the chunks of an array are encoded.

    Attributes:
        compressor: name of the only compressor; None if there is none.
        chunk_nbytes: decoded size of a chunk; if files are shards, of a chunk in a shard.
        chunks_per_file: number of chunks in a shard; 0 if a file is a chunk, without an index.
        index_at_end: whether the index of a shard is at its end, else at its beginning.
        index_nbytes: length of that index; None if it depends on the codecs of the index.
    """

    compressor: str | None
    chunk_nbytes: int
    chunks_per_file: int = 0
    index_at_end: bool = True
    index_nbytes: int | None = None


def encoding_of(array: ZarrArray) -> ChunkEncoding:
    """Return how the chunks of an array are encoded, according to its document.

    Raises:
        FormatError: more than one compressor, or shards in shards.
    """
    nbytes = math.prod(array.grid.inner) * DTYPES[array.spec.dtype].itemsize
    if array.zarr_format == 2:
        compressor = array.document.get("compressor")
        if not isinstance(compressor, dict) or not compressor:
            return ChunkEncoding(None, nbytes)
        return ChunkEncoding(str(compressor.get("id")), nbytes)
    codecs = _configurations(array.document.get("codecs"))
    if not codecs or codecs[0][0] != "sharding_indexed":
        return ChunkEncoding(_one_compressor(codecs, array), nbytes)
    sharding = codecs[0][1]
    count = math.prod(grid_extents(array.grid.chunk, array.grid.inner))
    index_codecs = [name for name, _ in _configurations(sharding.get("index_codecs"))]
    is_plain = index_codecs in (["bytes"], ["bytes", "crc32c"])
    # An entry of the index is an offset and a length, 8 bytes each; crc32c adds 4 bytes to the whole index.
    return ChunkEncoding(
        _one_compressor([*codecs[1:], *_configurations(sharding.get("codecs"))], array),
        nbytes,
        count,
        sharding.get("index_location", "end") == "end",
        count * ENTRY_BYTES + 4 * (len(index_codecs) - 1) if is_plain else None,
    )


def check_file(store: Store, array: ZarrArray, encoding: ChunkEncoding, name: str, chunk: int) -> None:
    """Check that a chunk, given by its number in the file, does not expand to too much.

    Raises:
        FormatError: it does.
    """
    nbytes, decoded = store.size(name), encoding.chunk_nbytes
    limit = 2 * decoded + _SLACK_BYTES
    # First what the sizes alone rule out, then the header or the decompressed length of this chunk.
    reason = _fault_of_sizes(array, encoding, nbytes, limit)
    if reason:
        raise _not_decoded(store, array, name, reason)
    if encoding.compressor is None:
        return
    start, length = 0, nbytes
    if encoding.chunks_per_file:
        start, length = _find_in_shard(store, array, encoding, name, chunk, nbytes)
    if length > limit:
        raise _not_decoded(store, array, name, f"a chunk of {decoded:,} bytes takes {length:,} in it")
    data = bytearray(length)
    store.read_into(name, start, memoryview(data))
    expand = _EXPANDED_SIZES.get(encoding.compressor)
    if expand is None:
        raise _not_decoded(store, array, name, f"compressor {encoding.compressor!r:.80} is not known here")
    if any(total > limit for total in expand(bytes(data))):
        raise _not_decoded(store, array, name, f"a chunk of {decoded:,} bytes becomes more than {limit:,}")


def _fault_of_sizes(array: ZarrArray, encoding: ChunkEncoding, nbytes: int, limit: int) -> str:
    """Return why a file of so many bytes is not decoded; "" if its size is plausible."""
    count, decoded = max(encoding.chunks_per_file, 1), encoding.chunk_nbytes
    if nbytes > count * (limit + ENTRY_BYTES):
        return f"it has {nbytes:,} bytes, and its elements {count * decoded:,}"
    # A large chunk must be worth its memory: most of it elements of the array, and its file not tiny.
    needed = math.prod(array.spec.global_shape) * DTYPES[array.spec.dtype].itemsize
    if decoded > LARGE_BYTES and decoded > min(_MAX_UNUSED * needed, _MAX_RATIO * nbytes):
        return f"its {nbytes:,} bytes become {decoded:,}, of an array of {needed:,}"
    return ""


def _find_in_shard(
    store: Store, array: ZarrArray, encoding: ChunkEncoding, name: str, chunk: int, nbytes: int
) -> tuple[int, int]:
    """Return where a chunk begins in its shard, and its length; both 0 if it is missing."""
    if encoding.index_nbytes is None or encoding.index_nbytes > nbytes:
        raise _not_decoded(store, array, name, "the index of its chunks is compressed, or longer than it")
    begin = nbytes - encoding.index_nbytes if encoding.index_at_end else 0
    entry = np.zeros(2, "<u8")
    store.read_into(name, begin + chunk * ENTRY_BYTES, entry.data.cast("B"))
    start, length = entry.tolist()
    if (start, length) == (_MISSING, _MISSING):
        return 0, 0  # tensorstore reports it
    if start + length > nbytes:
        raise _not_decoded(store, array, name, f"a chunk lies at {start:,} and has {length:,} bytes")
    return start, length


def _configurations(codecs: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return names and configurations of codecs. tensorstore reports malformed ones."""
    configurations = []
    for codec in codecs if isinstance(codecs, list) else ():
        entry = codec if isinstance(codec, dict) else {"name": codec}
        configuration = entry.get("configuration")
        fields = configuration if isinstance(configuration, dict) else {}
        configurations.append((str(entry.get("name")), fields))
    return configurations


_NO_COMPRESSORS = frozenset({"bytes", "endian", "crc32c", "transpose"})


def _one_compressor(codecs: Iterable[tuple[str, dict[str, Any]]], array: ZarrArray) -> str | None:
    compressors = [name for name, _ in codecs if name not in _NO_COMPRESSORS]
    if len(compressors) > 1 or "sharding_indexed" in compressors:
        raise FormatError(
            f"{array.spec.key!r}: the codecs {', '.join(compressors)[:200]} one after the other, or one in "
            f"another, cannot be loaded, as nobody can say what they expand to. Store the array with one "
            f"compressor at most.",
            key=array.spec.key,
            path=array.path,
        )
    return compressors[0] if compressors else None


def _deflate_sizes(data: bytes) -> Iterator[int]:
    """Yield the size of what was decompressed so far, part by part; ends at data that is malformed."""
    total = 0
    while data:
        decoder = zlib.decompressobj(wbits=47)  # of zlib or gzip, as its header says
        while not decoder.eof:
            try:
                decompressed = len(decoder.decompress(data, _PART_BYTES))
            except zlib.error:
                return
            total += decompressed
            yield total
            # Neither output nor input is left, so the data end before their stream does.
            if not decompressed and not decoder.unconsumed_tail:
                return
            data = decoder.unconsumed_tail or decoder.unused_data
        # Another stream may follow: gzip files can be joined.
        data = decoder.unused_data


def _bzip2_sizes(data: bytes) -> Iterator[int]:
    """Yield the same for bzip2."""
    total = 0
    while data:
        decoder = bz2.BZ2Decompressor()
        part = data
        while not decoder.eof:
            try:
                decompressed = len(decoder.decompress(part, _PART_BYTES))
            except (OSError, EOFError):
                return
            # The decoder keeps what it has not read yet, so it gets its input once.
            part = b""
            total += decompressed
            yield total
            if not decompressed and decoder.needs_input:
                return
        data = decoder.unused_data


def _zstd_sizes(data: bytes) -> Iterator[int]:
    """Yield a bound of the size that Zstandard expands data to, from the headers of its blocks alone.

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
        # The header of a frame: magic, descriptor, window (unless there is a single segment), number of the
        # dictionary, size of the content. The last three have lengths that the descriptor gives.
        descriptor = data[at + 4]
        is_single = descriptor >> 5 & 1
        size_bytes = (is_single, 2, 4, 8)[descriptor >> 6]
        at += 5 + (not is_single) + (0, 1, 2, 4)[descriptor & 3] + size_bytes
        is_last = False
        while not is_last and len(data) - at >= 3:
            # The header of a block: 1 bit for the last one, 2 bits for its kind (0 raw, 1 one repeated byte,
            # 2 compressed), 21 bits for its size. Of a repeated byte one is stored, whatever the size says.
            header = int.from_bytes(data[at : at + 3], "little")
            is_last, kind, size = bool(header & 1), header >> 1 & 3, header >> 3
            total += size if kind in (0, 1) else _ZSTD_BLOCK_BYTES
            at += 3 + (1 if kind == 1 else size)
            yield total
        # The checksum of the content, if the frame has one.
        at += 4 * (descriptor >> 2 & 1)


def _blosc_sizes(data: bytes) -> Iterator[int]:
    """Yield the size in a header of blosc. Source: README_CHUNK_FORMAT of c-blosc."""
    yield int.from_bytes(data[4:8], "little")


_EXPANDED_SIZES: dict[str, Callable[[bytes], Iterator[int]]] = {
    "zlib": _deflate_sizes,
    "gzip": _deflate_sizes,
    "bz2": _bzip2_sizes,
    "zstd": _zstd_sizes,
    "blosc": _blosc_sizes,
}


def _not_decoded(store: Store, array: ZarrArray, name: str, reason: str) -> FormatError:
    return FormatError(
        f"{array.spec.key!r}: {store.location}/{name} is not decoded: {reason}. The file is damaged or "
        f"forged; if neither, store the array in smaller chunks.",
        key=array.spec.key,
        path=f"{store.location}/{name}",
    )
