"""Samples of tensors that ranks declare as replicas, compared when a save is planned.

If ranks have slices of a parameter, and a module does not declare how the parameter is cut, all ranks
declare the same chunk. Their slices then look like replicas, and only one of them would be stored. A few
KiB of each tensor show that these slices differ. The replica check (`replica_check`) also finds small
differences elsewhere.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from megackpt.engine.data.tensor_bytes import as_bits
from megackpt.engine.saving.planned_save import SaveHook
from megackpt.entities.flatten import FlattenedState
from megackpt.errors import MismatchError, truncated_list
from megackpt.options import Policy
from megackpt.plans.geometry import Ints
from megackpt.plans.metadata import ChunkTable, DeclaredChunks
from megackpt.plans.validation.equality import Divergence, find_divergences
from megackpt.storage import digest_of

log = logging.getLogger(__name__)

SAMPLE = np.dtype([("name", "V8"), ("digest", "V8")])
"""A digest of the key and box of a chunk, and a digest of a sample of its bits."""

_POSITIONS = (0.0, 0.5, 1.0)  # where a tensor is sampled: at its start, in its middle and at its end
_POSITION_BYTES = 1024


@dataclass(frozen=True, slots=True)
class ReplicaSampleHook(SaveHook):
    """Compares samples of the chunks of tensors that several ranks declare, where a save makes a new plan.

    Attributes:
        policy: what to do if samples differ: ERROR or WARN.
    """

    policy: Policy

    def attachment(self, flattened: FlattenedState, declared: DeclaredChunks, *, ranks: int) -> bytes:
        """Return the samples of this rank's chunks, packed as SAMPLE.

        Flat ranges are left out, as each belongs to one data-parallel rank, and so are chunks that are
        compared in full anyway.
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
        samples = _sample_bits([data for row in rows if (data := tensors[row].data) is not None])
        pairs = zip(rows, samples, strict=True)
        return b"".join(
            _chunk_name(table, row) + bytes.fromhex(digest_of(sample))[:8] for row, sample in pairs
        )

    def check_attachments(
        self, attachments: Sequence[bytes], attachment_of_rank: Ints, table: ChunkTable
    ) -> None:
        """Compare the samples of all ranks."""
        divergences = find_divergences([np.frombuffer(samples, SAMPLE) for samples in attachments])
        if not divergences:
            return
        # Samples have digests of names only. The table of rank 0 has the chunks of all ranks, with keys and
        # boxes.
        labels = {_chunk_name(table, row): _label(table, row) for row in range(len(table))}
        of_chunks = sorted((labels[d.name], _with_ranks(d, attachment_of_rank)) for d in divergences)
        lines = [f"{key!r} {box}: {divergence}" for (key, box), divergence in of_chunks]
        what = (
            f"Ranks declare the same chunk of a tensor, as replicas of each other, and hold different bits "
            f"in it:\n{truncated_list(lines)}"
        )
        if self.policy is Policy.ERROR:
            (key, _), first = of_chunks[0]
            raise _divergence_error(what, key, rank=first.groups[-1][0])
        log.warning("%s\nOf each chunk, the main replica is stored.", what)


def _divergence_error(what: str, key: str, *, rank: int) -> MismatchError:
    return MismatchError(
        f"{what}\n"
        f"If each of these ranks holds a part of the tensor, only one part would be stored: declare how it "
        f"is cut, with tp_sharding = {{'name': dim}} on its module, or as a ShardedTensor with this rank's "
        f"offset. If they are copies that have drifted apart, make them equal, or save them anyway with "
        f"SaveOptions(sample_replicas=Policy.WARN); under Megatron-Core's names, install(replicas='warn').",
        key=key,
        rank=rank,
    )


def _with_ranks(divergence: Divergence, attachment_of_rank: Ints) -> Divergence:
    """Return a divergence between attachments as one between the ranks that sent them."""
    groups = [np.flatnonzero(np.isin(attachment_of_rank, sent)).tolist() for sent in divergence.groups]
    return replace(divergence, groups=tuple(sorted(map(tuple, groups), key=lambda g: (-len(g), g))))


