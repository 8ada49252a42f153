"""Who reads what, where several processes look at one checkpoint together.

Owns the division: things that lie near each other go to one of them, and each has about as many bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megackpt.formats.strategy import WholeFile
from megackpt.geometry import Ints

Share = tuple[int, int]
"""(i, n): the part of the i-th of n processes."""

WHOLE: Share = (0, 1)
"""The share of one that does all."""


def in_share(
    sizes: Ints, share: Share, *, before: int = 0, after: Ints | None = None
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return which of some things are in a share: each is in that of exactly one process. Pure.

    sizes are their bytes; before, and those of after, the bytes of what else is shared in one go with them.

    >>> [in_share(np.array([4, 4]), (i, 2), after=np.array([8])).tolist() for i in (0, 1)]
    [[True, True], [False, False]]
    """
    nbytes = sizes + 1  # so that empty ones are spread, too
    whole = before + int(nbytes.sum()) + (0 if after is None else int(after.sum()))
    number, count = share
    found = (before + np.cumsum(nbytes) - nbytes) * count // max(whole, 1) == number
    return np.asarray(found, np.bool_)


def sizes_of(files: Sequence[WholeFile]) -> Ints:
    """Return the sizes of files, in bytes, `[n]`."""
    return np.array([file.nbytes for file in files], np.int64)
