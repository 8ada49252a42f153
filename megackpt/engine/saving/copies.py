"""Copies of chunks and objects that ranks compare by digests: their names, and which of them differ."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from megackpt.codec import leaf_digests
from megackpt.comm import Group, broadcast_from_rank_0, gather_step
from megackpt.engine.data.device_copies import host_parts
from megackpt.entities import is_main_replica
from megackpt.entities.flatten import FlattenedState
from megackpt.plans.geometry import Box, Ints
from megackpt.plans.metadata import DIGEST_BLOCK_BYTES, ChunkTable
from megackpt.plans.validation.equality import Divergence, find_divergences
from megackpt.storage import BlockDigester, digest_of

Label = tuple[str, str]
"""The key of a chunk, and its box as text."""


def label_of(table: ChunkTable, row: int) -> Label:
    """Return the key and the box of a row. Pure."""
    return table.arrays[int(table.array[row])].key, table.describe(row)


def name_of(label: Label) -> bytes:
    """Return a digest of a label, of 16 bytes: equal for copies of one chunk on all ranks. Pure."""
    return bytes.fromhex(digest_of(json.dumps(label).encode()))


def replica_factors(table: ChunkTable, weights: Ints) -> npt.NDArray[np.uint64]:
    """Return the number that the digest of each row is multiplied with before digests are added. Pure.

    It is the weight of the row, times an odd number that depends on key and box. So equal changes of two
    chunks do not cancel each other out: a second copy of an embedding may change as the first.

    Args:
        table: the rows of one rank.
        weights: of the rows; see `plans.planning.replicas.replica_weights`.
    """
    rows = np.flatnonzero(weights)
    names = [int.from_bytes(name_of(label_of(table, row))[:8], "little") | 1 for row in rows.tolist()]
    factors = weights.astype(np.uint64)  # modulo 2**64, as the products
    factors[rows] *= np.array(names, np.uint64)
    return factors


def value_digest(value: Any) -> str:
    """Return a digest of a value that is no tensor; equal for equal values. Local.

    Raises:
        UnserializableError: a part of the value has no codec.
    """
    return digest_of(json.dumps(leaf_digests(value), sort_keys=True).encode())


def differing_copies(
    group: Group, labels: Sequence[Label], digests: Callable[[], npt.NDArray[np.void]], *, doing: str
) -> list[tuple[Label, Divergence]] | None:
    """Compare the digests of all ranks on rank 0. Collective.

    Args:
        group: the ranks.
        labels: of the copies of this rank.
        digests: returns name and digest of each of them, as for `find_divergences`. It is called in a step,
            so that all ranks raise its error.
        doing: what is done, for the text of errors.

    Returns:
        None on all ranks if no copies differ. Else rank 0 has what differs, sorted by label, and the others
        have an empty list.
    """
    with gather_step(group, doing) as digesting:
        own = digests()
        digesting.data = own.tobytes()
    divergences = find_divergences([np.frombuffer(sent, own.dtype) for sent in digesting.results])
    # Other ranks receive the digests of no rank, and find no divergence: what rank 0 has found counts.
    names = broadcast_from_rank_0(group, b"".join(d.name for d in divergences), doing=doing)
    if not names:
        return None
    # Rank 0 knows digests only. Ranks that hold what differs send its keys and boxes for the error.
    length = own.dtype["name"].itemsize
    wanted = {names[at : at + length] for at in range(0, len(names), length)}
    with gather_step(group, "naming replicas that differ") as naming:
        named = zip((name.tobytes() for name in own["name"]), labels, strict=True)
        naming.data = json.dumps({name.hex(): label for name, label in named if name in wanted}).encode()
    known = {name: label for sent in naming.results for name, label in json.loads(sent).items()}
    return sorted((tuple(known[divergence.name.hex()]), divergence) for divergence in divergences)


# Digests of DTensor chunks without a replica id, so that ranks can compare them.
#
# `plans.planning.replicas` chooses one of them as the main replica.


def digests_of_unmarked_replicas(flattened: FlattenedState) -> dict[str, str]:
    """Return a digest of each chunk that ranks outside of its mesh may declare too, by `key[box]`. Local."""
    digests = {}
    for tensor in flattened.tensors:
        if tensor.key in flattened.on_some_ranks and is_main_replica(tensor.replica_id):
            assert tensor.data is not None  # a DTensor has its local tensor
            digester = BlockDigester(DIGEST_BLOCK_BYTES)
            for part in host_parts(tensor.data, part_bytes=DIGEST_BLOCK_BYTES):
                digester.update(part)
            name = f"{tensor.key}{Box(tensor.global_offset, tensor.local_shape)}"
            digests[name] = digest_of(digester.result().tobytes())
    return digests
