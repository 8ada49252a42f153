"""Base classes of the strategies of a format, which write and read its checkpoints.

The engine decides which rank writes or reads which chunk, and knows nothing of the bytes in files. A strategy
writes and reads these bytes and decides nothing. `contents` has the result of opening a checkpoint.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from megackpt.formats.contents import Contents
from megackpt.formats.file_names import FileNames
from megackpt.plans.geometry import Ints
from megackpt.plans.metadata import ChunkTable
from megackpt.plans.planning import SavePlan
from megackpt.storage import Store

if TYPE_CHECKING:
    from megackpt.formats.damage import Damage

MANIFEST = "metadata.json"
"""The file that marks a save as finished, in every format. Source: Megatron-Core."""

MANIFEST_MAX_BYTES = 16 * 1024 * 1024
"""Largest size of a manifest; a larger file of that name is an error."""

Json: TypeAlias = dict[str, Any]  # plain JSON values
CoverageCheck: TypeAlias = Callable[[ChunkTable], Collection[str]]
"""Returns the keys of those arrays of a table whose every element is in exactly one chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a format can do besides what every format must do.

    Each `SaveStrategy` declares one. The defaults fit a strategy that has the required methods only.

    Attributes:
        shares_files: several ranks may write parts of one file. They need each other's rows in order not to
            write it at the same time, so a save without an exchange of declarations raises an error.
        needs_own_rows_only: `rounds` and `write_chunks` need only the rank's own rows of the plan. Ranks
            other than 0 are given these alone, which saves memory and messages that would grow with the
            number of ranks. `write_index` is given the plan of all ranks in any case.
        writes_in_order: all rows of a rank are in one round, and `write_chunks` takes the bytes of each row
            once, in the order of the rows. The bytes can then be passed through a buffer that does not hold
            them all.
        refers_to_arrays: common state may refer to arrays by `codec.ArrayReference`.
        writes_parity: `plan_parity`, `write_parity` and `list_parity` are implemented.
        digests_arrays: `with_array_digests` is implemented.
    """

    shares_files: bool = False
    needs_own_rows_only: bool = False
    writes_in_order: bool = False
    refers_to_arrays: bool = False
    writes_parity: bool = False
    digests_arrays: bool = False


class ChunkParts(ABC):
    """The bytes of the rows of a plan, in C-contiguous parts.

    A part is valid until the next one is taken, or the iterator is closed: its memory is then used again.
    Several threads may take parts of different rows at the same time.

    Attributes:
        object_sizes: lengths of the objects among the rows, in bytes, in the order of rows; None if the plan
            has them.
    """

    object_sizes: Ints | None = None

    @abstractmethod
    def __call__(self, row: int) -> Iterator[memoryview]:
        """Yield the parts of a row of the plan, in order."""

    def in_order(self, rows: Sequence[int]) -> Iterator[Iterator[memoryview]]:
        """Yield an iterator over the parts of each row in turn, valid until the next row is taken.

        Sources that can prepare the next row while one is written override this.
        """
        return map(self, rows)


class SaveStrategy(ABC):
    """Writes checkpoints of one format. Nothing that it writes is part of a checkpoint before the commit.

    A save calls, in this order: `check_common` on rank 0; `encode_object` on every rank; `write_chunks` once
    per round on every rank; `write_common`, `write_index` and `publish` on rank 0. The commit follows.
    The plan that `rounds` and `write_chunks` are given has the sizes of the rank's own objects. Those of
    other ranks may be out of date in it; the plan for `write_index` has the sizes of all.

    Attributes:
        backend: name of the format, `sharded_backend` in metadata.json.
        version: version of the format.
        file_names: recognises the names of its files.
        capabilities: what the format can do besides.
    """

    backend: str
    version: int
    file_names: FileNames
    capabilities: Capabilities = Capabilities()

    # Every format.

    @abstractmethod
    def check_common(self, common: Any) -> None:
        """Check, before anything is written, that `write_common` can store a common state. Rank 0.

        Raises:
            UnserializableError: the format cannot store it; the error names the path in the state dict.
        """

    @abstractmethod
    def encode_object(self, value: Any, *, path: str) -> bytes:
        """Return the bytes that stand for an object.

        Raises:
            UnserializableError: the format cannot store it; the error names path, its path in the state dict.
        """

    @abstractmethod
    def write_chunks(
        self, store: Store, *, attempt: str, rank: int, plan: SavePlan, rows: Ints, parts: ChunkParts
    ) -> bytes:
        """Write the rows of one round durably, and return a receipt for `write_index`.

        Raises:
            StorageError: the store cannot write.
        """

    @abstractmethod
    def write_index(self, store: Store, *, attempt: str, plan: SavePlan, receipts: list[list[bytes]]) -> Json:
        """Write the index durably; return entries for metadata.json. Rank 0; `receipts[rank][round]`."""

    @abstractmethod
    def write_common(self, store: Store, *, attempt: str, common: Any) -> Json:
        """Write common state durably; return entries for metadata.json. Rank 0."""

    @abstractmethod
    def committed_attempt(self, store: Store) -> str | None:
        """Return the attempt that a reader would read now; None if there is none, or it is not known."""

    @abstractmethod
    def remove_arrays(self, store: Store, manifest: Json, *, key_prefix: str) -> tuple[Json, list[str]]:
        """Write, durably, an index without the arrays whose keys begin with key_prefix.

        Return the new manifest, which is not committed yet, and the files that nobody needs once it is.
        """

    @abstractmethod
    def files_of(self, manifest: Json) -> list[str]:
        """Return the small files that a manifest names."""

    # Formats override the following where the default does not fit.

    def rounds(self, plan: SavePlan, rank: int) -> list[Ints]:
        """Return the rows that a rank writes, round by round, each in the order of its file.

        All ranks synchronise between rounds: what two ranks must not write at the same time is in different
        rounds. The number of rounds is the same on every rank, and at least one. By default it is one.
        """
        return [plan.rows_of(rank)]

    def publish(self, store: Store, *, attempt: str, entries: Json) -> Json:
        """Put files with fixed names in place; return the content of metadata.json. Rank 0.

        entries are all that is known: what `write_common` and `write_index` returned, `attempt` and
        `world_size`. Everything of the attempt is durable before. By default the entries are the content.
        """
        return entries

    def fixed_names(self, store: Store) -> list[str]:
        """Return those files of megackpt's saves, finished or not, whose names carry no attempt.

        Called if `FileNames.is_marker` is true of a file in the store. Files that another program has
        written, or may have written, are not among them. They are removed in this order, and before files
        that carry an attempt: if the removal stops anywhere, what remains is still recognised.
        """
        return []

    # Formats that declare the capability.

    def with_array_digests(self, covered: CoverageCheck) -> SaveStrategy:
        """Return a strategy that also stores a digest of each covered array (`digests_arrays`).

        See `Contents.array_digests`. The strategy can be sent to another process.

        Raises:
            MissingExtraError: the library that computes the digests is not installed.
        """
        raise NotImplementedError

    def plan_parity(
        self, *, attempt: str, plan: SavePlan, receipts: list[list[bytes]], most: int
    ) -> list[bytes]:
        """Return each rank's work, for groups of at most `most` files (`writes_parity`). Rank 0.

        Called when all ranks have written their chunks. plan is that of all ranks; `receipts[rank][round]`
        are those of `write_chunks`.
        """
        raise NotImplementedError

    def write_parity(self, store: Store, *, attempt: str, work: bytes) -> bytes:
        """Read files back and write their parity durably; return a receipt for `list_parity`."""
        raise NotImplementedError

    def list_parity(self, store: Store, *, attempt: str, receipts: list[bytes]) -> Json:
        """Write the list of parity files durably; return entries for metadata.json. Rank 0."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeFile:
    """A file with one digest of all its bytes.

    Attributes:
        name: its name in the checkpoint.
        nbytes: its size.
        digest: xxh3-128 of all its bytes, 32 hexadecimal digits.
    """

    name: str
    nbytes: int
    digest: str


