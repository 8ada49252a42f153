"""Whether a checkpoint is whole: everything that is wrong with it, and not only what a load meets first.

Owns the order of the checks, from the commit to single chunks, and the list of what they find. What formats
know of their own files they check themselves; reading every byte is in `verification.digests`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence, Set
from dataclasses import dataclass

import numpy as np

from megackpt.engine.checkpoint.manifest import read_manifest
from megackpt.engine.checkpoint.opening import open_checkpoint, read_common
from megackpt.engine.data.progress import Progress
from megackpt.engine.verification.arrays import ArrayCheck, ArrayShare, array_check, compare_arrays
from megackpt.engine.verification.digests import is_understood, verify_bytes, verify_files
from megackpt.engine.verification.shares import WHOLE, in_share, sizes_of
from megackpt.errors import CheckpointError, NotACheckpointError, StorageError
from megackpt.formats.contents import Chunks, Contents, FileRanges
from megackpt.formats.damage import Damage, damage_of
from megackpt.formats.registry import load_strategy
from megackpt.formats.strategy import MANIFEST, WholeFile
from megackpt.metadata import OBJECT
from megackpt.options import VerifyOptions
from megackpt.storage import Store
from megackpt.validation import coverage_faults

_SHOWN_KEYS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What a verification has looked at and found.

    Attributes:
        location: the checkpoint.
        backend: its format.
        version: the version of that.
        deep: whether every byte was read.
        arrays: number of global arrays.
        objects: number of objects.
        chunks: number of chunks, objects among them.
        files: number of files that hold chunks.
        nbytes: bytes of all chunks.
        unchecked_nbytes: of these, bytes for which nothing is stored that would tell if they have changed.
        array_digests: number of arrays of which a digest of the whole is stored.
        compared_array_digests: number of these whose digest was computed anew; with `deep`, of arrays whose
            blocks are all right, if the extra `digests` is installed; none where a share was looked at.
        damages: what is wrong, in the order of files.
        array_shares: where a share was looked at, what was read of arrays whose digests all that have one
            can only compare together.
        unknown_values: with `deep`, number of objects, and common state, that hold something of a class that
            this process does not know or may not make. They were read, and nothing was made of the class.
    """

    location: str
    backend: str
    version: int
    deep: bool
    arrays: int
    objects: int
    chunks: int
    files: int
    nbytes: int
    unchecked_nbytes: int
    array_digests: int
    compared_array_digests: int
    damages: tuple[Damage, ...]
    array_shares: tuple[ArrayShare, ...] = ()
    unknown_values: int = 0

    @property
    def is_undamaged(self) -> bool:
        """Whether no damage was found in what was checked; see `is_whole` for what that proves."""
        return not self.damages

    @property
    def is_whole(self) -> bool | None:
        """Whether the checkpoint is whole: False if damage was found, None if not every byte was checked.

        Bytes are checked only with `deep`, and only those for which a digest is stored.
        """
        if self.damages:
            return False
        return True if self.deep and not self.unchecked_nbytes else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareReport:
    """What one of several processes has seen that look at one checkpoint.

    Attributes:
        damages: what is wrong.
        arrays: see `VerifyReport.array_shares`.
    """

    damages: tuple[Damage, ...]
    arrays: tuple[ArrayShare, ...] = ()


