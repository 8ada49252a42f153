"""Which damaged files of a checkpoint can be mended, and from where.

Owns the search: found out by verifying the checkpoint as it would be; nothing is written. Finding damage is
the affair of `verify`, and what is done with what was found that of `repair`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megackpt.engine.checkpoint.manifest import read_manifest
from megackpt.engine.data.progress import Progress
from megackpt.engine.verification.verify import VerifyReport, verify_checkpoint
from megackpt.errors import CheckpointError, FormatError, NotACheckpointError
from megackpt.formats.damage import Damage, damage_of
from megackpt.formats.registry import load_strategy, save_strategy
from megackpt.formats.strategy import MANIFEST, Json
from megackpt.options import RepairOptions, VerifyOptions
from megackpt.storage import Store
from megackpt.storage.views import Patch, PatchedStore
from megackpt.validation import PARITY

_ROUNDS = 8  # each mends at least one file, or ends the search


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairedFile:
    """A file that was mended, or can be.

    Attributes:
        file: its name in the checkpoint.
        source: where its bytes come from: `parity`, or the location of a copy.
        nbytes: its length.
        ranges: which of them, half-open; the others are its own.
    """

    file: str
    source: str
    nbytes: int
    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class RepairState:
    """A checkpoint as it would be with what has been mended so far.

    Attributes:
        view: the checkpoint.
        damages: what is wrong with it.
        files: what was mended, in the order in which that was found.
    """

    view: Store
    damages: tuple[Damage, ...]
    files: tuple[RepairedFile, ...] = ()

    @property
    def damaged(self) -> set[str]:
        """Names of damaged files."""
        return {damage.file for damage in self.damages if damage.file}


class RepairSearch:
    """Looks for what can be mended. Nothing is written."""

    def __init__(
        self, store: Store, copies: Sequence[Store], options: RepairOptions, progress: Progress
    ) -> None:
        self._store, self._copies, self._progress = store, copies, progress
        self._options = VerifyOptions(
            deep=True, threads=options.threads, allow_unsafe_pickle=options.allow_unsafe_pickle
        )
        self.refusals: list[str] = []

    def begin(self) -> RepairState:
        """Return the checkpoint as it is."""
        try:
            found = verify_checkpoint(self._store, self._options, self._progress)
            return RepairState(self._store, found.damages)
        except (NotACheckpointError, FormatError) as error:
            commits = ((copy, _manifest_of(copy)) for copy in self._copies)
            if not any(said is not None and _are_of_one_save(c, said, self._store) for c, said in commits):
                raise
            what = damage_of(error, location=self._store.location, file=MANIFEST).what
            return RepairState(self._store, (Damage(file=MANIFEST, what=what),))

    def verify(self, view: Store) -> tuple[Damage, ...]:
        """Return what is wrong with a checkpoint; that it cannot be opened is damage, too."""
        try:
            found: VerifyReport = verify_checkpoint(view, self._options, self._progress)
        except CheckpointError as error:
            return (damage_of(error, location=view.location, file=MANIFEST),)
        return found.damages

    def mend(self, state: RepairState) -> RepairState:
        """Mend as much as can be."""
        for _ in range(_ROUNDS):
            before = state
            for name, source, others in self._sources(state):
                if state.damages:
                    state = self._mend_from(state, name, source, others)
            if not state.damages or state is before:
                break
        return state

    def _sources(self, state: RepairState) -> Iterator[tuple[str, Store, tuple[str, ...]]]:
        """Yield sources, and small files of theirs that may be at fault where others are called damaged."""
        try:
            rebuilt = self._rebuilt(state.view)
            if rebuilt is not None:
                yield PARITY, rebuilt, ()
        except CheckpointError as error:
            self.refusals.append(f"{PARITY}: {error}")
        for copy in self._copies:
            said = _manifest_of(copy)
            if said is None:
                self.refusals.append(f"{copy.location} holds no checkpoint that can be read")
            elif not _are_of_one_save(copy, said, self._store):
                self.refusals.append(f"{copy.location} holds another save, or does not say which")
            else:
                yield copy.location, copy, (MANIFEST, *_small_files(said))

    def _rebuilt(self, view: Store) -> Store | None:
        manifest = _manifest_of(view)
        if manifest is None:
            return None
        strategy = load_strategy(manifest, where=view.location)
        return strategy.rebuilt_files(view, manifest)

    def _mend_from(self, state: RepairState, name: str, source: Store, others: Sequence[str]) -> RepairState:
        """Take what is damaged from a source, as far as it is right afterwards."""
        patches = _patches(state, source, state.damaged)
        mended = self._tried(state, name, patches) if patches else state
        if mended is not state or not others:
            return mended
        if not _concerns(state, others):
            return state
        # The commit may be what is wrong, and say that other files are.
        patches = _patches(state, source, {*state.damaged, *others})
        tried = self._tried(state, name, patches) if patches else state
        return state if _concerns(tried, others) else tried

    def _tried(self, state: RepairState, source: str, patches: Mapping[str, Patch]) -> RepairState:
        """Return the state with those patches that leave nothing wrong with their files; or the same."""
        view = PatchedStore(state.view, patches)
        damages = self.verify(view)
        good = set(patches) - {damage.file for damage in damages}
        if good < set(patches):
            view = PatchedStore(state.view, {n: p for n, p in patches.items() if n in good})
            damages = self.verify(view) if good else state.damages
        if not good:
            return state
        files = [
            RepairedFile(file=n, source=source, nbytes=patches[n].nbytes, ranges=patches[n].ranges)
            for n in sorted(good)
        ]
        return RepairState(view, damages, (*state.files, *files))


def _concerns(state: RepairState, small: Sequence[str]) -> bool:
    """Say whether a small file is called damaged, or it is not known what is."""
    return bool(state.damaged & set(small)) or any(not damage.file for damage in state.damages)


def _manifest_of(store: Store) -> Json | None:
    try:
        return read_manifest(store)
    except CheckpointError:
        return None


def _are_of_one_save(copy: Store, manifest: Json, store: Store) -> bool:
    """Say whether a copy, with this commit, is of the save whose files are in a store.

    Where its commit does not say any more which that is, names of files do. Nothing else would tell values of
    one step from those of another in some formats; what another library has saved never says.
    """
    try:
        strategy = save_strategy((str(manifest["sharded_backend"]), int(manifest["sharded_backend_version"])))
        attempt = strategy.committed_attempt(copy)
        there = {strategy.file_names.attempt_of(name) for name in store.names()} - {None}
    except (CheckpointError, KeyError, TypeError, ValueError):
        return False
    try:
        own = strategy.committed_attempt(store)
    except CheckpointError:
        own = None
    return attempt is not None and (own == attempt or (attempt in there and own not in there))


def _small_files(manifest: Json) -> list[str]:
    try:
        found = (str(manifest["sharded_backend"]), int(manifest["sharded_backend_version"]))
        return save_strategy(found).files_of(manifest)
    except (CheckpointError, KeyError, TypeError, ValueError):
        return []


def _patches(state: RepairState, source: Store, files: set[str]) -> dict[str, Patch]:
    """Return patches for files that a source has in it, and that are not there as they are here."""
    patches = {}
    for name in sorted(files):
        nbytes = _size_of(source, name)
        if nbytes is None or (name not in state.damaged and _is_same(state.view, source, name, nbytes)):
            continue
        of_file = [damage for damage in state.damages if damage.file == name]
        ranges = _ranges(of_file) if _size_of(state.view, name) == nbytes else None
        patches[name] = Patch(
            nbytes=nbytes, source=source, name=name, ranges=_within(ranges or [(0, nbytes)], nbytes)
        )
    return patches


def _size_of(store: Store, name: str) -> int | None:
    try:
        return store.size(name)
    except CheckpointError:
        return None


def _is_same(one: Store, other: Store, name: str, nbytes: int) -> bool:
    """Say whether a small file has the same bytes in both stores."""
    try:
        return one.read(name, max_bytes=nbytes) == other.read(name, max_bytes=nbytes)
    except CheckpointError:
        return False


def _ranges(damages: Sequence[Damage]) -> list[tuple[int, int]] | None:
    """Return what is damaged of a file; None for all of it."""
    found: list[tuple[int, int]] = []
    for damage in damages:
        if damage.start is None or damage.stop is None:
            return None
        found.append((damage.start, damage.stop))
    return found


def _within(ranges: Sequence[tuple[int, int]], nbytes: int) -> tuple[tuple[int, int], ...]:
    """Sort ranges, join those that touch or overlap, and cut them at the end of the file."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        stop = min(stop, nbytes)
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        elif start < stop:
            found.append((start, stop))
    return tuple(found)
