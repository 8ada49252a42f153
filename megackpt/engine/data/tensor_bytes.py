"""Tensors as bytes: yielded in parts, or filled by strided blocks.

Every dtype is viewed as integers of its size. So bits are copied and no values are converted: NaN payloads
and signed zeros stay. `device_copies` copies tensors that are not in host memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from megackpt.codec.arrays import has_memory, has_own_operations
from megackpt.entities import ShardedTensor
from megackpt.errors import DeclarationError
from megackpt.plans.planning import StridedCopy

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NUMPY_OF = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64, 16: np.complex128}


_MATERIALISE = "Give it memory first: to_empty(device=...), then load or initialise it."


def check_source(tensor: ShardedTensor, *, on_meta: str = _MATERIALISE) -> None:
    """Check that the elements of a tensor can be read.

    Args:
        tensor: a tensor with data.
        on_meta: advice for the error if the tensor is on the meta device.

    Raises:
        DeclarationError: the tensor is sparse, quantized, or without memory, as on the meta device.
    """
    data = tensor.data
    assert data is not None
    if data.is_meta:
        raise DeclarationError(
            f"{tensor.key!r}: the tensor is on the meta device, where tensors have no elements. {on_meta}",
            key=tensor.key,
        )
    if data.layout != torch.strided or data.is_quantized:
        kind = f"{data.layout}{', quantized' if data.is_quantized else ''}"
        raise DeclarationError(
            f"{tensor.key!r}: the tensor is {kind} and has no elements in memory that could be moved. "
            f"Materialise it (to_dense, dequantize) first.",
            key=tensor.key,
        )
    if not (_gives_bytes(data) if has_own_operations(data) else has_memory(data)):
        raise DeclarationError(
            f"{tensor.key!r}: the memory of the {type(data).__name__} is freed or out of reach, so it has no "
            f"elements that could be moved. Give a plain tensor, while FSDP or its class keeps its memory.",
            key=tensor.key,
        )


def _gives_bytes(data: torch.Tensor) -> bool:
    """Return whether a tensor with operations of its own gives the bytes of its first element."""
    try:
        first = data.detach()[(slice(0, 1),) * data.dim()]
        byte_view(as_bits(first).cpu().contiguous())
    except Exception:  # noqa: BLE001 - code of a class of others
        return False
    return True


def check_target(tensor: ShardedTensor, *, on_meta: str = _MATERIALISE) -> None:
    """Check that the elements of a tensor can be written one by one. Arguments as for `check_source`.

    Raises:
        DeclarationError: as `check_source`; or two elements share memory, or the tensor is a lazy conjugate
            or negative.
    """
    check_source(tensor, on_meta=on_meta)
    data = tensor.data
    assert data is not None
    if data.is_conj() or data.is_neg() or _overlaps_itself(data):
        raise DeclarationError(
            f"{tensor.key!r}: the tensor is an expanded, overlapping, conjugate or negative view (strides "
            f"{data.stride()}), which cannot be filled in place. Load into a tensor of its own (clone()).",
            key=tensor.key,
        )


def _overlaps_itself(data: torch.Tensor) -> bool:
    """Return whether two elements may share memory.

    They may if a stride is not larger than the span of the dims with smaller strides.
    """
    if data.is_contiguous():
        return False
    reach = 0  # the largest distance, in elements, of two elements along the dims so far
    # A dim of extent 1 has no second element, whatever its stride.
    for stride, extent in sorted((s, n) for s, n in zip(data.stride(), data.shape, strict=True) if n > 1):
        if stride <= reach:
            return True
        reach += stride * (extent - 1)
    return False


def parts_of(tensor: torch.Tensor, part_bytes: int) -> Iterator[torch.Tensor]:
    """Yield views of a tensor that hold its elements in row-major order, one after the other.

    A part has at most part_bytes, and at least one element. Nothing is copied.
    """
    tensor = tensor.detach()
    if not tensor.numel():
        return
    width = tensor.element_size()
    if tensor.ndim == 0 or tensor.numel() * width <= part_bytes:
        yield tensor
    elif tensor.is_contiguous():
        yield from torch.split(tensor.view(-1), max(1, part_bytes // width))
    elif len(tensor) == 1:
        yield from parts_of(tensor[0], part_bytes)
    else:
        row_bytes = tensor.numel() // len(tensor) * width
        for rows in torch.split(tensor, max(1, part_bytes // row_bytes)):
            if row_bytes <= part_bytes:
                yield rows
            else:
                yield from parts_of(rows[0], part_bytes)


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor as integers of the size of its elements; 16-byte elements as complex128.

    The view shares memory with the tensor, unless the tensor is lazily conjugated or negated: then it is
    a copy.
    """
    tensor = tensor.detach().resolve_conj().resolve_neg()
    integer = _SAME_SIZE.get(tensor.element_size())
    # No integer of torch has 16 bytes. A copy of complex128 to complex128 keeps all bits.
    return tensor if integer is None else tensor.view(integer)


