"""Copies between devices and host memory, under way while something else is done.

Owns the pinned buffers that they go through, which are kept for the life of the process, and the streams that
they run on. Only tensors on CUDA devices have a stream beside the caller's; copies of all others are done at
once. A buffer that cannot be pinned is used as it is: copies are slower then, and the same.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cache
from itertools import groupby
from operator import itemgetter
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from megackpt.engine.data.tensor_bytes import as_bits, as_elements, byte_view, parts_of
from megackpt.storage.buffers import BUFFER_BYTES

log = logging.getLogger(__name__)

AHEAD = 2
"""Copies to the host that are under way while the one before them is written. Each has a buffer."""

_KEPT = 8

Label = TypeVar("Label")


class HostBuffers:
    """Buffers of one size, `[buffer_bytes]` uint8, pinned where that is possible. Safe for many threads.

    At most `limit` unused ones are kept, also while copies out of them are under way: then the next to come
    waits for the oldest copy.
    """

    def __init__(self, buffer_bytes: int, *, limit: int) -> None:
        self.buffer_bytes = buffer_bytes
        self._limit = limit
        self._idle: deque[tuple[torch.Tensor, torch.cuda.Event | None]] = deque()  # the longest idle first
        self._lock = threading.Lock()
        self._pins = True

    @property
    def nbytes(self) -> int:
        """How much memory is kept."""
        return len(self._idle) * self.buffer_bytes

    def take(self) -> torch.Tensor:
        """Return a buffer with arbitrary content that no copy uses."""
        with self._lock:
            is_full = len(self._idle) >= self._limit
            oldest = self._idle.popleft() if self._idle and (is_full or _is_over(self._idle[0][1])) else None
        if oldest is None:
            return self._fresh()
        buffer, copied = oldest
        if copied is not None:
            copied.synchronize()
        return buffer

    def give(self, buffer: torch.Tensor, copied: torch.cuda.Event | None = None) -> None:
        """Take a buffer back; `copied` is when the last copy that uses it will be over."""
        with self._lock:
            if len(self._idle) < self._limit:
                self._idle.append((buffer, copied))
                return
        if copied is not None:  # its memory may become another's
            copied.synchronize()

    def _fresh(self) -> torch.Tensor:
        with torch.inference_mode(False):  # what is made in that mode could not be filled outside of it
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
"""The buffers of this process. It keeps at most 32 MiB, and takes none for tensors in host memory."""


def follow(tensors: Iterable[torch.Tensor]) -> None:
    """Let copies of these tensors that are begun later wait for what the caller's streams are doing now.

    For the thread in which the tensors were computed: other threads have other current streams.
    """
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        _side_stream(device).wait_stream(torch.cuda.current_stream(device))


def host_parts(tensor: torch.Tensor, *, part_bytes: int) -> Iterator[memoryview]:
    """Return the tensor's elements in row-major order as bytes.

    A contiguous tensor in host memory is given as it lies, without a copy; anything else in copies of at
    most part_bytes (at least one element), each valid until the next is asked for. From CUDA devices copies
    are made ahead; there part_bytes is at most 4 MiB. They follow what the caller's stream is doing now.
    """
    if not tensor.is_cuda:
        if tensor.is_cpu and tensor.is_contiguous() and tensor.numel():
            return iter([byte_view(as_bits(tensor))])
        return (byte_view(as_bits(part).cpu().contiguous()) for part in parts_of(tensor, part_bytes))
    follow([tensor])
    return (piece for _, piece in to_host((None, part) for part in parts_in_buffers(tensor, part_bytes)))


def parts_in_buffers(tensor: torch.Tensor, part_bytes: int) -> Iterator[torch.Tensor]:
    """Yield `parts_of` a tensor on a device that fit into the common buffers."""
    return parts_of(tensor, min(part_bytes, COMMON_BUFFERS.buffer_bytes))


def to_host(
    parts: Iterable[tuple[Label, torch.Tensor]], buffers: HostBuffers = COMMON_BUFFERS
) -> Iterator[tuple[Label, memoryview]]:
    """Yield the bytes of parts of tensors with their labels, in order, each valid until the next is taken.

    A part fits into a buffer. While one is looked at, the next AHEAD are being copied; they follow what
    `follow` was told of.
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
    rows: Sequence[int],
    *,
    is_copied: Callable[[int], bool],
    parts: Callable[[int], Iterator[torch.Tensor]],
    as_they_lie: Callable[[int], Iterator[memoryview]],
    buffers: HostBuffers = COMMON_BUFFERS,
) -> Iterator[Iterator[memoryview]]:
    """Yield the pieces of each row in turn. Copies run ahead from row to row.

    Rows that are copied go through buffers, in parts, of which each has at least one; the bytes of others are
    asked for when it is their turn. Pieces are valid until the next is taken, of this row or the next.
    """
    labelled = ((row, part) for row in rows if is_copied(row) for part in parts(row))
    arriving = groupby(to_host(labelled, buffers), key=itemgetter(0))
    for row in rows:
        yield (piece for _, piece in next(arriving)[1]) if is_copied(row) else as_they_lie(row)