def verify_checkpoint(
    store: Store, options: VerifyOptions, progress: Progress, *, share: tuple[int, int] = WHOLE
) -> VerifyReport:
    """Look for everything that is wrong with a checkpoint of any known format. Local; nothing is changed.

    Always: the commit, the index and its digest, whether every file is there and as long as it must be,
    whether every chunk lies in its file, and whether chunks cover every array exactly once. With
    `options.deep` also: the digest of every block, that objects and common state can be decoded, and digests
    of whole arrays.

    share is (i, n) where n processes look at one checkpoint: each reads its part of chunks and parity files,
    about as many bytes as every other, and none compares digests of whole arrays. What else there is to check
    is done by all, but what formats know of their files and common state, by the first.

    Raises:
        NotACheckpointError: there is none.
        FormatError: it is of a format that is not known here.
        StorageError: the store does not say whether there is one: no permission, no connection.
    """
    found = _Found(store.location)
    try:
        manifest = read_manifest(store)
    except (NotACheckpointError, StorageError):
        raise
    except CheckpointError as error:
        found.add(damage_of(error, location=store.location, file=MANIFEST))
        return found.verified(options, "", 0)
    strategy = load_strategy(manifest, where=store.location)
    is_first = share[0] == 0
    if is_first:
        for damage in strategy.check_files(store, manifest, deep=options.deep):
            found.add(damage)
    try:
        contents = open_checkpoint(store, allow_unsafe_pickle=options.allow_unsafe_pickle)
    except CheckpointError as error:
        found.add_error(error)
        return found.verified(options, strategy.backend, strategy.version)
    found.array_digests = len(contents.array_digests)
    for key, why in contents.unreadable.items():
        found.add(Damage(key=key, what=why))
    listed: Sequence[WholeFile] = ()
    if options.deep:
        listed = strategy.whole_files(store, manifest)
    for keys, chunks in _opened(contents, found):
        found.count(set(keys), chunks)
        readable = _check_places(store, chunks, found)
        _check_coverage(chunks, set(keys), found)
        if options.deep:
            # Those with chunks are checked by the digests of these.
            listed = [file for file in listed if file.name not in found.files]
            in_order = np.argsort(chunks.position, kind="stable")
            readable[in_order] &= in_share(chunks.table.nbytes[in_order], share, after=sizes_of(listed))
            stored = {key: contents.array_digests[key] for key in keys if key in contents.array_digests}
            arrays = array_check(chunks.table, stored)
            damages, unknown = verify_bytes(contents, chunks, readable, store, options, progress, arrays)
            for damage in damages:
                found.add(damage)
            found.unknown_values += unknown
            if arrays is not None:
                found.take_arrays(arrays, is_all=share == WHOLE)
    if listed:
        mine = in_share(sizes_of(listed), share, before=found.nbytes)
        files = [file for file, is_mine in zip(listed, mine, strict=True) if is_mine]
        for damage in verify_files(files, store, options, progress):
            found.add(damage)
    if options.deep and is_first:
        _check_common(contents, found, options)
    return found.verified(options, strategy.backend, strategy.version)


def verify_share(
    store: Store, options: VerifyOptions, progress: Progress, share: tuple[int, int] = WHOLE
) -> ShareReport:
    """Return what is wrong with a checkpoint, as `verify_checkpoint`; what cannot be looked at is.

    Local; nothing is raised but what is no error of ours.
    """
    try:
        found = verify_checkpoint(store, options, progress, share=share)
    except CheckpointError as error:
        return ShareReport(damages=(Damage(what=" ".join(str(error).split())),))
    return ShareReport(damages=found.damages, arrays=found.array_shares)


class _Found:
    """Collects damages, each once, and counts what was looked at."""

    def __init__(self, location: str) -> None:
        self.location = location
        self._damages: dict[Damage, None] = {}
        self._places: set[tuple[str, str | None]] = set()
        self._arrays = self._objects = self._chunks = self._nbytes = self._unchecked = 0
        self._files: set[str] = set()
        self.array_digests = self._compared = 0
        self._arrays_read: list[ArrayShare] = []  # and not compared
        self.unknown_values = 0

    def add(self, damage: Damage) -> None:
        """Take one."""
        self._damages[damage] = None
        self._places.add((damage.file, damage.key))

    def add_error(self, error: CheckpointError) -> None:
        """Take what an error says, unless it only repeats what is known of that file and key."""
        damage = damage_of(error, location=self.location)
        known = (damage.file, damage.key) in self._places or (damage.file, None) in self._places
        if not (damage.file and known):
            self.add(damage)

    def count(self, keys: Collection[str], chunks: Chunks) -> None:
        """Count what was opened: all chunks of these keys."""
        table = chunks.table
        is_object = np.array([spec.dtype == OBJECT for spec in table.arrays], np.bool_)
        self._arrays += sum(spec.dtype != OBJECT and spec.key in keys for spec in table.arrays)
        self._objects += int(is_object[table.array].sum()) if len(table) else 0
        self._chunks += len(table)
        self._nbytes += int(table.nbytes.sum())
        ranges = chunks.file_ranges()
        if ranges is not None:
            self._files.update(ranges.files)
            self._unchecked += int(table.nbytes[~ranges.is_checked].sum())

    def take_arrays(self, arrays: ArrayCheck, *, is_all: bool) -> None:
        """Compare digests of the arrays that were read, if that is all of them."""
        if not is_all:
            self._arrays_read += arrays.shares()
            return
        compared, damages = compare_arrays([arrays.shares()])
        self._compared += compared
        for damage in damages:
            self.add(damage)

    @property
    def files(self) -> Set[str]:
        """The files of the chunks that were counted."""
        return self._files

    @property
    def nbytes(self) -> int:
        """The bytes of the chunks that were counted."""
        return self._nbytes

    def verified(self, options: VerifyOptions, backend: str, version: int) -> VerifyReport:
        """Return the result."""
        order = sorted(self._damages, key=lambda d: (d.file != MANIFEST, d.file, d.start or 0, d.key or ""))
        return VerifyReport(
            location=self.location,
            backend=backend,
            version=version,
            deep=options.deep,
            arrays=self._arrays,
            objects=self._objects,
            chunks=self._chunks,
            files=len(self._files),
            nbytes=self._nbytes,
            unchecked_nbytes=self._unchecked,
            array_digests=self.array_digests,
            compared_array_digests=self._compared,
            damages=tuple(order),
            array_shares=tuple(self._arrays_read),
            unknown_values=self.unknown_values,
        )


