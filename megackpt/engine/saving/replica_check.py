"""The replica vote: at a save, copies of a chunk that ranks hold are compared bit by bit.

Owns the digests of what this rank holds and the meetings. A replica that has drifted is otherwise written or
not by chance: which rank writes a chunk is decided by bytes, not by who is right.
"""

from __future__ import annotations

import json
import logging

import numpy as np

from megackpt.comm import Group, broadcast_from_rank_0, run_and_gather, scatter_from_rank_0
from megackpt.engine.data.device_copies import host_parts
from megackpt.engine.saving.local_state import LocalState, leaves
from megackpt.errors import MismatchError, truncated_list
from megackpt.options import Policy
from megackpt.storage import digest_of, digest_of_parts
from megackpt.validation import REPLICA_DIGEST, Divergence, find_divergences

log = logging.getLogger(__name__)

_DOING = "comparing replicas"


def compare_replicas(local: LocalState, group: Group, policy: Policy, *, part_bytes: int) -> None:
    """Compare the bits of all chunks and objects that several ranks declare. Collective; nothing is changed.

    Equal bits are asked for: NaNs with other bits differ, as do 0.0 and -0.0. Objects are compared leaf by
    leaf. With WARN rank 0 logs what differs, and the save goes on.

    Raises:
        MismatchError: with ERROR, what differs, and on which ranks; the same on every rank.
    """
    if policy is Policy.IGNORE:
        return
    claims = _Claims(local)
    said = run_and_gather(group, lambda: claims.digests(part_bytes).tobytes(), doing=_DOING)
    found = find_divergences([np.frombuffer(of_rank, REPLICA_DIGEST) for of_rank in said])
    names = broadcast_from_rank_0(group, b"".join(f.name for f in found), doing=_DOING)
    if not names:
        return
    asked = {names[at : at + 16] for at in range(0, len(names), 16)}
    labels = run_and_gather(group, lambda: claims.labels(asked), doing="naming replicas that differ")

    def settle() -> list[bytes]:
        known = {name: label for of_rank in labels for name, label in json.loads(of_rank).items()}
        error = _error(found, known)
        if policy is Policy.ERROR:
            raise error
        log.warning("%s", error)
        return [b""] * group.size

    scatter_from_rank_0(group, settle, doing=_DOING)


class _Claims:
    """What this rank says of the chunks that it holds."""

    def __init__(self, local: LocalState) -> None:
        self._local = local
        table, entities = local.declared.table, local.flattened.entities
        replicated = local.flattened.replicated  # compared by value already
        tensors = len(local.flattened.tensors)
        self._rows = [
            row
            for row, entity in enumerate(entities)
            if (row >= tensors or table.nbytes[row] > 0) and entity.key not in replicated
        ]
        self._labels = [(table.arrays[int(table.array[row])].key, table.describe(row)) for row in self._rows]
        self._names = [bytes.fromhex(digest_of(json.dumps(label).encode())) for label in self._labels]

    def digests(self, part_bytes: int) -> np.ndarray[tuple[int], np.dtype[np.void]]:
        """Digest everything, `[chunks]` of REPLICA_DIGEST."""
        found = [bytes.fromhex(self._digest(row, part_bytes)) for row in self._rows]
        packed = b"".join(part for pair in zip(self._names, found, strict=True) for part in pair)
        return np.frombuffer(packed, REPLICA_DIGEST)

    def labels(self, asked: set[bytes]) -> bytes:
        """Return key and box of those that are asked for, as JSON."""
        pairs = zip(self._names, self._labels, strict=True)
        return json.dumps({name.hex(): label for name, label in pairs if name in asked}).encode()

    def _digest(self, row: int, part_bytes: int) -> str:
        tensors = self._local.flattened.tensors
        if row >= len(tensors):
            return digest_of(leaves(self._local.flattened.objects[row - len(tensors)].data))
        data = tensors[row].data
        assert data is not None  # what has no data cannot be saved, and was refused
        return digest_of_parts(host_parts(data, part_bytes=part_bytes))


def _error(found: list[Divergence], known: dict[str, list[str]]) -> MismatchError:
    named = sorted((known[divergence.name.hex()], divergence) for divergence in found)
    lines = [f"{key!r} {box}: {divergence}" for (key, box), divergence in named]
    (key, _), first = named[0]
    return MismatchError(
        f"Ranks hold different bits in copies of the same chunk:\n{truncated_list(lines)}\n"
        f"Copies have drifted apart, by a fault of a device, by updates that are not deterministic, or as "
        f"they were never made equal. Restart from a checkpoint, look at the devices of the ranks that are "
        f"alone, or copy the right values to all.",
        key=key,
        rank=None if first.majority is None else first.camps[1][0],
    )
