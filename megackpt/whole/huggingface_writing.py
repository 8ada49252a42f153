"""Writing the files of a Hugging Face folder: read a window, write it, read the next one meanwhile."""

from __future__ import annotations

from dataclasses import dataclass

from megackpt.engine.data.progress import Progress
from megackpt.errors import IntegrityError
from megackpt.formats.contents import Chunks, Part
from megackpt.storage import BufferedWriter, FileDigester, Store
from megackpt.storage.store import temporary_name
from megackpt.whole.huggingface_plan import PlannedFile, ranges_to_read
from megackpt.whole.huggingface_target import Digests, ExportTarget
from megackpt.whole.row_windows import RowWindow, Segment, windows_of
from megackpt.whole.windows import ByteArray, filled_windows, window_threads


@dataclass(frozen=True, slots=True)
class FileExport:
    """Writes files of a folder. Safe for many threads.

    Attributes:
        chunks: the tensors, each as one chunk.
        target: the folder.
        buffer_bytes: length of a window; two are in memory for each file that is being written.
        verify: read each file again when it is written.
        progress: for bytes written and bytes read again.
    """

    chunks: Chunks
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
        digesters = [FileDigester() for _ in file.tensors]
        parts = (
            (number, start, stop)
            for number, tensor in enumerate(file.tensors)
            for start, stop in ranges_to_read(tensor, self.buffer_bytes)
        )
        rows = {spec.key: row for row, spec in enumerate(self.chunks.table.arrays)}

        def fill(window: RowWindow, data: ByteArray) -> None:
            of_chunks = [Part(rows[file.tensors[s.row].name], s.start, s.stop) for s in window.segments]
            self.chunks.read_parts(of_chunks, [_bytes_of(s, data) for s in window.segments])

        windows = list(windows_of(parts, self.buffer_bytes))
        with self.target.store.open_writer(name, file.nbytes) as writer, window_threads() as threads:
            buffered = BufferedWriter(writer)
            buffered.write(memoryview(file.header))
            for window, data in filled_windows(windows, fill, threads):
                for segment in window.segments:
                    digesters[segment.row].update(_bytes_of(segment, data))
                    buffered.write(_bytes_of(segment, data))
                    self.progress.advance(segment.stop - segment.start)
            buffered.flush()
        return {t.name: digester.result() for t, digester in zip(file.tensors, digesters, strict=True)}

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


def _bytes_of(segment: Segment, data: ByteArray) -> memoryview:
    return data[segment.at : segment.at + segment.stop - segment.start].data
