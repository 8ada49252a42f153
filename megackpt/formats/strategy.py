"""What a format must be able to do.

Owns the protocols between the engine, which decides nothing about bytes on disk, and the formats, which
decide nothing about who writes or reads what: a strategy only moves bytes. What opening a checkpoint gives is
in `contents`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

from megackpt.formats.contents import Contents
from megackpt.formats.damage import Damage
from megackpt.geometry import Ints
from megackpt.metadata import ChunkTable
from megackpt.planning import SavePlan
from megackpt.storage import Store

MANIFEST = "metadata.json"
"""The file whose presence, in every format, says that a save has finished. Source: Megatron-Core."""

MANIFEST_MAX_BYTES = 16 * 1024 * 1024
"""What a manifest may take; a larger file under its name is none."""

Json: TypeAlias = dict[str, Any]  # plain JSON values
Pieces: TypeAlias = Callable[[int], Iterator[memoryview]]
"""The bytes of a row of the plan: C-contiguous pieces, in order.

Each is valid until the next is taken, or the iterator is let go: its memory may then be another's.
"""


@runtime_checkable
class InOrder(Protocol):
    """What `Pieces` also have that fetch ahead when they know which rows come next."""

    def in_order(self, rows: Sequence[int]) -> Iterator[Iterator[memoryview]]:
        """Yield the pieces of each row in turn; those of a row are valid until the next row is taken."""


def pieces_in_order(pieces: Pieces, rows: Sequence[int]) -> Iterator[Iterator[memoryview]]:
    """Yield the pieces of each row in turn, fetched ahead where `pieces` can do that."""
    yield from pieces.in_order(rows) if isinstance(pieces, InOrder) else map(pieces, rows)


class SaveStrategy(Protocol):
    """Writes checkpoints of one format. Nothing it writes is part of a checkpoint before the commit.

    A save calls, in this order: `check_common` on rank 0; `encode_object` on every rank; `begin` on rank 0,
    if it writes in place; `write_chunks` once a round on every rank; `write_common`, `write_index` and
    `publish` on rank 0. The commit follows.
    """

    @property
    def backend(self) -> str:
        """Name of the format, `sharded_backend` in metadata.json."""

    @property
    def version(self) -> int:
        """Version of the format."""

    @property
    def writes_in_place(self) -> bool:
        """Whether names of files are fixed by what they hold, and not by who writes them and when.

        Then ranks must know each other's rows to keep out of each other's way, and so cannot save without
        exchanging declarations; and `begin` is called.
        """

    def begin(self, store: Store, *, attempt: str) -> None:
        """Clear the place for an attempt. Rank 0, after planning and before any rank writes."""

    def check_common(self, common: Any) -> None:
        """Refuse common state that `write_common` would refuse, before anything is written. Rank 0.

        Raises:
            UnserializableError: the format cannot hold it; its place in the state dict is named.
        """

    def encode_object(self, value: Any, *, path: str) -> bytes:
        """Return the bytes that stand for an object.

        Raises:
            UnserializableError: the format cannot hold it; path, its place in the state dict, is named.
        """

    def rounds(self, plan: SavePlan, rank: int) -> list[Ints]:
        """Return the rows that a rank writes, round by round, each in the order of its file.

        All ranks meet between rounds: what two ranks must not write at the same time stands in different
        ones. The number of rounds is the same on every rank, and at least one.
        """

    def write_chunks(
        self, store: Store, *, attempt: str, rank: int, plan: SavePlan, rows: Ints, pieces: Pieces
    ) -> bytes:
        """Write the rows of one round, durably; return a receipt for `write_index`.

        Raises:
            StorageError: the store refused.
        """

    def write_index(self, store: Store, *, attempt: str, plan: SavePlan, receipts: list[list[bytes]]) -> Json:
        """Write the index, durably; return what is to be known of it. Rank 0; `receipts[rank][round]`."""

    def write_common(self, store: Store, *, attempt: str, common: Any) -> Json:
        """Write common state, durably; return what is to be known of it. Rank 0."""

    def publish(self, store: Store, *, attempt: str, said: Json) -> Json:
        """Put files whose names are fixed in place, and return what metadata.json holds. Rank 0.

        said is everything known: what `write_common` and `write_index` returned, `attempt` and `world_size`.
        Everything of the attempt is durable before.
        """

    def committed_attempt(self, store: Store) -> str | None:
        """Return the attempt that a reader would get now; None if there is none, or it is not known."""

    def remove_arrays(self, store: Store, manifest: Json, *, key_prefix: str) -> tuple[Json, list[str]]:
        """Write an index without the arrays whose keys begin with key_prefix, durably.

        Return the new manifest, not yet committed, and the files that are not needed once it is.
        """

    def files_of(self, manifest: Json) -> list[str]:
        """Return the small files that a manifest names."""

    def attempt_of(self, name: str) -> str | None:
        """Return which attempt wrote a file; None for a file that is not of this format."""


@runtime_checkable
class HasFixedNames(Protocol):
    """What a `SaveStrategy` also has if some names of its files do not carry the attempt."""

    def fixed_names(self, store: Store) -> list[str]:
        """Return those files of saves of ours, finished or not, whose names carry no attempt.

        What another program has written, or cannot be told from it, is not among them. They are removed in
        this order, and before files that carry an attempt: if that stops anywhere, what remains is still
        recognised.
        """


@runtime_checkable
class TakesOwnRows(Protocol):
    """What a `SaveStrategy` also has if a rank needs no rows of the plan but its own to write.

    `rounds` and `write_chunks` are then given a plan of these rows alone, which saves memory and messages
    that grow with the number of ranks; `write_index` has the plan of all. Others have it everywhere.
    """

    @property
    def takes_own_rows(self) -> bool:
        """Whether it is so."""


@runtime_checkable
class WritesParity(Protocol):
    """What a `SaveStrategy` also has if it can protect files of chunks with parity.

    After all ranks have written their chunks, a save calls `plan_parity` on rank 0, `write_parity` on every
    rank, and, with the index, `list_parity` on rank 0.
    """

    def plan_parity(
        self, *, attempt: str, plan: SavePlan, receipts: list[list[bytes]], most: int
    ) -> list[bytes]:
        """Return what each rank is to compute, for groups of at most `most` files; rank 0.

        plan is that of all ranks; `receipts[rank][round]` are those of `write_chunks`.
        """

    def write_parity(self, store: Store, *, attempt: str, work: bytes) -> bytes:
        """Read files back and write their parity, durably; return a receipt for `list_parity`."""

    def list_parity(self, store: Store, *, attempt: str, receipts: list[bytes]) -> Json:
        """Write what a reader has to know, durably; return what metadata.json says of it. Rank 0."""


Covered: TypeAlias = Callable[[ChunkTable], Collection[str]]
"""Returns the keys of the arrays of which chunks of a table have each element exactly once."""


@runtime_checkable
class DigestsArrays(Protocol):
    """What a `SaveStrategy` also has if it can store a digest of each array; see `Contents.array_digests`."""

    def with_array_digests(self, covered: Covered) -> SaveStrategy:
        """Return a strategy that does so, for arrays that are covered; it can be sent to another process.

        Raises:
            MissingExtraError: the library that it needs is not installed.
        """


@runtime_checkable
class RebuildsFiles(Protocol):
    """What a `LoadStrategy` also has if its checkpoints may hold what lost files are computed from."""

    def rebuilt_files(self, store: Store, manifest: Json) -> Store | None:
        """Return a view that has only the files that can be computed from others; None if there are none.

        Raises:
            FormatError, IntegrityError, StorageError: what says which these are is damaged.
        """


def takes_own_rows(strategy: SaveStrategy) -> bool:
    """Say whether a rank needs no rows but its own to write in a format."""
    return isinstance(strategy, TakesOwnRows) and strategy.takes_own_rows


@runtime_checkable
class WritesInOrder(Protocol):
    """What a `SaveStrategy` also has whose `write_chunks` takes the bytes of rows in the order of the rows.

    All rows stand in one round, and each is asked for once: then a rank's bytes can be handed on while others
    are being made, through memory that does not hold them all.
    """

    @property
    def writes_in_order(self) -> bool:
        """Whether it is so."""


def writes_in_order(strategy: SaveStrategy) -> bool:
    """Say whether a format takes the bytes of a rank's rows in their order."""
    return isinstance(strategy, WritesInOrder) and strategy.writes_in_order


