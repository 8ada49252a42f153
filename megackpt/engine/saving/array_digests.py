"""Digests of whole arrays in a save.

Owns which strategies store them, and of which arrays. How they are computed is in `formats.array_digests`.
"""

from __future__ import annotations

from collections.abc import Collection

from megackpt.errors import UnsupportedError
from megackpt.formats.strategy import SaveStrategy
from megackpt.metadata import ChunkTable
from megackpt.validation import coverage_faults


def with_array_digests(strategy: SaveStrategy) -> SaveStrategy:
    """Return a strategy that writes the same format, and digests of arrays.

    Raises:
        UnsupportedError: the format has none.
        MissingExtraError: the library that it needs is not installed.
    """
    if not strategy.capabilities.digests_arrays:
        raise UnsupportedError(
            f"Format {strategy.backend} version {strategy.version} stores no digests of arrays. Save without "
            f"array_digests, or in the native format."
        )
    return strategy.with_array_digests(covered_keys)


def covered_keys(table: ChunkTable) -> Collection[str]:
    """Return the keys of arrays of which the chunks have each element once: all, in a save that validates."""
    keys = {spec.key for spec in table.arrays}
    return keys - {fault.spec.key for fault in coverage_faults(table, keys)}
