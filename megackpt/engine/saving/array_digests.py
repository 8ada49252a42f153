"""Digests of whole arrays in a save; `formats.array_digests` computes them."""

from __future__ import annotations

from collections.abc import Collection

from megackpt.engine.saving.planned_save import SaveHook
from megackpt.errors import UnsupportedError
from megackpt.formats.strategy import SaveStrategy
from megackpt.plans.metadata import ChunkTable
from megackpt.plans.validation import coverage_faults


class ArrayDigestHook(SaveHook):
    """Stores a digest of each array, which does not depend on how the array is sharded."""

    def strategy_for(self, strategy: SaveStrategy) -> SaveStrategy:
        """Return a strategy that also stores digests of arrays."""
        return with_array_digests(strategy)


def with_array_digests(strategy: SaveStrategy) -> SaveStrategy:
    """Return a strategy that writes the same format, and digests of arrays.

    Raises:
        UnsupportedError: the format stores no digests of arrays.
        MissingExtraError: the library that computes them is not installed.
    """
    if not strategy.capabilities.digests_arrays:
        raise UnsupportedError(
            f"Format {strategy.backend} version {strategy.version} stores no digests of arrays. Save without "
            f"array_digests, or in the native format."
        )
    return strategy.with_array_digests(covered_keys)


def covered_keys(table: ChunkTable) -> Collection[str]:
    """Return the keys of the arrays whose chunks cover every element exactly once.

    In a save that validates, these are all arrays.
    """
    keys = {spec.key for spec in table.arrays}
    return keys - {fault.spec.key for fault in coverage_faults(table, keys)}
