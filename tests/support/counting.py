"""A store that notes what is read of its files."""

from __future__ import annotations

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
