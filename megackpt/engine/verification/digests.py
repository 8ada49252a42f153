"""Reads every byte of a checkpoint and compares it with the digests of its blocks.

Several threads read, in bounded memory. If a part is damaged, it is read again block by block, to find the
damaged blocks. Undamaged bytes also count in the digests of whole arrays.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import TypeVar

import numpy as np

from megackpt.codec import keep_unknown_values
from megackpt.engine.data.chunk_bytes import parts_of
from megackpt.engine.data.progress import Progress
from megackpt.engine.data.read import read_chunk
from megackpt.engine.data.workers import run_jobs
from megackpt.errors import CheckpointError, FormatError, IntegrityError, MissingExtraError, UnknownClassError
from megackpt.formats.array_digests import ArrayDigester
from megackpt.formats.contents import Borrow, Chunks, Contents, Part, RawRanges
from megackpt.formats.damage import Damage, damage_of, raise_if_denied
from megackpt.formats.strategy import WholeFile
from megackpt.options import VerifyOptions
from megackpt.plans.metadata import ChunkTable
from megackpt.storage import COMMON_POOL, MAX_BORROWED_BYTES, FileDigester, Store
from megackpt.storage.crc64 import Crc64

# Computes digests of whole arrays in a verification, and compares them with the stored ones.
#
# The digest of an array can be compared only if every byte of the array was read, and every block has the
# right digest. One process may read all bytes, or several processes a share each.


@dataclass(frozen=True, slots=True)
class ArrayShare:
    """What one process has read of an array.

    Attributes:
        key: the name of the array.
        stored: the stored digest of the array, 64 bits.
        nbytes: size of the array, in bytes.
        read: how many of these bytes were read.
        contribution: what these bytes contribute to the digest, 64 bits. Contributions are combined by XOR.
    """

    key: str
    stored: int
    nbytes: int
    read: int
    contribution: int


class ArrayCheck:
    """Digests parts of chunks as they are read, each part once. Safe for several threads.

    Raises:
        MissingExtraError: the library that computes the digests is not installed.
    """

    def __init__(self, table: ChunkTable, digests: Mapping[str, int]) -> None:
        self._table, self._digests = table, digests
        self._digester = ArrayDigester(table)
        self._has_digest = np.array([spec.key in digests for spec in table.arrays], np.bool_)
        self._contributions = np.zeros(len(table), np.uint64)
        self._read = np.zeros(len(table), np.int64)
        self._lock = threading.Lock()
        self._short_ranges_lock = threading.Lock()

    def add(self, parts: Sequence[Part], data: Sequence[memoryview]) -> None:
        """Digest the bytes of parts. The caller has checked them against the digests of their blocks."""
        for part, part_data in zip(parts, data, strict=True):
            if not self._has_digest[self._table.array[part.row]]:
                continue
            digest = self._digester.begin(part.row, start=part.start)
            if digest is not None and len(part_data):
                # With short ranges most of the time is spent in Python, where threads only slow each other
                # down.
                with self._short_ranges_lock if digest.has_short_ranges else contextlib.nullcontext():
                    digest.update(part_data)
                # Parts of one chunk may come from several threads, and `^=` on a row of an array is not
                # atomic.
                with self._lock:
                    self._contributions[part.row] ^= np.uint64(digest.result())
                    self._read[part.row] += len(part_data)

    def shares(self) -> tuple[ArrayShare, ...]:
        """Return what was read of each array that has a digest, in the order of keys."""
        arrays = self._table.arrays
        # Sum up the chunks of each array.
        read, contributions = np.zeros(len(arrays), np.int64), np.zeros(len(arrays), np.uint64)
        np.add.at(read, self._table.array, self._read)
        np.bitwise_xor.at(contributions, self._table.array, self._contributions)
        return tuple(
            ArrayShare(spec.key, self._digests[spec.key], spec.nbytes, read=nbytes, contribution=value)
            for spec, nbytes, value in zip(arrays, read.tolist(), contributions.tolist(), strict=True)
            if spec.key in self._digests
        )


def array_check(table: ChunkTable, digests: Mapping[str, int], keys: Collection[str]) -> ArrayCheck | None:
    """Return a check of those of these arrays that have a digest; None if there are none, or no library."""
    digests = {key: digests[key] for key in keys if key in digests}
    if not digests:
        return None
    try:
        return ArrayCheck(table, digests)
    except MissingExtraError:
        return None


def compare_arrays(shares: Sequence[Sequence[ArrayShare]]) -> tuple[int, list[Damage]]:
    """Compare the digests of those arrays that were read completely, in all shares together.

    There is at least one share. All shares are of the same arrays, in the same order.

    Returns:
        How many digests were compared, and the arrays that have another digest than the stored one.
    """
    compared, damages = 0, []
    for array_shares in zip(*shares, strict=True):
        first = array_shares[0]
        # Some bytes were not read, or are damaged, which is reported already.
        if sum(share.read for share in array_shares) != first.nbytes:
            continue
        compared += 1
        contribution = reduce(operator.xor, (share.contribution for share in array_shares))
        digest = Crc64().finished(contribution, first.nbytes)
        if digest != first.stored:
            what = (
                f"its elements do not have the digest that is stored of the whole array (crc64nvme "
                f"{digest:016x} instead of {first.stored:016x}), although the digest of each block is right: "
                f"blocks were mixed up, or the stored digest is wrong"
            )
            damages.append(Damage(key=first.key, what=what))
    return compared, damages


T = TypeVar("T")

_MAX_GAP_BYTES = 64 * 1024  # between chunks that are read at once: another request would cost more
_DIFFER = "bytes are not those that were saved (their digest differs)"
_BATCH = 1 << 14
"""How many parts the threads are given at once: enough to keep them busy, in little memory."""


class ByteCheck:
    """Reads chunks and collects what is wrong with their bytes. Safe for several threads.

    Attributes:
        arrays: takes all bytes that are right, each once; None if no array has a digest.
        unknown_values: number of objects that hold values of unknown classes.
    """

    def __init__(
        self,
        contents: Contents,
        chunks: Chunks,
        store: Store,
        options: VerifyOptions,
        progress: Progress,
        arrays: ArrayCheck | None,
    ) -> None:
        self.arrays = arrays
        self.unknown_values = 0
        self._contents, self._chunks, self._store = contents, chunks, store
        self._options, self._progress = options, progress
        self._ranges = chunks.file_ranges()
        self._raw = chunks.raw_ranges()
        self._lock = threading.Lock()
        self._damaged: dict[int, list[tuple[int, int, str]]] = {}  # row: (start, stop in the chunk, why)
        self._damaged_objects: list[Damage] = []

    def run(self, readable: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> None:
        """Read the readable chunks, `[n]`, and decode objects."""
        table = self._chunks.table
        self._progress.begin("reading", int(table.nbytes[readable].sum()))
        is_object = table.are_objects()
        # In the order of the files, so that each is read from front to back, and neighbours in one request.
        in_order = np.argsort(self._chunks.position, kind="stable")
        tensors = in_order[(readable & ~is_object)[in_order]].tolist()
        objects = in_order[(readable & is_object)[in_order]].tolist()
        for parts in _batches(_parts(self._chunks, tensors)):
            run_jobs(self._jobs(parts), threads=self._options.threads, name="megackpt-verify")
        for rows in _batches(iter(objects)):
            jobs = [partial(self._check_object, row) for row in rows]
            run_jobs(jobs, threads=self._options.threads, name="megackpt-verify")

    def damages(self) -> list[Damage]:
        """Return what is wrong. Damaged blocks that follow each other in a chunk are one damage."""
        damages = list(self._damaged_objects)
        for row, ranges in self._damaged.items():
            merged: list[tuple[int, int, str]] = []
            for start, stop, why in sorted(ranges):
                if merged and merged[-1][1] == start and merged[-1][2] == why:
                    start = merged.pop()[0]
                merged.append((start, stop, why))
            damages += [self._damage(row, *part) for part in merged]
        return list(dict.fromkeys(damages))

    def _jobs(self, parts: Sequence[Part]) -> list[Callable[[], None]]:
        """Return jobs that read these parts; neighbours in a file are read by one request."""
        if self._raw is None:
            return [partial(self._check_part, part) for part in parts]
        groups = _neighbours(self._raw, parts)
        return [partial(self._check_group, self._raw.borrow, group) for group in groups]

    def _check_object(self, row: int) -> None:
        table = self._chunks.table
        nbytes = int(table.nbytes[row])
        spec = table.arrays[int(table.array[row])]
        try:
            data = read_chunk(self._chunks, row)
        except CheckpointError as error:
            if self._chunks.block_bytes == 1:  # the format has no digests of parts
                self._add_damage(Part(row, 0, nbytes), error)
            else:
                self._check_part(Part(row, 0, nbytes))
            return
        where = f"{self._store.location}: object {spec.key!r}"
        try:
            is_decoded = can_decode(lambda: self._contents.decode_object(data, where), self._options)
            with self._lock:
                self.unknown_values += not is_decoded
        except CheckpointError as error:
            what = damage_of(error, location=self._store.location).what
            with self._lock:
                self._damaged_objects.append(self._damage(row, 0, nbytes, f"it cannot be decoded: {what}"))
        self._progress.advance(nbytes)

    def _check_group(self, borrow: Borrow, parts: Sequence[Part]) -> None:
        try:
            # All digests are checked before the block begins. So a part goes to `arrays` here or in
            # `_check_part`, and never twice.
            with borrow(parts, True) as data:
                if self.arrays is not None:
                    self.arrays.add(parts, data)
                self._progress.advance(sum(part.stop - part.start for part in parts))
        except CheckpointError:  # at least one part is damaged: find out which
            for part in parts:
                self._check_part(part)

    def _check_part(self, part: Part) -> None:
        error = self._error_of(part)
        self._progress.advance(part.stop - part.start)
        if error is None:
            return
        block = self._chunks.block_bytes
        # Nothing smaller than a block can be checked, and a format without blocks has none to look for.
        if block == 1 or part.stop - part.start <= block:
            self._add_damage(part, error)
            return
        for start in range(part.start, part.stop, block):
            single_block = Part(part.row, start, min(start + block, part.stop))
            error = self._error_of(single_block)
            if error is not None:
                self._add_damage(single_block, error)

    def _error_of(self, part: Part) -> CheckpointError | None:
        """Read a part; return the error if it is damaged."""
        with COMMON_POOL.borrow() as buffer:
            nbytes = part.stop - part.start
            data = buffer.data[:nbytes] if nbytes <= len(buffer) else memoryview(bytearray(nbytes))
            try:
                self._chunks.read_into(part.row, part.start, data, verify=True)
            except CheckpointError as error:
                return error
            if self.arrays is not None:
                self.arrays.add([part], [data])
        return None

    def _add_damage(self, part: Part, error: CheckpointError) -> None:
        raise_if_denied(error)
        # Key, file and bytes are fields of the damage, so its text leaves them out.
        has_digest = self._chunks.block_bytes > 1 and isinstance(error, IntegrityError)
        why = f"the {_DIFFER}" if has_digest else " ".join(str(error).split())
        with self._lock:
            self._damaged.setdefault(part.row, []).append((part.start, part.stop, why))

    def _damage(self, row: int, start: int, stop: int, what: str) -> Damage:
        """Return the damage of the bytes `[start, stop)` of a chunk, with their position in the file."""
        table = self._chunks.table
        key, box = table.arrays[int(table.array[row])].key, table.describe(row)
        if self._ranges is None:
            return Damage(key=key, box=box, what=f"{self._chunks.describe(row)}: {what}")
        name = self._ranges.files[int(self._ranges.file[row])]
        # Of a compressed chunk nobody knows where in the file a byte of it is: the damage then names the
        # range of the whole chunk.
        first, last = int(self._ranges.start[row]), int(self._ranges.stop[row])
        if self._raw is not None:
            first, last = first + start, first + stop
        elif last < 0:  # the chunk has no range of its own in the file
            last = self._store.size(name)
        return Damage(file=name, key=key, box=box, start=first, stop=last, what=what)


def can_decode(decode: Callable[[], object], options: VerifyOptions) -> bool:
    """Decode a value; return whether this process knows, and may make, every class in it.

    A value of an unknown class is decoded as `convert` decodes it: no instance of the class is made.

    Raises:
        CheckpointError: the value cannot be decoded in this way either.
    """
    try:
        decode()
        return True
    except FormatError as error:
        if options.skip_unknown_classes and isinstance(error, UnknownClassError):
            return False
        # The unknown class may hide damage. This decodes all of the value, and makes no instance.
        with keep_unknown_values():
            decode()
        return False


def check_whole_files(
    files: Sequence[WholeFile], store: Store, options: VerifyOptions, progress: Progress
) -> list[Damage]:
    """Read files that have one digest each, as far as they exist, and return what is wrong. Local."""
    damages: list[Damage] = []
    progress.begin("reading parity", sum(file.nbytes for file in files))
    jobs = [partial(_check_whole_file, file, store, progress, damages) for file in files]
    run_jobs(jobs, threads=options.threads, name="megackpt-verify")
    return damages


def _check_whole_file(file: WholeFile, store: Store, progress: Progress, damages: list[Damage]) -> None:
    digester, read = FileDigester(), 0
    try:
        # A file of another length is reported by the check of the format that lists it.
        if store.exists(file.name) and store.size(file.name) == file.nbytes:
            for start in range(0, file.nbytes, MAX_BORROWED_BYTES):
                with store.borrow(file.name, start, min(MAX_BORROWED_BYTES, file.nbytes - start)) as data:
                    digester.update(data)
                    read += len(data)
                    progress.advance(len(data))
            if digester.hexdigest() != file.digest:
                damages.append(Damage(file=file.name, what=f"its {_DIFFER}"))
    except CheckpointError as error:
        damages.append(damage_of(error, location=store.location, file=file.name))
    progress.advance(file.nbytes - read)


def _parts(chunks: Chunks, rows: Sequence[int]) -> Iterator[Part]:
    for row in rows:
        for start, stop in parts_of(chunks, row, buffer_bytes=MAX_BORROWED_BYTES):
            yield Part(row, start, stop)


def _batches(items: Iterator[T]) -> Iterator[list[T]]:
    while batch := list(itertools.islice(items, _BATCH)):
        yield batch


def _neighbours(raw: RawRanges, parts: Sequence[Part]) -> Iterator[list[Part]]:
    """Group parts, sorted by position, that lie near each other in one file and fit into one buffer."""
    group: list[Part] = []
    group_file = group_start = group_stop = -1
    rows = [part.row for part in parts]
    files, offsets = raw.file[rows].tolist(), raw.offset_bytes[rows].tolist()
    for part, file, offset in zip(parts, files, offsets, strict=True):
        start, stop = offset + part.start, offset + part.stop
        # A damaged index may have chunks that overlap, so a part can begin before the group stops.
        is_near = file == group_file and group_start <= start <= group_stop + _MAX_GAP_BYTES
        if group and not (is_near and stop - group_start <= MAX_BORROWED_BYTES):
            yield group
            group = []
        if not group:
            group_file, group_start, group_stop = file, start, start
        group.append(part)
        group_stop = max(group_stop, stop)
    if group:
        yield group