def as_elements(buffer: torch.Tensor, width: int) -> torch.Tensor:
    """View bytes as integers of `width` bytes, or complex128 for 16; they begin at a multiple of it."""
    return buffer.view(_SAME_SIZE.get(width, torch.complex128))


def byte_view(bits: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor."""
    # Through numpy, for which one element is contiguous whatever its strides; view() of torch raises an
    # error.
    return bits.numpy().reshape(-1).view(np.uint8).data


def contiguous_bytes(bits: torch.Tensor, copy: StridedCopy) -> memoryview | None:
    """Return the memory that a contiguous copy fills, or None if the copy has to go through a buffer."""
    if not copy.is_contiguous or not bits.is_cpu:
        return None
    return byte_view(_strided(bits, (copy.numel,), (1,), copy.target))


def copy_block(elements: torch.Tensor, origin: int, target: torch.Tensor, copy: StridedCopy) -> None:
    """Copy one strided block from a buffer into a tensor; values are converted if the dtypes differ.

    Args:
        elements: a 1-D buffer with elements of the stored chunk.
        origin: number in the chunk of its first element.
        target: the tensor.
        copy: the block in the chunk and in the tensor.
    """
    block = _strided(elements, copy.shape, copy.source_stride, copy.source - origin)
    target_block(target, copy).copy_(block)


def copy_bytes(
    data: memoryview, begins: int, element: torch.dtype, target: torch.Tensor, copy: StridedCopy
) -> None:
    """Copy one strided block from flat bytes into a tensor; values are converted if the dtypes differ.

    Args:
        data: bytes of the stored chunk.
        begins: number in the chunk of the first of these bytes.
        element: dtype of the stored elements.
        target: the tensor.
        copy: the block in the chunk and in the tensor.
    """
    width = element.itemsize
    if not target.is_cpu or target.dtype != element:
        # torch takes memory that is aligned and, though it only reads, writable: an object store's is not.
        is_usable = _address_of(data) % width == 0 and not data.readonly
        elements = torch.frombuffer(data if is_usable else bytearray(data), dtype=element)
        copy_block(elements, begins // width, target, copy)
        return
    # numpy, since torch would start as many threads for each copy as training uses.
    np.copyto(target_block(target, copy).numpy(), source_block(data, begins, width, copy))


def copy_to_flat_bytes(
    data: memoryview, begins: int, width: int, target: memoryview, copy: StridedCopy
) -> None:
    """Like `copy_bytes`, without conversion, for a contiguous tensor that is given as flat bytes."""
    into = _block_in(target, copy.target * width, width, copy.shape, copy.target_stride)
    np.copyto(into, source_block(data, begins, width, copy))


def source_block(data: memoryview, begins: int, width: int, copy: StridedCopy) -> npt.NDArray[Any]:
    """Return the block to copy as a view of flat bytes, in integers of `width` bytes or complex128.

    data begins at byte `begins` of the stored chunk.
    """
    return _block_in(data, copy.source * width - begins, width, copy.shape, copy.source_stride)


def target_block(target: torch.Tensor, copy: StridedCopy) -> torch.Tensor:
    """Return the block of a tensor that a copy fills, as a view."""
    return _strided(target, copy.shape, copy.target_stride, copy.target)


def _block_in(
    data: memoryview, first: int, width: int, shape: tuple[int, ...], stride: tuple[int, ...]
) -> npt.NDArray[Any]:
    """Return a view of a block of elements in flat bytes; `first` counts bytes, `stride` elements."""
    strides = [step * width for step in stride]
    # numpy raises an error if the block does not lie within the bytes.
    block: npt.NDArray[Any] = np.ndarray(shape, _NUMPY_OF[width], data, first, strides)
    return block


def _address_of(data: memoryview) -> int:
    return int(np.frombuffer(data, np.uint8).ctypes.data)


def _strided(bits: torch.Tensor, shape: tuple[int, ...], stride: tuple[int, ...], first: int) -> torch.Tensor:
    return bits.as_strided(shape, stride, bits.storage_offset() + first)
