"""Choice of the main replica among replicas that are not marked as such by a replica id.

These are replicated values, and chunks of arrays on meshes or process groups that do not know of each other.
FSDP over TP makes such chunks of every parameter that TP does not shard: the DTensor is on the mesh of FSDP
only, and each rank of TP has its own.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megackpt.plans.geometry import Ints
from megackpt.plans.metadata import ON_SOME_RANKS, REPLICATED_VALUE, DeclaredChunks, MergedDeclarations
from megackpt.plans.planning.save_plan import first_of_equal_chunks


def keep_lowest_main(declared: DeclaredChunks, keys: set[str]) -> DeclaredChunks:
    """Of main replicas of equal chunks of these arrays, keep the one on the lowest rank as main. Pure."""
    if not keys:
        return declared
    is_chosen = np.array([array.key in keys for array in declared.table.arrays], np.bool_)
    rows = np.flatnonzero(is_chosen[declared.table.array] & declared.main)
    table = declared.table.take(rows)
    # Equal chunks become neighbours. The sort is stable, so the first of them is that of the lowest rank.
    order = np.lexsort((table.shape_keys(), table.start_keys()))
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
