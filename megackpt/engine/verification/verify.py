"""Finds everything that is wrong with a checkpoint.

The checks go from the outside in: the commit, the files that a format lists, the index, the structure of each
array (`structure`), and with `deep` every byte (`digests`) and the digests of whole arrays (`arrays`). If
several processes verify one checkpoint, each has a share of about equal size, of chunks that are neighbours
in files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megackpt.engine.checkpoint.manifest import read_manifest
from megackpt.engine.checkpoint.opening import open_checkpoint, read_common
from megackpt.engine.checkpoint.origins import origin_in
from megackpt.engine.data.progress import Progress
from megackpt.engine.verification.digests import (
    ArrayShare,
    ByteCheck,
    array_check,
    can_decode,
    check_whole_files,
    compare_arrays,
)
from megackpt.engine.verification.structure import check_coverage, check_files
from megackpt.errors import CheckpointError, NotACheckpointError, StorageError
from megackpt.formats.contents import Chunks, Contents
from megackpt.formats.damage import Damage, damage_of
from megackpt.formats.registry import load_strategy
from megackpt.formats.strategy import MANIFEST, LoadStrategy, WholeFile
from megackpt.options import VerifyOptions
from megackpt.plans.geometry import Ints
from megackpt.plans.metadata import OBJECT
from megackpt.storage import Store

Share = tuple[int, int]
"""(i, n): the share of process i of n processes."""

WHOLE: Share = (0, 1)
"""The share of a process that verifies everything."""


def in_share(
    sizes: Ints, share: Share, *, before: int = 0, after: Ints | None = None
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return which items are in a share, `[n]`; each item is in the share of exactly one process. Pure.

    Args:
        sizes: the sizes of the items in bytes, `[n]`.
        share: the share.
        before: bytes of other items that are assigned to shares before these.
        after: sizes of other items that are assigned after these.

    >>> [in_share(np.array([4, 4]), (i, 2), after=np.array([8])).tolist() for i in (0, 1)]
    [[True, True], [False, False]]
    """
    nbytes = sizes + 1  # so that empty items spread over the shares, too
    total = before + int(nbytes.sum()) + (0 if after is None else int(after.sum()))
    number, count = share
    # Items lie one after the other in [0, total). Share i has those that start in the i-th of n equal parts.
    start = before + np.cumsum(nbytes) - nbytes
    return np.asarray(start * count // max(total, 1) == number, np.bool_)


def sizes_of(files: Sequence[WholeFile]) -> Ints:
    """Return the sizes of files, in bytes, `[n]`."""
    return np.array([file.nbytes for file in files], np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """The result of `megackpt.verify`.

    Attributes:
        location: the checkpoint.
        backend: its format; empty if the commit cannot be read.
        version: the version of its format.
        deep: whether every byte was read.
        arrays: number of global arrays.
        objects: number of objects.
        chunks: number of chunks, objects among them.
        files: number of files that hold chunks.
        nbytes: bytes of all chunks.
        unchecked_nbytes: bytes of chunks without a stored digest; a change of these cannot be found.
        array_digests: number of arrays of which a digest of the whole array is stored.
        compared_array_digests: number of these digests that were computed again and compared. Only with
            `deep`, if the extra `digests` is installed, and for arrays all of whose blocks are right.
        damages: everything that is wrong, in the order of files.
        unknown_values: with `deep`, the number of objects with a value of a class that this process does not
            know or must not create; common state counts as one. They were read without creating an instance.
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
    unknown_values: int = 0

    @property
    def is_undamaged(self) -> bool:
        """Whether no damage was found in what was checked. For what that proves, see `is_whole`."""
        return not self.damages

    @property
    def is_whole(self) -> bool | None:
        """True if every byte was compared with a digest, False if there is damage, None otherwise.

        Only `deep` compares bytes, and only those with a stored digest.
        """
        if self.damages:
            return False
        return True if self.deep and not self.unchecked_nbytes else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareReport:
    """The result of one of several processes that verify one checkpoint.

    Attributes:
        damages: what is wrong with the checkpoint, as far as this process has checked it.
        arrays: what it has read of arrays whose digests all processes have to compare together.
    """

    damages: tuple[Damage, ...]
    arrays: tuple[ArrayShare, ...] = ()


def verify_checkpoint(store: Store, options: VerifyOptions, progress: Progress) -> VerifyReport:
    """Verify a checkpoint in this process; see `megackpt.verify`. Local."""
    return find_damages(store, options, progress, WHOLE).report(deep=options.deep)


def verify_share(
    store: Store, options: VerifyOptions, progress: Progress, share: Share = WHOLE
) -> ShareReport:
    """Verify one share of a checkpoint. Local. An error of megackpt is returned as damage.

    Each process reads about as many bytes of chunks and parity files as the others, and none compares
    digests of whole arrays. All processes check the structure. Only the first one checks common state and
    the files that only the format knows.
    """
    try:
        findings = find_damages(store, options, progress, share)
    except CheckpointError as error:
        return ShareReport(damages=(Damage(what=" ".join(str(error).split())),))
    return ShareReport(damages=findings.damages(), arrays=tuple(findings.array_shares))


def find_damages(store: Store, options: VerifyOptions, progress: Progress, share: Share) -> Findings:
    """Verify a share of a checkpoint, and return what was found. Local.

    Raises:
        NotACheckpointError: nothing was committed there.
        FormatError: the checkpoint is in a format that is not known here.
        UnsupportedError: the files of another tool are not damaged, but cannot be read.
        StorageError: the store cannot tell whether there is a checkpoint.
    """
    findings = Findings(store.location)
    try:
        manifest = read_manifest(store)
    except (NotACheckpointError, StorageError):
        raise
    except CheckpointError as error:
        findings.add(damage_of(error, location=store.location, file=MANIFEST))
        return findings
    strategy = load_strategy(manifest, where=store.location)
    findings.strategy = strategy
    is_first = share[0] == 0
    if is_first:
        findings.extend(strategy.check_files(store, manifest, deep=options.deep))
        try:
            origin_in(store, manifest, strategy)
        except CheckpointError as error:
            findings.add_error(error)
    try:
        contents = open_checkpoint(store, allow_unsafe_pickle=options.allow_unsafe_pickle)
    except CheckpointError as error:
        findings.add_error(error)
        return findings
    findings.array_digests = len(contents.array_digests)
    findings.extend(Damage(key=key, what=why) for key, why in contents.unreadable.items())
    whole_files = strategy.whole_files(store, manifest) if options.deep else ()
    for keys, chunks in _openable_chunks(contents, findings):
        findings.count(keys, chunks)
        readable, damages = check_files(store, chunks)
        findings.extend([*damages, *check_coverage(chunks, set(keys))])
        if options.deep:
            # The bytes of files with chunks are checked by the digests of their chunks.
            whole_files = [file for file in whole_files if file.name not in findings.files]
            in_order = np.argsort(chunks.position, kind="stable")
            nbytes = chunks.table.nbytes[in_order]
            # Shares are made of all chunks, readable or not. So all processes agree on their borders.
            readable[in_order] &= in_share(nbytes, share, after=sizes_of(whole_files))
            arrays = array_check(chunks.table, contents.array_digests, keys)
            check = ByteCheck(contents, chunks, store, options, progress, arrays)
            check.run(readable)
            findings.add_check(check, share)
    if whole_files:
        is_own = in_share(sizes_of(whole_files), share, before=findings.nbytes)
        own_files = [file for file, own in zip(whole_files, is_own, strict=True) if own]
        findings.extend(check_whole_files(own_files, store, options, progress))
    if options.deep and is_first:
        _check_common(contents, findings, options)
    return findings


class Findings:
    """Collects damages, each once, and counts what was checked.

    Attributes:
        strategy: of the checkpoint's format; None if its commit cannot be read.
        files: names of files with chunks.
        nbytes: bytes of chunks.
        array_digests: number of arrays with a stored digest.
        array_shares: what was read of these arrays, and not compared.
        unknown_values: objects, and common state, with values of unknown classes.
    """

    def __init__(self, location: str) -> None:
        self.location = location
        self.strategy: LoadStrategy | None = None
        self.files: set[str] = set()
        self.nbytes = self.array_digests = self.unknown_values = 0
        self.array_shares: list[ArrayShare] = []
        self._arrays = self._objects = self._chunks = self._unchecked_nbytes = self._compared = 0
        self._damages: dict[Damage, None] = {}
        self._damaged: set[tuple[str, str | None]] = set()  # file and key

    def add(self, damage: Damage) -> None:
        """Add one damage."""
        self._damages[damage] = None
        self._damaged.add((damage.file, damage.key))

    def extend(self, damages: Iterable[Damage]) -> None:
        """Add damages."""
        for damage in damages:
            self.add(damage)

    def add_error(self, error: CheckpointError) -> None:
        """Add the damage that an error reports, unless its file or key is known to be damaged."""
        damage = damage_of(error, location=self.location)
        is_known = bool({(damage.file, damage.key), (damage.file, None)} & self._damaged)
        if not (damage.file and is_known):
            self.add(damage)

    def count(self, keys: Sequence[str], chunks: Chunks) -> None:
        """Count all chunks of these keys."""
        table, counted = chunks.table, set(keys)
        self._arrays += sum(spec.dtype != OBJECT and spec.key in counted for spec in table.arrays)
        self._objects += int(table.are_objects().sum())
        self._chunks += len(table)
        self.nbytes += int(table.nbytes.sum())
        ranges = chunks.file_ranges()
        if ranges is not None:
            self.files.update(ranges.files)
            self._unchecked_nbytes += int(table.nbytes[~ranges.is_checked].sum())
        elif not chunks.has_checksums:
            self._unchecked_nbytes += int(table.nbytes.sum())

    def add_check(self, check: ByteCheck, share: Share) -> None:
        """Add what reading the bytes of a share has found."""
        self.extend(check.damages())
        self.unknown_values += check.unknown_values
        array_shares = () if check.arrays is None else check.arrays.shares()
        if share != WHOLE:
            self.array_shares += array_shares
        elif array_shares:
            compared, damages = compare_arrays([array_shares])
            self._compared += compared
            self.extend(damages)

    def damages(self) -> tuple[Damage, ...]:
        """Return all damages: those of the commit first, then by file, position and key."""
        return tuple(
            sorted(self._damages, key=lambda d: (d.file != MANIFEST, d.file, d.start or 0, d.key or ""))
        )

    def report(self, *, deep: bool) -> VerifyReport:
        """Return the report of a verification by one process."""
        return VerifyReport(
            location=self.location,
            backend="" if self.strategy is None else self.strategy.backend,
            version=0 if self.strategy is None else self.strategy.version,
            deep=deep,
            arrays=self._arrays,
            objects=self._objects,
            chunks=self._chunks,
            files=len(self.files),
            nbytes=self.nbytes,
            unchecked_nbytes=self._unchecked_nbytes,
            array_digests=self.array_digests,
            compared_array_digests=self._compared,
            damages=self.damages(),
            unknown_values=self.unknown_values,
        )


def _openable_chunks(contents: Contents, findings: Findings) -> Iterator[tuple[list[str], Chunks]]:
    """Yield the chunks of all arrays at once, or array by array if some of them cannot be opened."""
    keys = sorted(contents.arrays)
    try:
        yield keys, contents.chunks(keys)
        return
    except CheckpointError as error:
        if len(keys) <= 1:
            findings.add_error(error)
            return
    # One by one: an array that cannot be opened must not hide the damage of others.
    for key in keys:
        try:
            chunks = contents.chunks([key])
        except CheckpointError as error:
            findings.add_error(error)
        else:
            yield [key], chunks


def _check_common(contents: Contents, findings: Findings, options: VerifyOptions) -> None:
    try:
        is_decoded = can_decode(lambda: read_common(contents, where=findings.location), options)
        findings.unknown_values += not is_decoded
    except CheckpointError as error:
        findings.add_error(error)
