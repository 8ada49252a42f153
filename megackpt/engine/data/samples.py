"""Samples of tensors, with which ranks compare their replicas: at positions that move, and at fixed ones.

A sample that moves is 18 runs of neighbouring elements at equal distances, 256 bytes each. Save after save,
the runs move into the gaps. In 64 saves they begin at 1,152 positions. These are spread so evenly that each
sequence of 1/1,024 of the elements has been sampled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from megackpt.engine.data.tensor_bytes import as_bits
from megackpt.storage import digest_list

_SAVES = 64  # after so many, runs begin again near the positions where they have begun before
_WAVE = 1024  # in so many, they move from one of these positions to the next
_RUNS = 18
_RUN_BYTES = 256  # a page of memory that is not cached costs as much as these bytes, and far more than 64

_POSITIONS = (0.0, 0.5, 1.0)  # of fixed samples: the start, the middle and the end of a tensor
_POSITION_BYTES = 1024

# The number of rows of a matrix is often a multiple of 9 or 18. If the distance between runs were 1/18 of the
# matrix, all of them would lie in a few columns. So it is 1/18 of a shorter length, and the runs move from
# column to column. The length is shorter by so many 1,152ths. With the golden ratio, runs do not come back to
# the same columns soon.
_SHORTENED = 1.618

# torch.cat joins these dtypes in every version and on every device; others are viewed as integers.
_JOINED = {torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8}


def sample_digests(tensors: Sequence[torch.Tensor], number: int) -> npt.NDArray[np.uint64]:
    """Return a digest of a sample of each tensor, `[n]`. Local.

    Tensors of equal shape and dtype have equal digests if the sampled bits are equal, wherever they are and
    whatever their strides.

    Args:
        tensors: the tensors, on any device.
        number: of the save. The samples of 64 saves with numbers in sequence have different positions.
    """
    digests = np.zeros(len(tensors), np.uint64)
    # Tensors of one kind have their runs at the same positions. One call of torch joins their samples, and so
    # one copy brings them from a device. What is done for each tensor alone is most of the price.
    kinds: dict[tuple[torch.Size, torch.dtype, torch.device], list[int]] = {}
    for i, tensor in enumerate(tensors):
        kinds.setdefault((tensor.shape, tensor.dtype, tensor.device), []).append(i)
    with torch.no_grad():
        for (shape, dtype, _), indices in kinds.items():
            samples = _samples([tensors[i] for i in indices], shape.numel(), dtype, number)
            data = as_bits(torch.cat(samples)).cpu().numpy()
            nbytes = data.nbytes // len(indices)
            digests[indices] = digest_list(data.reshape(-1).view(np.uint8).data, nbytes) if nbytes else 0
    return digests


def _samples(
    tensors: Sequence[torch.Tensor], elements: int, dtype: torch.dtype, number: int
) -> list[torch.Tensor]:
    """Return the sampled elements of tensors of one shape, dtype and device, in one shape and dtype.

    They are a view of a tensor that is contiguous, and a copy of the elements of any other.
    """
    run = _RUN_BYTES // dtype.itemsize
    is_small = elements <= _RUNS * run
    start, distance = (0, 0) if is_small else run_positions(elements, run, number)
    size, stride = (elements,) if is_small else (_RUNS, run), (1,) if is_small else (distance, 1)
    samples = []
    for tensor in tensors:
        # A lazy conjugate or negative has other bits than the tensor that it was made of.
        if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            bits = tensor if dtype in _JOINED else as_bits(tensor)
            samples.append(bits.as_strided(size, stride, bits.storage_offset() + start))
            continue
        if is_small:
            sample = tensor.reshape(-1)
        else:
            positions = start + distance * np.arange(_RUNS)[:, np.newaxis] + np.arange(run)
            indices = np.unravel_index(positions, tuple(tensor.shape))
            sample = tensor[tuple(torch.from_numpy(index).to(tensor.device) for index in indices)]
        samples.append(sample.resolve_conj().resolve_neg() if dtype in _JOINED else as_bits(sample))
    return samples


@lru_cache(maxsize=256)  # the tensors of a model have few sizes
def run_positions(elements: int, run: int, number: int) -> tuple[int, int]:
    """Return where the first run begins in a save, and how far apart its runs are, in elements. Pure.

    Args:
        elements: of the tensor; more than all runs have together.
        run: elements of a run.
        number: of the save.

    >>> [run_positions(64_000, 16, number) for number in range(3)]
    [(0, 3550), (1817, 3550), (894, 3550)]
    """
    distance = int(elements - _SHORTENED * elements / (_RUNS * _SAVES)) // _RUNS
    # The first run begins at one of these positions, so that the last one ends with the tensor at most.
    begins = elements - run - (_RUNS - 1) * distance + 1
    # Bits in reverse: the runs of the next save lie in the middle of the largest gaps.
    turn = int(f"{number % _SAVES:06b}"[::-1], 2)
    # In later saves they lie a little further on, up to the next position, and then come back. So other
    # elements are sampled, and yet the positions of any 64 saves are spread evenly.
    wave = number % (2 * _WAVE)
    shift = min(wave, 2 * _WAVE - 1 - wave)
    # At the ends this would lead out of the tensor.
    start = ((2 * turn - 1) * _WAVE + 2 * shift) * begins // (2 * (_SAVES - 1) * _WAVE)
    return max(0, min(start, begins - 1)), distance


def fixed_samples(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    """Return a sample of each tensor, which is the same at every save. Local.

    A small tensor is all in its sample, else 1 KiB at its start, in its middle and at its end.
    """
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
