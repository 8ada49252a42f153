"""Finds what is wrong with the files of a native checkpoint, apart from the bytes of its chunks.

Several files contain the same information, which is compared here: the commit and the names in it, the index
and its head, the index and the headers of data files. A load uses only the index, so it does not see a
damaged header. Readers of plain safetensors do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from megackpt.errors import CheckpointError
from megackpt.formats.damage import Damage, damage_of, size_of, why_not_found
from megackpt.formats.documents import file_entry
from megackpt.formats.file_names import NATIVE
from megackpt.formats.index_file import read_index
from megackpt.formats.index_head import read_head
from megackpt.formats.native import names
from megackpt.formats.native.data_file import METADATA, header_of, tensors_of
from megackpt.formats.native.parity import read_groups
from megackpt.formats.safetensors_header import read_header
from megackpt.formats.strategy import MANIFEST, Json, WholeFile
from megackpt.plans.metadata import StoredChunks
from megackpt.storage import Store, digest_of

_ATTEMPT = re.compile(r"[0-9a-f]{16}")
_HEADER_MAX_BYTES = 1 << 32  # no file of a rank has so many chunks
_SMALL_BYTES = 64 << 20  # common state up to this length is read and compared with its digest


def check_files(store: Store, manifest: Json) -> Iterator[Damage]:
    """Yield what is wrong with files; see `LoadStrategy.check_files`."""
    yield from _check_manifest(manifest)
    yield from _check_named(store, manifest)
    yield from _check_parity(store, manifest)
    for entry in ("common", "common_tensors"):
        if entry == "common" or entry in manifest:
            yield from _check_small(store, manifest, entry)
    try:
        stored = read_index(store, manifest)
        yield from _check_head(store, manifest, stored)
    except CheckpointError as error:
        # Without an index there is nothing to compare the data files with.
        yield damage_of(error, location=store.location)
        return
    yield from _check_data_files(store, manifest, stored)


def whole_files(store: Store, manifest: Json) -> tuple[WholeFile, ...]:
    """Return parity files and the files they protect; none if their list is damaged."""
    try:
        groups = read_groups(store, manifest)
    except CheckpointError:
        return ()
    return tuple(file for group in groups for file in group.files)


def _check_manifest(manifest: Json) -> Iterator[Damage]:
    """Compare the attempt of the commit with the one in the names of its files."""
    attempt, ranks = manifest.get("attempt"), manifest.get("world_size")
    if not isinstance(attempt, str) or not _ATTEMPT.fullmatch(attempt):
        yield Damage(file=MANIFEST, what=f"its attempt {attempt!r:.80} is not 16 hexadecimal digits")
        return
    if type(ranks) is not int or ranks < 1:
        yield Damage(file=MANIFEST, what=f"its world_size {ranks!r:.80} is no number of ranks")
    common = (manifest.get("common_backend"), manifest.get("common_backend_version"))
    if common != (names.BACKEND, names.VERSION):
        yield Damage(file=MANIFEST, what=f"its common state is of format {common!r:.80}")
    for entry in ("index", "common", "common_tensors", "parity"):
        named = manifest.get(entry)
        name = named.get("file") if isinstance(named, dict) else None
        if isinstance(name, str) and NATIVE.attempt_of(name) != attempt:
            yield Damage(file=MANIFEST, what=f"it is of attempt {attempt}, and its {entry} is {name!r:.200}")


def _check_named(store: Store, manifest: Json) -> Iterator[Damage]:
    """Find files of the attempt that the commit does not name: optional ones, whose entry may be lost."""
    entries = [manifest.get(entry) for entry in ("common", "common_tensors", "parity")]
    named = [entry["file"] for entry in entries if isinstance(entry, dict) and "file" in entry]
    for name in (*store.names("common-"), *store.names("parity-")):
        if NATIVE.attempt_of(name) == manifest.get("attempt") and name not in named:
            yield Damage(file=MANIFEST, what=f"it does not name {name!r}, which is of its attempt")


def _check_small(store: Store, manifest: Json, entry: str) -> Iterator[Damage]:
    try:
        expected, _ = file_entry(store, manifest, entry)
        name, nbytes = expected["file"], expected["nbytes"]
        actual_nbytes = store.size(name)
        if actual_nbytes != nbytes:
            yield Damage(file=name, what=f"it has {actual_nbytes:,} bytes instead of {nbytes:,}")
        elif nbytes <= _SMALL_BYTES and digest_of(store.read(name, max_bytes=nbytes)) != expected["xxh3_128"]:
            yield Damage(file=name, what="its bytes are not those that were saved (their digest differs)")
    except CheckpointError as error:
        yield damage_of(error, location=store.location)


def _check_parity(store: Store, manifest: Json) -> Iterator[Damage]:
    """Check the list of parity files, and the sizes of listed files without chunks of the checkpoint."""
    try:
        groups = read_groups(store, manifest)
        with_chunks = set(read_index(store, manifest).files) if groups else set()
    except CheckpointError as error:
        yield damage_of(error, location=store.location)
        return
    for listed in (file for group in groups for file in group.files):
        # The caller looks up the files of chunks, and would report the same fault again.
        if listed.name in with_chunks:
            continue
        try:
            actual_nbytes = store.size(listed.name)
            if actual_nbytes != listed.nbytes:
                what = f"it has {actual_nbytes:,} bytes instead of {listed.nbytes:,}"
                yield Damage(file=listed.name, what=what)
        except CheckpointError as error:
            what = why_not_found(store, listed.name, error)
            yield Damage(file=listed.name, what=f"{what}; it is needed to repair others")


def _check_head(store: Store, manifest: Json, stored: StoredChunks) -> Iterator[Damage]:
    """Compare the index with its head, which ranks of large jobs use to find their rows."""
    entry, where = file_entry(store, manifest, "index")
    if "head" not in entry:
        if _has_head(store, entry["file"]):
            yield Damage(file=MANIFEST, what="it does not name the head of the index, which has one")
        return
    head = read_head(store, entry, where)
    table = stored.table
    counts = np.bincount(table.array, minlength=len(table.arrays))
    if head.arrays != table.arrays or not np.array_equal(np.diff(head.first_row), counts):
        yield Damage(file=entry["file"], what="its head lists other arrays or chunks than its columns")


def _has_head(store: Store, index: str) -> bool:
    """Return whether an index, which is known to be undamaged, begins with the columns of a head."""
    return any(column.name == "block.xxh3" for column in read_header(store, index).entries)


def _check_data_files(store: Store, manifest: Json, stored: StoredChunks) -> Iterator[Damage]:
    # After this, the chunks of a file are neighbours, in the order of their offsets.
    order = np.lexsort((stored.offset_bytes, stored.file))
    ends = np.searchsorted(stored.file[order], np.arange(len(stored.files) + 1))
    for number, name in enumerate(stored.files):
        rank = names.rank_of(name)
        ranks = manifest.get("world_size")
        if rank is not None and type(ranks) is int and rank >= ranks:
            yield Damage(file=name, what=f"it is of rank {rank}, and {MANIFEST} says that {ranks} saved")
        try:
            yield from _check_data_file(store, name, stored.take(order[ends[number] : ends[number + 1]]))
        except CheckpointError as error:
            # The caller looks up all files, and reports those that it does not find.
            if size_of(store, name) is not None:
                yield damage_of(error, location=store.location, file=name)


def _check_data_file(store: Store, name: str, chunks: StoredChunks) -> Iterator[Damage]:
    """Check one data file; chunks are those that the index has in it, in their order."""
    size = store.size(name)
    prefix = bytearray(8)
    store.read_into(name, 0, memoryview(prefix))
    length = int.from_bytes(prefix, "little")
    data_start = 8 + length
    # Bounded before memory is allocated for the header.
    if not 2 <= length <= min(size - 8, _HEADER_MAX_BYTES):
        yield Damage(
            file=name, what=f"its header has {length:,} bytes, which the file cannot hold", start=0, stop=8
        )
        return
    text = bytearray(length)
    store.read_into(name, 8, memoryview(text))
    # The usual case in one comparison: the header is the one that a save of just these chunks writes.
    is_expected = prefix + text == header_of(chunks.table)
    if is_expected and _are_contiguous(chunks, data_start) and size == _end(chunks, data_start):
        return
    yield from _check_entries(name, bytes(text), chunks, size=size)


def _are_contiguous(chunks: StoredChunks, data_start: int) -> bool:
    ends = np.cumsum(chunks.table.nbytes)
    return bool(np.array_equal(chunks.offset_bytes, data_start + ends - chunks.table.nbytes))


def _end(chunks: StoredChunks, data_start: int) -> int:
    return data_start + int(chunks.table.nbytes.sum())


def _check_entries(name: str, text: bytes, chunks: StoredChunks, *, size: int) -> Iterator[Damage]:
    """Find what is wrong in a header that differs from the one that a save of just these chunks writes.

    A header may rightly list more chunks, which have been removed from the checkpoint since.
    """
    data_start = 8 + len(text)
    in_header = partial(Damage, file=name, start=0, stop=data_start)
    try:
        header: dict[str, Any] = json.loads(text)
        metadata = header.pop("__metadata__", None)
        entries = {_range(entry): (key, entry["dtype"], entry["shape"]) for key, entry in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        yield in_header(what=f"its header is not that of a safetensors file ({error})")
        return
    if metadata != METADATA:
        yield in_header(what=f"its header says that it is {metadata!r:.100}")
    end = data_start + max((stop for _, stop in entries), default=0)
    if size != end:
        yield Damage(file=name, what=f"it has {size:,} bytes instead of {end:,}")
    # A chunk is found by its byte range, as its name in the header may carry a number.
    begins = (chunks.offset_bytes - data_start).tolist()
    ends = (chunks.offset_bytes - data_start + chunks.table.nbytes).tolist()
    for row, expected in enumerate(tensors_of(chunks.table)):
        fault = _fault_of(entries.get((begins[row], ends[row])), expected)
        if fault:
            key = chunks.table.arrays[int(chunks.table.array[row])].key
            yield in_header(key=key, box=chunks.table.describe(row), what=fault)


def _range(entry: Any) -> tuple[int, int]:
    begin, end = entry["data_offsets"]
    if type(begin) is not int or type(end) is not int or not 0 <= begin <= end:
        raise ValueError(f"data_offsets {begin!r:.40}, {end!r:.40}")
    return begin, end


def _fault_of(entry: tuple[str, Any, Any] | None, expected: tuple[str, str, list[int]]) -> str | None:
    """Return how the header's entry for the bytes of a chunk contradicts the index; None if it does not."""
    if entry is None:
        return "the header has no tensor where the index has this chunk"
    name, dtype, shape = entry
    expected_name, *dtype_and_shape = expected
    # A name that was taken was numbered when the file was written.
    if name != expected_name and not re.fullmatch(rf"{re.escape(expected_name)}#\d+", name):
        return f"the header calls it {name!r:.200}"
    if [dtype, shape] != dtype_and_shape:
        return f"the header has it as {dtype} {shape}, and not as {expected[1]} {expected[2]}"
    return None
