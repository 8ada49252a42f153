"""Storage: named files of one checkpoint, in a directory, in an object store or in memory.

Only this part of megackpt reads and writes files; `formats` knows what their bytes mean. Stores that few
programs need are imported at their first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megackpt.ground.lazy_names import lazy_names
from megackpt.storage.digests import (
    BlockDigester,
    FileDigester,
    block_digests,
    digest_list,
    digest_of,
    digest_of_parts,
)
from megackpt.storage.local import LocalStore, absolute_path, expanded_path
from megackpt.storage.opening import Location, as_store, checked_path, is_url, open_store, opened_store
from megackpt.storage.options import FileOptions, ObjectOptions
from megackpt.storage.rawio import COMMON_POOL, MAX_BORROWED_BYTES, is_in_memory
from megackpt.storage.store import BufferedWriter, Store, StreamWriter, check_name, is_allowed_name

if TYPE_CHECKING:
    from megackpt.storage.memory import MemoryStore
    from megackpt.storage.object_store import ObjectStore
    from megackpt.storage.views import ForwardingStore
else:  # type checkers would accept any name
    __getattr__ = lazy_names(
        __name__,
        {
            "megackpt.storage.memory": ("MemoryStore",),
            "megackpt.storage.object_store": ("ObjectStore",),
            "megackpt.storage.views": ("ForwardingStore",),
        },
    )

__all__ = [
    "COMMON_POOL",
    "MAX_BORROWED_BYTES",
    "BlockDigester",
    "BufferedWriter",
    "FileDigester",
    "FileOptions",
    "ForwardingStore",
    "LocalStore",
    "Location",
    "MemoryStore",
    "ObjectOptions",
    "ObjectStore",
    "Store",
    "StreamWriter",
    "absolute_path",
    "as_store",
    "block_digests",
    "check_name",
    "checked_path",
    "digest_list",
    "digest_of",
    "digest_of_parts",
    "expanded_path",
    "is_allowed_name",
    "is_in_memory",
    "is_url",
    "open_store",
    "opened_store",
]
