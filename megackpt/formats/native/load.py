"""Reading the native format. Nothing in a file is believed before it is checked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import safetensors.torch
from safetensors import SafetensorError

from megackpt.codec import Encoded, decode, load_tree, unpack
from megackpt.errors import FormatError, IntegrityError
from megackpt.formats.file_chunks import FileChunks
from megackpt.formats.native import names
from megackpt.formats.strategy import Contents, Json
from megackpt.metadata import ChunkTable, StoredChunks, block_counts, column, unpack_columns, unpack_strings
from megackpt.storage import Store, check_name, digest_of


class NativeLoadStrategy:
    """Loads format `megackpt` version 1. Source: docs/format.md."""

    backend = names.BACKEND
    version = names.VERSION

    def detect(self, store: Store) -> Json | None:
        """Return None: without metadata.json nothing was committed."""
        return None

    def open(self, store: Store, manifest: Json, *, allow_unsafe_pickle: bool) -> Contents:
        """Read and check the index; the common state is read when asked for. There are no pickles."""
        index = read_index(store, manifest)

        def chunks(keys: Iterable[str]) -> FileChunks:
            wanted = set(keys)
            chosen = np.array([a.key in wanted for a in index.table.arrays], np.bool_)
            return FileChunks(store, index.take(np.flatnonzero(chosen[index.table.array])))

        return Contents(
            arrays={a.key: a for a in index.table.arrays},
            chunks=chunks,
            common=lambda: _read_common(store, manifest),
            decode_object=lambda data, where: unpack(data, where=where),
            identity=str(manifest.get("attempt")),
        )


def read_index(store: Store, manifest: Json) -> StoredChunks:
    """Return the index that a manifest names, checked.

    Raises:
        FormatError, IntegrityError: it is not what the format, or the manifest, says.
    """
    data, where = _read(store, manifest, "index")
    columns = unpack_columns(data, where=where)
    table = ChunkTable.from_columns(columns, where=where)
    files = unpack_strings(columns, "file_name", where=where)
    file = column(columns, "file", where=where, length=len(table))
    offset = column(columns, "offset_bytes", where=where, length=len(table))
    blocks = block_counts(table.nbytes)
    digests = column(columns, "digest", where=where, length=int(blocks.sum())).astype(np.uint64, copy=False)
    for name in files:
        check_name(name, location=store.location)
    if np.any(file < 0) or np.any(file >= len(files)) or np.any(offset < 0) or np.any(table.nbytes < 0):
        raise FormatError(f"{where}: a chunk lies in no file. The index is damaged.", path=where)
    return StoredChunks(table, file, offset, np.cumsum(blocks) - blocks, digests, tuple(files))


def _read_common(store: Store, manifest: Json) -> Any:
    data, where = _read(store, manifest, "common")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise FormatError(f"{where}: not UTF-8 ({error}). The file is damaged.", path=where) from error
    tensors: dict[str, Any] = {}
    if "common_tensors" in manifest:
        blob, where_tensors = _read(store, manifest, "common_tensors")
        try:
            tensors = safetensors.torch.load(blob)
        except SafetensorError as error:
            raise FormatError(
                f"{where_tensors}: not a safetensors file ({error}).", path=where_tensors
            ) from error
    try:
        ordered = tuple(tensors[str(i)] for i in range(len(tensors)))
    except KeyError as error:
        raise FormatError(f"{where}: tensor {error} of the common state is missing.", path=where) from error
    return decode(Encoded(tree=load_tree(text, where=where), tensors=ordered), where=where)


def _read(store: Store, manifest: Json, entry: str) -> tuple[bytes, str]:
    """Return a file that the manifest names, checked against the size and digest given there."""
    said = manifest.get(entry)
    if not isinstance(said, dict) or not {"file", "nbytes", "xxh3_128"} <= set(said):
        raise FormatError(
            f"{store.location}/metadata.json does not say where the {entry} is. The file is damaged or "
            f"foreign.",
            path=store.location,
        )
    name, where = said["file"], f"{store.location}/{said['file']}"
    if not isinstance(name, str) or not isinstance(said["nbytes"], int):
        raise FormatError(
            f"{store.location}/metadata.json: entry {entry!r} is malformed.", path=store.location
        )
    data = store.read(name, max_bytes=said["nbytes"])
    if len(data) != said["nbytes"] or digest_of(data) != said["xxh3_128"]:
        raise IntegrityError(
            f"{where}: the content differs from what was saved ({len(data)} bytes, {said['nbytes']} "
            f"expected; the digest "
            f"does not match). The file is damaged; load another checkpoint.",
            path=where,
        )
    return data, where
