"""Finds which damaged files of a checkpoint can be repaired, and from which source.

A repair is tried on a view of the checkpoint: the view has the patches, and is verified. Nothing is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megackpt.engine.checkpoint.manifest import read_manifest
from megackpt.engine.data.progress import Progress
from megackpt.engine.verification.verify import verify_checkpoint
from megackpt.errors import CheckpointError, FormatError, NotACheckpointError
from megackpt.formats.damage import Damage, described_error
from megackpt.formats.registry import load_strategy, save_strategy
from megackpt.formats.strategy import MANIFEST, Json, SaveStrategy
from megackpt.options import VerifyOptions
from megackpt.plans.validation.report import PARITY
from megackpt.storage import Store
from megackpt.storage.views import Patch, PatchedStore

_ROUNDS = 8  # each one repairs at least one file, or the search ends


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairedFile:
    """A file that was repaired, or can be.

    Attributes:
        file: its name in the checkpoint.
        source: the source of its new bytes: `parity`, or the location of a copy.
        nbytes: its length.
        ranges: the replaced bytes, half-open; other bytes stay.
    """

    file: str
    source: str
    nbytes: int
    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class RepairState:
    """A checkpoint as it would be with the repairs that were found so far.

    Attributes:
        view: the checkpoint.
        damages: the damage that it has.
        files: the repaired files, in the order in which their repairs were found.
    """

    view: Store
    damages: tuple[Damage, ...]
    files: tuple[RepairedFile, ...] = ()

    @property
    def damaged_files(self) -> set[str]:
        """Names of damaged files."""
        return {damage.file for damage in self.damages if damage.file}


@dataclass(frozen=True, slots=True)
class _Source:
    """A source of repairs.

    Attributes:
        name: `parity`, or the location of a copy.
        store: has the files.
        small_files: the commit, index and similar files of a copy. If one of them is damaged in the
            checkpoint, other files may seem to be damaged.
    """

    name: str
    store: Store
    small_files: tuple[str, ...] = ()


class RepairSearch:
    """Searches for repairs of one checkpoint. Nothing is written.

    Attributes:
        unusable_sources: why a source could not be used.
    """

    def __init__(
        self, store: Store, copies: Sequence[Store], options: VerifyOptions, progress: Progress
    ) -> None:
        self._store, self._copies = store, copies
        self._options, self._progress = options, progress
        self.unusable_sources: list[str] = []

    def begin(self) -> RepairState:
        """Return the checkpoint without repairs.

        Raises:
            NotACheckpointError, FormatError: there is no readable commit, and no copy of the same save.
        """
        try:
            report = verify_checkpoint(self._store, self._options, self._progress)
            return RepairState(self._store, report.damages)
        except (NotACheckpointError, FormatError) as error:
            manifests = ((copy, _manifest_of(copy)) for copy in self._copies)
            if not any(m is not None and _is_same_save(copy, m, self._store) for copy, m in manifests):
                raise
            what = described_error(error, location=self._store.location, file=MANIFEST).what
            return RepairState(self._store, (Damage(file=MANIFEST, what=what),))

    def verify(self, view: Store) -> tuple[Damage, ...]:
        """Return the damage of a checkpoint. An error in opening it is returned as damage."""
        try:
            return verify_checkpoint(view, self._options, self._progress).damages
        except CheckpointError as error:
            return (described_error(error, location=view.location, file=MANIFEST),)

    def repair(self, state: RepairState) -> RepairState:
        """Return the state with as many repairs as can be found."""
        # One repair can make another possible: a commit from a copy, and with it parity files.
        for _ in range(_ROUNDS):
            before = state
            for source in self._sources(state):
                if state.damages:
                    state = self._repair_from(source, state)
            if not state.damages or state is before:
                break
        return state

    def _sources(self, state: RepairState) -> Iterator[_Source]:
        try:
            rebuilt = _rebuilt_from_parity(state.view)
            if rebuilt is not None:
                yield _Source(PARITY, rebuilt)
        except CheckpointError as error:
            self.unusable_sources.append(f"{PARITY}: {error}")
        for copy in self._copies:
            manifest = _manifest_of(copy)
            if manifest is None:
                self.unusable_sources.append(f"{copy.location} has no checkpoint that can be read")
            elif not _is_same_save(copy, manifest, self._store):
                self.unusable_sources.append(
                    f"{copy.location} has another save, or its format does not record which save it is"
                )
            else:
                yield _Source(copy.location, copy, (MANIFEST, *_small_files(manifest)))

    def _repair_from(self, source: _Source, state: RepairState) -> RepairState:
        """Return the state after the repair of all damaged files that a source can repair."""
        repaired = self._try_patches(state, source, state.damaged_files)
        small = set(source.small_files)
        if repaired is not state or not small or not _concerns(state, small):
            return repaired
        # A damaged commit or index may make other files look damaged: replace all of them together.
        repaired = self._try_patches(state, source, state.damaged_files | small)
        return state if _concerns(repaired, small) else repaired

    def _try_patches(self, state: RepairState, source: _Source, names: set[str]) -> RepairState:
        """Return the state with the files of a source that are undamaged then; the same state without any."""
        patches = _patches(state, source.store, names)
        if not patches:
            return state
        view = PatchedStore(state.view, patches)
        damages = self.verify(view)
        good = set(patches) - {damage.file for damage in damages}
        if not good:
            return state
        if good < set(patches):
            view = PatchedStore(state.view, {name: patches[name] for name in good})
            damages = self.verify(view)
        files = [_repaired_file(name, source.name, patches) for name in sorted(good)]
        return RepairState(view, damages, (*state.files, *files))


def _repaired_file(name: str, source: str, patches: Mapping[str, Patch]) -> RepairedFile:
    return RepairedFile(file=name, source=source, nbytes=patches[name].nbytes, ranges=patches[name].ranges)


def _rebuilt_from_parity(view: Store) -> Store | None:
    """Return a store of files computed from parity; None if the format, or this checkpoint, has none."""
    manifest = _manifest_of(view)
    if manifest is None:
        return None
    return load_strategy(manifest, where=view.location).rebuilt_files(view, manifest)


def _concerns(state: RepairState, small_files: set[str]) -> bool:
    """Return whether a small file is damaged, or a damage has no known file."""
    return bool(state.damaged_files & small_files) or any(not damage.file for damage in state.damages)


def _manifest_of(store: Store) -> Json | None:
    try:
        return read_manifest(store)
    except CheckpointError:
        return None


def _strategy_of(manifest: Json) -> SaveStrategy | None:
    """Return the strategy that writes the format of a commit; None if there is none."""
    try:
        return save_strategy((str(manifest["sharded_backend"]), int(manifest["sharded_backend_version"])))
    except (CheckpointError, KeyError, TypeError, ValueError):
        return None


def _is_same_save(copy: Store, manifest: Json, store: Store) -> bool:
    """Return whether a copy, with this commit, has the same save as a store.

    The attempt id identifies a save. If the commit in the store cannot be read, the attempt ids in the names
    of its files decide. Without attempt ids, the values of two steps cannot be distinguished. So checkpoints
    that other libraries saved never count as the same save.
    """
    strategy = _strategy_of(manifest)
    if strategy is None:
        return False
    try:
        attempt = strategy.committed_attempt(copy)
        attempts_of_files = {strategy.file_names.attempt_of(name) for name in store.names()} - {None}
    except (CheckpointError, KeyError, TypeError, ValueError):
        return False
    try:
        own_attempt = strategy.committed_attempt(store)
    except CheckpointError:
        own_attempt = None
    if attempt is None or own_attempt == attempt:
        return attempt is not None
    return attempt in attempts_of_files and own_attempt not in attempts_of_files


def _small_files(manifest: Json) -> list[str]:
    strategy = _strategy_of(manifest)
    try:
        return [] if strategy is None else strategy.files_of(manifest)
    except (CheckpointError, KeyError, TypeError, ValueError):
        return []


def _patches(state: RepairState, source: Store, names: set[str]) -> dict[str, Patch]:
    """Return patches for those files that a source has, and that differ from the ones in the checkpoint."""
    patches = {}
    for name in sorted(names):
        nbytes = _size_of(source, name)
        is_damaged = name in state.damaged_files
        if nbytes is None or (not is_damaged and _is_same_file(state.view, source, name, nbytes)):
            continue
        damages = [damage for damage in state.damages if damage.file == name]
        # A file of another length is replaced as a whole.
        ranges = _damaged_ranges(damages) if _size_of(state.view, name) == nbytes else None
        patches[name] = Patch(
            nbytes=nbytes, source=source, name=name, ranges=_merged(ranges or [(0, nbytes)], nbytes)
        )
    return patches


def _size_of(store: Store, name: str) -> int | None:
    try:
        return store.size(name)
    except CheckpointError:
        return None


def _is_same_file(first: Store, second: Store, name: str, nbytes: int) -> bool:
    """Return whether a small file has the same bytes in both stores."""
    try:
        return first.read(name, max_bytes=nbytes) == second.read(name, max_bytes=nbytes)
    except CheckpointError:
        return False


def _damaged_ranges(damages: Sequence[Damage]) -> list[tuple[int, int]] | None:
    """Return the damaged ranges of a file; None for the whole file."""
    ranges: list[tuple[int, int]] = []
    for damage in damages:
        if damage.start is None or damage.stop is None:
            return None
        ranges.append((damage.start, damage.stop))
    return ranges


def _merged(ranges: Sequence[tuple[int, int]], nbytes: int) -> tuple[tuple[int, int], ...]:
    """Sort ranges, join those that touch or overlap, and cut them at the end of the file."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        stop = min(stop, nbytes)
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        elif start < stop:
            merged.append((start, stop))
    return tuple(merged)
