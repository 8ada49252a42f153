"""The replica check: at a save, ranks compare all bits of the chunks and objects that several of them have.

Without it, a replica that has drifted may be stored: the planner chooses the writer of a chunk by bytes,
and does not know which replica is right.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np

from megackpt.comm import Group, rank_0_errors_on_all_ranks
from megackpt.engine.data.device_copies import host_parts
from megackpt.engine.saving.copies import Label, differing_copies, label_of, name_of, value_digest
from megackpt.engine.saving.planned_save import SaveHook
from megackpt.entities.flatten import FlattenedState
from megackpt.errors import MismatchError, truncated_list
from megackpt.options import Policy
from megackpt.plans.metadata import DeclaredChunks
from megackpt.plans.validation.equality import REPLICA_DIGEST, Divergence
from megackpt.storage import digest_of_parts

log = logging.getLogger(__name__)

_DOING = "comparing replicas"


@dataclass(frozen=True, slots=True)
class ReplicaCheckHook(SaveHook):
    """Compares the bits of all chunks and objects that several ranks declare.

    Equal bits are asked for: NaNs with other bits differ, as do 0.0 and -0.0. Objects are compared leaf by
    leaf. If replicas differ, ERROR raises an error on all ranks; WARN lets rank 0 log it, and the save goes
    on.

    Attributes:
        policy: ERROR or WARN.
        part_bytes: how much of a tensor is copied to the host at a time.
    """

    policy: Policy
    part_bytes: int

    def after_planning(self, flattened: FlattenedState, declared: DeclaredChunks, group: Group) -> None:
        """Compare this rank's state with the replicas of other ranks."""
        replicas = _LocalReplicas(flattened, declared)
        differing = differing_copies(
            group, lambda: replicas.digests(self.part_bytes), replicas.labels, doing=_DOING
        )
        if differing is None:
            return
        with rank_0_errors_on_all_ranks(group, doing=_DOING):
            if group.rank == 0:
                self._report(_divergence_error(differing))

    def _report(self, error: MismatchError) -> None:
        if self.policy is Policy.ERROR:
            raise error
        log.warning("%s", error)


class _LocalReplicas:
    """The chunks and objects of this rank that other ranks may hold, too."""

    def __init__(self, flattened: FlattenedState, declared: DeclaredChunks) -> None:
        self._tensors, self._objects = flattened.tensors, flattened.objects
        table = declared.table
        # Replicated values are compared by value already; chunks without elements have no bits.
        self._rows = [
            row
            for row, entity in enumerate(flattened.entities)
            if (row >= len(self._tensors) or table.nbytes[row] > 0) and entity.key not in flattened.replicated
        ]
        self._labels = [label_of(table, row) for row in self._rows]
        self._names = [name_of(label) for label in self._labels]

    def digests(self, part_bytes: int) -> np.ndarray[tuple[int], np.dtype[np.void]]:
        """Return name and digest of each chunk and object, `[n]` of REPLICA_DIGEST."""
        digests = [bytes.fromhex(self._digest(row, part_bytes)) for row in self._rows]
        packed = b"".join(field for pair in zip(self._names, digests, strict=True) for field in pair)
        return np.frombuffer(packed, REPLICA_DIGEST)

    def labels(self, wanted: Set[bytes]) -> dict[bytes, Label]:
        """Return key and box of the chunks with these names."""
        pairs = zip(self._names, self._labels, strict=True)
        return {name: label for name, label in pairs if name in wanted}

    def _digest(self, row: int, part_bytes: int) -> str:
        if row >= len(self._tensors):
            return value_digest(self._objects[row - len(self._tensors)].data)
        data = self._tensors[row].data
        assert data is not None  # a tensor without data cannot be saved, which was checked before
        return digest_of_parts(host_parts(data, part_bytes=part_bytes))


def _divergence_error(differing: Sequence[tuple[Label, Divergence]]) -> MismatchError:
    lines = [f"{key!r} {box}: {divergence}" for (key, box), divergence in differing]
    (key, _), first = differing[0]
    return MismatchError(
        f"Ranks hold different bits in copies of the same chunk:\n{truncated_list(lines)}\n"
        f"Copies have drifted apart: a device is faulty, updates are not deterministic, or the copies were "
        f"never made equal. Restart from a checkpoint, check the devices of the ranks in the minority, copy "
        f"the right values to all ranks, or save them anyway with "
        f"SaveOptions(compare_replicas=Policy.WARN).",
        key=key,
        rank=None if first.majority is None else first.groups[1][0],
    )
