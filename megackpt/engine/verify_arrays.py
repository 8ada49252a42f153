"""Digests of whole arrays, computed anew from what a verification reads, and compared with those stored.

Owns which arrays can be compared: those of which every byte was read and is what was saved. Reading is in
`verify_bytes`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence

import numpy as np

from megackpt.errors import MissingExtraError
from megackpt.formats.array_digests import ArrayDigester
from megackpt.formats.damage import Damage
from megackpt.formats.strategy import Part
from megackpt.metadata import ChunkTable


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
                with self._turns if digest.has_short_runs else contextlib.nullcontext():
                    digest.update(of_part)
                with self._lock:
                    self._contributions[part.row] ^= np.uint64(digest.result())
                    self._read[part.row] += len(of_part)

    def compared(self) -> tuple[int, list[Damage]]:
        """Return how many arrays were compared, and which of them have another digest."""
        read = np.zeros(len(self._table.arrays), np.int64)
        np.add.at(read, self._table.array, self._read)
        is_whole = zip(self._table.arrays, read.tolist(), strict=True)
        whole = [spec.key for spec, n in is_whole if spec.key in self._digests and n == spec.nbytes]
        found = self._digester.combined(self._contributions, set(whole))
        damages = [
            Damage(
                key=key,
                what=f"its elements do not have the digest that is stored of the whole array (crc64nvme "
                f"{found[key]:016x} instead of {self._digests[key]:016x}), although each block has its own: "
                f"they were mixed up, or the digest is wrong",
            )
            for key in whole
            if found[key] != self._digests[key]
        ]
        return len(whole), damages


def array_check(table: ChunkTable, digests: Mapping[str, int]) -> ArrayCheck | None:
    """Return what takes parts; None if no array has a digest, or none can be computed here."""
    if not digests:
        return None
    try:
        return ArrayCheck(table, digests)
    except MissingExtraError:
        return None
