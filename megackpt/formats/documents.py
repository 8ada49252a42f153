"""Small files of a checkpoint: metadata.json, other JSON documents, and files that an entry names.

They may be damaged. So each is read with a bound on its size, and every error names the file. An entry is a
JSON object with the name, the size and the digest of a file: `{"file", "nbytes", "xxh3_128"}`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from megackpt.codec.tree import object_of
from megackpt.errors import FormatError, IntegrityError
from megackpt.formats.strategy import MANIFEST, MANIFEST_MAX_BYTES, Json
from megackpt.plans.metadata import ArraySpec
from megackpt.storage import Store, digest_of


def damaged(reason: str, where: str, *, key: str | None = None) -> FormatError:
    """Return the error for a file of a checkpoint that is not what its format says.

    Args:
        reason: what is wrong.
        where: the path of the file.
        key: of the array or object, if the file has it of a single one.
    """
    return FormatError(
        f"{where}: {reason}. The file is damaged; load another checkpoint.", key=key, path=where
    )


def parse_document(data: bytes, *, where: str) -> Json:
    """Return a JSON document.

    Raises:
        FormatError: the data is not a JSON object, or a key occurs twice in one.
    """
    try:
        # Of two equal keys `json` alone would keep the last without a word.
        document = json.loads(data, object_pairs_hook=object_of)
    except (ValueError, RecursionError) as error:
        raise damaged(f"not JSON ({error})", where) from error
    if not isinstance(document, dict):
        raise damaged("not a JSON object", where)
    return document


def read_document(store: Store, name: str) -> Json:
    """Return a JSON document of a checkpoint.

    Raises:
        FormatError: the file is not a JSON object, or larger than a manifest may be.
    """
    data = store.read(name, max_bytes=MANIFEST_MAX_BYTES)
    return parse_document(data, where=f"{store.location}/{name}")


def read_manifest_file(store: Store) -> Json | None:
    """Return metadata.json; None if there is none.

    Raises:
        FormatError: it is not a JSON object.
    """
    return read_document(store, MANIFEST) if store.exists(MANIFEST) else None


def is_ours(manifest: Json) -> bool:
    """Return whether a metadata.json is that of a checkpoint: other programs have files of this name, too."""
    return "sharded_backend" in manifest


def attempt_in_manifest(store: Store) -> str | None:
    """Return the attempt that metadata.json names; None if there is none, or it names none.

    Raises:
        FormatError: it is not a JSON object.
    """
    attempt = (read_manifest_file(store) or {}).get("attempt")
    return attempt if isinstance(attempt, str) else None


def write_small_file(store: Store, name: str, data: bytes) -> Json:
    """Write a small file; return its entry.

    The content is durable when this returns, the name after `store.sync()`.
    """
    store.write(name, data)
    return {"file": name, "nbytes": len(data), "xxh3_128": digest_of(data)}


def file_entry(store: Store, document: Json, key: str, *, document_name: str = MANIFEST) -> tuple[Json, str]:
    """Return the entry of a document that names a file, and the path of that file for messages.

    document is the content of the file called document_name; key is that of the entry, such as `index`.

    Raises:
        FormatError: there is no such entry, or it is malformed.
    """
    entry = document.get(key)
    where = f"{store.location}/{document_name}"
    if not isinstance(entry, dict) or not {"file", "nbytes", "xxh3_128"} <= set(entry):
        raise FormatError(
            f"{where} does not name the file of the {key}. It is damaged, or another program wrote it; load "
            f"another checkpoint.",
            path=where,
        )
    # No digest covers the document itself, so its entries may have any types.
    if not isinstance(entry["file"], str) or not isinstance(entry["nbytes"], int):
        raise damaged(f"entry {key!r} is malformed", where)
    return entry, f"{store.location}/{entry['file']}"


def read_small_file(
    store: Store, document: Json, key: str, *, document_name: str = MANIFEST
) -> tuple[bytes, str]:
    """Return the content of the file that an entry names, and its path for messages.

    Raises:
        FormatError: there is no such entry, or it is malformed.
        IntegrityError: the file does not have the size and digest of the entry.
    """
    entry, where = file_entry(store, document, key, document_name=document_name)
    # Bounded by the entry: a damaged file must not take more memory than the one that was saved.
    data = store.read(entry["file"], max_bytes=entry["nbytes"])
    if len(data) != entry["nbytes"] or digest_of(data) != entry["xxh3_128"]:
        raise IntegrityError(
            f"{where}: the content differs from what was saved ({len(data)} bytes, {entry['nbytes']} "
            f"expected; the digest does not match). The file is damaged; load another checkpoint.",
            path=where,
        )
    return data, where


CONTENT_METADATA = "content_metadata"
"""Key of content metadata in common.pt. Source: Megatron-Core `dist_checkpointing.serialization`."""


def manifest_of_megatron(backend: str, version: int) -> Json:
    """Return the whole content of metadata.json: Megatron-Core up to 0.16 fails on any other field."""
    common = {"common_backend": "torch", "common_backend_version": 1}
    return {"sharded_backend": backend, "sharded_backend_version": version, **common}


def split_common(state: object, *, where: str, has_content_metadata: bool = True) -> Json:
    """Return common state as `Contents.common` has it, from the content of common.pt.

    Raises:
        FormatError: it is not a dict; where is its path.
    """
    if not isinstance(state, dict):
        raise FormatError(
            f"{where}: common state is a {type(state).__name__}, not a dict. The file is damaged, or "
            f"{MANIFEST} is of another checkpoint.",
            path=where,
        )
    content = state.pop(CONTENT_METADATA, None) if has_content_metadata else None
    return {"state_dict": state, CONTENT_METADATA: content}


UNPADDED = "unpadded"
"""Entry with the shapes of arrays without their padding, by key; missing if there are none."""


def unpadded_shapes(
    document: Json, arrays: Mapping[str, ArraySpec], *, where: str
) -> dict[str, tuple[int, ...]]:
    """Return the shapes without padding of those arrays for which a document names one. Pure.

    Args:
        document: the content of metadata.json, or of the file that has its entries.
        arrays: the arrays of the checkpoint, by key.
        where: the document, for errors.

    Raises:
        FormatError: the entry is malformed.
    """
    named = document.get(UNPADDED, {})
    shapes = {}
    for key, shape in named.items() if isinstance(named, dict) else [("", None)]:
        whole = arrays[key].global_shape if key in arrays else None
        if isinstance(shape, list) and whole is None:  # the array was removed since
            continue
        if (
            whole is None
            or not isinstance(shape, list)
            or len(shape) != len(whole)
            or not all(type(n) is int and 0 <= n <= m for n, m in zip(shape, whole, strict=True))
        ):
            raise damaged(f"entry {UNPADDED!r} is malformed", where)
        shapes[key] = tuple(shape)
    return shapes
