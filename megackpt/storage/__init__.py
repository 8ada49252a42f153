"""The door to bytes: named files under one checkpoint directory, wherever that is.

The only part of megackpt that reads and writes files. What the bytes mean is up to formats.
"""

from megackpt.storage.digest import BlockDigester, block_digests, digest_of
from megackpt.storage.local import LocalStore
from megackpt.storage.memory import MemoryStore
from megackpt.storage.opening import open_store
from megackpt.storage.sinks import WriterOptions
from megackpt.storage.store import Store, StreamWriter, check_name, is_allowed_name

__all__ = [
    "BlockDigester",
    "LocalStore",
    "MemoryStore",
    "Store",
    "StreamWriter",
    "WriterOptions",
    "block_digests",
    "check_name",
    "digest_of",
    "is_allowed_name",
    "open_store",
]
