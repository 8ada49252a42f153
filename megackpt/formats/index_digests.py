"""Digests of whole arrays in an index: two columns of its head, with a row for each array.

Owns how they lie there, and their check when they are read. An index without them is one in which no array
has a digest; readers that know nothing of them pass over the columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from megackpt.errors import FormatError
from megackpt.metadata import OBJECT, ArraySpec, Column

VALUE, KNOWN = "array.crc64nvme", "array.has_crc64nvme"


def digest_columns(arrays: Sequence[ArraySpec], digests: Mapping[str, int]) -> dict[str, Column]:
    """Return the columns that hold the digests of arrays by key; none if there are no digests."""
    if not digests:
        return {}
    return {
        VALUE: np.array([digests.get(spec.key, 0) for spec in arrays], np.uint64),
        KNOWN: np.array([spec.key in digests for spec in arrays], np.uint8),
    }


def digests_in(columns: Mapping[str, Column], arrays: Sequence[ArraySpec], *, where: str) -> dict[str, int]:
    """Return the digests of arrays by key, of those that have one.

    Raises:
        FormatError: the columns are not what the format says; where names the index.
    """
    if VALUE not in columns and KNOWN not in columns:
        return {}
    for name, dtype in ((VALUE, np.uint64), (KNOWN, np.uint8)):
        found = columns.get(name)
        if found is None or found.dtype != dtype or found.shape != (len(arrays),):
            said = "missing" if found is None else f"{found.dtype} {list(found.shape)}"
            raise _damaged(f"column {name!r} is {said} instead of {np.dtype(dtype)} [{len(arrays)}]", where)
    value, known = columns[VALUE], columns[KNOWN]
    if np.any(known > 1) or np.any(value[known == 0] != 0):
        raise _damaged("digests of arrays are neither there nor left out", where)
    digests = {arrays[i].key: int(value[i]) for i in np.flatnonzero(known).tolist()}
    objects = sorted(spec.key for spec in arrays if spec.dtype == OBJECT and spec.key in digests)
    if objects:
        raise _damaged(f"{objects[0]!r} has the digest of an array and holds objects", where)
    return digests


def _damaged(what: str, where: str) -> FormatError:
    return FormatError(f"{where}: {what}. The index is damaged; load another checkpoint.", path=where)
