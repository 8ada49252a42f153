"""Uploads one new object of known size, all of it or none.

Owns the buffers between the thread that writes and the one that uploads, and what an upload ends in. A short
file is one request; a longer one a multipart upload, of which nothing is visible before it is complete.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import weakref
from collections import deque
from typing import Any

import numpy as np

from megackpt.storage.buffers import BUFFER_BYTES, COMMON_POOL, ByteArray
from megackpt.storage.object_client import ObjectOptions, obstore, repeating
from megackpt.storage.object_refusal import translated_object_errors
from megackpt.storage.sized_writer import SizedWriter

_MOST_PARTS = 10_000  # Source: Amazon S3, limits of multipart uploads.
_MARK = "megackpt-upload"  # metadata of an object that says which upload made it


class _AbandonedError(Exception):
    """Tells the library to abort an upload."""


class _Pipe:
    """An iterator over filled buffers, which waits for the next; the buffers that it lends are limited.

    A buffer goes back to the pool when the library has let go of it: that it may read it until then, after
    however many repetitions, needs no copy and no book-keeping here.
    """

    def __init__(self, *, piece_bytes: int, limit: int) -> None:
        self._piece_bytes = piece_bytes
        self._limit = limit
        self._lent = 0
        self._filled: deque[ByteArray] = deque()
        self.is_begun = False  # whether the library has asked for a buffer
        self._state = "open"  # or "ended", "abandoned", "broken"
        self._changed = threading.Condition()

    def take(self) -> ByteArray | None:
        """Return a buffer to be filled, `[piece_bytes]`, once there is one; None if nobody takes any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._lent < self._limit or self._state == "broken")
            if self._state == "broken":
                return None
            self._lent += 1
        buffer = COMMON_POOL.take()
        view = buffer[: self._piece_bytes]
        weakref.finalize(view, self._give_back, buffer).atexit = False
        return view

    def put(self, view: ByteArray, count: int) -> None:
        """Hand the first `count` bytes of a buffer on. The caller lets go of it."""
        with self._changed:
            self._filled.append(view if count == view.size else _front(view, count))
            self._changed.notify_all()

    def end(self, state: str) -> None:
        """Say how it ends: "ended" after the buffers that are there, "abandoned" or "broken" at once."""
        with self._changed:
            self._state = state
            if state != "ended":
                self._filled.clear()
            self._changed.notify_all()

    def __iter__(self) -> _Pipe:
        return self

    def __next__(self) -> ByteArray:
        self.is_begun = True
        with self._changed:
            self._changed.wait_for(lambda: self._filled or self._state != "open")
            if self._state == "abandoned":
                raise _AbandonedError
            if not self._filled:
                raise StopIteration
            return self._filled.popleft()

    def _give_back(self, buffer: ByteArray) -> None:
        COMMON_POOL.give(buffer)
        with self._changed:
            self._lent -= 1
            self._changed.notify_all()


def _front(view: ByteArray, count: int) -> ByteArray:
    """Return the first bytes of a buffer; they keep the whole of it lent."""
    return np.frombuffer(view.data[:count], np.uint8)  # its base is the view, not what that lies in


class ObjectWriter(SizedWriter):
    """A `StreamWriter` into an object store. The object is visible, all at once, when it is closed.

    client is the library's, key the object's name in it. An upload that fails or is left by an exception is
    aborted. One whose process is killed leaves parts, which no listing shows: a lifecycle rule of the bucket
    removes them.
    """

    def __init__(self, client: Any, key: str, nbytes: int, *, path: str, options: ObjectOptions) -> None:
        super().__init__(path, nbytes)
        self._client = client
        self._key = key
        self._filling: ByteArray | None = None
        self._filled = 0
        self._error: Exception | None = None
        self._mark = secrets.token_hex(16)
        part_bytes = _part_bytes(nbytes, options.part_bytes)
        piece = min(part_bytes, BUFFER_BYTES)
        self._is_short = nbytes <= part_bytes
        self._part_bytes = part_bytes
        self._options = options
        pieces = part_bytes // piece
        self._pipe = _Pipe(
            piece_bytes=piece, limit=pieces * (1 if self._is_short else 1 + options.parts_in_flight)
        )
        self._thread = threading.Thread(target=self._upload, name="megackpt-upload")
        if not self._is_short:
            self._thread.start()

    def write(self, data: memoryview) -> None:
        """Append `data`. See StreamWriter."""
        left = np.frombuffer(data, np.uint8) if memoryview(data).nbytes else np.zeros(0, np.uint8)
        self._check_room(left.size)
        self._written += left.size
        while left.size:
            if self._filling is None:
                self._filling = self._pipe.take()
                if self._filling is None:
                    self._fail()
                    return
            count = min(left.size, self._filling.size - self._filled)
            # np.copyto releases the GIL; assigning to a slice of a memoryview would not.
            np.copyto(self._filling[self._filled : self._filled + count], left[:count])
            self._filled += count
            left = left[count:]
            if self._filled == self._filling.size:
                self._hand_on()

    def _complete(self) -> None:
        self._open = False
        self._hand_on()
        self._pipe.end("ended")
        if self._is_short:
            self._upload()
        else:
            self._thread.join()
        if self._error is not None and not self._has_arrived():
            self._raise_error()

    def _hand_on(self) -> None:
        if self._filling is not None:
            self._pipe.put(self._filling, self._filled)
        self._filling, self._filled = None, 0

    def _upload(self) -> None:
        try:
            # What the library has been given cannot be given again.
            repeating(self._put, self._options, unless=lambda: self._pipe.is_begun)
        except Exception as error:  # noqa: BLE001 - the last line of a thread: raised by the one that writes
            self._error = error
            self._pipe.end("broken")

    def _put(self) -> None:
        if not self._nbytes:  # the library takes no empty list of buffers
            obstore().put(self._client, self._key, b"", use_multipart=False)
            return
        obstore().put(
            self._client,
            self._key,
            self._pipe,
            attributes=None if self._is_short else {_MARK: self._mark},
            use_multipart=not self._is_short,
            chunk_size=self._part_bytes,
            max_concurrency=self._options.parts_in_flight,
        )

    def _has_arrived(self) -> bool:
        """Whether a failed upload is complete nevertheless: its last answer may have been lost.

        Repeated, the last request finds no upload any more. The mark tells this upload from an older object.
        """
        if self._is_short:
            return False
        with contextlib.suppress(Exception):
            found = obstore().get(self._client, self._key, options={"head": True})
            return bool(found.attributes.get(_MARK) == self._mark and found.meta["size"] == self._nbytes)
        return False

    def _fail(self) -> None:
        """Raise what ended the upload while there was more to write."""
        self._abandon()
        self._raise_error()

    def _raise_error(self) -> None:
        assert self._error is not None
        with translated_object_errors("write", self._path):
            raise self._error

    def _abandon(self) -> None:
        self._open = False
        self._filling = None
        self._pipe.end("abandoned")
        if not self._is_short:
            self._thread.join()


def _part_bytes(nbytes: int, wanted: int) -> int:
    """Return the size of parts: that wanted, or as large as the limit of their number asks for.

    Whole buffers, if it is more than one.
    """
    least = max(wanted, -(-nbytes // _MOST_PARTS))
    return least if least <= BUFFER_BYTES else -(-least // BUFFER_BYTES) * BUFFER_BYTES
