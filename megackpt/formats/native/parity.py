"""Parity files: one for each group of data files, from which any single lost file of the group is computed.

`plans.planning` decides which files make a group. A computed byte is wrong if a second file of the group is
damaged at the same position. So every reader checks computed bytes against the digests of the index.
Source: docs/format.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megackpt.errors import StorageError
from megackpt.formats.documents import damaged, parse_document, read_small_file, write_small_file
from megackpt.formats.native import names
from megackpt.formats.native.data_file import HEADER_ALIGNMENT
from megackpt.formats.safetensors_encoding import encode_header
from megackpt.formats.strategy import Json, WholeFile
from megackpt.plans.planning.redundancy import parity_groups, parity_writer
from megackpt.storage import MAX_BORROWED_BYTES, FileDigester, Store, check_name
from megackpt.storage.views import ReadOnlyView

PART_BYTES = MAX_BORROWED_BYTES
"""Bytes of each file of a group that are in memory at a time."""


class ListedFile(WholeFile):
    """A file in the list of parity files."""

    __slots__ = ()

    def to_json(self) -> Json:
        """Return the entry that names the file."""
        return {"file": self.name, "nbytes": self.nbytes, "xxh3_128": self.digest}

    @classmethod
    def from_json(cls, entry: Any, *, where: str, location: str) -> ListedFile:
        """Read an entry that may be damaged.

        Raises:
            FormatError: it is malformed.
            StorageError: its name could lead out of the checkpoint.
        """
        fields = entry if isinstance(entry, dict) else {}
        name, nbytes, digest = fields.get("file"), fields.get("nbytes"), fields.get("xxh3_128")
        if not isinstance(name, str) or type(nbytes) is not int or nbytes < 0 or not isinstance(digest, str):
            raise damaged(f"{entry!r:.200} names no file", where)
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

    @property
    def files(self) -> tuple[ListedFile, ...]:
        """The parity file and the data files."""
        return (self.parity, *self.members)

    @property
    def longest(self) -> int:
        """Size of the longest data file, in bytes."""
        return max(member.nbytes for member in self.members)

    def to_json(self) -> Json:
        """Return the group's entry in the list."""
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
            raise damaged(f"{entry!r:.200} is no group of files", where)
        group = cls(
            parity=ListedFile.from_json(entry, where=where, location=location),
            members=tuple(ListedFile.from_json(m, where=where, location=location) for m in members),
        )
        # The position of the data in the parity file is computed from its size, so the two must fit.
        if group.parity.nbytes != len(parity_header(group.longest)) + group.longest:
            raise damaged(
                f"{group.parity.name!r} has {group.parity.nbytes:,} bytes, which its longest file of "
                f"{group.longest:,} rules out",
                where,
            )
        return group


def parity_header(nbytes: int) -> bytes:
    """Return the first bytes of a parity file for files of at most so many bytes.

    The rest is one tensor: the exclusive or of all files, each followed by zeros up to that length.
    """
    parity = ("parity", "U8", [nbytes], nbytes)
    metadata = {"format": "megackpt.parity", "version": "1"}
    return encode_header([parity], metadata=metadata, alignment=HEADER_ALIGNMENT)


