"""Writing the files of a Hugging Face folder: read a window, write it, read the next one meanwhile."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megackpt.engine.data.progress import Progress
from megackpt.errors import IntegrityError
from megackpt.maintenance.huggingface_plan import PlannedFile, Segment, Window
from megackpt.maintenance.huggingface_target import Digests, ExportTarget
from megackpt.maintenance.mapped_reading import MappedCheckpoint
from megackpt.maintenance.windows import ByteArray, filled_windows
from megackpt.mapping import ShardedTensor
from megackpt.storage import BufferedWriter, FileDigester, Store
from megackpt.storage.store import temporary_name


@dataclass(frozen=True, slots=True)
class FileExport:
    """Writes files of a folder. Safe for many threads.

    Attributes:
        source: the checkpoint, read in the names of the folder.
        target: the folder.
        buffer_bytes: length of a window; two are in memory for each file that is being written.
        verify: read each file again when it is written.
        progress: for bytes written and bytes read again.
    """

    source: MappedCheckpoint
    target: ExportTarget
    buffer_bytes: int
    verify: bool
    progress: Progress

    def write(self, file: PlannedFile) -> None:
        """Write a file; it gets its name when it is whole and, with `verify`, equal to what was written.

        Raises:
            IntegrityError: the file differs from what was written.
            CheckpointError: reading or writing failed. There is no file of that name.
        """
        store = self.target.store
        name = file.name if store.replaces_on_close else temporary_name(file.name)
        digests = self._write(file, name)
        if self.verify:
            self.check(file, name, digests)
        if name != file.name:
            store.move(name, file.name)
        store.sync()
        self.target.record(file, digests)

    def check(self, file: PlannedFile, name: str, digests: Digests) -> None:
        """Read a written file again, under the name that it has now, and compare a digest of each tensor.

        Raises:
            IntegrityError: the file differs from what was written. It is removed.
        """
        store = self.target.store
        difference = self._difference(file, name, digests)
        if difference is not None:
            store.delete([name])
            store.sync()
            where = f"{store.location}/{file.name}"
            raise IntegrityError(
                f"{where}: {difference} differs from what was written. The file is removed. Suspect the "
                f"storage.",
                path=where,
            )

    def _difference(self, file: PlannedFile, name: str, digests: Digests) -> str | None:
        """Return what differs from what was written; None if nothing does."""
        header = bytearray(len(file.header))
        self.target.store.read_into(name, 0, memoryview(header))
        if header != file.header:
            return "the header"
        position = len(file.header)
        for tensor in file.tensors:
            if self._digest(name, position, tensor.nbytes) != digests[tensor.name]:
                return repr(tensor.name)
            position += tensor.nbytes
        return None

    def _write(self, file: PlannedFile, name: str) -> dict[str, str]:
        digesters = {tensor.name: FileDigester() for tensor in file.tensors}
        with self.target.store.open_writer(name, file.nbytes) as writer:
            buffered = BufferedWriter(writer)
            buffered.write(memoryview(file.header))
            for window, data in filled_windows(list(file.windows(self.buffer_bytes)), self._fill):
                for segment in window.segments:
                    digesters[segment.tensor.name].update(_bytes_of(segment, data).data)
                buffered.write(data[: window.nbytes].data)
                self.progress.advance(window.nbytes)
            buffered.flush()
        return {tensor: digester.result() for tensor, digester in digesters.items()}

    def _fill(self, window: Window, data: ByteArray) -> None:
        self.source.read([_request(segment, data) for segment in window.segments])

    def _digest(self, name: str, position: int, nbytes: int) -> str:
        digester = FileDigester()
        buffer = memoryview(bytearray(min(nbytes, self.buffer_bytes)))
        for start in range(0, nbytes, self.buffer_bytes):
            part = buffer[: min(self.buffer_bytes, nbytes - start)]
            self.target.store.read_into(name, position + start, part)
            digester.update(part)
            self.progress.advance(len(part))
        return digester.result()


def written_small_files(store: Store, files: dict[str, bytes]) -> None:
    """Write small files, each atomically."""
    for name, data in sorted(files.items()):
        store.replace(name, data)


def _bytes_of(segment: Segment, data: ByteArray) -> ByteArray:
    return data[segment.at : segment.at + segment.nbytes]


def _request(segment: Segment, data: ByteArray) -> ShardedTensor:
    """Return a segment as a flat range of its array, with its bytes of the window as memory."""
    tensor = segment.tensor
    dtype = getattr(torch, tensor.dtype)
    memory = torch.from_numpy(_bytes_of(segment, data)).view(dtype)
    shape = tensor.viewed
    return ShardedTensor(
        tensor.name,
        memory,
        dtype,
        shape,
        shape,
        (0,) * len(shape),
        flattened_range=slice(segment.start, segment.stop),
    )
