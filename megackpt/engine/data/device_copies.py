"""Copies between devices and host memory that run while other work is done.

Copies of CUDA tensors run on a stream of their own: through pinned buffers that this process keeps, or
straight into memory of the caller, who may `pin` it. Copies of other tensors are synchronous. If memory
cannot be pinned, it is ordinary memory: slower, with the same result.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import cache
from itertools import groupby
from operator import itemgetter
from types import TracebackType
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from megackpt.engine.data.tensor_bytes import as_bits, as_elements, byte_view, parts_of
from megackpt.storage.rawio import BUFFER_BYTES, COMMON_POOL

log = logging.getLogger(__name__)

AHEAD = 2
"""How many copies to the host run while the previous one is written. Each has a buffer."""

_KEPT = 8
_SMALL_BYTES = 64 << 10  # a tensor of which a copy takes less time than to borrow a buffer
_FOR_ALL_DEVICES = 1  # cudaHostRegisterPortable

Label = TypeVar("Label")

ByteArray: TypeAlias = npt.NDArray[np.uint8]
ByteSource: TypeAlias = ByteArray | torch.Tensor
"""Bytes in host memory, or on a device as a uint8 tensor; `[n]`."""


class HostBuffers:
    """Buffers of one size, `[buffer_bytes]` uint8, pinned if that is possible. Safe for many threads.

    At most `limit` unused buffers are kept. A buffer counts as unused also while a copy out of it is under
    way; whoever takes it waits for that copy.
    """

    def __init__(self, buffer_bytes: int, *, limit: int) -> None:
        self.buffer_bytes = buffer_bytes
        self._limit = limit
        self._idle: deque[tuple[torch.Tensor, torch.cuda.Event | None]] = deque()  # the longest idle first
        # Reentrant: the garbage collector may close a generator of `to_host` while this thread is in `take`.
        self._lock = threading.RLock()
        self._pins = True

    @property
    def nbytes(self) -> int:
        """Bytes of the unused buffers."""
        return len(self._idle) * self.buffer_bytes

    def take(self) -> torch.Tensor:
        """Return a buffer that no copy uses; its content is arbitrary."""
        with self._lock:
            is_full = len(self._idle) >= self._limit
            # A new buffer is better than a wait, as long as fewer than `limit` are kept.
            can_take = bool(self._idle) and (is_full or _is_done(self._idle[0][1]))
            oldest = self._idle.popleft() if can_take else None
        if oldest is None:
            return self._fresh()
        buffer, copied = oldest
        if copied is not None:
            copied.synchronize()
        return buffer

    def give(self, buffer: torch.Tensor, copied: torch.cuda.Event | None = None) -> None:
        """Put a buffer back; `copied` is recorded when the last copy that uses it is done."""
        with self._lock:
            if len(self._idle) < self._limit:
                self._idle.append((buffer, copied))
                return
        if copied is not None:  # its memory may be reused as soon as it is freed
            copied.synchronize()

    def _fresh(self) -> torch.Tensor:
        with torch.inference_mode(False):  # a tensor made in that mode could not be filled outside of it
            if self._pins:
                try:
                    return self._empty(pinned=True)
                except RuntimeError as error:
                    self._pins = False
                    log.warning(
                        "Host memory cannot be pinned; copies from and to devices are slower: %s", error
                    )
            return self._empty(pinned=False)

    def _empty(self, *, pinned: bool) -> torch.Tensor:
        return torch.empty(self.buffer_bytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)


COMMON_BUFFERS = HostBuffers(BUFFER_BYTES, limit=_KEPT)
"""The buffers of this process: at most 32 MiB are kept, and none is used for tensors in host memory."""


def follow(tensors: Iterable[torch.Tensor]) -> None:
    """Make later copies of these tensors wait for the work that is now on the caller's streams.

    Call it in the thread that has computed the tensors: other threads have other current streams.
    """
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        _side_stream(device).wait_stream(torch.cuda.current_stream(device))


def host_parts(tensor: torch.Tensor, *, part_bytes: int) -> Iterator[memoryview]:
    """Yield the bytes of a tensor's elements, in row-major order.

    A contiguous tensor in host memory is yielded as it is, without a copy. Any other tensor is yielded in
    copied parts of at most part_bytes and 4 MiB (at least one element), each valid until the next one. Parts
    of CUDA tensors are copied ahead; these copies wait for the work that is now on the caller's stream.
    """
    if tensor.is_cuda:
        follow([tensor])
        return (part for _, part in to_host((None, part) for part in parts_in_buffers(tensor, part_bytes)))
    # A lazy conjugate or negative has other bits than the memory that it refers to.
    is_as_stored = not tensor.is_conj() and not tensor.is_neg()
    if tensor.is_cpu and tensor.is_contiguous() and tensor.numel() and is_as_stored:
        return iter([byte_view(as_bits(tensor))])
    if 0 < tensor.numel() * tensor.element_size() <= min(part_bytes, _SMALL_BYTES):
        return iter([byte_view(as_bits(tensor).cpu().contiguous())])
    return _copied_parts(tensor, part_bytes)


def parts_in_buffers(tensor: torch.Tensor, part_bytes: int) -> Iterator[torch.Tensor]:
    """Yield `parts_of` a tensor that fit into a buffer, of those here or of the pool of `rawio`."""
    return parts_of(tensor, min(part_bytes, BUFFER_BYTES))


def _copied_parts(tensor: torch.Tensor, part_bytes: int) -> Iterator[memoryview]:
    # One buffer for all parts. Memory that is allocated for each part is freed into the heap of the thread,
    # which does not use all of it again: two threads have taken 150 MiB.
    with COMMON_POOL.borrow() as buffer:
        for part in parts_in_buffers(tensor, part_bytes):
            # as_bits would copy a lazy conjugate or negative once more.
            source = part if part.is_conj() or part.is_neg() else as_bits(part)
            nbytes = source.numel() * source.element_size()
            into = torch.from_numpy(buffer[:nbytes]).view(source.dtype).view(source.shape)
            into.copy_(source)
            yield buffer.data[:nbytes]


def to_host(
    parts: Iterable[tuple[Label, torch.Tensor]], buffers: HostBuffers = COMMON_BUFFERS
) -> Iterator[tuple[Label, memoryview]]:
    """Yield the bytes of parts of tensors with their labels, in order, each valid until the next one.

    Each part has to fit into a buffer. While one part is used, the next AHEAD parts are being copied. These
    copies wait for the work that `follow` has marked.
    """
    under_way: deque[tuple[Label, _Download]] = deque()
    try:
        for label, part in parts:
            under_way.append((label, _Download(part, buffers)))
            if len(under_way) > AHEAD:
                yield from _first_of(under_way)
        while under_way:
            yield from _first_of(under_way)
    finally:
        for _, download in under_way:
            download.release()


def rows_to_host(
    rows: Iterable[Iterable[torch.Tensor]], buffers: HostBuffers = COMMON_BUFFERS
) -> Iterator[Iterator[memoryview]]:
    """Yield the bytes of each row, in parts. Copies run ahead across rows.

    A part is valid until the next one is taken, of the same row or of the next.

    Args:
        rows: the parts of each row, at least one, as for `to_host`. They are asked for as they are copied.
        buffers: where parts are copied to.
    """
    labelled = ((number, part) for number, parts in enumerate(rows) for part in parts)
    for _, arriving in groupby(to_host(labelled, buffers), key=itemgetter(0)):
        yield (part for _, part in arriving)


def bytes_on_device(tensor: torch.Tensor, part_bytes: int) -> Iterator[torch.Tensor]:
    """Yield the bytes of a tensor's elements on its device, `[n]` uint8, in row-major order, for `Downloads`.

    Parts are those of `parts_in_buffers`. If the tensor is contiguous, they are views of it; if not, each is
    copied on the device.
    """
    for part in parts_in_buffers(tensor, part_bytes):
        with _on_side_stream(part.device):
            # contiguous() allocates on this stream: no other stream reuses the memory before the copy.
            bits = as_bits(part).contiguous()
        # view(-1) would keep the stride of a single element, which may be any, and reject the bytes.
        yield bits.as_strided((bits.numel(),), (1,)).view(torch.uint8)


class Downloads:
    """Copies of bytes into host memory. Copies from CUDA devices run while others begin.

    These copies wait for the work that `follow` has marked. All are done when the block is left. Until then
    the caller keeps the tensors.
    """

    def __init__(self) -> None:
        self._devices: set[torch.device] = set()

    def __enter__(self) -> Downloads:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.wait()

    def copy(self, source: ByteSource, target: ByteArray) -> None:
        """Begin to copy bytes; those in host memory are copied when this returns."""
        if isinstance(source, np.ndarray):
            np.copyto(target, source)  # without the interpreter lock
            return
        self._devices.add(source.device)
        with _on_side_stream(source.device):
            torch.from_numpy(target).copy_(source, non_blocking=True)

    def wait(self) -> None:
        """Return when the copies begun so far are done."""
        for device in self._devices:
            copied = _event(device)
            if copied is not None:
                copied.synchronize()


def pin(memory: ByteArray, device: torch.device) -> None:
    """Pin memory until `unpin`: all CUDA devices copy into it at the speed of their links.

    Args:
        memory: whole pages.
        device: a CUDA device that this process uses.

    Raises:
        RuntimeError: the system or the driver does not allow it.
    """

    def register() -> Any:
        with torch.cuda.device(device):  # a new thread's device is 0, where this process may have no context
            return torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, _FOR_ALL_DEVICES)

    # In its own thread: CUDA keeps an error as the last one of the thread, and the next kernel that the
    # thread launches raises it.
    with ThreadPoolExecutor(1) as thread:
        status = thread.submit(register).result()
    if int(status) != 0:
        raise RuntimeError(torch.cuda.cudart().cudaGetErrorString(status))


def unpin(memory: ByteArray) -> None:
    """Undo `pin`, before the memory is unmapped. No copy is under way."""
    torch.cuda.cudart().cudaHostUnregister(memory.ctypes.data)


class Uploads:
    """Copies into tensors on devices that run while the next bytes are read. Any thread may copy.

    The thread that owns the tensors enters and leaves the context. Copies wait for the work that its streams
    had before, and are done when it leaves.
    """

    def __init__(self, targets: Sequence[torch.Tensor], buffers: HostBuffers = COMMON_BUFFERS) -> None:
        self._targets = targets
        self._buffers = buffers

    def __enter__(self) -> Uploads:
        follow(self._targets)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for device in {target.device for target in self._targets if target.is_cuda}:
            torch.cuda.current_stream(device).wait_stream(_side_stream(device))
            # When a load returns, its tensors may be used on any stream, so the host waits, too.
            _side_stream(device).synchronize()

    def ordered_with_copies(self, device: torch.device) -> AbstractContextManager[None]:
        """Within the block, operations of torch on a device run in order with the copies to it."""
        return _on_side_stream(device)

    def copy(self, source: npt.NDArray[Any], target: torch.Tensor) -> None:
        """Begin to copy a block of elements into a tensor.

        Args:
            source: the block, strided, small enough for a buffer. It may change as soon as this returns.
            target: a view of the tensor as `as_bits` makes it, strided, of the same shape and element size.
        """
        buffer = self._buffers.take()
        packed = as_elements(buffer[: source.nbytes], target.element_size()).view(target.shape)
        np.copyto(packed.numpy(), source)
        with _on_side_stream(target.device):
            target.copy_(packed, non_blocking=True)
            copied = _event(target.device)
        self._buffers.give(buffer, copied)


class _Download:
    """The copy of one part of a tensor into a buffer."""

    def __init__(self, part: torch.Tensor, buffers: HostBuffers) -> None:
        self._part = part  # kept until it is copied, so that its memory is not reused
        self._buffers = buffers
        self._buffer = buffers.take()
        self._nbytes = part.numel() * part.element_size()
        with _on_side_stream(part.device):
            bits = as_bits(part)
            into = as_elements(self._buffer[: self._nbytes], bits.element_size()).view(bits.shape)
            # contiguous() allocates on this stream: no other stream reuses the memory before the copy.
            into.copy_(bits.contiguous(), non_blocking=True)
            self._copied = _event(part.device)

    def wait(self) -> memoryview:
        """Return the bytes when the copy is done."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._buffer.numpy().data[: self._nbytes]

    def release(self) -> None:
        """Put the buffer back."""
        self._buffers.give(self._buffer, self._copied)


def _first_of(under_way: deque[tuple[Label, _Download]]) -> Iterator[tuple[Label, memoryview]]:
    label, download = under_way[0]  # stays in the queue, so that it is released if the caller stops
    yield label, download.wait()
    under_way.popleft()
    download.release()


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def _on_side_stream(device: torch.device) -> Iterator[None]:
    if device.type != "cuda":
        yield
        return
    # The device first: otherwise leaving the stream creates a context on device 0, a new thread's device.
    with torch.cuda.device(device), torch.cuda.stream(_side_stream(device)):
        yield


def _event(device: torch.device) -> torch.cuda.Event | None:
    """Return an event for the copies begun so far; None if they are done already."""
    return _side_stream(device).record_event() if device.type == "cuda" else None


def _is_done(copied: torch.cuda.Event | None) -> bool:
    return copied is None or bool(copied.query())