@runtime_checkable
class RefersToArrays(Protocol):
    """What a `SaveStrategy` also has whose common state may refer to arrays, by `codec.ArrayReference`."""

    @property
    def refers_to_arrays(self) -> bool:
        """Whether tensors of common state are stored as arrays."""


def refers_to_arrays(strategy: SaveStrategy) -> bool:
    """Say whether a format stores tensors of common state as arrays."""
    return isinstance(strategy, RefersToArrays) and strategy.refers_to_arrays


class LoadStrategy(Protocol):
    """Opens checkpoints of one format."""

    @property
    def backend(self) -> str:
        """Name of the format."""

    @property
    def version(self) -> int:
        """Version of the format."""

    def detect(self, store: Store) -> Json | None:
        """Return a manifest for a checkpoint of this format that has no metadata.json; None if it is none."""

    def open(self, store: Store, manifest: Json, *, allow_unsafe_pickle: bool) -> Contents:
        """Open what a metadata.json stands for.

        allow_unsafe_pickle lets a format that holds pickles load any class they name, which may run code.

        Raises:
            FormatError: the manifest or a file it names is not what the format says.
            IntegrityError: a file does not have the digest it was stored with.
        """


@runtime_checkable
class KnowsFiles(Protocol):
    """What a `LoadStrategy` also has if it can say more of its files than a load needs to know."""

    def check_files(self, store: Store, manifest: Json, *, deep: bool) -> Iterator[Damage]:
        """Yield what is wrong with files, as far as that is seen without reading the bytes of chunks.

        That is: documents, indices, headers and lists, against each other and against the digests that they
        have. That the files of chunks are there, and reach as far as their chunks, is left to the caller.
        With deep, objects and common state may be read where only the format knows a checksum of theirs; not
        what `ListsWholeFiles` lists, which ranks share.
        """

    def writer_of(self, name: str) -> int | None:
        """Return the rank that wrote a file of chunks, if its name tells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeFile:
    """A file with one digest of all its bytes.

    Attributes:
        name: its name in the checkpoint.
        nbytes: its size.
        digest: xxh3-128 of all of it, 32 hexadecimal digits.
    """

    name: str
    nbytes: int
    digest: str


@runtime_checkable
class ListsWholeFiles(Protocol):
    """What a `LoadStrategy` also has if it lists large files with a digest of each, such as parity files."""

    def whole_files(self, store: Store, manifest: Json) -> Sequence[WholeFile]:
        """Return them, files of chunks among them; none if the list is damaged, which `check_files` says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One version of a format, as the registry and the entry points of third parties name it.

    Attributes:
        backend: its name.
        version: its version.
        save: makes the strategy that writes it; None if it is only read.
        load: makes the strategy that reads it; None if it is only written.
    """

    backend: str
    version: int
    save: Callable[[], SaveStrategy] | None = None
    load: Callable[[], LoadStrategy] | None = None
