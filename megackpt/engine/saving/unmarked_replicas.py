"""Digests of DTensor chunks without a replica id, so that ranks can compare them.

`planning.main_replicas` chooses one of them as the main replica.
"""

from __future__ import annotations

from megackpt.engine.data.device_copies import host_parts
from megackpt.entities import is_main_replica
from megackpt.entities.flatten import FlattenedState
from megackpt.plans.geometry import Box
from megackpt.plans.metadata import DIGEST_BLOCK_BYTES
from megackpt.storage import BlockDigester, digest_of


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
