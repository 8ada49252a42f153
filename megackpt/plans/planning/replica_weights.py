"""Weights with which ranks add up the digests of replicas, so that the sum shows whether they are equal.

Of a chunk with n replicas, one has the weight -(n - 1) and each other 1. If all replicas have the digest d,
their terms are -(n - 1) * d + (n - 1) * d = 0. So a single number, the sum of the terms of all chunks over
all ranks, compares everything that ranks have copies of, whoever they are.
"""

from __future__ import annotations

import numpy as np

from megackpt.plans.geometry import Ints
from megackpt.plans.metadata import OBJECT, MergedDeclarations
from megackpt.plans.planning.save_plan import first_of_equal_chunks, index_order


def replica_weights(merged: MergedDeclarations, marks: Ints, owner_group_of_rank: Ints) -> list[Ints]:
    """Return the weights of the rows of each rank, in the order in which it has packed them. Pure.

    A row of a chunk that no other row declares, or that has no main replica, has the weight 0, as it has
    nothing to compare with. So has a row without bytes, and a row of a marked array: these are compared by
    value.

    Args:
        merged: the declarations of all ranks, before main replicas are chosen.
        marks: the marks of the rows, as `merge_packed_declarations` returns them.
        owner_group_of_rank: the owner group of each rank, `[ranks]`.
    """
    declared, table, ranks = merged.declared, merged.declared.table, merged.ranks
    lists = ranks + len(merged.owner_groups)
    weights = np.zeros(len(table), np.int64)
    if len(table):
        order = index_order(table)
        starts = first_of_equal_chunks(table.take(order))
        # Rows order[starts[c] : starts[c + 1]] declare chunk c, and a row of an owner group stands for all of
        # its ranks.
        owners_of_list = np.concatenate([np.ones(ranks, np.int64), [len(g) for g in merged.owner_groups]])
        replicas = np.add.reduceat(owners_of_list.astype(np.int64)[declared.rank[order]], starts)
        # Rows of main replicas come first in `merged`, and the order is stable: if the first row of a chunk
        # belongs to an owner group, the chunk has no main replica.
        first = order[starts]
        is_compared = (replicas > 1) & (declared.rank[first] < ranks) & _has_bytes(merged)[first]
        is_compared &= ~_is_marked(merged, marks)[first]
        weights[order] = np.repeat(is_compared, np.diff(np.append(starts, len(table))))
        weights[first] = np.where(is_compared, 1 - replicas, 0)
    # The rows of `merged` are list by list: a list of main rows for each rank, then one for each owner group.
    ends = np.cumsum(np.bincount(declared.rank, minlength=lists))
    by_list = np.split(weights, ends[:-1])
    groups = owner_group_of_rank.tolist()
    return [np.concatenate((by_list[rank], by_list[ranks + group])) for rank, group in enumerate(groups)]


def _has_bytes(merged: MergedDeclarations) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return which rows have bytes; a rank that does not write an object has not encoded it."""
    table = merged.declared.table
    is_object = np.array([array.dtype == OBJECT for array in table.arrays], np.bool_)
    return is_object[table.array] | (table.nbytes > 0)


def _is_marked(merged: MergedDeclarations, marks: Ints) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return which rows belong to an array of which some row is marked."""
    table = merged.declared.table
    is_marked = np.zeros(len(table.arrays), np.bool_)
    is_marked[table.array[marks != 0]] = True
    return is_marked[table.array]
