"""Format `zarr` version 3: zarr v3 arrays in shards, each attempt in a group of its own.

Names of files carry the attempt, so no file of a committed checkpoint is changed before the next commit.
Objects and common state are blobs of `megackpt.codec`, without pickle, each with a digest.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megackpt.codec import pack, unpack
from megackpt.errors import CheckpointError, FormatError, IntegrityError
from megackpt.formats.contents import Contents
from megackpt.formats.damage import Damage, damage_of
from megackpt.formats.documents import (
    attempt_in_manifest,
    damaged,
    file_entry,
    read_document,
    read_small_file,
    unpadded_shapes,
    write_small_file,
)
from megackpt.formats.file_names import ZARR_V3
from megackpt.formats.strategy import (
    MANIFEST,
    Capabilities,
    ChunkParts,
    Format,
    Json,
    LoadStrategy,
    SaveStrategy,
)
from megackpt.formats.zarr import names
from megackpt.formats.zarr.array_codec import tensorstore
from megackpt.formats.zarr.array_documents import V3_FILE, ZarrArray, array_v3, group_v3
from megackpt.formats.zarr.assembly import Assembler, WritePlan, gathered, put_file
from megackpt.formats.zarr.checking import changed_documents, missing_chunks, missing_files
from megackpt.formats.zarr.chunks import StoredObjects
from megackpt.formats.zarr.load import (
    check_listed,
    find_arrays_v3,
    find_objects,
    identity_of,
    open_contents,
    parse_files,
)
from megackpt.formats.zarr.rounds import Grid, GridRules, choose_grids, find_touched_files, plan_rounds
from megackpt.plans.geometry import Ints
from megackpt.plans.metadata import OBJECT, ArraySpec
from megackpt.plans.planning import SavePlan
from megackpt.storage import Store, check_name, digest_of

RULES = GridRules()
SUFFIX = ".bin"


class ZarrV3SaveStrategy(SaveStrategy):
    """Saves format `zarr` version 3, with sizes of files and chunks by rules. Used for one save at a time."""

    backend = names.BACKEND
    version = 3
    file_names = ZARR_V3
    capabilities = Capabilities(shares_files=True)

    def __init__(self, rules: GridRules = RULES) -> None:
        self._rules = rules
        self._last: tuple[SavePlan, str, WritePlan] | None = None

    def check_common(self, common: Any) -> None:
        """Check that `megackpt.codec` can encode common state and content metadata."""
        pack(common["state_dict"])
        pack(common["content_metadata"], path="content_metadata")

    def encode_object(self, value: Any, *, path: str) -> bytes:
        """Return the digest and the blob of a value."""
        return with_digest(pack(value, path=path))

    def rounds(self, plan: SavePlan, rank: int) -> list[Ints]:
        """Return the rows of a rank by round: ranks that share a file write it in different rounds.

        Raises:
            DeclarationError: a key cannot be stored; the same on every rank.
            MissingExtraError: tensorstore is not installed here.
        """
        tensorstore()
        names.check_lengths(plan.table.arrays)
        rounds = self._planned(plan, "").rounds
        own_rows = plan.rows_of(rank)
        return [np.sort(own_rows[rounds.round[own_rows] == number]) for number in range(rounds.count)]

    def write_chunks(
        self, store: Store, *, attempt: str, rank: int, plan: SavePlan, rows: Ints, parts: ChunkParts
    ) -> bytes:
        """Write the files of one round. Rank 0 needs no receipt."""
        writing = self._planned(plan, attempt)
        table = plan.table
        # Whoever writes the first row of an array writes its documents, so that exactly one rank does.
        first_rows = np.searchsorted(table.array, np.arange(len(table.arrays)))
        assembler = Assembler(store, writing)
        tensors = [row for row in rows.tolist() if writing.arrays[int(table.array[row])] is not None]
        assembler.write(np.array(tensors, np.int64), parts)
        for row in rows.tolist():
            number = int(table.array[row])
            array, spec = writing.arrays[number], table.arrays[number]
            if array is None:
                offset = tuple(table.start[row, : len(spec.global_shape)].tolist())
                data = gathered(parts(row), int(table.nbytes[row])).tobytes()
                put_file(store, _object_name(spec, offset, attempt), data)
            elif row == first_rows[number]:
                _put_documents(store, array)
        # Durable, with their names, before rank 0 commits them after the last round.
        store.sync()
        return b""

    def write_index(self, store: Store, *, attempt: str, plan: SavePlan, receipts: list[list[bytes]]) -> Json:
        """Write the document of the group of arrays, those of arrays without elements, and the list of files.

        `write_chunks` has written the documents of all other arrays.
        """
        filled = set(plan.table.array.tolist())
        for number, array in enumerate(self._planned(plan, attempt).arrays):
            if array is not None and number not in filled:
                _put_documents(store, array)
        put_file(store, names.arrays_directory(attempt) + V3_FILE, group_v3())
        # Without this list, an array whose document is lost would look like one that was never saved.
        files = json.dumps({"files": self._identifying_files(plan, attempt)}, indent=1)
        return {
            "files": write_small_file(store, names.files_file(attempt), files.encode()),
            "arrays": names.arrays_directory(attempt).rstrip("/"),
            "objects": names.objects_directory(attempt).rstrip("/"),
        }

    def _identifying_files(self, plan: SavePlan, attempt: str) -> list[str]:
        """Return the documents of arrays and the files of objects, from which a reader knows the keys."""
        table, files = plan.table, set()
        # Files of chunks are not listed: a reader derives their names from the document of their array.
        for spec in table.arrays:
            if spec.dtype != OBJECT:
                files.add(f"{names.arrays_directory(attempt)}{names.quoted(spec.key)}/{V3_FILE}")
        is_object = np.array([spec.dtype == OBJECT for spec in table.arrays], np.bool_)
        for row in np.flatnonzero(is_object[table.array]).tolist() if len(table) else ():
            spec = table.arrays[int(table.array[row])]
            offset = tuple(table.start[row, : len(spec.global_shape)].tolist())
            files.add(_object_name(spec, offset, attempt))
        return sorted(files)

    def write_common(self, store: Store, *, attempt: str, common: Any) -> Json:
        """Write common state as one blob."""
        return {"common": write_small_file(store, names.common_file(attempt), pack(common))}

    def publish(self, store: Store, *, attempt: str, entries: Json) -> Json:
        """Remove the empty directories of earlier attempts; return the entries."""
        with contextlib.suppress(CheckpointError):  # what cannot be removed stays
            for prefix in ("zarr-", "objects-"):
                store.remove_empty_directories(prefix)
        return entries

    def committed_attempt(self, store: Store) -> str | None:
        """Return the attempt that metadata.json names."""
        return attempt_in_manifest(store)

    def remove_arrays(self, store: Store, manifest: Json, *, key_prefix: str) -> tuple[Json, list[str]]:
        """Add the prefix to the removed ones in the manifest; the files of these arrays become stale."""
        stored = _find(store, manifest)
        gone = tuple(a.path for a in stored.arrays if a.spec.key.startswith(key_prefix))
        stale = [n for n in stored.listed if n.startswith(gone)] if gone else []
        for key, objects in stored.objects.items():
            stale += objects.files.values() if key.startswith(key_prefix) else []
        # Documents carry no list of arrays, so the manifest names what is gone: until the files are deleted,
        # and if that never happens, a load skips these keys.
        return manifest | {_REMOVED: [*manifest.get(_REMOVED, []), key_prefix]}, stale

    def files_of(self, manifest: Json) -> list[str]:
        """Return the group's document and the common state."""
        return [f"{manifest['arrays']}/{V3_FILE}", *(manifest[e]["file"] for e in ("files", "common"))]

    def _planned(self, plan: SavePlan, attempt: str) -> WritePlan:
        """Return how a plan is written. It is kept, as each rank needs it several times in a save."""
        last = self._last  # read once: ranks simulated by threads may share a strategy
        # Plans that differ in the sizes of their objects only have the same column.
        has_same_rows = last is not None and last[0].writer is plan.writer
        if last is not None and has_same_rows and last[1] == attempt:
            return last[2]
        grids = choose_grids(plan.table, self._rules)
        arrays = [
            None if grid is None else _array_of(spec, grid, attempt)
            for spec, grid in zip(plan.table.arrays, grids, strict=True)
        ]
        # `rounds` asks before there is an attempt. Which rows touch which files does not depend on it, and is
        # what takes long to compute.
        if last is not None and has_same_rows:
            touches, rounds = last[2].touches, last[2].rounds
        else:
            touches = find_touched_files(plan.table, grids)
            rounds = plan_rounds(plan, touches)
        planned = WritePlan(plan, arrays, touches, rounds)
        self._last = (plan, attempt, planned)
        return planned


