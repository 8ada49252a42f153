"""Files with fixed names, and the note that a save of ours writes about its `.metadata`.

The note names the files that belong to the `.metadata` with a certain digest. If another library has replaced
`.metadata` since, no note belongs to it.
"""

from __future__ import annotations

from megackpt.errors import FormatError
from megackpt.formats.documents import read_document
from megackpt.formats.strategy import Json
from megackpt.formats.torch_dist import names
from megackpt.storage import Store

METADATA_MAX_BYTES = 2 << 30
COMMON_MAX_BYTES = 4 << 30
"""Limits of the two files, which are read as a whole."""

CONTENT_METADATA = "content_metadata"
"""Key of content metadata in common.pt. Source: Megatron-Core `dist_checkpointing.serialization`."""

MANIFEST_CONTENT: Json = {
    "sharded_backend": names.BACKEND,
    "sharded_backend_version": names.VERSION,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""The whole content of metadata.json: Megatron-Core up to 0.16 fails on any other field."""


def read_metadata(store: Store) -> bytes:
    """Return the bytes of `.metadata`.

    Raises:
        FormatError: it is missing, or too large.
    """
    if not store.exists(names.METADATA):
        raise FormatError(
            f"{store.location} has no {names.METADATA}, which every checkpoint of format torch_dist has. The "
            f"checkpoint is incomplete; load another one.",
            path=store.location,
        )
    return store.read(names.METADATA, max_bytes=METADATA_MAX_BYTES)


def find_note(store: Store, metadata_digest: str) -> tuple[Json, str] | None:
    """Return the note about the `.metadata` with this digest, and its name; None if there is none."""
    for name in store.names("megackpt-"):
        # Any other note is about a `.metadata` that another save has replaced.
        attempt_and_digest = names.note_of(name)
        if attempt_and_digest is None or attempt_and_digest[1] != metadata_digest:
            continue
        return read_document(store, name), name
    return None
