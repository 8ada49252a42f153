"""Writes one new local file of known size, all of it or none.

Owns the order of events: reserve, choose a way, write, flush, and remove what stayed incomplete. How bytes
reach the file fast is in `sinks`; which file it is, and its directory, is up to `local`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

import numpy as np

from megackpt.storage.buffers import BufferPool
from megackpt.storage.error_translation import translated_errors
from megackpt.storage.rawio import enable_direct, reserve
from megackpt.storage.residency import is_in_memory
from megackpt.storage.sinks import BufferedSink, DirectSink, FileOptions, Sink
from megackpt.storage.sized_writer import SizedWriter


class FileWriter(SizedWriter):
    """A `StreamWriter` for a file that was just created.

    descriptor is open for writing and now belongs to the writer. remove deletes the file if it cannot be
    completed.
    """

    def __init__(
        self,
        descriptor: int,
        nbytes: int,
        *,
        path: str,
        remove: Callable[[], None],
        options: FileOptions,
        pool: BufferPool,
    ) -> None:
        super().__init__(path, nbytes)
        self._descriptor = descriptor
        self._remove = remove
        self._writing = translated_errors("write", path, nbytes=nbytes)
        self._sink: Sink = BufferedSink(descriptor)
        try:
            with translated_errors("reserve space", path, nbytes=nbytes):
                reserve(descriptor, nbytes)
            is_long = nbytes >= options.direct_from_bytes and not is_in_memory(descriptor)
            if options.direct and is_long and enable_direct(descriptor):
                self._sink = DirectSink(descriptor, options=options, pool=pool)
        except BaseException:
            self._abandon()
            raise

    def write(self, data: memoryview) -> None:
        """Append `data`. See StreamWriter."""
        nbytes = memoryview(data).nbytes
        self._check_room(nbytes)
        if nbytes:
            with self._writing:
                self._sink.append(np.frombuffer(data, np.uint8))
            self._written += nbytes

    def _complete(self) -> None:
        try:
            with self._writing:
                self._sink.finish()
                os.fsync(self._descriptor)
        except BaseException:
            self._abandon()
            raise
        with translated_errors("close", self._path):
            self._release()

    def _abandon(self) -> None:
        self._release()
        with contextlib.suppress(
            OSError
        ):  # what made us give up matters more than a file that cannot be removed
            self._remove()

    def _release(self) -> None:
        self._open = False
        self._sink.stop()  # before the descriptor's number can mean another file
        os.close(self._descriptor)
