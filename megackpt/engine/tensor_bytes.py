"""Tensors as bytes: out in pieces, in as strided blocks.

The one place that touches the memory of the user's tensors. Bits are moved, never values: every dtype is
seen as integers of its size, so that NaN payloads and signed zeros survive.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from megackpt.errors import DeclarationError
from megackpt.mapping import ShardedTensor
from megackpt.planning import BlockCopy

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NUMPY_OF = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64, 16: np.complex128}


def check_source(tensor: ShardedTensor) -> None:
    """Refuse a tensor whose elements cannot be read.

    Raises:
        DeclarationError: it is sparse, quantized, or on the meta device.
    """
    data = tensor.data
    assert data is not None
    if data.is_meta or data.layout != torch.strided or data.is_quantized:
        kind = (
            "on the meta device"
            if data.is_meta
            else f"{data.layout}{', quantized' if data.is_quantized else ''}"
        )
        raise DeclarationError(
            f"{tensor.key!r}: the tensor is {kind} and has no elements in memory that could be moved. "
            f"Materialise it "
            f"(to_empty, to_dense, dequantize) first.",
            key=tensor.key,
        )


def check_target(tensor: ShardedTensor) -> None:
    """Refuse a tensor whose elements cannot be written one by one.

    Raises:
        DeclarationError: as `check_source`; or two of its elements share memory, or it is a lazy conjugate
            or negative.
    """
    check_source(tensor)
    data = tensor.data
    assert data is not None
    if data.is_conj() or data.is_neg() or _overlaps_itself(data):
        raise DeclarationError(
            f"{tensor.key!r}: the tensor is an expanded, overlapping, conjugate or negative view (strides "
            f"{data.stride()}), which cannot be filled in place. Load into a tensor of its own (clone()).",
            key=tensor.key,
        )


def _overlaps_itself(data: torch.Tensor) -> bool:
    """Whether two elements may lie at one place: a stride is shorter than all smaller ones reach."""
    if data.is_contiguous():
        return False
    reach = 0
    for stride, extent in sorted((s, n) for s, n in zip(data.stride(), data.shape, strict=True) if n > 1):
        if stride <= reach:
            return True
        reach += stride * (extent - 1)
    return False


def pieces_of(tensor: torch.Tensor, *, piece_bytes: int) -> Iterator[memoryview]:
    """Return the tensor's elements in row-major order as bytes.

    A contiguous tensor in host memory comes as it lies, without a copy; anything else in copies of at
    most piece_bytes (at least one element), each valid until the next is asked for.
    """
    return _pieces(as_bits(tensor), piece_bytes)


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor as integers of the size of its elements; 16-byte elements as complex128.

    Shares memory with the tensor, except for lazily conjugated or negated ones, which are resolved into a
    copy.
    """
    tensor = tensor.detach().resolve_conj().resolve_neg()
    integer = _SAME_SIZE.get(tensor.element_size())
    return tensor if integer is None else tensor.view(integer)


def as_elements(buffer: torch.Tensor, width: int) -> torch.Tensor:
    """View bytes as elements of a width, in which bits are moved; they begin at a multiple of it."""
    return buffer.view(_SAME_SIZE.get(width, torch.complex128))


def byte_view(bits: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor."""
    # By numpy, to which any strides of one element are contiguous: view() of torch would refuse them.
    return bits.numpy().reshape(-1).view(np.uint8).data


def run_in(bits: torch.Tensor, copy: BlockCopy) -> memoryview | None:
    """Return the memory that a contiguous copy fills, or None where it has to go through a buffer."""
    if not copy.is_run or not bits.is_cpu:
        return None
    return byte_view(_strided(bits, (copy.numel,), (1,), copy.target))


def copy_block(elements: torch.Tensor, origin: int, target: torch.Tensor, copy: BlockCopy) -> None:
    """Copy one strided block from a buffer into a tensor; values are converted where the dtypes differ.

    elements is a 1-D buffer whose first element is element `origin` of the stored chunk.
    """
    block = _strided(elements, copy.shape, copy.source_stride, copy.source - origin)
    _strided(target, copy.shape, copy.target_stride, copy.target).copy_(block)


def copy_bytes(
    data: memoryview, begins: int, element: torch.dtype, target: torch.Tensor, copy: BlockCopy
) -> None:
    """Copy one strided block from flat bytes into a tensor; values are converted where the dtypes differ.

    data holds the bytes of elements of dtype `element`, from byte `begins` of the stored chunk on.
    """
    width = element.itemsize
    if not target.is_cpu or target.dtype != element:
        aligned = data if _address_of(data) % width == 0 else memoryview(bytearray(data))
        copy_block(torch.frombuffer(aligned, dtype=element), begins // width, target, copy)
        return
    # numpy, since torch would start as many threads for each copy as training has.
    strides = [stride * width for stride in copy.source_stride]
    source = np.ndarray(copy.shape, _NUMPY_OF[width], data, copy.source * width - begins, strides)
    into = _strided(target, copy.shape, copy.target_stride, copy.target).numpy()
    np.copyto(into, source)


def _address_of(data: memoryview) -> int:
    return int(np.frombuffer(data, np.uint8).ctypes.data)


def _strided(bits: torch.Tensor, shape: tuple[int, ...], stride: tuple[int, ...], first: int) -> torch.Tensor:
    return bits.as_strided(shape, stride, bits.storage_offset() + first)


def _pieces(bits: torch.Tensor, piece_bytes: int) -> Iterator[memoryview]:
    if not bits.numel():
        return
    if bits.is_cpu and bits.is_contiguous():
        yield byte_view(bits)
    elif bits.ndim == 0 or bits.numel() * bits.element_size() <= piece_bytes:
        yield byte_view(bits.cpu().contiguous())
    elif len(bits) == 1:
        yield from _pieces(bits[0], piece_bytes)
    else:
        row_bytes = bits.numel() // len(bits) * bits.element_size()
        for rows in torch.split(bits, max(1, piece_bytes // row_bytes)):
            if row_bytes <= piece_bytes:
                yield byte_view(rows.cpu().contiguous())
            else:
                yield from _pieces(rows[0], piece_bytes)