def write_parity_file(
    store: Store, *, attempt: str, number: int, members: Sequence[tuple[str, int]]
) -> ParityGroup:
    """Read the files of a group back and write their parity durably; return the group for the list.

    members are names and sizes.

    Raises:
        StorageError, FormatError: a file cannot be read, or ends early; or the store cannot write.
    """
    longest = max(nbytes for _, nbytes in members)
    header = parity_header(longest)
    name, total = names.parity_file(attempt, number), len(header) + longest
    member_digests = [FileDigester() for _ in members]
    parity_digest = FileDigester()
    parity_digest.update(memoryview(header))
    buffer = np.empty(min(PART_BYTES, longest), np.uint8)
    with store.open_writer(name, total) as writer:
        writer.write(memoryview(header))
        # A part of each file at a time: memory does not grow with the number of files.
        for start in range(0, longest, PART_BYTES):
            parity = buffer[: min(PART_BYTES, longest - start)]
            parity[:] = 0
            for (member, nbytes), digest in zip(members, member_digests, strict=True):
                # A shorter file counts as if zeros followed it, which change nothing.
                if nbytes > start:
                    stop = min(start + len(parity), nbytes)
                    with store.borrow(member, start, stop - start) as data:
                        digest.update(data)
                        _xor_into(parity, data)
            parity_digest.update(parity.data)
            writer.write(parity.data)
    # The receipt makes rank 0 list this file, so its name must be durable first.
    store.sync()
    return ParityGroup(
        parity=ListedFile(name=name, nbytes=total, digest=parity_digest.hexdigest()),
        members=tuple(
            ListedFile(name=member, nbytes=nbytes, digest=digest.hexdigest())
            for (member, nbytes), digest in zip(members, member_digests, strict=True)
        ),
    )


def _xor_into(parity: npt.NDArray[np.uint8], data: memoryview) -> None:
    """Set the beginning of parity to its exclusive or with data."""
    head = parity[: len(data)]
    np.bitwise_xor(head, np.frombuffer(data, np.uint8), out=head)


def list_of(groups: Sequence[ParityGroup]) -> bytes:
    """Return the list of parity files as it is stored."""
    return json.dumps({"groups": [group.to_json() for group in groups]}, indent=1).encode()


def read_groups(store: Store, manifest: Json) -> tuple[ParityGroup, ...]:
    """Return the groups of a checkpoint, checked; none if it has no parity.

    Raises:
        FormatError, IntegrityError, StorageError: the list is missing, or not what was saved.
    """
    if "parity" not in manifest:
        return ()
    data, where = read_small_file(store, manifest, "parity")
    entries = parse_document(data, where=where).get("groups")
    if not isinstance(entries, list):
        raise damaged("it lists no groups", where)
    # A file in two groups, or twice in one, would be computed from itself.
    groups = tuple(ParityGroup.from_json(entry, where=where, location=store.location) for entry in entries)
    listed = [file.name for group in groups for file in group.files]
    if len(set(listed)) != len(listed):
        raise damaged("it lists a file twice", where)
    return groups


