"""Format `zarr` version 1: zarr v2 arrays exactly as Megatron-Core up to 0.15 wrote them.

Each array is in the directory of its key, with uncompressed chunks. Objects and common state are files of
torch.save. An attempt is written to a directory of its own, and moved to its final names at the end.

Source: Megatron-Core 0.12 `dist_checkpointing/strategies/{zarr,tensorstore,common}.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megackpt.errors import CheckpointError, FormatError, UnserializableError
from megackpt.formats.contents import Contents
from megackpt.formats.damage import Damage, damage_of
from megackpt.formats.file_names import ZARR_V1
from megackpt.formats.safe_pickle import load_value, save_value, warn_of_unsafe_pickle
from megackpt.formats.strategy import MANIFEST, Format, Json, LoadStrategy
from megackpt.formats.zarr import names
from megackpt.formats.zarr.array_documents import V2_FILE, ZarrArray, array_v2
from megackpt.formats.zarr.assembly import put_file
from megackpt.formats.zarr.checking import (
    changed_documents,
    changed_records,
    missing_chunks,
    missing_files,
)
from megackpt.formats.zarr.grids import Grid, GridRules
from megackpt.formats.zarr.library import tensorstore
from megackpt.formats.zarr.load import find_arrays_v2, find_objects, identity_of, open_contents, parse_files
from megackpt.formats.zarr.publication import (
    MARKER_MAX_BYTES,
    arrays_in,
    check_marked,
    is_committed,
    marked_files,
    owned_files,
    publish_files,
    put_marker,
    remove_empty_directories,
)
from megackpt.formats.zarr.save import ZarrSaveStrategy
from megackpt.metadata import ArraySpec
from megackpt.storage import Store

RULES = GridRules()
SUFFIX = ".pt"
CONTENT_METADATA = "content_metadata"
"""Key under which Megatron-Core stores content metadata in common state."""

_MANIFEST: Json = {
    "sharded_backend": names.BACKEND,
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""The whole content of metadata.json: Megatron-Core fails on any other field."""

_COMMON_MAX_BYTES = 2**34


class ZarrV2SaveStrategy(ZarrSaveStrategy):
    """Saves format `zarr` version 1."""

    version = 1
    file_names = ZARR_V1

    def __init__(self, rules: GridRules = RULES) -> None:
        super().__init__(rules)

    def begin(self, store: Store, *, attempt: str) -> None:
        """Check, before anything is written, that all arrays in the directory are of a checkpoint."""
        tensorstore()
        # Called for its errors: publishing replaces arrays by name, so it must not meet those of somebody
        # else.
        owned_files(store, store.names())
        remove_empty_directories(store, names.STAGING)

    def check_keys(self, arrays: tuple[ArraySpec, ...]) -> None:
        """Check that keys are paths that do not contain each other."""
        names.check_names(arrays)

    def array_of(self, spec: ArraySpec, grid: Grid, attempt: str) -> ZarrArray:
        """Return the array as it is stored in the directory of an attempt."""
        return array_v2(spec, grid, directory=names.staged(attempt))

    def object_name(self, spec: ArraySpec, offset: tuple[int, ...], attempt: str) -> str:
        """Return the file of an object."""
        return (
            f"{names.staged(attempt)}{spec.key}/{names.shard_file(offset, spec.global_shape, suffix=SUFFIX)}"
        )

    def check_common(self, common: Any) -> None:
        """Check that common state can be pickled, and loaded without running code."""
        _encoded_common(common)

    def encode_object(self, value: Any, *, path: str) -> bytes:
        """Return the bytes of torch.save for a value."""
        return save_value(value, path=path)

    def write_common(self, store: Store, *, attempt: str, common: Any) -> Json:
        """Write common state; content metadata is a part of it, as in Megatron-Core."""
        put_file(store, names.staged(attempt) + names.COMMON, _encoded_common(common))
        return {"common": names.staged(attempt) + names.COMMON}

    def publish(self, store: Store, *, attempt: str, entries: Json) -> Json:
        """Replace the files of the last checkpoint by those of the attempt."""
        publish_files(store, attempt=attempt)
        return dict(_MANIFEST)

    def committed_attempt(self, store: Store) -> str | None:
        """Return the attempt of the marker, if metadata.json is of this format."""
        return _attempt(store, store.names()) if is_committed(store) else None

    def remove_arrays(self, store: Store, manifest: Json, *, key_prefix: str) -> tuple[Json, list[str]]:
        """Return the files of the arrays, documents first: without its document there is no array."""
        listed = store.names()
        paths = [n.removesuffix(V2_FILE) for n in arrays_in(listed) if n.startswith(key_prefix)]
        stale = [path + V2_FILE for path in sorted(paths)]
        owned = sorted(owned_files(store, listed) - set(stale))
        stale += [n for n in owned if n.startswith(key_prefix) and n != names.COMMON]
        # The marker keeps naming the removed files as ours, so that a later save deletes them if this one
        # does not get to it. They leave the list of the checkpoint, by which a load finds that files are
        # missing.
        attempt = _attempt(store, listed)
        if attempt is not None:
            kept = parse_files(
                store.read(names.marker(attempt), max_bytes=MARKER_MAX_BYTES),
                "checkpoint",
                where=f"{store.location}/{names.marker(attempt)}",
            )
            put_marker(store, attempt, owned=owned + stale, checkpoint=sorted(set(kept) - set(stale)))
        return manifest, stale

    def files_of(self, manifest: Json) -> list[str]:
        """Return the file with common state before it is published."""
        return [manifest["common"]] if "common" in manifest else []

    def fixed_names(self, store: Store) -> list[str]:
        """Return the files that our markers name, then the markers."""
        return marked_files(store, store.names())