def _opened(contents: Contents, found: _Found) -> Iterator[tuple[list[str], Chunks]]:
    """Yield the chunks: of all arrays at once, or one by one where some cannot be opened."""
    keys = sorted(contents.arrays)
    try:
        yield keys, contents.chunks(keys)
        return
    except CheckpointError as error:
        if len(keys) <= 1:
            found.add_error(error)
            return
    for key in keys:
        try:
            chunks = contents.chunks([key])
        except CheckpointError as error:
            found.add_error(error)
        else:
            yield [key], chunks


def _check_places(store: Store, chunks: Chunks, found: _Found) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Check that files are there and hold their chunks; return which chunks can be read."""
    readable = np.ones(len(chunks.table), np.bool_)
    ranges = chunks.file_ranges()
    if ranges is None:
        return readable
    sizes = np.zeros(len(ranges.files), np.int64)
    for number, name in enumerate(ranges.files):
        try:
            sizes[number] = store.size(name)
        except CheckpointError as error:
            sizes[number] = -1
            rows = np.flatnonzero(ranges.file == number)
            what = "it is missing" if not store.exists(name) else " ".join(str(error).split())
            found.add(Damage(file=name, what=f"{what}; {_chunks_in(chunks, rows)}"))
            continue
        if ranges.nbytes[number] not in (-1, sizes[number]):
            what = f"it has {sizes[number]:,} bytes instead of {ranges.nbytes[number]:,}"
            rows = np.flatnonzero(ranges.file == number)
            found.add(Damage(file=name, what=f"{what}; {_chunks_in(chunks, rows)}"))
    of_chunk = sizes[ranges.file] if len(ranges.file) else sizes[:0]
    beyond = (of_chunk >= 0) & (ranges.stop > of_chunk)
    for row in np.flatnonzero(beyond).tolist():
        name = ranges.files[int(ranges.file[row])]
        found.add(_damage(chunks, ranges, row, f"the file ends at byte {of_chunk[row]:,}", name=name))
    _check_overlaps(chunks, ranges, found)
    return readable & (of_chunk >= 0) & ~beyond


def _damage(chunks: Chunks, ranges: FileRanges, row: int, what: str, *, name: str) -> Damage:
    table = chunks.table
    return Damage(
        file=name,
        key=table.arrays[int(table.array[row])].key,
        box=table.describe(row),
        start=int(ranges.start[row]),
        stop=int(ranges.stop[row]),
        what=what,
    )


def _chunks_in(chunks: Chunks, rows: np.ndarray[tuple[int], np.dtype[np.int64]]) -> str:
    """Say what a file holds."""
    table = chunks.table
    keys = [table.arrays[i].key for i in np.unique(table.array[rows]).tolist()]
    more = f" and {len(keys) - _SHOWN_KEYS} more" if len(keys) > _SHOWN_KEYS else ""
    return f"{len(rows)} chunks of {', '.join(map(repr, keys[:_SHOWN_KEYS]))}{more} lie in it"


def _check_overlaps(chunks: Chunks, ranges: FileRanges, found: _Found) -> None:
    """Find chunks that begin before the one in front of them ends."""
    if chunks.raw_ranges() is None:
        return
    order = np.lexsort((ranges.stop, ranges.start, ranges.file))
    file, start, stop = ranges.file[order], ranges.start[order], ranges.stop[order]
    overlaps = (file[1:] == file[:-1]) & (start[1:] < stop[:-1]) & (stop[1:] > start[1:])
    for at in np.flatnonzero(overlaps).tolist():
        row, before = int(order[at + 1]), int(order[at])
        other = chunks.table.arrays[int(chunks.table.array[before])].key
        what = f"it begins inside of {other!r} {chunks.table.describe(before)}"
        found.add(_damage(chunks, ranges, row, what, name=ranges.files[int(ranges.file[row])]))


def _check_coverage(chunks: Chunks, keys: Collection[str], found: _Found) -> None:
    for fault in coverage_faults(chunks.table, keys):
        place = ", ".join(f"{a}:{b}" for a, b in zip(fault.start, fault.stop, strict=True))
        what = {0: "no chunk has it", -1: "much of it is in no chunk, or in several"}
        said = what.get(fault.count, f"{fault.count} chunks have it")
        found.add(Damage(key=fault.spec.key, box=f"[{place}]", what=said))


def _check_common(contents: Contents, found: _Found, options: VerifyOptions) -> None:
    try:
        understood = is_understood(lambda: read_common(contents, where=found.location), options)
        found.unknown_values += not understood
    except CheckpointError as error:
        found.add_error(error)
