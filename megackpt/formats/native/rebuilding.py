"""Data files as parity gives them: each byte computed from the other files of its group.

Owns the computation. Whether a computed byte is right is known by the digests of those who read it: where a
second file of the group is damaged at the same place, it is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from megackpt.errors import StorageError
from megackpt.formats.native.parity import STEP_BYTES, ParityGroup, add_into, parity_header
from megackpt.storage import Store
from megackpt.storage.views import ReadOnlyView


class RebuiltFiles(ReadOnlyView):
    """A view of a store that has the files of groups, parity files as well, and no others.

    Each is computed, and never read itself.
    """

    def __init__(self, store: Store, groups: Sequence[ParityGroup]) -> None:
        super().__init__(store)
        self._groups = {f.name: group for group in groups for f in (group.parity, *group.members)}

    def names(self, prefix: str = "") -> list[str]:
        """Return the names of all files of groups, also of those that are gone."""
        return sorted(name for name in self._groups if name.startswith(prefix))

    def exists(self, name: str) -> bool:
        """Tell whether there is such a file in a group."""
        return name in self._groups

    def size(self, name: str) -> int:
        """Return the size in bytes, that in the list of parity files."""
        group = self._group_of(name)
        return next(f.nbytes for f in (group.parity, *group.members) if f.name == name)

    def read_into(self, name: str, offset_bytes: int, out: memoryview) -> None:
        """Fill `out` with what parity says of a file.

        Raises:
            StorageError, FormatError: another file of the group cannot be read.
        """
        group = self._group_of(name)
        if offset_bytes < 0 or offset_bytes + out.nbytes > self.size(name):
            raise StorageError(
                f"{self.location}/{name}: the list of parity files has it with {self.size(name):,} bytes, "
                f"too few for {offset_bytes}:{offset_bytes + out.nbytes}.",
                path=f"{self.location}/{name}",
            )
        if not out.nbytes:
            return
        view = out.cast("B")
        if name != group.parity.name:
            self._add_others(group, name, offset_bytes, view)
            return
        header = parity_header(max(member.nbytes for member in group.members))
        in_header = header[offset_bytes : offset_bytes + len(view)]
        view[: len(in_header)] = in_header
        self._add_others(group, name, offset_bytes + len(in_header) - len(header), view[len(in_header) :])

    def _group_of(self, name: str) -> ParityGroup:
        if name not in self._groups:
            path = f"{self.location}/{name}"
            raise StorageError(f"{path}: there is no parity for this file.", path=path)
        return self._groups[name]

    def _add_others(self, group: ParityGroup, name: str, start: int, out: memoryview) -> None:
        """Fill out with the exclusive or of all files but one; start counts in data files."""
        for at in range(0, len(out), STEP_BYTES):
            part = np.frombuffer(out[at : at + STEP_BYTES], np.uint8)
            part[:] = 0
            for other, offset, nbytes in self._others(group, name, start + at, len(part)):
                with self._store.borrow(other, offset, nbytes) as data:
                    add_into(part, data)

    def _others(
        self, group: ParityGroup, name: str, start: int, nbytes: int
    ) -> Iterator[tuple[str, int, int]]:
        """Yield which ranges of which other files make the bytes of one; start counts in data files."""
        header_nbytes = group.parity.nbytes - max(member.nbytes for member in group.members)
        if name != group.parity.name:
            yield group.parity.name, header_nbytes + start, nbytes
        for member in group.members:
            if member.name != name and member.nbytes > start:
                yield member.name, start, min(nbytes, member.nbytes - start)