class ZarrV2LoadStrategy(LoadStrategy):
    """Loads format `zarr` version 1, of megackpt and Megatron-Core, and zarr v2 arrays that others wrote."""

    backend = names.BACKEND
    version = 1

    def detect(self, store: Store) -> Json | None:
        """Accept a directory of zarr v2 arrays as a checkpoint, unless it looks like an incomplete save.

        Arrays in deeper directories count only inside a zarr group: else they are of the steps of a training.
        """
        listed = store.names()
        # Saves of megackpt and Megatron-Core write one of these before the commit, and other writers neither.
        is_incomplete = names.COMMON in listed or any(names.attempt_of_marker(n) for n in listed)
        arrays = arrays_in(listed)
        is_group = bool(arrays) and ".zgroup" in listed
        if is_incomplete or not (is_group or any(name.count("/") == 1 for name in arrays)):
            return None
        return {**_MANIFEST, "detected": True}

    def check_files(self, store: Store, manifest: Json, *, deep: bool) -> Iterator[Damage]:
        """Yield the files that are missing or changed, and entries of the commit that no save writes."""
        listed = store.names()
        try:
            attempt = None if manifest.get("detected") else _attempt(store, listed)
            if attempt is not None:  # saved by megackpt: others may write other entries
                if manifest != _MANIFEST:
                    what = "it has other entries than a save of this format writes"
                    yield Damage(file=MANIFEST, what=what)
                name = names.marker(attempt)
                data = store.read(name, max_bytes=MARKER_MAX_BYTES)
                files = parse_files(data, "checkpoint", where=f"{store.location}/{name}")
                yield from missing_files(files, listed, list_name=name)
            arrays = find_arrays_v2(store, listed)
            yield from missing_chunks(arrays, listed)
            if attempt is not None:
                yield from changed_documents(store, arrays, lambda array: array_v2(array.spec, array.grid))
                if deep:
                    yield from changed_records(
                        store, [n for n in files if n.endswith(SUFFIX) and n in listed]
                    )
        except CheckpointError as error:
            yield damage_of(error, location=store.location)

    def open(self, store: Store, manifest: Json, *, allow_unsafe_pickle: bool) -> Contents:
        """Find the arrays. Pickles are read when they are needed."""
        tensorstore()
        if allow_unsafe_pickle:
            warn_of_unsafe_pickle(store.location)
        listed = store.names()
        # Arrays are found by their documents, so without this check a lost document is a lost array,
        # silently.
        if not manifest.get("detected"):
            check_marked(store, listed)
        arrays = find_arrays_v2(store, listed)

        def decode(data: bytes, where: str) -> Any:
            return load_value(data, where=where, allow_unsafe=allow_unsafe_pickle)

        def common() -> Any:
            if manifest.get("detected"):
                return {"state_dict": {}, CONTENT_METADATA: None}
            return _read_common(store, allow_unsafe_pickle)

        return open_contents(
            store,
            arrays=arrays,
            objects=find_objects(listed, directory="", key_of=str, suffix=SUFFIX),
            listed=listed,
            common=common,
            decode_object=decode,
            identity=_attempt(store, listed) or identity_of(arrays, listed),
            names_save=_attempt(store, listed) is not None,
        )


def _encoded_common(common: Any) -> bytes:
    """Return the content of common.pt: common state, with content metadata in it."""
    state, content_metadata = common["state_dict"], common[CONTENT_METADATA]
    if CONTENT_METADATA in state:  # Megatron-Core would take it for what save() was given
        raise UnserializableError(
            f"{CONTENT_METADATA}: the state dict has this key, where format zarr version 1 stores the "
            f"content metadata that save() is given. Rename it.",
            path=CONTENT_METADATA,
        )
    if content_metadata is not None:
        state = {**state, CONTENT_METADATA: content_metadata}
    return save_value(state, path="common state")


def _attempt(store: Store, listed: list[str]) -> str | None:
    attempts = [a for a in map(names.attempt_of_marker, listed) if a is not None]
    # There are two markers if a save died after it wrote its own and before it deleted the old one. Files of
    # both attempts may then be in place.
    return attempts[0] if len(attempts) == 1 else None


def _read_common(store: Store, allow_unsafe_pickle: bool) -> Any:
    where = f"{store.location}/{names.COMMON}"
    data = store.read(names.COMMON, max_bytes=_COMMON_MAX_BYTES)
    state = load_value(data, where=where, allow_unsafe=allow_unsafe_pickle)
    if not isinstance(state, dict):
        raise FormatError(
            f"{where}: the common state is a {type(state).__name__}, not a dict. The file is damaged, or "
            f"{MANIFEST} is of another checkpoint.",
            path=where,
        )
    return {
        "state_dict": {key: value for key, value in state.items() if key != CONTENT_METADATA},
        CONTENT_METADATA: state.get(CONTENT_METADATA),
    }


FORMAT = Format(
    backend=names.BACKEND,
    version=1,
    save=ZarrV2SaveStrategy,
    load=ZarrV2LoadStrategy,
    file_names=ZARR_V1,
)