class Uploads:
    """Copies into tensors on devices, under way while the next bytes are read. Any thread may copy.

    Entered and left by the thread that has the tensors: copies follow what its streams were doing before, and
    are over when it leaves.
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
            _side_stream(device).synchronize()

    def ordered_with_copies(self, device: torch.device) -> AbstractContextManager[None]:
        """Within the block, what torch does on a device is in order with copies to it."""
        return _on_side_stream(device)

    def copy(self, source: npt.NDArray[Any], target: torch.Tensor) -> None:
        """Begin to copy a block, strided on either side, into a block of a tensor of the same shape and bits.

        It fits into a buffer, and may change as soon as this returns. target is seen as by `as_bits`.
        """
        buffer = self._buffers.take()
        packed = as_elements(buffer[: source.nbytes], target.element_size()).view(target.shape)
        np.copyto(packed.numpy(), source)
        with _on_side_stream(target.device):
            target.copy_(packed, non_blocking=True)
            copied = _event(target.device)
        self._buffers.give(buffer, copied)


class _Download:
    """One part of a tensor on its way into a buffer."""

    def __init__(self, part: torch.Tensor, buffers: HostBuffers) -> None:
        self._part = part  # until it is copied, its memory must not become another tensor's
        self._buffers = buffers
        self._buffer = buffers.take()
        self._nbytes = part.numel() * part.element_size()
        with _on_side_stream(part.device):
            bits = as_bits(part)
            into = as_elements(self._buffer[: self._nbytes], bits.element_size()).view(bits.shape)
            # What contiguous() makes is memory of this stream, which no other takes over before the copy.
            into.copy_(bits.contiguous(), non_blocking=True)
            self._copied = _event(part.device)

    def wait(self) -> memoryview:
        """Return the bytes when they are there."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._buffer.numpy().data[: self._nbytes]

    def release(self) -> None:
        """Give the buffer back."""
        self._buffers.give(self._buffer, self._copied)


def _first_of(under_way: deque[tuple[Label, _Download]]) -> Iterator[tuple[Label, memoryview]]:
    label, download = under_way[0]  # it stays there, so that it is released if nobody asks for more
    yield label, download.wait()
    under_way.popleft()
    download.release()


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _on_side_stream(device: torch.device) -> Iterator[None]:
    if device.type != "cuda":
        yield
        return
    # The device first: else, leaving the stream makes a context on device 0, where a new thread begins.
    with torch.cuda.device(device), torch.cuda.stream(_side_stream(device)):
        yield


def _event(device: torch.device) -> torch.cuda.Event | None:
    """Return when the copies begun so far are over; None: they are."""
    return _side_stream(device).record_event() if device.type == "cuda" else None


def _is_over(copied: torch.cuda.Event | None) -> bool:
    return copied is None or bool(copied.query())  # type: ignore[no-untyped-call]
