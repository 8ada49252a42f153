"""Files from node to node, through the ranks' own group, in pieces.

Owns the buffers, a few pieces per rank however large a file is, and that a rank which cannot read or write
goes on taking part: so nobody waits for it, and all hear of it when everything has been moved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from typing import TypeAlias

from megackpt.comm import Group, Numbers, run_and_compare
from megackpt.storage import Store, StreamWriter

PART_BYTES = 4 * 1024 * 1024

SizedFile: TypeAlias = tuple[str, int]
"""Name and length of a file."""


def from_rank(group: Group, make: Callable[[], bytes], *, source: int, doing: str) -> bytes:
    """Return on every rank what make returns on one of them. Collective.

    Raises:
        CheckpointError: what make raised, on all ranks.
    """
    made: list[bytes] = []

    def begin() -> Numbers:
        if group.rank == source:
            made.append(make())
        return Numbers((), (len(made[0]) if made else 0,))

    (length,) = run_and_compare(group, begin, equal=0, largest=1, doing=doing).largest
    buffer = bytearray(made[0] if made else length)
    group.broadcast(memoryview(buffer), root=source)
    return bytes(buffer)


def send_to_keepers(group: Group, said: bytes, keepers: Sequence[Sequence[int]]) -> dict[int, bytes]:
    """Return what those ranks say for which this one keeps copies, by rank. Collective."""
    sources = _sources(group, keepers)
    lengths = {rank: bytearray(8) for rank in sources}
    head = memoryview(bytearray(len(said).to_bytes(8, "little")))
    mine = keepers[group.rank]
    group.exchange([(rank, head) for rank in mine], [(rank, memoryview(d)) for rank, d in lengths.items()])
    told = {rank: bytearray(int.from_bytes(length, "little")) for rank, length in lengths.items()}
    body = memoryview(bytearray(said))
    group.exchange([(rank, body) for rank in mine], [(rank, memoryview(d)) for rank, d in told.items()])
    return {rank: bytes(data) for rank, data in told.items()}


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
    """Give files that one rank has to those ranks that take them, durably. Collective.

    files are the same on all ranks; read_from counts on the source alone, takes is each rank's own choice.

    Raises:
        CheckpointError: the same on all ranks; partial files are removed.
    """
    faults: list[Exception] = []
    longest = max((nbytes for _, nbytes in files), default=0)
    buffer = memoryview(bytearray(min(PART_BYTES, longest)))
    for name, nbytes in files:
        taker = _Taker(write_to, (name, nbytes) if name in takes else None, faults)
        for at, length in _pieces(nbytes):
            if group.rank == source:
                _attempt(faults, partial(read_from.read_into, name, at, buffer[:length]))
            group.broadcast(buffer[:length], root=source)
            taker.write(buffer[:length])
        taker.close()
    _finish(group, write_to, faults, doing)


def copy_files(
    group: Group,
    files: Mapping[int, Sequence[SizedFile]],
    keepers: Sequence[Sequence[int]],
    store: Store,
    *,
    doing: str,
) -> None:
    """Give the files of each rank to the ranks that keep copies of them, durably. Collective.

    files are this rank's own, and those of the ranks for which it keeps copies; keepers are by rank, and the
    same on all ranks; store is this rank's, to read and to write.

    Raises:
        CheckpointError: the same on all ranks; partial files are removed.
    """

    def count() -> Numbers:
        mine = files[group.rank]
        return Numbers((), (len(mine), max((len(_pieces(nbytes)) for _, nbytes in mine), default=0)))

    most_files, most_pieces = run_and_compare(group, count, equal=0, largest=2, doing=doing).largest
    faults: list[Exception] = []
    for number in range(most_files):
        now = {rank: of_rank[number] for rank, of_rank in files.items() if number < len(of_rank)}
        _copy_one_each(group, now, keepers, most_pieces, store, faults)
    _finish(group, store, faults, doing)


def _copy_one_each(
    group: Group,
    files: Mapping[int, SizedFile],
    keepers: Sequence[Sequence[int]],
    most_pieces: int,
    store: Store,
    faults: list[Exception],
) -> None:
    """Move at most one file of each rank, all ranks at a time."""
    sources = [rank for rank in _sources(group, keepers) if rank in files]
    pieces = {rank: _pieces(nbytes) for rank, (_, nbytes) in files.items()}
    takers = {rank: _Taker(store, files[rank], faults) for rank in sources}
    mine, of_mine = files.get(group.rank), pieces.get(group.rank, [])
    given = memoryview(bytearray(_longest(mine)))
    taken = {rank: memoryview(bytearray(_longest(files[rank]))) for rank in sources}
    for number in range(most_pieces):
        sends, receives = [], []
        if mine is not None and keepers[group.rank] and number < len(of_mine):
            at, length = of_mine[number]
            _attempt(faults, partial(store.read_into, mine[0], at, given[:length]))
            sends = [(rank, given[:length]) for rank in keepers[group.rank]]
        for rank in sources:
            if number < len(pieces[rank]):
                receives.append((rank, taken[rank][: pieces[rank][number][1]]))
        group.exchange(sends, receives)
        for rank, data in receives:
            takers[rank].write(data)
    for taker in takers.values():
        taker.close()


def _sources(group: Group, keepers: Sequence[Sequence[int]]) -> list[int]:
    """Return the ranks for which this one keeps copies."""
    return [rank for rank, of_rank in enumerate(keepers) if group.rank in of_rank]


def _longest(file: SizedFile | None) -> int:
    return min(PART_BYTES, file[1]) if file is not None else 0


def _pieces(nbytes: int) -> list[tuple[int, int]]:
    return [(at, min(PART_BYTES, nbytes - at)) for at in range(0, nbytes, PART_BYTES)]


class _Taker:
    """Writes one file as it comes, until something goes wrong; that is noted, and the rest is dropped."""

    def __init__(self, store: Store, file: SizedFile | None, faults: list[Exception]) -> None:
        self._faults = faults
        self._writer: StreamWriter | None = None
        if file is not None:
            self._try(lambda: self._open(store, *file))

    def write(self, data: memoryview) -> None:
        """Append data."""
        if self._writer is not None:
            writer = self._writer
            self._try(lambda: writer.write(data))

    def close(self) -> None:
        """End the file."""
        if self._writer is not None:
            self._try(self._writer.close)

    def _open(self, store: Store, name: str, nbytes: int) -> None:
        self._writer = store.open_writer(name, nbytes)

    def _try(self, act: Callable[[], None]) -> None:
        if not _attempt(self._faults, act) and self._writer is not None:
            error, writer, self._writer = self._faults[-1], self._writer, None
            writer.__exit__(type(error), error, None)  # removes what was written of it


def _attempt(faults: list[Exception], act: Callable[[], None]) -> bool:
    try:
        act()
    except Exception as error:  # noqa: BLE001 - raised on all ranks when everything was moved
        faults.append(error)
        return False
    return True


def _finish(group: Group, store: Store, faults: list[Exception], doing: str) -> None:
    def tell() -> Numbers:
        if faults:
            raise faults[0]
        store.sync()
        return Numbers(())

    run_and_compare(group, tell, equal=0, doing=doing)
