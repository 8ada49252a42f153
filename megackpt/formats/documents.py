"""JSON documents of a checkpoint: metadata.json, and what formats put beside it.

Owns reading one that may be damaged: bounded, an object, and an error that names the file.
"""

from __future__ import annotations

import json

from megackpt.codec.tree import object_of
from megackpt.errors import FormatError
from megackpt.formats.strategy import MANIFEST, MANIFEST_MAX_BYTES, Json
from megackpt.storage import Store


def parse_document(data: bytes, *, where: str) -> Json:
    """Return a document.

    Raises:
        FormatError: it is not a JSON object, or a key stands twice in one.
    """
    try:
        document = json.loads(data, object_pairs_hook=object_of)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where}: not JSON ({error}). The file is damaged.", path=where) from error
    if not isinstance(document, dict):
        raise FormatError(f"{where}: not a JSON object. The file is damaged.", path=where)
    return document


def read_document(store: Store, name: str) -> Json:
    """Return a document of a checkpoint.

    Raises:
        FormatError: it is not a JSON object, or larger than a manifest may be.
    """
    data = store.read(name, max_bytes=MANIFEST_MAX_BYTES)
    return parse_document(data, where=f"{store.location}/{name}")


def read_manifest_file(store: Store) -> Json | None:
    """Return metadata.json; None if there is none.

    Raises:
        FormatError: it is not a JSON object.
    """
    return read_document(store, MANIFEST) if store.exists(MANIFEST) else None


def attempt_in_manifest(store: Store) -> str | None:
    """Return the attempt that metadata.json names; None if there is none, or it names none.

    Raises:
        FormatError: it is not a JSON object.
    """
    attempt = (read_manifest_file(store) or {}).get("attempt")
    return attempt if isinstance(attempt, str) else None