def _label(table: ChunkTable, row: int) -> tuple[str, str]:
    return table.arrays[int(table.array[row])].key, table.describe(row)


def _chunk_name(table: ChunkTable, row: int) -> bytes:
    key, box = _label(table, row)
    return bytes.fromhex(digest_of(f"{key} {box}".encode()))[:8]


def _sample_bits(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    """Return the sample of each tensor: all of a small one, else its start, middle and end."""
    parts = [part for tensor in tensors for part in _parts_of(tensor.detach())]
    # Each tensor has one part for each position, one after the other: lengths[t] counts the bytes of all
    # parts of tensor t.
    lengths = np.array([part.numel() for part in parts], np.int64).reshape(-1, len(_POSITIONS)).sum(axis=1)
    on_host = np.empty(int(lengths.sum()), np.uint8)
    # Part p is to lie in on_host[first[p] : first[p + 1]].
    first = np.cumsum([0, *(part.numel() for part in parts)])
    # One copy from each device: many small copies would each wait for the device.
    for device in {part.device for part in parts}:
        chosen = [number for number, part in enumerate(parts) if part.device == device]
        joined = torch.cat([parts[number] for number in chosen]).cpu().numpy()
        start = 0
        for number in chosen:
            count = int(first[number + 1] - first[number])
            on_host[first[number] : first[number + 1]] = joined[start : start + count]
            start += count
    # The parts of a tensor are neighbours in on_host, so its sample is one range that ends at ends[t].
    ends = np.cumsum(lengths)
    return [on_host[end - count : end].tobytes() for end, count in zip(ends, lengths, strict=True)]


def _parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return a flat uint8 tensor for each position; if the first has all bytes, the others are empty."""
    fits = tensor.numel() * tensor.element_size() <= _POSITION_BYTES
    # Torch calls any strides of a single element contiguous, but does not view them as bytes.
    is_contiguous = tensor.is_contiguous() and tensor.numel() > 1
    # A lazy conjugate or negative keeps the bits of the tensor that it was made of.
    if is_contiguous and not tensor.is_conj() and not tensor.is_neg():
        flat, width = tensor.view(-1).view(torch.uint8), tensor.element_size()
        if fits:
            return [flat, *[flat[:0]] * (len(_POSITIONS) - 1)]
        ranges = [_flat_range_at(tensor.shape, width, position) for position in _POSITIONS]
        return [flat[start * width : (start + length) * width] for start, length in ranges]
    if fits:
        flat = _flat_bytes(tensor)
        return [flat, *[flat[:0]] * (len(_POSITIONS) - 1)]
    return [_flat_bytes(_box_at(tensor, position)) for position in _POSITIONS]


def _flat_range_at(shape: Sequence[int], width: int, position: float) -> tuple[int, int]:
    """Return start and length, in elements, of what `_box_at` returns of a contiguous tensor."""
    start, inner = 0, math.prod(shape)
    for extent in shape:
        # No extent is 0: a tensor without elements is not sampled.
        inner //= extent
        kept = max(1, min(extent, _POSITION_BYTES // (inner * width)))
        start += int((extent - kept) * position) * inner
        if kept > 1:
            return start, kept * inner
    return start, inner


def _box_at(tensor: torch.Tensor, position: float) -> torch.Tensor:
    """Return a box of at most _POSITION_BYTES, or of one element, at a position of the tensor.

    It has one index along the outer dims, several along one dim, and all along the dims after that, so its
    elements are one range of the row-major order.
    """
    for dim, extent in enumerate(tensor.shape):
        slice_bytes = tensor.numel() // extent * tensor.element_size()
        kept = max(1, min(extent, _POSITION_BYTES // slice_bytes))
        tensor = tensor.narrow(dim, int((extent - kept) * position), kept)
    return tensor


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return as_bits(tensor).clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
