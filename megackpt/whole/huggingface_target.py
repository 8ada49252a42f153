"""The folder that an export writes: what is there before, which files an interrupted export has finished.

Until the export ends, a subfolder of the target has the digest of the plan, and a record of each finished
file. The next export with the same plan keeps these files. No index lists a file before it is finished.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megackpt.errors import CheckpointError, DeclarationError
from megackpt.formats.documents import parse_document
from megackpt.formats.huggingface.names import INDEX, MODEL
from megackpt.formats.strategy import MANIFEST
from megackpt.storage import Store
from megackpt.storage.store import is_temporary_name
from megackpt.whole.huggingface_plan import PlannedFile

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
        if MANIFEST in names:
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
        self.store.delete(self.store.names(FOLDER))
        self.store.remove_empty_directories(FOLDER.rstrip("/"))
        self.store.sync()

    def _finished(self, names: Sequence[str]) -> dict[str, Digests]:
        present = set(names)
        if _PLAN not in present or self._document(_PLAN).get("plan") != self.plan:
            return {}
        finished: dict[str, Digests] = {}
        for file in self.files:
            if file.name not in present or _record_of(file.name) not in present:
                continue
            record = self._document(_record_of(file.name))
            is_same = record.get("plan") == self.plan and self.store.size(file.name) == file.nbytes
            digests = record.get("digests")
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
    return _is_weights(name) or (is_temporary_name(name) and ".safetensors." in name)
