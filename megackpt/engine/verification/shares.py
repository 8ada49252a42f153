"""Shares of a checkpoint that several processes verify: about equal in bytes, of chunks that lie together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megackpt.formats.strategy import WholeFile
from megackpt.geometry import Ints

Share = tuple[int, int]
"""(i, n): the share of process i of n processes."""

WHOLE: Share = (0, 1)
"""The share of a process that verifies everything."""


def in_share(
    sizes: Ints, share: Share, *, before: int = 0, after: Ints | None = None
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return which items are in a share, `[n]`; each item is in the share of exactly one process. Pure.

    Args:
        sizes: the sizes of the items in bytes, `[n]`.
        share: the share.
        before: bytes of other items that are shared out first.
        after: sizes of other items that are shared out afterwards.

    >>> [in_share(np.array([4, 4]), (i, 2), after=np.array([8])).tolist() for i in (0, 1)]
    [[True, True], [False, False]]
    """
    nbytes = sizes + 1  # so that empty items are shared out, too
    total = before + int(nbytes.sum()) + (0 if after is None else int(after.sum()))
    number, count = share
    start = before + np.cumsum(nbytes) - nbytes
    return np.asarray(start * count // max(total, 1) == number, np.bool_)


def sizes_of(files: Sequence[WholeFile]) -> Ints:
    """Return the sizes of files, in bytes, `[n]`."""
    return np.array([file.nbytes for file in files], np.int64)
