"""Hooks of a save for integrity: parity files, digests of whole arrays, and the comparison of replicas."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megackpt.comm import Group, gather_step, rank_0_errors_on_all_ranks, scatter_step
from megackpt.engine.data.device_copies import host_parts
from megackpt.engine.saving.copies import Label, differing_copies, label_of, name_of, value_digest
from megackpt.engine.saving.planned_save import PlannedSave, SaveHook, WrittenChunks
from megackpt.entities.flatten import FlattenedState
from megackpt.errors import MismatchError, UnsupportedError, truncated_list
from megackpt.formats.strategy import Json, SaveStrategy
from megackpt.options import Policy
from megackpt.plans.metadata import ChunkTable, DeclaredChunks
from megackpt.plans.validation import coverage_faults
from megackpt.plans.validation.equality import REPLICA_DIGEST, Divergence
from megackpt.storage import Store, digest_of_parts


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityHook(SaveHook):
    """Writes one parity file for each group of data files.

    Attributes:
        max_files: how many data files a group has at most.
    """

    max_files: int

    def strategy_for(self, strategy: SaveStrategy) -> SaveStrategy:
        """Return the strategy as it is, if its format has parity files."""
        if not strategy.capabilities.writes_parity:
            raise UnsupportedError(
                f"Format {strategy.backend} version {strategy.version} has no parity files. Save without "
                f"SaveOptions.parity, or in the native format."
            )
        return strategy

    def after_writing(self, written: WrittenChunks, store: Store, group: Group) -> list[bytes]:
        """Compute the parity of the files that were written; rank 0 decides which rank computes what."""
        attempt, strategy = written.planned.attempt, written.planned.strategy
        with scatter_step(group, "planning parity") as planning:
            if group.rank == 0:
                planning.parts = strategy.plan_parity(
                    attempt=attempt, plan=written.plan(), receipts=written.receipts, most=self.max_files
                )
        with gather_step(group, "writing parity files") as writing:
            writing.data = strategy.write_parity(store, attempt=attempt, work=planning.part)
        return writing.results

    def index_fields(self, receipts: list[bytes], planned: PlannedSave, store: Store) -> Json:
        """Write the list of parity files, and return what the manifest says of it."""
        return planned.strategy.list_parity(store, attempt=planned.attempt, receipts=receipts)


# Digests of whole arrays in a save; `formats.array_digests` computes them.


class ArrayDigestHook(SaveHook):
    """Stores a digest of each array, which does not depend on how the array is sharded."""

    def strategy_for(self, strategy: SaveStrategy) -> SaveStrategy:
        """Return a strategy that also stores digests of arrays."""
        return with_array_digests(strategy)


def with_array_digests(strategy: SaveStrategy) -> SaveStrategy:
    """Return a strategy that writes the same format, and digests of arrays.

    Raises:
        UnsupportedError: the format stores no digests of arrays.
        MissingExtraError: the library that computes them is not installed.
    """
    if not strategy.capabilities.digests_arrays:
        raise UnsupportedError(
            f"Format {strategy.backend} version {strategy.version} stores no digests of arrays. Save without "
            f"array_digests, or in the native format."
        )
    return strategy.with_array_digests(covered_keys)


def covered_keys(table: ChunkTable) -> Collection[str]:
    """Return the keys of the arrays whose chunks cover every element exactly once.

    In a save that validates, these are all arrays.
    """
    keys = {spec.key for spec in table.arrays}
    return keys - {fault.spec.key for fault in coverage_faults(table, keys)}


# The replica check: at a save, ranks compare all bits of the chunks and objects that several of them have.
#
# Without it, a replica that has drifted may be stored: the planner chooses the writer of a chunk by bytes,
# and does not know which replica is right.

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
        tensors, table = flattened.tensors, declared.table
        # Replicated values are compared by value already; chunks without elements have no bits.
        rows = [
            row
            for row, entity in enumerate(flattened.entities)
            if (row >= len(tensors) or table.nbytes[row] > 0) and entity.key not in flattened.replicated
        ]
        labels = [label_of(table, row) for row in rows]

        def digests() -> npt.NDArray[np.void]:
            named = zip(map(name_of, labels), rows, strict=True)
            packed = b"".join(name + self._digest(flattened, row) for name, row in named)
            return np.frombuffer(packed, REPLICA_DIGEST)

        differing = differing_copies(group, labels, digests, doing=_DOING)
        if differing is None:
            return
        with rank_0_errors_on_all_ranks(group, doing=_DOING):
            if group.rank == 0:
                self._report(_divergence_error(differing))

    def _digest(self, flattened: FlattenedState, row: int) -> bytes:
        """Return a digest of all bits of a tensor, or of an object leaf by leaf."""
        tensors = flattened.tensors
        if row >= len(tensors):
            return bytes.fromhex(value_digest(flattened.objects[row - len(tensors)].data))
        data = tensors[row].data
        assert data is not None  # a tensor without data cannot be saved, which was checked before
        return bytes.fromhex(digest_of_parts(host_parts(data, part_bytes=self.part_bytes)))

    def _report(self, error: MismatchError) -> None:
        if self.policy is Policy.ERROR:
            raise error
        log.warning("%s", error)


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
