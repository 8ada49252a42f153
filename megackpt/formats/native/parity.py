"""Parity files: one for each group of data files, of which any single one can be computed from the others.

Owns how they are written and listed. Which files make a group was decided by `planning`; computing lost bytes
is in `rebuilding`. Source: docs/format.md.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megackpt.errors import FormatError
from megackpt.formats.documents import parse_document, read_small_file
from megackpt.formats.native import names
from megackpt.formats.native.data_file import HEADER_ALIGNMENT
from megackpt.formats.strategy import Json, WholeFile
from megackpt.storage import MAX_BORROWED_BYTES, FileDigester, Store, check_name

STEP_BYTES = MAX_BORROWED_BYTES
"""How much of each file of a group is in memory at a time."""


class ListedFile(WholeFile):
    """A file as the list of parity files has it."""

    __slots__ = ()

    def to_json(self) -> Json:
        """Return the entry that names it."""
        return {"file": self.name, "nbytes": self.nbytes, "xxh3_128": self.digest}

    @classmethod
    def from_json(cls, entry: Any, *, where: str, location: str) -> ListedFile:
        """Read an entry that may be damaged.

        Raises:
            FormatError: it is malformed.
            StorageError: its name could lead out of the checkpoint.
        """
        found = entry if isinstance(entry, dict) else {}
        name, nbytes, digest = found.get("file"), found.get("nbytes"), found.get("xxh3_128")
        if not isinstance(name, str) or type(nbytes) is not int or nbytes < 0 or not isinstance(digest, str):
            raise FormatError(f"{where}: {entry!r:.200} names no file. The file is damaged.", path=where)
        check_name(name, location=location)
        return cls(name=name, nbytes=nbytes, digest=digest)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityGroup:
    """Data files, and the parity file that protects them.

    Attributes:
        parity: the parity file.
        members: the data files.
    """

    parity: ListedFile
    members: tuple[ListedFile, ...]

    def to_json(self) -> Json:
        """Return its entry in the list."""
        return {**self.parity.to_json(), "of": [member.to_json() for member in self.members]}

    @classmethod
    def from_json(cls, entry: Any, *, where: str, location: str) -> ParityGroup:
        """Read an entry that may be damaged.

        Raises:
            FormatError: it is malformed.
            StorageError: a name could lead out of the checkpoint.
        """
        members = entry.get("of") if isinstance(entry, dict) else None
        if not isinstance(members, list) or not members:
            raise FormatError(
                f"{where}: {entry!r:.200} is no group of files. The file is damaged.", path=where
            )
        group = cls(
            parity=ListedFile.from_json(entry, where=where, location=location),
            members=tuple(ListedFile.from_json(m, where=where, location=location) for m in members),
        )
        longest = max(member.nbytes for member in group.members)
        if group.parity.nbytes != len(parity_header(longest)) + longest:
            raise FormatError(
                f"{where}: {group.parity.name!r} has {group.parity.nbytes:,} bytes, which its longest file "
                f"of {longest:,} rules out. The file is damaged.",
                path=where,
            )
        return group


def parity_header(nbytes: int) -> bytes:
    """Return the first bytes of a parity file for files of at most so many bytes.

    The rest is one tensor: the exclusive or of all files, each followed by zeros up to that length.
    """
    entries = {
        "__metadata__": {"format": "megackpt.parity", "version": "1"},
        "parity": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]},
    }
    text = json.dumps(entries, separators=(",", ":")).encode()
    padded = -(-(8 + len(text)) // HEADER_ALIGNMENT) * HEADER_ALIGNMENT - 8
    return padded.to_bytes(8, "little") + text.ljust(padded)


def write_parity_file(
    store: Store, *, attempt: str, number: int, members: Sequence[tuple[str, int]]
) -> ParityGroup:
    """Read the files of a group back, write their parity, durably; return what is to be listed.

    members are names and sizes.

    Raises:
        StorageError, FormatError: a file cannot be read, or ends early; or the store refused to write.
    """
    longest = max(nbytes for _, nbytes in members)
    header = parity_header(longest)
    name, total = names.parity_file(attempt, number), len(header) + longest
    digests = [FileDigester() for _ in members]
    of_parity = FileDigester()
    of_parity.update(memoryview(header))
    buffer = np.empty(min(STEP_BYTES, longest), np.uint8)
    with store.open_writer(name, total) as writer:
        writer.write(memoryview(header))
        for start in range(0, longest, STEP_BYTES):
            parity = buffer[: min(STEP_BYTES, longest - start)]
            parity[:] = 0
            for (member, nbytes), digest in zip(members, digests, strict=True):
                if nbytes > start:
                    stop = min(start + len(parity), nbytes)
                    with store.borrow(member, start, stop - start) as data:
                        digest.update(data)
                        add_into(parity, data)
            of_parity.update(parity.data)
            writer.write(parity.data)
    store.sync()
    return ParityGroup(
        parity=ListedFile(name=name, nbytes=total, digest=of_parity.result()),
        members=tuple(
            ListedFile(name=member, nbytes=nbytes, digest=digest.result())
            for (member, nbytes), digest in zip(members, digests, strict=True)
        ),
    )


def add_into(parity: npt.NDArray[np.uint8], data: memoryview) -> None:
    """Set parity, from its beginning on, to its exclusive or with data."""
    head = parity[: len(data)]
    np.bitwise_xor(head, np.frombuffer(data, np.uint8), out=head)


def list_of(groups: Sequence[ParityGroup]) -> bytes:
    """Return the list of parity files as it is stored."""
    return json.dumps({"groups": [group.to_json() for group in groups]}, indent=1).encode()


def read_groups(store: Store, manifest: Json) -> tuple[ParityGroup, ...]:
    """Return the groups of a checkpoint, checked; none where it has no parity.

    Raises:
        FormatError, IntegrityError, StorageError: the list is gone, or not what was saved.
    """
    if "parity" not in manifest:
        return ()
    data, where = read_small_file(store, manifest, "parity")
    said = parse_document(data, where=where).get("groups")
    if not isinstance(said, list):
        raise FormatError(f"{where}: it lists no groups. The file is damaged.", path=where)
    groups = tuple(ParityGroup.from_json(entry, where=where, location=store.location) for entry in said)
    listed = [f.name for group in groups for f in (group.parity, *group.members)]
    if len(set(listed)) != len(listed):
        raise FormatError(f"{where}: it lists a file twice. The file is damaged.", path=where)
    return groups
