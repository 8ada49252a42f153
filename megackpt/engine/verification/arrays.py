"""Computes digests of whole arrays in a verification, and compares them with the stored ones.

The digest of an array can be compared only if every byte of the array was read, and every block has the right
digest. One process may read all bytes, or several processes a share each.
"""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from megackpt.errors import MissingExtraError
from megackpt.formats.array_digests import ArrayDigester
from megackpt.formats.contents import Part
from megackpt.formats.damage import Damage
from megackpt.plans.metadata import ChunkTable
from megackpt.storage.crc64 import Crc64


@dataclass(frozen=True, slots=True)
class ArrayShare:
    """What one process has read of an array.

    Attributes:
        key: the name of the array.
        stored: the stored digest of the array, 64 bits.
        nbytes: size of the array, in bytes.
        read: how many of these bytes were read.
        contribution: what these bytes contribute to the digest, 64 bits. Contributions are combined by XOR.
    """

    key: str
    stored: int
    nbytes: int
    read: int
    contribution: int


class ArrayCheck:
    """Digests parts of chunks as they are read, each part once. Safe for several threads.

    Raises:
        MissingExtraError: the library that computes the digests is not installed.
    """

    def __init__(self, table: ChunkTable, digests: Mapping[str, int]) -> None:
        self._table, self._digests = table, digests
        self._digester = ArrayDigester(table)
        self._has_digest = np.array([spec.key in digests for spec in table.arrays], np.bool_)
        self._contributions = np.zeros(len(table), np.uint64)
        self._read = np.zeros(len(table), np.int64)
        self._lock = threading.Lock()
        self._short_ranges_lock = threading.Lock()

    def add(self, parts: Sequence[Part], data: Sequence[memoryview]) -> None:
        """Digest the bytes of parts. The caller has checked them against the digests of their blocks."""
        for part, part_data in zip(parts, data, strict=True):
            if not self._has_digest[self._table.array[part.row]]:
                continue
            digest = self._digester.begin(part.row, start=part.start)
            if digest is not None and len(part_data):
                # With short ranges most of the time is spent in Python, where threads only slow each other
                # down.
                with self._short_ranges_lock if digest.has_short_ranges else contextlib.nullcontext():
                    digest.update(part_data)
                # Parts of one chunk may come from several threads, and `^=` on a row of an array is not
                # atomic.
                with self._lock:
                    self._contributions[part.row] ^= np.uint64(digest.result())
                    self._read[part.row] += len(part_data)

    def shares(self) -> tuple[ArrayShare, ...]:
        """Return what was read of each array that has a digest, in the order of keys."""
        arrays = self._table.arrays
        # Sum up the chunks of each array.
        read, contributions = np.zeros(len(arrays), np.int64), np.zeros(len(arrays), np.uint64)
        np.add.at(read, self._table.array, self._read)
        np.bitwise_xor.at(contributions, self._table.array, self._contributions)
        return tuple(
            ArrayShare(spec.key, self._digests[spec.key], spec.nbytes, read=nbytes, contribution=value)
            for spec, nbytes, value in zip(arrays, read.tolist(), contributions.tolist(), strict=True)
            if spec.key in self._digests
        )


def array_check(table: ChunkTable, digests: Mapping[str, int], keys: Collection[str]) -> ArrayCheck | None:
    """Return a check of those of these arrays that have a digest; None if there are none, or no library."""
    digests = {key: digests[key] for key in keys if key in digests}
    if not digests:
        return None
    try:
        return ArrayCheck(table, digests)
    except MissingExtraError:
        return None


def compare_arrays(shares: Sequence[Sequence[ArrayShare]]) -> tuple[int, list[Damage]]:
    """Compare the digests of those arrays that were read completely, in all shares together.

    There is at least one share. All shares are of the same arrays, in the same order.

    Returns:
        How many digests were compared, and the arrays that have another digest than the stored one.
    """
    compared, damages = 0, []
    for array_shares in zip(*shares, strict=True):
        first = array_shares[0]
        # Some bytes were not read, or are damaged, which is reported already.
        if sum(share.read for share in array_shares) != first.nbytes:
            continue
        compared += 1
        contribution = reduce(operator.xor, (share.contribution for share in array_shares))
        digest = Crc64().finished(contribution, first.nbytes)
        if digest != first.stored:
            what = (
                f"its elements do not have the digest that is stored of the whole array (crc64nvme "
                f"{digest:016x} instead of {first.stored:016x}), although the digest of each block is right: "
                f"blocks were mixed up, or the stored digest is wrong"
            )
            damages.append(Damage(key=first.key, what=what))
    return compared, damages
