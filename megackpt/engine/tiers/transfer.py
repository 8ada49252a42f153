"""Copies files from node to node through the group of the ranks, one part after the other.

A rank has a few parts in memory, however large a file is. A rank that cannot read or write still takes part
in all exchanges, so that no other rank waits for it. Its error is raised on all ranks after the last
exchange.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from typing import TypeAlias

from megackpt.comm import Group, compare_step, errors_on_all_ranks
from megackpt.storage import Store, StreamWriter

PART_BYTES = 4 * 1024 * 1024

SizedFile: TypeAlias = tuple[str, int]
"""Name of a file and its length in bytes."""


def broadcast_from_rank(group: Group, make: Callable[[], bytes], *, source: int, doing: str) -> bytes:
    """Return on every rank what `make` returns on one of them. Collective.

    Raises:
        CheckpointError: raised by `make`, on all ranks.
    """
    with compare_step(group, doing, largest=("nbytes",)) as making:
        data = make() if group.rank == source else b""
        making.largest["nbytes"] = len(data)
    buffer = bytearray(data if group.rank == source else making.maximum["nbytes"])
    group.broadcast(memoryview(buffer), root=source)
    return bytes(buffer)


def send_to_keepers(group: Group, data: bytes, keepers: Sequence[Sequence[int]]) -> dict[int, bytes]:
    """Send data to the ranks that keep copies of this rank's files. Collective.

    Args:
        group: the ranks.
        data: of this rank; any length.
        keepers: by rank, the ranks that keep copies of its files; equal on all ranks.

    Returns:
        The data of the ranks whose copies this rank keeps, by rank.
    """
    sources, own_keepers = _sources(group, keepers), keepers[group.rank]
    # The lengths first: a receiver has to allocate buffers for the data.
    head = memoryview(bytearray(len(data).to_bytes(8, "little")))
    lengths = {rank: bytearray(8) for rank in sources}
    _exchange(group, head, own_keepers, lengths)
    received = {rank: bytearray(int.from_bytes(length, "little")) for rank, length in lengths.items()}
    _exchange(group, memoryview(bytearray(data)), own_keepers, received)
    return {rank: bytes(buffer) for rank, buffer in received.items()}


def _exchange(
    group: Group, data: memoryview, receivers: Sequence[int], buffers: Mapping[int, bytearray]
) -> None:
    group.exchange(
        [(rank, data) for rank in receivers], [(rank, memoryview(buffer)) for rank, buffer in buffers.items()]
    )


def broadcast_files(
    group: Group,
    files: Sequence[SizedFile],
    *,
    source: int,
    read_from: Store,
    write_to: Store,
    takes: Set[str],
    doing: str,
) -> None:
    """Send files of one rank to the ranks that take them, which write them durably. Collective.

    Args:
        group: the ranks.
        files: equal on all ranks.
        source: the rank that has the files.
        read_from: the store of the source; not used on other ranks.
        write_to: the store of this rank.
        takes: names of the files that this rank writes.
        doing: what the ranks do, for the error's text.

    Raises:
        CheckpointError: on all ranks. What this call wrote is removed.
    """
    errors: list[Exception] = []
    longest = max((nbytes for _, nbytes in files), default=0)
    buffer = memoryview(bytearray(min(PART_BYTES, longest)))
    for name, nbytes in files:
        copy = _Copy(write_to, (name, nbytes) if name in takes else None, errors)
        for begin, length in _parts(nbytes):
            if group.rank == source:
                # If it fails, the buffer has any bytes. They are sent all the same, since other ranks wait
                # for them. The error is raised on all ranks below.
                _attempt(errors, partial(read_from.read_into, name, begin, buffer[:length]))
            group.broadcast(buffer[:length], root=source)
            copy.write(buffer[:length])
        copy.close()
    _end_on_all_ranks(group, write_to, takes & {name for name, _ in files}, errors, doing)


def copy_files(
    group: Group,
    files: Mapping[int, Sequence[SizedFile]],
    keepers: Sequence[Sequence[int]],
    store: Store,
    *,
    doing: str,
) -> None:
    """Send the files of each rank to the ranks that keep copies, which write them durably. Collective.

    Args:
        group: the ranks.
        files: by rank, the files of this rank and of the ranks whose copies it keeps.
        keepers: by rank, the ranks that keep copies of its files; equal on all ranks.
        store: of this rank, to read its files and to write copies.
        doing: what the ranks do, for the error's text.

    Raises:
        CheckpointError: on all ranks. What this call wrote is removed.
    """
    with compare_step(group, doing, largest=("files", "parts")) as counting:
        counting.largest["files"] = len(files[group.rank])
        counting.largest["parts"] = max((len(_parts(n)) for _, n in files[group.rank]), default=0)
    # An exchange is collective, so all ranks make equally many, also those with fewer or shorter files.
    most_files, most_parts = counting.maximum["files"], counting.maximum["parts"]
    errors: list[Exception] = []
    for number in range(most_files):
        of_round = {rank: listed[number] for rank, listed in files.items() if number < len(listed)}
        _copy_one_file_of_each(group, of_round, keepers, most_parts, store, errors)
    kept = {name for rank in _sources(group, keepers) for name, _ in files[rank]}
    _end_on_all_ranks(group, store, kept, errors, doing)


def _copy_one_file_of_each(
    group: Group,
    files: Mapping[int, SizedFile],
    keepers: Sequence[Sequence[int]],
    most_parts: int,
    store: Store,
    errors: list[Exception],
) -> None:
    """Copy at most one file of each rank, one part of all of them at a time."""
    sources = [rank for rank in _sources(group, keepers) if rank in files]
    parts = {rank: _parts(nbytes) for rank, (_, nbytes) in files.items()}
    copies = {rank: _Copy(store, files[rank], errors) for rank in sources}
    own_file, own_parts = files.get(group.rank), parts.get(group.rank, [])
    outgoing = memoryview(bytearray(_longest_part(own_file)))
    incoming = {rank: memoryview(bytearray(_longest_part(files[rank]))) for rank in sources}
    # Both sides of a pair compute the parts from the same list of the sender's files, so their lengths agree.
    for number in range(most_parts):
        sends, receives = [], []
        if own_file is not None and keepers[group.rank] and number < len(own_parts):
            begin, length = own_parts[number]
            _attempt(errors, partial(store.read_into, own_file[0], begin, outgoing[:length]))
            sends = [(rank, outgoing[:length]) for rank in keepers[group.rank]]
        for rank in sources:
            if number < len(parts[rank]):
                receives.append((rank, incoming[rank][: parts[rank][number][1]]))
        group.exchange(sends, receives)
        for rank, data in receives:
            copies[rank].write(data)
    for copy in copies.values():
        copy.close()


def _sources(group: Group, keepers: Sequence[Sequence[int]]) -> list[int]:
    """Return the ranks whose copies this one keeps."""
    return [rank for rank, of_rank in enumerate(keepers) if group.rank in of_rank]


def _longest_part(file: SizedFile | None) -> int:
    return min(PART_BYTES, file[1]) if file is not None else 0


def _parts(nbytes: int) -> list[tuple[int, int]]:
    """Return where each part of a file begins, and how long it is."""
    return [(begin, min(PART_BYTES, nbytes - begin)) for begin in range(0, nbytes, PART_BYTES)]


class _Copy:
    """A file that is written as its parts arrive. It notes an error, and drops the parts after it."""

    def __init__(self, store: Store, file: SizedFile | None, errors: list[Exception]) -> None:
        self._errors = errors
        self._writer: StreamWriter | None = None
        if file is not None:
            self._attempt(lambda: self._open(store, *file))

    def write(self, data: memoryview) -> None:
        """Append data."""
        if self._writer is not None:
            self._attempt(partial(self._writer.write, data))

    def close(self) -> None:
        """End the file."""
        if self._writer is not None:
            self._attempt(self._writer.close)

    def _open(self, store: Store, name: str, nbytes: int) -> None:
        self._writer = store.open_writer(name, nbytes)

    def _attempt(self, act: Callable[[], None]) -> None:
        if not _attempt(self._errors, act) and self._writer is not None:
            error, writer, self._writer = self._errors[-1], self._writer, None
            writer.__exit__(type(error), error, None)  # removes the partial file


def _attempt(errors: list[Exception], act: Callable[[], None]) -> bool:
    """Return whether an action succeeded; note its error if not."""
    try:
        act()
    except Exception as error:  # noqa: BLE001 - raised on all ranks when everything was moved
        errors.append(error)
        return False
    return True


def _end_on_all_ranks(
    group: Group, store: Store, written: Set[str], errors: Sequence[Exception], doing: str
) -> None:
    """Make the files that were written durable; raise the first error of any rank on all ranks."""
    try:
        with errors_on_all_ranks(group, doing):
            if errors:
                raise errors[0]
            store.sync()
    except Exception:
        # A source that could not read a file has sent other bytes in its place: no file can be trusted.
        with contextlib.suppress(OSError):
            store.delete(written)
        raise
