"""Copies on several ranks, compared at every save: samples of tensors, and objects as a whole.

If ranks have slices of a parameter, and a module does not declare how the parameter is cut, all ranks
declare the same chunk. Their slices then look like replicas, and only one of them would be stored. A few
KiB of each tensor show that these slices differ. Samples also show, within some saves, that true replicas
have drifted apart. The replica check (`ReplicaCheckHook`) finds that at once.

Where a save makes a new plan, each rank sends names and digests with its declarations. With a cached plan,
ranks add up their digests with weights (`plans.planning.replicas.replica_weights`), in the first message of
the save. They exchange names and digests only if the sum shows that something differs.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from megackpt.comm import SUMMAND_BITS, Group, rank_0_errors_on_all_ranks
from megackpt.engine.data.samples import fixed_samples, sample_digests
from megackpt.engine.saving.copies import Label, differing_copies, label_of, name_of, value_digest
from megackpt.engine.saving.plan_cache import CachedPlan
from megackpt.engine.saving.planned_save import SaveHook
from megackpt.entities.flatten import FlattenedState
from megackpt.errors import MismatchError, UnserializableError, truncated_list
from megackpt.options import Policy
from megackpt.plans.geometry import Ints
from megackpt.plans.metadata import OBJECT, ArraySpec, ChunkTable, DeclaredChunks
from megackpt.plans.validation.equality import Divergence, find_divergences
from megackpt.storage import digest_of

log = logging.getLogger(__name__)

SAMPLE = np.dtype([("name", "V8"), ("digest", "V8")])
"""A digest of the key and box of a chunk, and a digest of a sample of its bits, or of an object."""

_TENSORS = (
    "Ranks declare the same chunk of a tensor, as replicas of each other, and hold different bits in it:",
    "If each of these ranks holds a part of the tensor, only one part would be stored: declare how it is "
    "cut, with tp_sharding = {'name': dim} on its module, or as a ShardedTensor with this rank's offset. If "
    "they are copies that have drifted apart, make them equal, or save them anyway: under "
    "Megatron-Core's names by install(replicas='warn'), here by SaveOptions(sample_replicas=Policy.WARN).",
    "Of each chunk, the main replica is stored.",
)
_OBJECTS = (
    "Ranks declare the same object, as copies of each other, and hold different values:",
    "Only one of them would be stored, and all ranks would load it. If each of these ranks needs its own, as "
    "of a random stream, declare it as PerRankValue(key, value), or as a ShardedObject with this rank's "
    "offset. If they are copies, make them equal, or save them anyway: under "
    "Megatron-Core's names by install(replicas='warn'), here by SaveOptions(sample_replicas=Policy.WARN).",
    "Of each object, the main replica is stored.",
)
"""What is wrong, what to do about it, and what is stored if it is only a warning."""


@dataclass(frozen=True, slots=True)
class ReplicaSampleHook(SaveHook):
    """Compares samples of the chunks of tensors, and the objects, that several ranks declare.

    Attributes:
        policy: what to do if they differ: ERROR or WARN.
    """

    policy: Policy

    def attachment(
        self, flattened: FlattenedState, declared: DeclaredChunks, *, ranks: int, number: int
    ) -> bytes:
        """Return the samples of this rank's chunks, and the digests of its objects, packed as SAMPLE.

        Not known yet is which of them other ranks have, too. Flat ranges are left out, as each belongs to one
        data-parallel rank. So are values that belong to one rank, and what is compared in full anyway.
        """
        if ranks == 1:
            return b""
        table, tensors = declared.table, flattened.tensors
        rows = [
            row
            for row, tensor in enumerate(tensors)
            if table.nbytes[row] > 0
            and tensor.flattened_range is None
            and tensor.key not in flattened.on_some_ranks
        ]
        # A save without a cached plan may be the only one: its samples have fixed positions, too.
        chosen = [data for row in rows if (data := tensors[row].data) is not None]
        moving = [digest.tobytes() for digest in sample_digests(chosen, number)]
        fixed = [bytes.fromhex(digest_of(sample)) for sample in fixed_samples(chosen)]
        digests = [bytes.fromhex(digest_of(a + b))[:8] for a, b in zip(moving, fixed, strict=True)]
        left_out = flattened.replicated | flattened.per_rank.keys()
        objects = [row for row, o in enumerate(flattened.objects, len(tensors)) if o.key not in left_out]
        digests += [_object_digest(flattened, row) for row in objects]
        names = [name_of(label_of(table, row))[:8] for row in (*rows, *objects)]
        return b"".join(field for pair in zip(names, digests, strict=True) for field in pair)

    def check_attachments(
        self, attachments: Sequence[bytes], attachment_of_rank: Ints, table: ChunkTable
    ) -> None:
        """Compare the samples and digests of all ranks."""
        divergences = find_divergences([np.frombuffer(samples, SAMPLE) for samples in attachments])
        if not divergences:
            return
        # What ranks have sent has digests of names only. The table of rank 0 has the chunks of all ranks,
        # with keys and boxes.
        labels = {name_of(label := label_of(table, row))[:8]: label for row in range(len(table))}
        self._report(
            sorted((labels[d.name], _with_ranks(d, attachment_of_rank)) for d in divergences), table.arrays
        )

    def terms(self, flattened: FlattenedState, cached: CachedPlan, *, number: int) -> tuple[int, int]:
        """Return the weighted sum of the digests of this rank's copies of tensors, and that of objects."""
        terms = []
        for rows in _rows_with_copies(flattened, cached):
            # Unsigned integers of numpy wrap around, so this is the sum modulo 2**64.
            products = _digests(flattened, rows, number=number) * cached.replica_factors[rows]
            terms.append(int(products.sum(dtype=np.uint64)) % 2**SUMMAND_BITS)
        of_tensors, of_objects = terms
        return of_tensors, of_objects

    def compare_copies(
        self,
        flattened: FlattenedState,
        cached: CachedPlan,
        group: Group,
        *,
        number: int,
        tensors: bool,
        objects: bool,
    ) -> None:
        """Exchange the digests of all copies, to name those that differ; they may all be equal."""
        kinds = zip(_rows_with_copies(flattened, cached), (tensors, objects), strict=True)
        rows = np.concatenate([of_kind for of_kind, is_chosen in kinds if is_chosen])
        table = cached.declared.table
        labels = [label_of(table, row) for row in rows.tolist()]

        def digests() -> npt.NDArray[np.void]:
            packed = np.zeros(len(rows), SAMPLE)
            packed["name"] = np.frombuffer(b"".join(name_of(label)[:8] for label in labels), "V8")
            packed["digest"] = _digests(flattened, rows, number=number).view("V8")
            return packed

        differing = differing_copies(group, labels, digests, doing="comparing copies")
        if differing is None:
            return
        with rank_0_errors_on_all_ranks(group, doing="comparing copies"):
            if group.rank == 0:
                self._report(differing, cached.plan.table.arrays)

    def _report(self, differing: Sequence[tuple[Label, Divergence]], arrays: Sequence[ArraySpec]) -> None:
        """Raise the error or log the warning of copies that differ, sorted by key and box; on rank 0."""
        object_keys = {array.key for array in arrays if array.dtype == OBJECT}
        texts = []
        for of_objects, (what, remedy, stored) in ((False, _TENSORS), (True, _OBJECTS)):
            lines = [
                f"{key!r} {box}: {divergence}"
                for (key, box), divergence in differing
                if (key in object_keys) is of_objects
            ]
            last = remedy if self.policy is Policy.ERROR else stored
            texts += [f"{what}\n{truncated_list(lines)}\n{last}"] if lines else []
        if self.policy is Policy.ERROR:
            (key, _), first = differing[0]
            raise MismatchError("\n".join(texts), key=key, rank=first.groups[-1][0])
        log.warning("%s", "\n".join(texts))


