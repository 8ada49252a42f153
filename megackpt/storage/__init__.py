"""The door to bytes: named files under one checkpoint directory, wherever that is.

The only part of megackpt that reads and writes files. What the bytes mean is up to formats.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megackpt.storage.buffers import COMMON_POOL
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
from megackpt.storage.opening import as_store, checked_path, is_url, open_store
from megackpt.storage.paths import absolute_path, expanded_path
from megackpt.storage.residency import is_in_memory
from megackpt.storage.sinks import FileOptions
from megackpt.storage.store import Store, StreamWriter, check_name, is_allowed_name

if TYPE_CHECKING:
    from megackpt.storage.memory import MemoryStore
    from megackpt.storage.object_client import ObjectOptions
    from megackpt.storage.object_store import ObjectStore

__all__ = [
    "COMMON_POOL",
    "MAX_BORROWED_BYTES",
    "BlockDigester",
    "FileDigester",
    "FileOptions",
    "LocalStore",
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
    "fill",
    "is_allowed_name",
    "is_in_memory",
    "is_url",
    "lend",
    "open_store",
]

_OPTIONAL = {"MemoryStore": "memory", "ObjectOptions": "object_client", "ObjectStore": "object_store"}
"""Modules of the stores that a checkpoint on a file system does not need, by public name."""


def __getattr__(name: str) -> Any:
    """Import an optional store at its first use."""
    if name in _OPTIONAL:
        return getattr(import_module(f"{__name__}.{_OPTIONAL[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