def _array_of(spec: ArraySpec, grid: Grid, attempt: str) -> ZarrArray:
    """Return the array as it is stored in the group of an attempt."""
    return array_v3(spec, grid, directory=names.arrays_directory(attempt), name=names.quoted(spec.key))


def _object_name(spec: ArraySpec, offset: tuple[int, ...], attempt: str) -> str:
    """Return the file of an object."""
    leaf = names.shard_file(offset, spec.global_shape, suffix=SUFFIX)
    return f"{names.objects_directory(attempt)}{names.quoted(spec.key)}/{leaf}"


def _put_documents(store: Store, array: ZarrArray) -> None:
    for name, data in array.documents().items():
        put_file(store, name, data)


class ZarrV3LoadStrategy(LoadStrategy):
    """Loads format `zarr` version 3, and groups of zarr v3 arrays that others wrote."""

    backend = names.BACKEND
    version = 3

    def detect(self, store: Store) -> Json | None:
        """Accept a zarr v3 group with arrays as a checkpoint, or a directory of arrays without a group.

        Arrays in deeper directories are of other checkpoints: those of the steps of a training.
        """
        listed = store.names()
        documents = [n for n in listed if n.endswith(f"/{V3_FILE}") and ZARR_V3.attempt_of(n) is None]
        is_group = V3_FILE in listed and bool(documents)
        if is_group or any(_is_array(store, name) for name in documents if name.count("/") == 1):
            return {"sharded_backend": names.BACKEND, "sharded_backend_version": 3, "detected": True}
        return None

    def check_files(self, store: Store, manifest: Json, *, deep: bool) -> Iterator[Damage]:
        """Yield the files that are missing or changed, and wrong entries of the commit."""
        listed = store.names()
        try:
            if not manifest.get("detected"):
                directories = _directories(manifest, store.location)
                files = _identifying_files(store, manifest)
                yield from missing_files(files, listed, list_name=manifest["files"]["file"])
                # Only documents that exist can be read: the others were yielded just now.
                existing = sorted(set(files) & set(listed))
                arrays = find_arrays_v3(store, existing, directory=directories[0])
                yield from missing_chunks(arrays, listed)
                yield from changed_documents(
                    store,
                    arrays,
                    lambda array: array_v3(
                        array.spec, array.grid, directory=directories[0], name=names.quoted(array.spec.key)
                    ),
                )
                yield from _check_common(store, manifest)
        except CheckpointError as error:
            yield damage_of(error, location=store.location)

    def open(self, store: Store, manifest: Json, *, allow_unsafe_pickle: bool) -> Contents:
        """Find the arrays. There are no pickles in this format."""
        tensorstore()
        detected = bool(manifest.get("detected"))
        stored = _find(store, manifest)
        own_identity = f"{manifest.get('attempt')} {manifest.get(_REMOVED, [])}"
        contents = open_contents(
            store,
            arrays=stored.arrays,
            objects=stored.objects,
            listed=stored.listed,
            common=lambda: dict(_NOTHING) if detected else _read_common(store, manifest),
            decode_object=lambda data, where: unpack(without_digest(data, where=where), where=where),
            identity=identity_of(stored.arrays, stored.listed) if detected else own_identity,
            names_save=not detected,
        )
        unpadded = unpadded_shapes(manifest, contents.arrays, where=f"{store.location}/{MANIFEST}")
        return replace(contents, unpadded=unpadded)


