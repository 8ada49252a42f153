"""Base class of the formats of other tools: folders of files that torch.save wrote. Read only.

A subclass finds the files of a folder, and says which arrays they hold. So a new tool is one class.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Iterator

from megackpt.errors import CheckpointError, FormatError, IntegrityError, NotACheckpointError
from megackpt.formats.contents import Contents
from megackpt.formats.damage import Damage, damage_of
from megackpt.formats.file_names import FileNames
from megackpt.formats.foreign.contents import contents_of
from megackpt.formats.foreign.mapped_files import file_stamp, noted_stamps
from megackpt.formats.foreign.state import ForeignState
from megackpt.formats.strategy import Json, LoadStrategy
from megackpt.formats.torch_zip import is_zip_file
from megackpt.storage import LocalStore, Store

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")
"""Of files of torch.save, by custom."""


class ForeignLoadStrategy(LoadStrategy):
    """Opens the files of another tool. Arrays stay in the files, which are mapped; no pickle runs code.

    Attributes:
        file_names: recognises the names of the tool's files.
    """

    version = 1
    file_names: FileNames

    @abstractmethod
    def read(self, path: str, *, checks_bytes: bool) -> ForeignState:
        """Return what the files hold.

        Args:
            path: of the folder, or of a single file.
            checks_bytes: whether to compare the checksums in the files, for which all bytes are read.

        Raises:
            NotACheckpointError, UnsupportedError, FormatError: the files cannot be read, with the reason.
        """

    def detect(self, store: Store) -> Json | None:
        """Recognise the files by their names."""
        if not any(map(self.file_names.is_foreign, names_of(store))):
            return None
        return self.manifest()

    def manifest(self) -> Json:
        """Return what stands for a metadata.json, which these tools do not write."""
        return {"sharded_backend": self.backend, "sharded_backend_version": self.version}

    def open(self, store: Store, manifest: Json, *, allow_unsafe_pickle: bool) -> Contents:
        """Map the files. Nothing that they name runs, whatever allow_unsafe_pickle is."""
        return self.open_path(local_path(store))

    def open_path(self, path: str) -> Contents:
        """Return what the files at a path hold as the contents of a checkpoint. Local."""

        def check_bytes() -> None:
            self.read(path, checks_bytes=True)

        def check_unchanged() -> None:
            for file, stamp in stamps.items():
                if file_stamp(file) != stamp:
                    raise IntegrityError(
                        f"{file} changed while it was read, so what was read may be of two states. Wait "
                        f"until nothing writes there, and start again.",
                        path=file,
                    )

        with noted_stamps() as stamps:
            state = self.read(path, checks_bytes=False)
        return contents_of(
            state,
            where=path,
            check_bytes=check_bytes if _have_checksums(path) else None,
            check_unchanged=check_unchanged,
        )

    def check_files(self, store: Store, manifest: Json, *, deep: bool) -> Iterator[Damage]:
        """Yield what is wrong with the files; with deep, their checksums are compared."""
        try:
            self.read(local_path(store), checks_bytes=deep)
        except CheckpointError as error:
            yield damage_of(error, location=store.location)


def _have_checksums(path: str) -> bool:
    """Return whether files of torch.save have checksums; those of its old form, no zip files, have none."""
    paths = [path, *(os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names)]
    return all(is_zip_file(file) for file in paths if os.path.isfile(file) and file.endswith(SUFFIXES))


def names_of(store: Store) -> list[str]:
    """Return the names of the files in a folder; of a store at a single file, that of the file."""
    if isinstance(store, LocalStore) and os.path.isfile(store.location):
        return [os.path.basename(store.location)]
    return store.names()


def folder_of_latest(path: str, tracker: str, folder_of: Callable[[str], str] = str) -> str:
    """Return the folder of the step that a file names, or the path itself if it has no such file.

    Args:
        path: of a folder of steps, or of one step.
        tracker: name of the file.
        folder_of: returns the name of the folder for the text in the file.

    Raises:
        FormatError: the file names no folder in path.
    """
    file_path = os.path.join(path, tracker)
    if not os.path.isfile(file_path):
        return path
    with open(file_path, encoding="utf-8", errors="replace") as file:
        text = file.read(1000).strip()
    name = folder_of(text)
    # The text may be damaged or forged. It must not lead out of the folder.
    if not name or os.path.basename(name) != name or name in (".", ".."):
        raise FormatError(
            f"{file_path}: {text!r:.80} is not the name of a folder in {path}. Name the folder of one step.",
            path=file_path,
        )
    return os.path.join(path, name)


def local_path(store: Store) -> str:
    """Return the path of a folder or a file.

    Raises:
        NotACheckpointError: it is not on a file system, where files can be mapped.
    """
    if isinstance(store, LocalStore):
        return store.location
    raise NotACheckpointError(
        f"{store.location} is not a local directory, and files of torch.save are read from one only. Copy "
        f"the folder to a disk first.",
        path=store.location,
    )
