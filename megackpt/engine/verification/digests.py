"""Every byte of a checkpoint, read and compared with its digests.

Owns how it is read, by several threads in bounded memory, and how a part that turns out damaged is narrowed
down to the blocks that are. A load stops at the first damaged block; this goes on to the last. What is read
is handed on to `verification.arrays`, for digests of whole arrays.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import numpy as np

from megackpt.codec import keep_unknown_values
from megackpt.engine.data.chunk_bytes import parts_of
from megackpt.engine.data.progress import Progress
from megackpt.engine.data.read import read_chunk
from megackpt.engine.data.workers import run_jobs
from megackpt.engine.verification.arrays import ArrayCheck
from megackpt.errors import CheckpointError, FormatError, IntegrityError, UnknownClassError
from megackpt.formats.contents import Borrow, Chunks, Contents, Part, RawRanges
from megackpt.formats.damage import Damage, damage_of
from megackpt.formats.strategy import WholeFile
from megackpt.metadata import OBJECT
from megackpt.options import VerifyOptions
from megackpt.storage import COMMON_POOL, MAX_BORROWED_BYTES, FileDigester, Store

T = TypeVar("T")

_NEAR_BYTES = 64 * 1024  # between chunks that are read at once: to ask again costs more
_DIFFER = "bytes are not those that were saved (their digest differs)"
_AT_A_TIME = 1 << 14
"""Parts that are handed out in one go: as many as keep the threads busy, and are nothing in memory."""


def verify_bytes(
    contents: Contents,
    chunks: Chunks,
    readable: np.ndarray[tuple[int], np.dtype[np.bool_]],
    store: Store,
    options: VerifyOptions,
    progress: Progress,
    arrays: ArrayCheck | None = None,
) -> tuple[list[Damage], int]:
    """Read chunks, `[n]` of which are readable, and return what is wrong with them. Local.

    Objects are decoded as well. Returned too is in how many of them there are values of unknown classes.
    Damaged blocks that follow each other in a chunk are one damage. What is not damaged is given to arrays,
    each byte once.
    """
    table = chunks.table
    is_object = np.array([spec.dtype == OBJECT for spec in table.arrays], np.bool_)
    objects = is_object[table.array] if len(table) else np.zeros(0, np.bool_)
    progress.begin("reading", int(table.nbytes[readable].sum()))
    reading = _Reading(contents, chunks, store, options, progress, arrays)
    in_order = np.argsort(chunks.position, kind="stable")
    tensors = in_order[(readable & ~objects)[in_order]].tolist()
    for batch in _batched(_parts(chunks, tensors), _AT_A_TIME):
        run_jobs(reading.jobs(batch), threads=options.threads, name="megackpt-verify")
    for rows in _batched(iter(in_order[(readable & objects)[in_order]].tolist()), _AT_A_TIME):
        jobs = [partial(reading.check_object, row) for row in rows]
        run_jobs(jobs, threads=options.threads, name="megackpt-verify")
    return reading.damages(), reading.unknown


def is_understood(decode: Callable[[], object], options: VerifyOptions) -> bool:
    """Decode a value; say whether this process knows, and may make, everything in it.

    What it does not know is read as `convert` carries it along: nothing of it is made.

    Raises:
        CheckpointError: the value cannot be read in this way either.
    """
    try:
        decode()
        return True
    except FormatError as error:
        if options.skip_unknown_classes and isinstance(error, UnknownClassError):
            return False
        with keep_unknown_values():
            decode()
        return False


def verify_files(
    files: Sequence[WholeFile], store: Store, options: VerifyOptions, progress: Progress
) -> list[Damage]:
    """Read files that have one digest each, as far as they are there, and return what is wrong. Local."""
    found: list[Damage] = []
    progress.begin("reading parity", sum(file.nbytes for file in files))
    jobs = [partial(_check_file, file, store, progress, found) for file in files]
    run_jobs(jobs, threads=options.threads, name="megackpt-verify")
    return found


def _check_file(file: WholeFile, store: Store, progress: Progress, found: list[Damage]) -> None:
    digest, read = FileDigester(), 0
    try:
        # Of another size it is damaged, and that is said by whoever knows what its size is for.
        if store.exists(file.name) and store.size(file.name) == file.nbytes:
            for start in range(0, file.nbytes, MAX_BORROWED_BYTES):
                with store.borrow(file.name, start, min(MAX_BORROWED_BYTES, file.nbytes - start)) as data:
                    digest.update(data)
                    read += len(data)
                    progress.advance(len(data))
            if digest.result() != file.digest:
                found.append(Damage(file=file.name, what=f"its {_DIFFER}"))
    except CheckpointError as error:
        found.append(damage_of(error, location=store.location, file=file.name))
    progress.advance(file.nbytes - read)


def _parts(chunks: Chunks, rows: Sequence[int]) -> Iterator[Part]:
    for row in rows:
        for start, stop in parts_of(chunks, row, buffer_bytes=MAX_BORROWED_BYTES):
            yield Part(row, start, stop)


def _batched(items: Iterator[T], size: int) -> Iterator[list[T]]:
    while batch := list(itertools.islice(items, size)):
        yield batch


def _neighbours(raw: RawRanges, parts: Sequence[Part]) -> Iterator[list[Part]]:
    """Group parts, sorted by place, that lie near each other in one file and fit into one buffer."""
    group: list[Part] = []
    number = first = end = -1  # the file of the group, and where in it the group begins and ends
    rows = [part.row for part in parts]
    files, offsets = raw.file[rows].tolist(), raw.offset_bytes[rows].tolist()
    for part, file, offset in zip(parts, files, offsets, strict=True):
        begin, stop = offset + part.start, offset + part.stop
        is_near = (
            file == number and first <= begin <= end + _NEAR_BYTES and stop - first <= MAX_BORROWED_BYTES
        )
        if group and not is_near:
            yield group
            group = []
        if not group:
            number, first, end = file, begin, begin
        group.append(part)
        end = max(end, stop)
    if group:
        yield group


class _Reading:
    """Reads parts of chunks and keeps what is wrong with them. Safe for many threads."""

    def __init__(
        self,
        contents: Contents,
        chunks: Chunks,
        store: Store,
        options: VerifyOptions,
        progress: Progress,
        arrays: ArrayCheck | None,
    ) -> None:
        self._contents = contents
        self._options = options
        self.unknown = 0  # objects that hold values of classes that are not known
        self._chunks = chunks
        self._store = store
        self._progress = progress
        self._arrays = arrays
        self._ranges = chunks.file_ranges()
        self._raw = chunks.raw_ranges()
        self._lock = threading.Lock()
        self._bad: dict[int, list[tuple[int, int, str]]] = {}  # row: (start, stop in the chunk, why)
        self._objects: list[Damage] = []

    def jobs(self, parts: Sequence[Part]) -> list[Callable[[], None]]:
        """Return what reads these parts, neighbours in a file at once."""
        raw = self._raw
        if raw is None:
            return [partial(self._check_part, part) for part in parts]
        return [partial(self._check_group, raw.borrow, group) for group in _neighbours(raw, parts)]

    def check_object(self, row: int) -> None:
        """Read and decode an object."""
        table = self._chunks.table
        nbytes = int(table.nbytes[row])
        spec = table.arrays[int(table.array[row])]
        try:
            data = read_chunk(self._chunks, row)
        except CheckpointError as error:
            if self._chunks.block_bytes == 1:  # there are no digests of parts that would tell more
                self._note(Part(row, 0, nbytes), error)
            else:
                self._check_part(Part(row, 0, nbytes))
            return
        where = f"{self._store.location}: object {spec.key!r}"
        try:
            understood = is_understood(lambda: self._contents.decode_object(data, where), self._options)
            with self._lock:
                self.unknown += not understood
        except CheckpointError as error:
            found = damage_of(error, location=self._store.location)
            with self._lock:
                self._objects.append(self._damage(row, 0, nbytes, f"it cannot be decoded: {found.what}"))
        self._progress.advance(nbytes)

    def damages(self) -> list[Damage]:
        """Return what was found so far."""
        found = list(self._objects)
        for row, bad in self._bad.items():
            merged: list[tuple[int, int, str]] = []
            for start, stop, why in sorted(bad):
                if merged and merged[-1][1] == start and merged[-1][2] == why:
                    start = merged.pop()[0]
                merged.append((start, stop, why))
            found += [self._damage(row, *part) for part in merged]
        return list(dict.fromkeys(found))

    def _check_group(self, borrow: Borrow, parts: Sequence[Part]) -> None:
        try:
            with borrow(parts, True) as lent:
                if self._arrays is not None:
                    self._arrays.add(parts, lent)
                self._progress.advance(sum(part.stop - part.start for part in parts))
        except CheckpointError:  # of one of them, or of several
            for part in parts:
                self._check_part(part)

    def _check_part(self, part: Part) -> None:
        error = self._error_of(part)
        self._progress.advance(part.stop - part.start)
        if error is None:
            return
        block = self._chunks.block_bytes
        if block == 1 or part.stop - part.start <= block:
            self._note(part, error)
            return
        for start in range(part.start, part.stop, block):
            smaller = Part(part.row, start, min(start + block, part.stop))
            error = self._error_of(smaller)
            if error is not None:
                self._note(smaller, error)

    def _error_of(self, part: Part) -> CheckpointError | None:
        with COMMON_POOL.borrow() as buffer:
            nbytes = part.stop - part.start
            data = buffer.data[:nbytes] if nbytes <= len(buffer) else memoryview(bytearray(nbytes))
            try:
                self._chunks.read_into(part.row, part.start, data, verify=True)
            except CheckpointError as error:
                return error
            if self._arrays is not None:
                self._arrays.add([part], [data])
        return None

    def _note(self, part: Part, error: CheckpointError) -> None:
        why = _why(error, has_blocks=self._chunks.block_bytes > 1)
        with self._lock:
            self._bad.setdefault(part.row, []).append((part.start, part.stop, why))

    def _damage(self, row: int, start: int, stop: int, what: str) -> Damage:
        """Say where in which file the bytes `[start, stop)` of a chunk are."""
        table = self._chunks.table
        key, box = table.arrays[int(table.array[row])].key, table.describe(row)
        if self._ranges is None:
            return Damage(key=key, box=box, what=f"{self._chunks.describe(row)}: {what}")
        name = self._ranges.files[int(self._ranges.file[row])]
        first, last = int(self._ranges.start[row]), int(self._ranges.stop[row])
        if self._raw is not None:
            first, last = first + start, first + stop
        elif last < 0:  # no bytes of its own
            last = self._store.size(name)
        return Damage(file=name, key=key, box=box, start=first, stop=last, what=what)


def _why(error: CheckpointError, *, has_blocks: bool) -> str:
    """Say what is wrong without what stands beside it already: key, file and bytes."""
    if has_blocks and isinstance(error, IntegrityError):
        return f"the {_DIFFER}"
    return " ".join(str(error).split())
