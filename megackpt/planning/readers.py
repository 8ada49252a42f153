"""Who reads a unit of an exchange: a rank that needs it, or one that can reach the file it lies in.

Pure. Owns the choice; balancing is `assign`'s.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megackpt.geometry import Ints
from megackpt.planning.assign import assign_writers


@dataclass(frozen=True, slots=True, eq=False)
class Readers:
    """Which ranks can read which stored chunks, where not every rank can read all.

    Attributes:
        of: number of the set of ranks that can read each stored chunk, `[n]`.
        first: where each set begins in ranks, `[sets + 1]`.
        ranks: the ranks, ascending in each set; no set is empty.
    """

    of: Ints
    first: Ints
    ranks: Ints


def choose_readers(
    nbytes: Ints, first: Ints, needing: Ints, chunk: Ints, *, readers: Readers | None, ranks: int
) -> Ints:
    """Choose the rank that reads each unit, keeping bytes per rank even, `[u]`.

    Unit i, a part of stored chunk `chunk[i]`, is needed by the ranks `needing[first[i] : first[i + 1]]`. One
    of these reads it, which saves sending it there; where none of them can, another one that can.
    """
    if readers is None:
        return needing[assign_writers(nbytes, first, needing, ranks=ranks)]
    set_of = readers.of[chunk]
    unit = np.repeat(np.arange(len(chunk)), np.diff(first))
    sets = np.repeat(np.arange(len(readers.first) - 1), np.diff(readers.first))
    can = np.isin(set_of[unit] * ranks + needing, sets * ranks + readers.ranks)
    near = np.bincount(unit[can], minlength=len(chunk))
    far = np.flatnonzero(near == 0)
    begin, counts = readers.first[set_of[far]], np.diff(readers.first)[set_of[far]]
    ends = np.cumsum(counts)
    from_sets = np.repeat(begin - ends + counts, counts) + np.arange(int(counts.sum()))
    units = np.concatenate([unit[can], np.repeat(far, counts)])
    candidates = np.concatenate([needing[can], readers.ranks[from_sets]])[np.argsort(units, kind="stable")]
    start = np.append(0, np.cumsum(np.bincount(units, minlength=len(chunk))))
    return candidates[assign_writers(nbytes, start, candidates, ranks=ranks)]
