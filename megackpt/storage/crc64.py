"""CRC-64/NVME as a linear function: of zeros in front of bytes it is 0, behind them it is a shift.

The door to awscrt, an optional dependency: the extra `digests`. Owns its import and the arithmetic; whose
bytes are digested is up to formats.

Without its constants a CRC is linear over GF(2): that of `a + b` is that of `a`, shifted by the length of b,
XOR that of b. So bytes can be digested in any order, each part where it lies among zeros. Values here are
such linear ones, unless said otherwise.
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
"""To continue from it is to begin with a register of zeros; results come inverted as well."""

_FEW = 48  # values that are shifted one by one: a table takes 64 shifts to make
_MOST_TABLES = 256  # 16 KiB each


class Crc64:
    """Computes it. Safe for several threads.

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
        """Return the value of bytes, or of those with this value and data behind them."""
        return self._crc(data, before ^ ONES) ^ ONES

    def of_each(self, data: memoryview, nbytes: int) -> Words:
        """Return the value of each part of nbytes bytes, `[parts]`; data is as many whole ones."""
        count = len(data) // nbytes
        if nbytes < 128:  # shorter than what a call takes: word by word, all parts at once
            words = np.zeros((count, -(-nbytes // 8) * 8), np.uint8)
            words[:, -nbytes % 8 :] = np.frombuffer(data, np.uint8).reshape(count, nbytes)
            return self.shift(self.fold(words.view("<u8").astype(np.uint64, copy=False), 8), 8)
        crc = self._crc
        found = [crc(data[at : at + nbytes], ONES) for at in range(0, count * nbytes, nbytes)]
        each: Words = np.array(found, np.uint64) ^ np.uint64(ONES)
        return each

    def shifted(self, value: int, nbytes: int) -> int:
        """Return the value with so many zero bytes behind."""
        return self._combine(value, 0, nbytes)

    def shift(self, values: Words, nbytes: int) -> Words:
        """Return values, of any shape, with so many zero bytes behind."""
        table = self._table(nbytes)
        octets = np.ascontiguousarray(values, "<u8").view(np.uint8).reshape(*values.shape, 8)
        found: Words = table[0][octets[..., 0]]
        for place in range(1, 8):
            found ^= table[place][octets[..., place]]
        return found

    def fold(self, values: Words, stride: int) -> Words:
        """Return for each row of `[n, m]` the value of all m; their ends are stride bytes apart."""
        if values.size <= _FEW:
            folded = values[:, 0].tolist()
            for column in values[:, 1:].T.tolist():
                folded = [self._combine(a, b, stride) for a, b in zip(folded, column, strict=True)]
            return np.array(folded, np.uint64)
        while values.shape[1] > 1:
            if values.shape[1] % 2:
                values = np.pad(values, ((0, 0), (1, 0)))  # zeros in front change nothing
            values = self.shift(values[:, 0::2], stride) ^ values[:, 1::2]
            stride *= 2
        return values[:, 0]

    def finished(self, value: int, nbytes: int) -> int:
        """Return the CRC as the catalogue defines it, of nbytes bytes with this value."""
        return self._combine(ONES, 0, nbytes) ^ ONES ^ value

    def _table(self, nbytes: int) -> Words:
        """Return what each octet of a value becomes, `[8, 256]`."""
        found = self._tables.get(nbytes)
        if found is None:
            bits = [self._combine(1 << bit, 0, nbytes) for bit in range(64)]
            of_bit = np.array(bits, np.uint64).reshape(8, 8)
            found = np.zeros((8, 1), np.uint64)
            for bit in range(8):
                found = np.concatenate((found, found ^ of_bit[:, bit : bit + 1]), axis=1)
            if len(self._tables) >= _MOST_TABLES:
                self._tables.clear()
            self._tables[nbytes] = found
        return found
