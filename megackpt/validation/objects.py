"""What is wrong with arrays of objects, in words.

Owns the wording only: objects are elements of an array to the proof of coverage, but people know them by the
unique key of each.
"""

from __future__ import annotations

from collections.abc import Sequence

from megackpt.errors import rank_list
from megackpt.metadata import ArraySpec


def object_fault(spec: ArraySpec, offset: Sequence[int], count: int, savers: Sequence[int]) -> str:
    """Say that the object at `offset` is saved by no rank (count 0) or by several main replicas.

    >>> object_fault(ArraySpec("rng", "object", (4,)), (1,), 0, ())
    "object 'rng/shard_1_4' is saved by no rank"
    """
    name = f"object {unique_key(spec, offset)!r}"
    if count == 0:
        return f"{name} is saved by no rank"
    who = f"ranks {rank_list(savers)}" if len(savers) > 1 else f"all of rank {savers[0]}"
    return f"{name} is saved by more than one main replica ({who})"


def unique_key(spec: ArraySpec, offset: Sequence[int]) -> str:
    """Name of one object of an array of objects: that of `ShardedObject.unique_key`."""
    return f"{spec.key}/shard_{'.'.join(map(str, offset))}_{'.'.join(map(str, spec.global_shape))}"
