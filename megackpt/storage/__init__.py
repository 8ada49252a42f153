"""The door to bytes: named files under one checkpoint directory, wherever that is.

The only part of megackpt that reads and writes files. What the bytes mean is up to formats.
"""

from megackpt.storage.buffers import COMMON_POOL
from megackpt.storage.crc64 import Crc64
from megackpt.storage.digests import (
    BlockDigester,
    FileDigester,
    block_digests,
    digest_list,
    digest_of,
    digest_of_parts,
)
from megackpt.storage.filling import fill
from megackpt.storage.lending import MAX_BORROWED_BYTES, lend
from megackpt.storage.local import LocalStore
from megackpt.storage.memory import MemoryStore
from megackpt.storage.object_client import ObjectOptions, is_object_url
from megackpt.storage.object_store import ObjectStore
from megackpt.storage.opening import as_store, checked_path, is_url, open_store
from megackpt.storage.patched import Patch, PatchedStore
from megackpt.storage.paths import absolute_path, expanded_path
from megackpt.storage.prefix_store import PrefixStore
from megackpt.storage.residency import is_in_memory
from megackpt.storage.sinks import FileOptions
from megackpt.storage.store import Store, StreamWriter, check_name, is_allowed_name

__all__ = [
    "COMMON_POOL",
    "MAX_BORROWED_BYTES",
    "BlockDigester",
    "Crc64",
    "FileDigester",
    "FileOptions",
    "LocalStore",
    "MemoryStore",
    "ObjectOptions",
    "ObjectStore",
    "Patch",
    "PatchedStore",
    "PrefixStore",
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
    "fill",
    "is_allowed_name",
    "is_in_memory",
    "is_object_url",
    "is_url",
    "lend",
    "open_store",
]