def _rows_with_copies(flattened: FlattenedState, cached: CachedPlan) -> tuple[Ints, Ints]:
    """Return the rows of tensors, and those of objects, that other ranks declare, too."""
    rows = np.flatnonzero(cached.replica_factors)
    is_tensor = rows < len(flattened.tensors)
    return rows[is_tensor], rows[~is_tensor]


def _digests(flattened: FlattenedState, rows: Ints, *, number: int) -> npt.NDArray[np.uint64]:
    """Return a digest of the sample of each tensor, or of each object; tensors come first in rows."""
    count = len(flattened.tensors)
    tensors = [
        data for row in rows.tolist() if row < count and (data := flattened.tensors[row].data) is not None
    ]
    objects = [_object_digest(flattened, row) for row in rows.tolist() if row >= count]
    return np.concatenate((sample_digests(tensors, number), np.frombuffer(b"".join(objects), np.uint64)))


def _object_digest(flattened: FlattenedState, row: int) -> bytes:
    """Return a digest of an object, of 8 bytes."""
    value: Any = flattened.objects[row - len(flattened.tensors)].data
    try:
        return bytes.fromhex(value_digest(value))[:8]
    except UnserializableError:
        # Some formats take objects that have no codec. A rank that does not write one must not fail.
        return bytes.fromhex(digest_of(type(value).__qualname__.encode()))[:8]


def _with_ranks(divergence: Divergence, attachment_of_rank: Ints) -> Divergence:
    """Return a divergence between attachments as one between the ranks that sent them."""
    groups = [np.flatnonzero(np.isin(attachment_of_rank, sent)).tolist() for sent in divergence.groups]
    return replace(divergence, groups=tuple(sorted(map(tuple, groups), key=lambda g: (-len(g), g))))