_NOTHING: Json = {"state_dict": {}, "content_metadata": None}
_REMOVED = "removed_prefixes"
_DIGEST_BYTES = 32  # hexadecimal


@dataclass(frozen=True, slots=True)
class _FoundItems:
    """Arrays, objects by key, and all names in the store."""

    arrays: list[ZarrArray]
    objects: dict[str, StoredObjects]
    listed: list[str]


def _find(store: Store, manifest: Json) -> _FoundItems:
    listed = store.names()
    if manifest.get("detected"):
        return _FoundItems(find_arrays_v3(store, listed, directory=""), {}, listed)
    directories, gone = _directories(manifest, store.location), _removed(manifest, store.location)
    files, list_name = _identifying_files(store, manifest), f"{store.location}/{manifest['files']['file']}"
    # Before any document is read: a key whose files are lost must be an error, not a smaller checkpoint.
    check_listed(files, listed, location=store.location, list_name=list_name, key_of=_key_of_directory)
    arrays = find_arrays_v3(store, listed, directory=directories[0])
    objects = find_objects(
        listed, directory=directories[1], key_of=names.unquoted, suffix=SUFFIX, is_checked=True
    )
    return _FoundItems(
        # Files of removed arrays may still be there, if the process died before it deleted them.
        [a for a in arrays if not a.spec.key.startswith(gone)],
        {key: of_key for key, of_key in objects.items() if not key.startswith(gone)},
        listed,
    )


