"""Digests of whole arrays, computed anew from what a verification reads, and compared with those stored.

Owns which arrays can be compared: those of which every byte was read, by one process or by several that each
had a share, and is what was saved. Reading is in `verification.digests`.
"""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from megackpt.errors import MissingExtraError
from megackpt.formats.array_digests import ArrayDigester
from megackpt.formats.contents import Part
from megackpt.formats.damage import Damage
from megackpt.metadata import ChunkTable
from megackpt.storage.crc64 import Crc64


@dataclass(frozen=True, slots=True)
class ArrayShare:
    """What one process has read of an array.

    Attributes:
        key: its name.
        stored: the digest that is stored of it.
        nbytes: how long it is.
        read: how many of its bytes were read.
        contribution: what these contribute to its digest.
    """

    key: str
    stored: int
    nbytes: int
    read: int
    contribution: int


class ArrayCheck:
    """Takes parts of chunks as they are read, each once. Safe for many threads.

    digests are those stored, by key.

    Raises:
        MissingExtraError: the library that computes them is not installed.
    """

    def __init__(self, table: ChunkTable, digests: Mapping[str, int]) -> None:
        self._table, self._digests = table, digests
        self._digester = ArrayDigester(table)
        self._has_digest = np.array([spec.key in digests for spec in table.arrays], np.bool_)
        self._contributions = np.zeros(len(table), np.uint64)
        self._read = np.zeros(len(table), np.int64)
        self._lock = threading.Lock()
        self._turns = threading.Lock()

    def add(self, parts: Sequence[Part], data: Sequence[memoryview]) -> None:
        """Take the bytes of parts, which have their own digests."""
        for part, of_part in zip(parts, data, strict=True):
            if not self._has_digest[self._table.array[part.row]]:
                continue
            digest = self._digester.begin(part.row, start=part.start)
            if digest is not None and len(of_part):
                with self._turns if digest.has_short_ranges else contextlib.nullcontext():
                    digest.update(of_part)
                with self._lock:
                    self._contributions[part.row] ^= np.uint64(digest.result())
                    self._read[part.row] += len(of_part)

    def shares(self) -> tuple[ArrayShare, ...]:
        """Return what was read of each array that has a digest, in the order of keys."""
        arrays = self._table.arrays
        read, values = np.zeros(len(arrays), np.int64), np.zeros(len(arrays), np.uint64)
        np.add.at(read, self._table.array, self._read)
        np.bitwise_xor.at(values, self._table.array, self._contributions)
        return tuple(
            ArrayShare(spec.key, self._digests[spec.key], spec.nbytes, read=n, contribution=value)
            for spec, n, value in zip(arrays, read.tolist(), values.tolist(), strict=True)
            if spec.key in self._digests
        )


def compare_arrays(shares: Sequence[Sequence[ArrayShare]]) -> tuple[int, list[Damage]]:
    """Return how many arrays were read whole, in all shares together, and which of them have another digest.

    All shares are of the same arrays, in their order, and there is one at least.
    """
    compared, damages = 0, []
    for of_array in zip(*shares, strict=True):
        first = of_array[0]
        if sum(share.read for share in of_array) != first.nbytes:
            continue
        compared += 1
        value = reduce(operator.xor, (share.contribution for share in of_array))
        found = Crc64().finished(value, first.nbytes)
        if found != first.stored:
            what = (
                f"its elements do not have the digest that is stored of the whole array (crc64nvme "
                f"{found:016x} instead of {first.stored:016x}), although each block has its own: they were "
                f"mixed up, or the digest is wrong"
            )
            damages.append(Damage(key=first.key, what=what))
    return compared, damages


def array_check(table: ChunkTable, digests: Mapping[str, int]) -> ArrayCheck | None:
    """Return what takes parts; None if no array has a digest, or none can be computed here."""
    if not digests:
        return None
    try:
        return ArrayCheck(table, digests)
    except MissingExtraError:
        return None
