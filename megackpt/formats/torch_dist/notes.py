"""Files of fixed names, and the note by which a save of ours says what belongs to its `.metadata`.

Owns what these may hold, and finding the note of the `.metadata` that is there.
"""

from __future__ import annotations

from megackpt.errors import FormatError
from megackpt.formats.documents import read_document
from megackpt.formats.strategy import Json
from megackpt.formats.torch_dist import names
from megackpt.storage import Store

METADATA_MAX_BYTES = 2 << 30
COMMON_MAX_BYTES = 4 << 30
"""What the two files may take; they are read whole."""

CONTENT_METADATA = "content_metadata"
"""Key of content metadata in common.pt. Source: Megatron-Core `dist_checkpointing.serialization`."""

MANIFEST_CONTENT: Json = {
    "sharded_backend": names.BACKEND,
    "sharded_backend_version": names.VERSION,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""All that metadata.json may hold: Megatron-Core up to 0.16 fails on any other field."""


def read_metadata(store: Store) -> bytes:
    """Return the bytes of `.metadata`.

    Raises:
        FormatError: there is none, or it is too large.
    """
    if not store.exists(names.METADATA):
        raise FormatError(
            f"{store.location} has no {names.METADATA}, which every checkpoint of format torch_dist has. The "
            f"checkpoint is incomplete; load another one.",
            path=store.location,
        )
    return store.read(names.METADATA, max_bytes=METADATA_MAX_BYTES)


def find_note(store: Store, metadata_digest: str) -> tuple[Json, str] | None:
    """Return what a save of ours noted about the `.metadata` with this digest, and the name of the note."""
    for name in store.names("megackpt-"):
        found = names.note_of(name)
        if found is None or found[1] != metadata_digest:
            continue
        return read_document(store, name), name
    return None
