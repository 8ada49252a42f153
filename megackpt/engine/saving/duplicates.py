"""Copies that no replica id tells apart.

Owns the choice of the one that counts, for replicated values and for arrays on meshes that do not know of
each other, and the digests by which these are compared. FSDP over TP makes them of whatever TP leaves alone:
such a DTensor lies on the mesh of FSDP only, and each rank of TP holds its own.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megackpt.engine.data.device_copies import host_parts
from megackpt.engine.state.flatten import FlattenedState
from megackpt.geometry import Box, Ints
from megackpt.mapping import is_main_replica
from megackpt.metadata import (
    DIGEST_BLOCK_BYTES,
    ON_SOME_RANKS,
    REPLICATED_VALUE,
    DeclaredChunks,
    MergedDeclarations,
)
from megackpt.planning import first_of_equal_chunks
from megackpt.storage import BlockDigester, digest_of


def digests_of_copies(flattened: FlattenedState) -> dict[str, str]:
    """Return the digest of each chunk of which ranks outside of its mesh may declare the same. Local.

    Chunks are named `key[box]`.
    """
    found = {}
    for tensor in flattened.tensors:
        if tensor.key in flattened.part_of_ranks and is_main_replica(tensor.replica_id):
            assert tensor.data is not None  # a DTensor has its local tensor
            digester = BlockDigester(DIGEST_BLOCK_BYTES)
            for piece in host_parts(tensor.data, part_bytes=DIGEST_BLOCK_BYTES):
                digester.update(piece)
            name = f"{tensor.key}{Box(tensor.global_offset, tensor.local_shape)}"
            found[name] = digest_of(digester.result().tobytes())
    return found


def without_copies(declared: DeclaredChunks, keys: set[str]) -> DeclaredChunks:
    """Of equal chunks of these arrays that are all main replicas, leave the one on the lowest rank. Pure."""
    if not keys:
        return declared
    chosen = np.array([a.key in keys for a in declared.table.arrays], np.bool_)
    rows = np.flatnonzero(chosen[declared.table.array] & declared.main)
    table = declared.table.take(rows)
    order = np.lexsort((table.shape_keys(), table.start_keys()))  # stable: ranks stay in their order
    main = declared.main.copy()
    main[rows] = False
    main[rows[order[first_of_equal_chunks(table.take(order))]]] = True
    return replace(declared, main=main)


def with_mains_chosen(held: MergedDeclarations, marks: Ints) -> MergedDeclarations:
    """Choose the main replicas that no rank could choose alone, of marked rows. Pure.

    A replicated value is written by the lowest rank that holds it.
    """
    of_array = np.zeros(len(held.declared.table.arrays), np.int64)
    np.bitwise_or.at(of_array, held.declared.table.array, marks)
    keys = [a.key for a in held.declared.table.arrays]
    parts = {keys[i] for i in np.flatnonzero(of_array & ON_SOME_RANKS).tolist()}
    held = replace(held, declared=without_copies(held.declared, parts))
    rows = np.flatnonzero(marks & REPLICATED_VALUE)
    row, rank = held.take(rows).owners()
    order = np.lexsort((rank, held.declared.table.array[rows][row]))
    first = order[np.unique(held.declared.table.array[rows][row][order], return_index=True)[1]]
    chosen, writers = rows[row[first]], rank[first]
    return held.with_main_rows(chosen, writers)


def with_one_main_each(declared: DeclaredChunks, replicated: set[str]) -> DeclaredChunks:
    """Make the lowest rank that holds a replicated value its main replica, and no other. Pure."""
    chosen = np.array([a.key in replicated for a in declared.table.arrays], np.bool_)
    rows = np.flatnonzero(chosen[declared.table.array])
    first = np.unique(declared.table.array[rows], return_index=True)[1]  # rows are in the order of ranks
    main = declared.main.copy()
    main[rows[first]] = True
    return replace(declared, main=main)