def _removed(manifest: Json, where: str) -> tuple[str, ...]:
    """Return the prefixes of keys that were removed."""
    removed = manifest.get(_REMOVED, [])
    if not isinstance(removed, list) or not all(isinstance(prefix, str) for prefix in removed):
        raise damaged(f"{_REMOVED} is no list of keys", f"{where}/{MANIFEST}")
    return tuple(removed)


def _identifying_files(store: Store, manifest: Json) -> list[str]:
    """Return the documents of arrays and the files of objects that the save has listed."""
    gone = _removed(manifest, store.location)
    data, where = read_small_file(store, manifest, "files")
    return [name for name in parse_files(data, "files", where=where) if not _key_of(name).startswith(gone)]


def _is_array(store: Store, name: str) -> bool:
    """Return whether a document describes an array, or is damaged, which opening it reports."""
    try:
        return bool(read_document(store, name).get("node_type") != "group")
    except FormatError:
        return True


def _check_common(store: Store, manifest: Json) -> Iterator[Damage]:
    named, _ = file_entry(store, manifest, "common")
    nbytes = store.size(named["file"])
    if nbytes != named["nbytes"]:
        yield Damage(file=named["file"], what=f"it has {nbytes:,} bytes instead of {named['nbytes']:,}")


def _key_of(name: str) -> str:
    """Return the key that a file of an array or an object belongs to."""
    return _key_of_directory(name.rpartition("/")[0])


def _key_of_directory(directory: str) -> str:
    return names.unquoted(directory.rpartition("/")[2])


def with_digest(data: bytes) -> bytes:
    """Return the digest of data, followed by data."""
    # No entry names the file of a single object, so its digest has to be in the file.
    return digest_of(data).encode() + data


def without_digest(data: bytes, *, where: str) -> bytes:
    """Return the data that follow a digest.

    Raises:
        IntegrityError: the digest does not match.
    """
    if digest_of(data[_DIGEST_BYTES:]).encode() != data[:_DIGEST_BYTES]:
        raise IntegrityError(
            f"{where}: the bytes are not those that were saved (their digest differs). The file is damaged; "
            f"load another checkpoint.",
            path=where,
        )
    return data[_DIGEST_BYTES:]


def _directories(manifest: Json, where: str) -> tuple[str, str]:
    """Return the directories of arrays and objects, with '/' at their ends."""
    directories = []
    for entry in ("arrays", "objects"):
        name = manifest.get(entry)
        if not isinstance(name, str):
            raise FormatError(
                f"{where}/{MANIFEST} does not say where the {entry} are. The file is damaged or foreign.",
                path=where,
            )
        check_name(name, location=where)
        directories.append(f"{name}/")
    # The directories have no digest in the manifest. What ties them to it is the attempt in their names.
    attempt = str(manifest.get("attempt"))
    if directories != [names.arrays_directory(attempt), names.objects_directory(attempt)]:
        raise FormatError(
            f"{where}/{MANIFEST} is of attempt {attempt:.80}, and its arrays and objects are in "
            f"{directories[0]:.200} and {directories[1]:.200}. The file is damaged, or of another "
            f"checkpoint.",
            path=f"{where}/{MANIFEST}",
        )
    return directories[0], directories[1]


def _read_common(store: Store, manifest: Json) -> Any:
    data, where = read_small_file(store, manifest, "common")
    return unpack(data, where=where)


FORMAT = Format(
    backend=names.BACKEND,
    version=3,
    save=ZarrV3SaveStrategy,
    load=ZarrV3LoadStrategy,
    file_names=ZARR_V3,
)
