"""Choice of the main replica among those that no replica id marks, and weights to compare all replicas.

Unmarked replicas are replicated values, and chunks of arrays on meshes or process groups that do not know of
each other. FSDP over TP makes such chunks of every parameter that TP does not shard: the DTensor is on the
mesh of FSDP only, and each rank of TP has its own.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megackpt.plans.geometry import Ints
from megackpt.plans.metadata import (
    ON_SOME_RANKS,
    REPLICATED_VALUE,
    DeclaredChunks,
    MergedDeclarations,
)
from megackpt.plans.planning.save_plan import first_of_equal_chunks, index_order


def keep_lowest_main(declared: DeclaredChunks, keys: set[str]) -> DeclaredChunks:
    """Of main replicas of equal chunks of these arrays, keep the one on the lowest rank as main. Pure."""
    if not keys:
        return declared
    is_chosen = np.array([array.key in keys for array in declared.table.arrays], np.bool_)
    rows = np.flatnonzero(is_chosen[declared.table.array] & declared.main)
    table = declared.table.take(rows)
    # Equal chunks become neighbours, that of the lowest rank first.
    order = index_order(table)
    main = declared.main.copy()
    main[rows] = False
    main[rows[order[first_of_equal_chunks(table.take(order))]]] = True
    return replace(declared, main=main)


def choose_main_replicas(merged: MergedDeclarations, marks: Ints) -> MergedDeclarations:
    """Choose the main replicas that ranks cannot choose by themselves: those of marked rows. Pure.

    Args:
        merged: the declarations of all ranks.
        marks: ON_SOME_RANKS and REPLICATED_VALUE, for each row.
    """
    declared = merged.declared
    marks_of_array = np.zeros(len(declared.table.arrays), np.int64)
    np.bitwise_or.at(marks_of_array, declared.table.array, marks)
    keys = [array.key for array in declared.table.arrays]
    on_some_ranks = {keys[i] for i in np.flatnonzero(marks_of_array & ON_SOME_RANKS).tolist()}
    merged = replace(merged, declared=keep_lowest_main(declared, on_some_ranks))
    # The lowest rank that has a replicated value writes it: sort by value and rank, take the first of each.
    rows = np.flatnonzero(marks & REPLICATED_VALUE)
    row, rank = merged.take(rows).owners()
    value = merged.declared.table.array[rows][row]
    order = np.lexsort((rank, value))
    first = order[np.unique(value[order], return_index=True)[1]]
    return merged.with_main_rows(rows[row[first]], rank[first])


def choose_lowest_rank_as_main(declared: DeclaredChunks, replicated: set[str]) -> DeclaredChunks:
    """Make the lowest rank that holds a replicated value its only main replica. Pure."""
    is_replicated = np.array([array.key in replicated for array in declared.table.arrays], np.bool_)
    rows = np.flatnonzero(is_replicated[declared.table.array])
    first = np.unique(declared.table.array[rows], return_index=True)[1]  # rows are in the order of ranks
    main = declared.main.copy()
    main[rows[first]] = True
    return replace(declared, main=main)


# Weights with which ranks add up the digests of replicas, so that the sum shows whether they are equal.
#
# Of a chunk with n replicas, one has the weight -(n - 1) and each other 1. If all replicas have the digest d,
# their terms are -(n - 1) * d + (n - 1) * d = 0. So a single number, the sum of the terms of all chunks over
# all ranks, compares everything that ranks have copies of, whoever they are.


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
        # A rank that does not write an object has not encoded it, so its size says nothing.
        has_bytes = table.are_objects() | (table.nbytes > 0)
        is_compared = (replicas > 1) & (declared.rank[first] < ranks) & has_bytes[first]
        is_compared &= ~_is_marked(merged, marks)[first]
        weights[order] = np.repeat(is_compared, np.diff(np.append(starts, len(table))))
        weights[first] = np.where(is_compared, 1 - replicas, 0)
    # The rows of `merged` are list by list: a list of main rows for each rank, then one for each owner group.
    ends = np.cumsum(np.bincount(declared.rank, minlength=lists))
    by_list = np.split(weights, ends[:-1])
    groups = owner_group_of_rank.tolist()
    return [np.concatenate((by_list[rank], by_list[ranks + group])) for rank, group in enumerate(groups)]


def _is_marked(merged: MergedDeclarations, marks: Ints) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return which rows belong to an array that has a marked row."""
    table = merged.declared.table
    is_marked = np.zeros(len(table.arrays), np.bool_)
    is_marked[table.array[marks != 0]] = True
    return is_marked[table.array]