class LoadStrategy(ABC):
    """Opens checkpoints of one format.

    Attributes:
        backend: name of the format.
        version: version of the format.
    """

    backend: str
    version: int

    @abstractmethod
    def open(self, store: Store, manifest: Json, *, allow_unsafe_pickle: bool) -> Contents:
        """Open the checkpoint that a manifest describes.

        allow_unsafe_pickle lets a format that stores pickles load any class they name, which may run code.

        Raises:
            FormatError: the manifest or a file it names is not what the format says.
            IntegrityError: a file does not have the digest that was stored for it.
        """

    def detect(self, store: Store) -> Json | None:
        """Return a manifest for a checkpoint of this format without metadata.json; None if there is none."""
        return None

    def published_entries(self, store: Store, manifest: Json) -> Json:
        """Return the entries that `SaveStrategy.publish` was given for the committed attempt.

        By default they are the manifest. Without those of a save of ours, the result lacks them.

        Raises:
            FormatError: a document that has them is damaged.
        """
        return manifest

    def check_files(self, store: Store, manifest: Json, *, deep: bool) -> Iterator[Damage]:
        """Yield what is wrong with files, as far as that is seen without reading the bytes of chunks.

        This covers documents, indices, headers and lists, which are compared with each other and with their
        digests. The caller checks that the files of chunks exist, and are long enough for their chunks. With
        deep, objects and common state may be read where only the format knows a checksum of them; but not
        the files that `whole_files` lists, whose check ranks divide among themselves.
        """
        yield from ()

    def writer_of(self, name: str) -> int | None:
        """Return the rank that wrote a file of chunks; None if its name does not say."""
        return None

    def whole_files(self, store: Store, manifest: Json) -> Sequence[WholeFile]:
        """Return large files with a digest of each, such as parity files and the files they protect.

        Empty if there are none, or if their list is damaged, which `check_files` reports.
        """
        return ()

    def rebuilt_files(self, store: Store, manifest: Json) -> Store | None:
        """Return a view of the files that can be computed from others, and no more; None if there are none.

        Raises:
            FormatError, IntegrityError, StorageError: the list of these files is damaged.
        """
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One version of a format, as the registry and the entry points of other packages name it.

    Attributes:
        backend: its name.
        version: its version.
        save: makes the strategy that writes it; None if it can only be read.
        load: makes the strategy that reads it; None if it can only be written.
        file_names: recognises the files that its saves leave, so that a save in another format removes them
            as stale. None if it can only be read.
    """

    backend: str
    version: int
    save: Callable[[], SaveStrategy] | None = None
    load: Callable[[], LoadStrategy] | None = None
    file_names: FileNames | None = None
