"""Format `zarr` version 1: zarr v2 arrays as Megatron-Core before 0.15 wrote them. It is only read.

Each array is in the directory of its key, with uncompressed chunks. Objects and common state are files of
torch.save. Earlier versions of megackpt saved this format as well: a marker, whose name has the attempt,
lists the files of such a save.

Source: Megatron-Core 0.12 `dist_checkpointing/strategies/{zarr,tensorstore,common}.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from megackpt.errors import CheckpointError
from megackpt.formats.contents import Contents
from megackpt.formats.damage import Damage, damage_of
from megackpt.formats.documents import CONTENT_METADATA, manifest_of_megatron, split_common
from megackpt.formats.file_names import ZARR_V1
from megackpt.formats.safe_pickle import load_value, warn_of_unsafe_pickle
from megackpt.formats.strategy import MANIFEST, Format, Json, LoadStrategy
from megackpt.formats.torch_zip import changed_record
from megackpt.formats.zarr import names
from megackpt.formats.zarr.array_codec import tensorstore
from megackpt.formats.zarr.array_documents import V2_FILE, array_v2
from megackpt.formats.zarr.checking import (
    changed_documents,
    missing_chunks,
    missing_files,
)
from megackpt.formats.zarr.load import (
    check_listed,
    find_arrays_v2,
    find_objects,
    identity_of,
    open_contents,
    parse_files,
)
from megackpt.storage import Store

SUFFIX = ".pt"

_MANIFEST = manifest_of_megatron(names.BACKEND, 1)
_COMMON_MAX_BYTES = 2**34
_MARKER_MAX_BYTES = 2**30


class ZarrV2LoadStrategy(LoadStrategy):
    """Loads format `zarr` version 1, of megackpt and Megatron-Core, and zarr v2 arrays that others wrote."""

    backend = names.BACKEND
    version = 1

    def detect(self, store: Store) -> Json | None:
        """Accept a directory of zarr v2 arrays as a checkpoint, unless it looks like an incomplete save.

        Arrays in deeper directories count only inside a zarr group: else they are of the steps of a training.
        """
        listed = store.names()
        # Megatron-Core and earlier versions of megackpt wrote one of these before the commit, and other
        # writers neither.
        is_incomplete = names.COMMON in listed or any(names.attempt_of_marker(n) for n in listed)
        arrays = [n for n in listed if n.endswith(f"/{V2_FILE}") and not n.startswith(names.STAGING)]
        is_group = bool(arrays) and ".zgroup" in listed
        if is_incomplete or not (is_group or any(name.count("/") == 1 for name in arrays)):
            return None
        return {**_MANIFEST, "detected": True}

    def check_files(self, store: Store, manifest: Json, *, deep: bool) -> Iterator[Damage]:
        """Yield the files that are missing or changed, and entries of the commit that no save wrote."""
        listed = store.names()
        try:
            attempt = None if manifest.get("detected") else _attempt(listed)
            if attempt is not None:  # saved by megackpt: others may write other entries
                if manifest != _MANIFEST:
                    what = "it has other entries than a save of this format wrote"
                    yield Damage(file=MANIFEST, what=what)
                name = names.marker(attempt)
                data = store.read(name, max_bytes=_MARKER_MAX_BYTES)
                files = parse_files(data, "checkpoint", where=f"{store.location}/{name}")
                yield from missing_files(files, listed, list_name=name)
            arrays = find_arrays_v2(store, listed)
            yield from missing_chunks(arrays, listed)
            if attempt is not None:
                yield from changed_documents(store, arrays, lambda array: array_v2(array.spec, array.grid))
                if deep:
                    yield from _changed_records(
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
            _check_marked(store, listed)
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
            identity=_attempt(listed) or identity_of(arrays, listed),
            names_save=_attempt(listed) is not None,
        )


def _changed_records(store: Store, files: Iterable[str]) -> Iterator[Damage]:
    """Yield the files of torch.save with a record that has a wrong checksum, which torch.load does not check.

    Files of old versions of torch have none.
    """
    for name in files:
        try:
            what = changed_record(store.read(name, max_bytes=_COMMON_MAX_BYTES))
        except CheckpointError as error:
            yield damage_of(error, location=store.location, file=name)
            continue
        if what is not None:
            yield Damage(file=name, what=what)


def _check_marked(store: Store, listed: Sequence[str]) -> None:
    """Check that no document of an array, and no object, is missing that a marker lists.

    The marker of an attempt that was never published is ignored. Checkpoints of others have no marker, and
    cannot be checked.

    Raises:
        FormatError: a file is missing, or the marker is damaged.
    """
    unpublished = {ZARR_V1.attempt_of(name) for name in listed}
    for name in listed:
        attempt = names.attempt_of_marker(name)
        if attempt is None or attempt in unpublished:
            continue
        where = f"{store.location}/{name}"
        files = parse_files(store.read(name, max_bytes=_MARKER_MAX_BYTES), "checkpoint", where=where)
        files = [n for n in files if n != names.COMMON]  # its reader reports it
        check_listed(files, listed, location=store.location, list_name=where, key_of=str)


def _attempt(listed: Iterable[str]) -> str | None:
    """Return the attempt of the only marker; None if there is none, or more than one."""
    attempts = [a for a in map(names.attempt_of_marker, listed) if a is not None]
    # There are two markers if a save died after it wrote its own and before it deleted the old one. Files of
    # both attempts may then be in place.
    return attempts[0] if len(attempts) == 1 else None


def _read_common(store: Store, allow_unsafe_pickle: bool) -> Any:
    where = f"{store.location}/{names.COMMON}"
    data = store.read(names.COMMON, max_bytes=_COMMON_MAX_BYTES)
    return split_common(load_value(data, where=where, allow_unsafe=allow_unsafe_pickle), where=where)


FORMAT = Format(
    backend=names.BACKEND,
    version=1,
    load=ZarrV2LoadStrategy,
)
