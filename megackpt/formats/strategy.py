"""What a format must be able to do.

Owns the protocols between the engine, which decides nothing about bytes on disk, and the formats, which
decide nothing about who writes or reads what: a strategy only moves bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from megackpt.metadata import ArraySpec, ChunkTable, StoredChunks
from megackpt.planning import SavePlan
from megackpt.storage import Store

Json: TypeAlias = dict[str, Any]  # plain JSON values
Pieces: TypeAlias = Callable[[int], Iterator[memoryview]]
"""The bytes of a chunk, given its row: C-contiguous pieces, in order, each valid until the next is taken."""


@dataclass(frozen=True, slots=True)
class Contents:
    """An opened checkpoint.

    Attributes:
        arrays: every global array and array of objects, by key.
        chunks: returns the stored chunks of the given keys.
        common: returns the value that `SaveStrategy.write_common` was given.
    """

    arrays: Mapping[str, ArraySpec]
    chunks: Callable[[Iterable[str]], StoredChunks]
    common: Callable[[], Any]  # whatever the user saved


class SaveStrategy(Protocol):
    """Writes checkpoints of one format. Nothing it writes is part of a checkpoint before the commit.

    Attributes:
        backend: name of the format, `sharded_backend` in metadata.json.
        version: version of the format.
    """

    @property
    def backend(self) -> str:
        """Name of the format."""

    @property
    def version(self) -> int:
        """Version of the format."""

    def write_chunks(
        self, store: Store, *, attempt: str, rank: int, chunks: ChunkTable, pieces: Pieces
    ) -> bytes:
        """Write this rank's chunks, durably, in the order of the rows; return a receipt for `write_index`.

        Raises:
            StorageError: the store refused.
        """

    def write_index(self, store: Store, *, attempt: str, plan: SavePlan, receipts: list[bytes]) -> Json:
        """Write the index, durably; return what metadata.json must say of it. Rank 0 only."""

    def write_common(self, store: Store, *, attempt: str, common: Any) -> Json:
        """Write common state, durably; return what metadata.json must say of it. Rank 0 only."""

    def remove_arrays(self, store: Store, manifest: Json, *, key_prefix: str) -> tuple[Json, list[str]]:
        """Write an index without the arrays whose keys begin with key_prefix, durably.

        Return the new manifest, not yet committed, and the files that are not needed once it is.
        """

    def files_of(self, manifest: Json) -> list[str]:
        """Return the small files that a manifest names."""

    def attempt_of(self, name: str) -> str | None:
        """Return which attempt wrote a file; None for a file that is not of this format."""


class LoadStrategy(Protocol):
    """Opens checkpoints of one format."""

    @property
    def backend(self) -> str:
        """Name of the format."""

    @property
    def version(self) -> int:
        """Version of the format."""

    def open(self, store: Store, manifest: Json) -> Contents:
        """Open what a metadata.json stands for.

        Raises:
            FormatError: the manifest or a file it names is not what the format says.
            IntegrityError: a file does not have the digest it was stored with.
        """
