"""Uploads one new object of known size, completely or not at all.

A short file is one request. A longer one is a multipart upload, of which nothing is visible before it is
complete. The caller's thread fills buffers, and another thread uploads them; a queue of a bounded number of
buffers connects the two.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import weakref
from collections import deque
from typing import Any

import numpy as np

from megackpt.storage.object_client import obstore, translated_object_errors, with_retries
from megackpt.storage.options import ObjectOptions
from megackpt.storage.rawio import BUFFER_BYTES, COMMON_POOL, ByteArray
from megackpt.storage.store import SizedWriter

_MAX_PARTS = 10_000  # Source: Amazon S3, limits of multipart uploads.
_UPLOAD_ID = "megackpt-upload"  # metadata of an object: which upload made it


class _AbandonedError(Exception):
    """Makes the library abort an upload."""


class _BufferQueue:
    """Filled buffers for the library, which iterates over them; at most `limit` are in use.

    The library may read a buffer until it drops its view of it, also after it has repeated a request several
    times. So a buffer goes back to the pool when its view is garbage: nothing is copied.

    Args:
        buffer_bytes: how much of a buffer to use.
        limit: buffers in use at a time.
    """

    def __init__(self, *, buffer_bytes: int, limit: int) -> None:
        self._buffer_bytes = buffer_bytes
        self._limit = limit
        self._in_use = 0
        self._filled: deque[ByteArray] = deque()
        self.is_begun = False  # whether the library has asked for a buffer
        self._state = "open"  # or "ended", "abandoned", "broken"
        self._lock = threading.RLock()
        # Blocks enter the lock: Condition.__exit__ is Python code, and Ctrl-C in it could leave it locked.
        self._changed = threading.Condition(self._lock)

    def take(self) -> ByteArray | None:
        """Return an empty buffer, `[buffer_bytes]`, once there is one; None if the upload has failed."""
        with self._lock:
            self._changed.wait_for(lambda: self._in_use < self._limit or self._state == "broken")
            if self._state == "broken":
                return None
            self._in_use += 1
        buffer = COMMON_POOL.take()
        view = buffer[: self._buffer_bytes]
        weakref.finalize(view, self._give_back, buffer).atexit = False
        return view

    def put(self, view: ByteArray, count: int) -> None:
        """Pass the first `count` bytes of a buffer to the library. The caller must not use it any more."""
        with self._lock:
            self._filled.append(view if count == view.size else _front(view, count))
            self._changed.notify_all()

    def end(self, state: str) -> None:
        """End the queue: "ended" after the buffers that are in it, "abandoned" or "broken" immediately."""
        with self._lock:
            self._state = state
            if state != "ended":  # the buffers go back to the pool, and `take` on the other thread returns
                self._filled.clear()
            self._changed.notify_all()

    def __iter__(self) -> _BufferQueue:
        return self

    def __next__(self) -> ByteArray:
        self.is_begun = True
        with self._lock:
            self._changed.wait_for(lambda: self._filled or self._state != "open")
            if self._state == "abandoned":
                raise _AbandonedError
            if not self._filled:
                raise StopIteration
            return self._filled.popleft()

    def _give_back(self, buffer: ByteArray) -> None:
        COMMON_POOL.give_back(buffer)
        with self._lock:
            self._in_use -= 1
            self._changed.notify_all()


def _front(view: ByteArray, count: int) -> ByteArray:
    """Return the first bytes of a buffer; as long as they are referenced, the buffer stays in use."""
    # A slice of the view would have the buffer as its base, so the view would be garbage too early.
    return np.frombuffer(view.data[:count], np.uint8)


class ObjectWriter(SizedWriter):
    """A `StreamWriter` into an object store. The whole object becomes visible when the writer is closed.

    An upload that fails is aborted, and so is one whose block ends with an exception. If the process is
    killed, uploaded parts stay that no listing shows; a lifecycle rule of the bucket can remove them.

    Args:
        client: from `open_client`.
        key: the object's name relative to the URL of the client.
        nbytes: the size of the object.
        path: the name of the object in messages.
        options: sizes and numbers of requests.
    """

    def __init__(self, client: Any, key: str, nbytes: int, *, path: str, options: ObjectOptions) -> None:
        super().__init__(path, nbytes)
        self._client = client
        self._key = key
        self._buffer: ByteArray | None = None  # the one that is being filled
        self._filled = 0  # bytes in it
        self._error: Exception | None = None
        self._upload_id = secrets.token_hex(16)
        self._part_bytes = _part_bytes(nbytes, options.part_bytes)
        self._is_short = nbytes <= self._part_bytes
        self._options = options
        # One part is being filled while others are sent. A part takes one buffer or several.
        buffer_bytes = min(self._part_bytes, BUFFER_BYTES)
        parts = 1 if self._is_short else 1 + options.parts_in_flight
        self._queue = _BufferQueue(buffer_bytes=buffer_bytes, limit=self._part_bytes // buffer_bytes * parts)
        self._thread = threading.Thread(target=self._upload, name="megackpt-upload")
        if not self._is_short:
            self._thread.start()

    def write(self, data: memoryview) -> None:
        """Append `data`. See StreamWriter."""
        rest = np.frombuffer(data, np.uint8) if memoryview(data).nbytes else np.zeros(0, np.uint8)
        self._check_room(rest.size)
        self._written += rest.size
        while rest.size:
            if self._buffer is None:
                self._buffer = self._queue.take()
                if self._buffer is None:  # the upload has failed while there was more to write
                    self._abandon()
                    self._raise_error()
                    return
            count = min(rest.size, self._buffer.size - self._filled)
            # np.copyto releases the GIL; assigning to a slice of a memoryview would not.
            np.copyto(self._buffer[self._filled : self._filled + count], rest[:count])
            self._filled += count
            rest = rest[count:]
            if self._filled == self._buffer.size:
                self._put_buffer()

    def _complete(self) -> None:
        self._open = False
        self._put_buffer()
        self._queue.end("ended")
        if self._is_short:
            self._upload()
        else:
            self._thread.join()
        if self._error is not None and not self._has_arrived():
            self._raise_error()

    def _put_buffer(self) -> None:
        if self._buffer is not None:
            self._queue.put(self._buffer, self._filled)
        self._buffer, self._filled = None, 0

    def _upload(self) -> None:
        try:
            # Buffers that the library has taken out of the queue cannot be sent a second time.
            with_retries(self._send_request, self._options, unless=lambda: self._queue.is_begun)
        except Exception as error:  # noqa: BLE001 - the last line of a thread: raised by the one that writes
            self._error = error
            self._queue.end("broken")

    def _send_request(self) -> None:
        if not self._nbytes:  # the library takes no empty list of buffers
            obstore().put(self._client, self._key, b"", use_multipart=False)
            return
        obstore().put(
            self._client,
            self._key,
            self._queue,
            attributes=None if self._is_short else {_UPLOAD_ID: self._upload_id},
            use_multipart=not self._is_short,
            chunk_size=self._part_bytes,
            max_concurrency=self._options.parts_in_flight,
        )

    def _has_arrived(self) -> bool:
        """Return whether a failed upload is complete after all.

        The answer to its last request may have been lost. The library then repeats the request, which
        fails, since the upload no longer exists. The id in the metadata distinguishes this object from an
        older one.
        """
        if self._is_short:
            return False
        with contextlib.suppress(Exception):
            head = obstore().get(self._client, self._key, options={"head": True})
            is_ours = head.attributes.get(_UPLOAD_ID) == self._upload_id
            return bool(is_ours and head.meta["size"] == self._nbytes)
        return False

    def _raise_error(self) -> None:
        assert self._error is not None
        with translated_object_errors("write", self._path):
            raise self._error

    def _abandon(self) -> None:
        self._open = False
        self._buffer = None
        self._queue.end("abandoned")
        # The library aborts the upload before the thread ends. An upload that is left alone costs storage.
        if not self._is_short:
            self._thread.join()


def _part_bytes(nbytes: int, wanted: int) -> int:
    """Return the size of parts: `wanted`, or more if there would be too many parts.

    A size of more than one buffer is rounded up to whole buffers.
    """
    part_bytes = max(wanted, -(-nbytes // _MAX_PARTS))
    return part_bytes if part_bytes <= BUFFER_BYTES else -(-part_bytes // BUFFER_BYTES) * BUFFER_BYTES