class RebuiltFiles(ReadOnlyView):
    """A view of a store with the files of parity groups only, parity files included.

    Each file is computed from the others of its group; the file itself is never read.
    """

    def __init__(self, store: Store, groups: Sequence[ParityGroup]) -> None:
        super().__init__(store)
        self._groups = {file.name: group for group in groups for file in group.files}

    def names(self, prefix: str = "") -> list[str]:
        """Return the names of all files of groups, missing ones included."""
        return sorted(name for name in self._groups if name.startswith(prefix))

    def exists(self, name: str) -> bool:
        """Return whether there is such a file in a group."""
        return name in self._groups

    def size(self, name: str) -> int:
        """Return the size that the list of parity files gives, in bytes."""
        return next(file.nbytes for file in self._group_of(name).files if file.name == name)

    def read_into(self, name: str, offset_bytes: int, out: memoryview) -> None:
        """Fill `out` with bytes of a file, computed from the others.

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
            self._xor_others(group, name, offset_bytes, view)
            return
        # The header of a parity file follows from its size; only what comes after it is computed.
        header = parity_header(group.longest)
        in_header = header[offset_bytes : offset_bytes + len(view)]
        view[: len(in_header)] = in_header
        # Positions in data files count from the end of this header. If all of out is in it, nothing is left.
        self._xor_others(group, name, offset_bytes + len(in_header) - len(header), view[len(in_header) :])

    def _group_of(self, name: str) -> ParityGroup:
        if name not in self._groups:
            path = f"{self.location}/{name}"
            raise StorageError(f"{path}: there is no parity for this file.", path=path)
        return self._groups[name]

    def _xor_others(self, group: ParityGroup, name: str, start: int, out: memoryview) -> None:
        """Fill out with the exclusive or of all files but one; start is a position in data files."""
        for position in range(0, len(out), PART_BYTES):
            part = np.frombuffer(out[position : position + PART_BYTES], np.uint8)
            # The exclusive or of all other files, the parity among them, is the one that is missing.
            part[:] = 0
            for other, offset, nbytes in self._ranges_of_others(group, name, start + position, len(part)):
                with self._inner.borrow(other, offset, nbytes) as data:
                    _xor_into(part, data)

    def _ranges_of_others(
        self, group: ParityGroup, name: str, start: int, nbytes: int
    ) -> Iterator[tuple[str, int, int]]:
        """Yield file, offset and length of the bytes that make those of one file.

        start is a position in data files: the data of a parity file begins behind its header.
        """
        if name != group.parity.name:
            yield group.parity.name, group.parity.nbytes - group.longest + start, nbytes
        for member in group.members:
            if member.name != name and member.nbytes > start:
                yield member.name, start, min(nbytes, member.nbytes - start)


# Parity files of a save: which rank writes which, their list, and what removing arrays leaves of them.


def parity_work(sizes: Mapping[int, int], *, attempt: str, ranks: int, most: int) -> list[bytes]:
    """Return the parity files that each rank writes, with the data files that they protect, as JSON.

    Args:
        sizes: bytes of the data file of each rank that has one.
        attempt: id of the attempt.
        ranks: number of ranks.
        most: data files in a group, at most.
    """
    work: list[list[Any]] = [[] for _ in range(ranks)]
    for number, group in enumerate(parity_groups(np.array(list(sizes), np.int64), most=most)):
        members = [[names.data_file(attempt, rank), sizes[rank]] for rank in group.tolist()]
        work[parity_writer(group, number)].append([number, members])
    return [json.dumps(rank_work).encode() for rank_work in work]


def write_parity_files(store: Store, *, attempt: str, work: bytes) -> bytes:
    """Write the parity files of a rank, one after the other; return a receipt for `write_parity_list`."""
    written = []
    for number, members in json.loads(work):
        sizes = [(name, nbytes) for name, nbytes in members]
        written.append(write_parity_file(store, attempt=attempt, number=number, members=sizes).to_json())
    return json.dumps(written).encode()


def write_parity_list(store: Store, *, attempt: str, receipts: list[bytes]) -> Json:
    """Write the list of all ranks' parity files, if there are any; return its entry for metadata.json."""
    entries = [entry for receipt in receipts for entry in json.loads(receipt)]
    where = "receipts of parity files"
    # With the checks of a load, so that no list is committed that a load rejects.
    groups = [ParityGroup.from_json(entry, where=where, location=store.location) for entry in entries]
    if not groups:
        return {}
    groups.sort(key=lambda group: group.parity.name)
    return {"parity": write_small_file(store, names.parity_list(attempt), list_of(groups))}


def reduced_parity(store: Store, manifest: Json, kept: Set[str]) -> tuple[Json, set[str], set[str]]:
    """Keep the parity groups that protect at least one of some files; write their list if others go.

    Returns:
        The entry for metadata.json, if any group is kept; the files that these groups need; and those that
        nothing needs any more.
    """
    groups = read_groups(store, manifest)
    remaining = [group for group in groups if any(member.name in kept for member in group.members)]
    needed = {file.name for group in remaining for file in group.files}
    # The committed list stays valid; a new revision would have the same content.
    if len(remaining) == len(groups):
        return {"parity": manifest["parity"]}, needed, set()
    old = manifest["parity"]["file"]
    unneeded = {file.name for group in groups for file in group.files} - needed | {old}
    if not remaining:
        return {}, needed, unneeded
    new = names.parity_list(manifest["attempt"], revision=names.revision_of(old) + 1)
    return {"parity": write_small_file(store, new, list_of(remaining))}, needed, unneeded
