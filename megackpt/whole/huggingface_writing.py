"""Writing the files of a Hugging Face folder: read a window, write it, read the next one meanwhile."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megackpt.engine.data.progress import Progress
from megackpt.errors import CheckpointError, DeclarationError, IntegrityError
from megackpt.formats.contents import Chunks, Part
from megackpt.formats.documents import is_ours, parse_document, read_manifest_file
from megackpt.formats.huggingface.names import INDEX, MODEL
from megackpt.formats.strategy import MANIFEST
from megackpt.storage import BufferedWriter, FileDigester, Store
from megackpt.storage.store import is_temporary_name, temporary_name
from megackpt.whole.huggingface_plan import PlannedFile, ranges_to_read
from megackpt.whole.windows import ByteArray, RowWindow, Segment, filled_windows, window_threads, windows_of

# The folder that an export writes: what is there before, which files an interrupted export has finished.
#
# Until the export ends, a subfolder of the target has the digest of the plan, and a record of each finished
# file. The next export with the same plan keeps these files. No index lists a file before it is finished.

FOLDER = ".megackpt-export/"
_PLAN = f"{FOLDER}plan.json"
_MAX_BYTES = 256 * 1024 * 1024
_WEIGHTS = (".safetensors", ".index.json")

Digests = Mapping[str, str]
"""xxh3-128 of each tensor of a file, by name."""


@dataclass(frozen=True, slots=True)
class ExportTarget:
    """The folder, for one plan.

    Attributes:
        store: the folder.
        plan: digest of the plan.
        files: the planned files.
    """

    store: Store
    plan: str
    files: Sequence[PlannedFile]

    def check(self, *, overwrite: bool) -> None:
        """Check that no model or checkpoint would be lost. Nothing is written.

        Raises:
            DeclarationError: the folder has a model that must not be replaced, or a checkpoint.
        """
        names, where = self.store.names(), self.store.location
        if MANIFEST in names and is_ours(read_manifest_file(self.store) or {}):
            raise DeclarationError(
                f"{where} has a checkpoint of another format. Name another directory.", path=where
            )
        old = [name for name in names if _is_weights(name)]
        if old and _PLAN not in names and not overwrite:
            raise DeclarationError(
                f"{where} has a model already ({old[0]}). Name another directory, or set overwrite "
                f"(--overwrite).",
                path=where,
            )

    def begin(self) -> dict[str, Digests]:
        """Make the folder ready; return the digests of the finished files of this plan, by file.

        Everything else of an earlier model is removed, the index first.
        """
        self.store.create()
        names = self.store.names()
        finished = self._finished(names)
        if not finished:
            # Before anything is removed: what is left after a crash is known to be an unfinished export.
            self.store.delete([name for name in names if name.startswith(FOLDER) and name != _PLAN])
            self.store.replace(_PLAN, json.dumps({"plan": self.plan}).encode())
        self.store.delete([name for name in (INDEX, MODEL) if name not in finished])
        self.store.sync()
        self.store.delete([name for name in names if _is_left_over(name) and name not in finished])
        self.store.sync()
        return finished

    def record(self, file: PlannedFile, digests: Digests) -> None:
        """Record that a file is finished: whole, durable and under its name."""
        document = {"plan": self.plan, "nbytes": file.nbytes, "digests": digests}
        self.store.replace(_record_of(file.name), json.dumps(document).encode())

    def end(self) -> None:
        """Remove what only an unfinished export needs."""
        names = self.store.names()
        # First one file with all records, last the plan: whenever this ends, all files stay finished.
        document = {"plan": self.plan, "finished": self._finished(names)}
        self.store.replace(_PLAN, json.dumps(document).encode())
        self.store.delete([name for name in names if name.startswith(FOLDER) and name != _PLAN])
        self.store.delete([_PLAN])
        self.store.remove_empty_directories(FOLDER.rstrip("/"))
        self.store.sync()

    def _finished(self, names: Sequence[str]) -> dict[str, Digests]:
        present = set(names)
        plan = self._document(_PLAN) if _PLAN in present else {}
        if plan.get("plan") != self.plan:
            return {}
        ended = plan.get("finished")
        of_ended = ended if isinstance(ended, dict) else {}  # of an export that was interrupted in its end
        finished: dict[str, Digests] = {}
        for file in self.files:
            if file.name not in present:
                continue
            is_recorded = _record_of(file.name) in present
            record = self._document(_record_of(file.name)) if is_recorded else {"plan": self.plan}
            is_same = record.get("plan") == self.plan and self.store.size(file.name) == file.nbytes
            digests = record.get("digests", of_ended.get(file.name))
            if is_same and isinstance(digests, dict) and digests.keys() == {t.name for t in file.tensors}:
                finished[file.name] = digests
        return finished

    def _document(self, name: str) -> Mapping[str, Any]:
        """Return a record; an empty one if it is damaged, as after it the file is written again."""
        try:
            data = self.store.read(name, max_bytes=_MAX_BYTES)
            return parse_document(data, where=f"{self.store.location}/{name}")
        except CheckpointError:
            return {}


def _record_of(file: str) -> str:
    return f"{FOLDER}{file}.json"


def _is_weights(name: str) -> bool:
    return "/" not in name and name.endswith(_WEIGHTS)


def _is_left_over(name: str) -> bool:
    """Return whether a file is of an earlier model or export, and not of this one."""
    return _is_weights(name) or ("/" not in name and is_temporary_name(name))


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
        return {t.name: digester.hexdigest() for t, digester in zip(file.tensors, digesters, strict=True)}

    def _digest(self, name: str, position: int, nbytes: int) -> str:
        digester = FileDigester()
        buffer = memoryview(bytearray(min(nbytes, self.buffer_bytes)))
        for start in range(0, nbytes, self.buffer_bytes):
            part = buffer[: min(self.buffer_bytes, nbytes - start)]
            self.target.store.read_into(name, position + start, part)
            digester.update(part)
            self.progress.advance(len(part))
        return digester.hexdigest()


def written_small_files(store: Store, files: dict[str, bytes]) -> None:
    """Write small files, each atomically."""
    for name, data in sorted(files.items()):
        store.replace(name, data)


def _bytes_of(segment: Segment, data: ByteArray) -> memoryview:
    return data[segment.at : segment.at + segment.stop - segment.start].data
