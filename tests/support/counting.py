"""What tests count: reads of the files of a store, and open descriptors."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from megackpt.storage import LocalStore


class CountingStore(LocalStore):
    """Notes the name, offset and number of bytes of every read of a range."""

    def __init__(self, directory: Path | str) -> None:
        super().__init__(directory)
        self.reads: list[tuple[str, int, int]] = []  # `read_into` calls `stream_into`

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, _, nbytes in self.reads)

    def borrow(self, name: str, offset_bytes: int, nbytes: int) -> Any:
        self.reads.append((name, offset_bytes, nbytes))
        return super().borrow(name, offset_bytes, nbytes)

    def stream_into(self, name: str, offset_bytes: int, out: memoryview) -> Any:
        self.reads.append((name, offset_bytes, out.nbytes))
        return super().stream_into(name, offset_bytes, out)


def open_descriptors(folder: Path) -> int:
    """Return how many descriptors of this process are of a folder and what is in it.

    Others come and go: what other tests have left is closed when garbage is collected.
    """
    paths = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the list itself
            paths.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return sum(path == str(folder) or path.startswith(f"{folder}/") for path in paths)
