"""CRC-64/NVME as a linear function, so that parts of an array can be digested in any order.

Without its initial value and final XOR, a CRC is linear over GF(2): the CRC of `a + b` is that of `a`,
shifted by the length of b, XOR that of b. Zeros before the bytes change nothing, and zeros after them are a
shift. So each part of an array is digested as if all other bytes were zeros, and the results are combined
by XOR. The values in this module are these linear ones; `finished` returns the CRC as the catalogue defines
it.

Computed by awscrt, an optional dependency: the extra `digests`.
Source: CRC-64/NVME of the catalogue of parametrised CRC algorithms (polynomial 0xad93d23594c93659, reflected,
initial value and final XOR of all ones; check value 0xae8b14860a799888).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from megackpt.errors import MissingExtraError

Words = npt.NDArray[np.uint64]

ONES = 2**64 - 1
"""XOR with it turns a CRC of awscrt into a linear value and back: awscrt inverts it at both ends."""

_MAX_SINGLE_SHIFTS = 48  # up to this many values are shifted one by one: a table takes 64 shifts to make
_MAX_TABLES = 256  # 16 KiB each


class Crc64:
    """Computes linear CRC-64 values. Safe for several threads.

    Raises:
        MissingExtraError: awscrt is not installed, or is too old.
    """

    def __init__(self) -> None:
        try:
            from awscrt.checksums import combine_crc64nvme, crc64nvme
        except ImportError as error:
            raise MissingExtraError(
                f"Digests of arrays need the package awscrt, which cannot be imported ({error}). Install it "
                f"with: pip install 'megackpt[digests]'"
            ) from error
        self._crc: Callable[[memoryview, int], int] = crc64nvme
        self._combine: Callable[[int, int, int], int] = combine_crc64nvme
        self._tables: dict[int, Words] = {}

    def of(self, data: memoryview, before: int = 0) -> int:
        """Return the value of data, or of other bytes followed by data: `before` is the value of these."""
        return self._crc(data, before ^ ONES) ^ ONES

    def of_each(self, data: memoryview, nbytes: int) -> Words:
        """Return the value of each part of nbytes bytes, `[parts]`; data is a whole number of parts."""
        count = len(data) // nbytes
        if nbytes < 128:  # a call per part would take longer than its bytes: all parts at once, word by word
            # Zeros in front of a part change nothing, so each part can be padded to whole words.
            padded = np.zeros((count, -(-nbytes // 8) * 8), np.uint8)
            padded[:, -nbytes % 8 :] = np.frombuffer(data, np.uint8).reshape(count, nbytes)
            words = padded.view("<u8").astype(np.uint64, copy=False)
            # A word as a number is the register before its 8 bytes are processed, hence the shift by 8.
            return self.shift(self.fold(words, 8), 8)
        crc = self._crc
        inverted = [crc(data[at : at + nbytes], ONES) for at in range(0, count * nbytes, nbytes)]
        values: Words = np.array(inverted, np.uint64) ^ np.uint64(ONES)
        return values

    def shifted(self, value: int, nbytes: int) -> int:
        """Return the value of the same bytes followed by nbytes zeros."""
        return self._combine(value, 0, nbytes)

    def shift(self, values: Words, nbytes: int) -> Words:
        """Return values, of any shape, as if nbytes zeros followed the bytes of each."""
        table = self._table(nbytes)
        # A shift is linear: shift each byte of a value by its table, and combine the results.
        value_bytes = np.ascontiguousarray(values, "<u8").view(np.uint8).reshape(*values.shape, 8)
        shifted: Words = table[0][value_bytes[..., 0]]
        for index in range(1, 8):
            shifted ^= table[index][value_bytes[..., index]]
        return shifted

    def fold(self, values: Words, stride: int) -> Words:
        """Return the values of n byte strings, `[n]`.

        Args:
            values: of their m parts, `[n, m]`, uint64.
            stride: length of a part, in bytes.
        """
        if values.size <= _MAX_SINGLE_SHIFTS:
            folded = values[:, 0].tolist()
            for column in values[:, 1:].T.tolist():
                folded = [self._combine(a, b, stride) for a, b in zip(folded, column, strict=True)]
            return np.array(folded, np.uint64)
        while values.shape[1] > 1:
            if values.shape[1] % 2:
                values = np.pad(values, ((0, 0), (1, 0)))  # zeros in front change nothing
            # Combine neighbours, so that the number of parts halves and each is twice as long.
            values = self.shift(values[:, 0::2], stride) ^ values[:, 1::2]
            stride *= 2
        return values[:, 0]

    def finished(self, value: int, nbytes: int) -> int:
        """Return the CRC as the catalogue defines it, of nbytes bytes with this linear value."""
        return self._combine(ONES, 0, nbytes) ^ ONES ^ value

    def _table(self, nbytes: int) -> Words:
        """Return what each byte of a value becomes when it is shifted by nbytes, `[8, 256]`."""
        table = self._tables.get(nbytes)
        if table is None:
            shifted_bits = [self._combine(1 << bit, 0, nbytes) for bit in range(64)]
            of_bit = np.array(shifted_bits, np.uint64).reshape(8, 8)
            # Each bit doubles the table: entries with it are those without it, XOR the shifted bit.
            table = np.zeros((8, 1), np.uint64)
            for bit in range(8):
                table = np.concatenate((table, table ^ of_bit[:, bit : bit + 1]), axis=1)
            # All at once: lengths repeat within one array, and the next array has others.
            if len(self._tables) >= _MAX_TABLES:
                self._tables.clear()
            self._tables[nbytes] = table
        return table
