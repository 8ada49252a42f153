"""Samples of tensors that ranks declare as replicas, compared when a save is planned.

A rank that holds a slice of a parameter, and does not declare how it is cut, declares the same chunk as the
others: their slices then look like replicas, and one of them would be stored for all. A few KiB of each
tensor tell such slices apart. Small differences at other places are left to the replica vote (`replicas`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from megackpt.engine.data.tensor_bytes import as_bits
from megackpt.engine.saving.local_state import LocalState
from megackpt.errors import MismatchError, truncated_list
from megackpt.metadata import ChunkTable
from megackpt.options import Policy
from megackpt.storage import digest_of
from megackpt.validation import Divergence, find_divergences

log = logging.getLogger(__name__)

SAMPLE = np.dtype([("name", "V8"), ("digest", "V8")])
"""A digest of the key and box of a chunk, and one of a sample of its bits."""

_PLACES = (0.0, 0.5, 1.0)  # where in a tensor: its begin, its middle, its end
_PLACE_BYTES = 1024


def samples_of(local: LocalState) -> bytes:
    """Return the samples of the chunks of tensors that this rank declares, packed as SAMPLE.

    Left out are flat ranges, which belong to one data-parallel rank, and what is compared as a whole anyway.
    """
    if local.request.sample_replicas is Policy.IGNORE or local.ranks == 1:
        return b""
    table, flattened = local.declared.table, local.flattened
    rows = [
        row
        for row, tensor in enumerate(flattened.tensors)
        if table.nbytes[row] > 0
        and tensor.flattened_range is None
        and tensor.key not in flattened.part_of_ranks
    ]
    data = [tensor.data for tensor in flattened.tensors]
    bits = _bits_of([tensor for row in rows if (tensor := data[row]) is not None])
    pairs = zip(rows, bits, strict=True)
    return b"".join(_name_of(table, row) + bytes.fromhex(digest_of(sample))[:8] for row, sample in pairs)


def check_samples(
    packed: Sequence[bytes], of_rank: npt.NDArray[np.int64], table: ChunkTable, policy: Policy
) -> None:
    """Compare the samples of all ranks. Pure but for the log.

    packed has every distinct list of samples once, and of_rank the number of the list of each rank. table has
    the chunks of all ranks. With WARN what differs is logged.

    Raises:
        MismatchError: with ERROR, what differs, and on which ranks.
    """
    found = find_divergences([np.frombuffer(samples, SAMPLE) for samples in packed])
    if not found:
        return
    label = {_name_of(table, row): _label(table, row) for row in range(len(table))}
    named = sorted((label[divergence.name], _on_ranks(divergence, of_rank)) for divergence in found)
    lines = [f"{key!r} {box}: {divergence}" for (key, box), divergence in named]
    (key, _), first = named[0]
    error = MismatchError(
        f"Ranks declare the same chunk of a tensor, as replicas of each other, and hold different bits in "
        f"it:\n{truncated_list(lines)}\n"
        f"If each of these ranks holds a part of the tensor, only one part would be stored: declare how it "
        f"is cut, with tp_sharding = {{'name': dim}} on its module, or as a ShardedTensor with this rank's "
        f"offset. If they are copies that have drifted apart, make them equal, or save them anyway with "
        f"SaveOptions(sample_replicas=Policy.WARN).",
        key=key,
        rank=first.camps[-1][0],
    )
    if policy is Policy.ERROR:
        raise error
    log.warning("%s", error)


def _on_ranks(divergence: Divergence, of_rank: npt.NDArray[np.int64]) -> Divergence:
    """Return the same with ranks in place of the numbers of their lists."""
    camps = [np.flatnonzero(np.isin(of_rank, camp)).tolist() for camp in divergence.camps]
    return replace(divergence, camps=tuple(sorted(map(tuple, camps), key=lambda camp: (-len(camp), camp))))


def _label(table: ChunkTable, row: int) -> tuple[str, str]:
    return table.arrays[int(table.array[row])].key, table.describe(row)


def _name_of(table: ChunkTable, row: int) -> bytes:
    key, box = _label(table, row)
    return bytes.fromhex(digest_of(f"{key} {box}".encode()))[:8]


def _bits_of(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    """Return the sample of each tensor: all of a small one, else its begin, middle and end."""
    parts = [part for tensor in tensors for part in _parts_of(tensor.detach())]
    lengths = np.array([part.numel() for part in parts], np.int64).reshape(-1, len(_PLACES)).sum(axis=1)
    on_host = np.empty(int(lengths.sum()), np.uint8)
    first = np.cumsum([0, *(part.numel() for part in parts)])
    for device in {part.device for part in parts}:  # one copy from each device
        chosen = [number for number, part in enumerate(parts) if part.device == device]
        joined = torch.cat([parts[number] for number in chosen]).cpu().numpy()
        begin = 0
        for number in chosen:
            count = int(first[number + 1] - first[number])
            on_host[first[number] : first[number + 1]] = joined[begin : begin + count]
            begin += count
    ends = np.cumsum(lengths)
    return [on_host[end - count : end].tobytes() for end, count in zip(ends, lengths, strict=True)]


def _parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return a flat uint8 tensor for each place; the later ones are empty where the first has everything."""
    fits = tensor.numel() * tensor.element_size() <= _PLACE_BYTES
    # Torch calls any strides of a single element contiguous, but does not view them as bytes.
    is_run = tensor.is_contiguous() and tensor.numel() > 1
    if is_run and not tensor.is_conj() and not tensor.is_neg():
        flat, width = tensor.view(-1).view(torch.uint8), tensor.element_size()
        if fits:
            return [flat, *[flat[:0]] * (len(_PLACES) - 1)]
        runs = [_run_at(tensor.shape, width, place) for place in _PLACES]
        return [flat[start * width : (start + length) * width] for start, length in runs]
    if fits:
        whole = _flat_bytes(tensor)
        return [whole, *[whole[:0]] * (len(_PLACES) - 1)]
    return [_flat_bytes(_narrowed(tensor, place)) for place in _PLACES]


def _run_at(shape: Sequence[int], width: int, place: float) -> tuple[int, int]:
    """Return where the elements of `_narrowed` begin in a contiguous tensor, and how many they are."""
    start, inner = 0, math.prod(shape)
    for extent in shape:
        inner //= extent
        kept = max(1, min(extent, _PLACE_BYTES // (inner * width)))
        start += int((extent - kept) * place) * inner
        if kept > 1:
            return start, kept * inner
    return start, inner


def _narrowed(tensor: torch.Tensor, place: float) -> torch.Tensor:
    """Return a box of at most _PLACE_BYTES, or one element, at a place of the tensor.

    Along one dim it has several slices, before that one each and behind it all: one run in row-major order.
    """
    for dim, extent in enumerate(tensor.shape):
        slice_bytes = tensor.numel() // extent * tensor.element_size()
        kept = max(1, min(extent, _PLACE_BYTES // slice_bytes))
        tensor = tensor.narrow(dim, int((extent - kept) * place), kept)
    return tensor


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return as_bits(tensor).clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
