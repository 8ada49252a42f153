"""What a checkpoint holds, as plain data to be shown: arrays, objects, files, who wrote how much.

Owns the summary. Nothing of any tensor is read.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from megackpt.codec import carrying_unknown
from megackpt.engine.checkpoint.manifest import read_manifest
from megackpt.engine.checkpoint.opening import read_common_and_references
from megackpt.errors import CheckpointError
from megackpt.formats.contents import Chunks, Contents
from megackpt.formats.registry import load_strategy
from megackpt.formats.strategy import Json, LoadStrategy
from megackpt.maintenance.leaves import leaves_of
from megackpt.storage import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredArray:
    """An array, or an array of objects.

    Attributes:
        key: its name.
        dtype: of its elements; `object` for objects.
        shape: of all of it.
        chunks: number of its chunks.
        nbytes: bytes of these.
        crc64nvme: CRC-64/NVME of its elements, 16 hexadecimal digits, where it was saved with array_digests.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    chunks: int
    nbytes: int
    crc64nvme: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file that holds chunks.

    Attributes:
        name: its name in the checkpoint.
        rank: who wrote it, where its name tells.
        chunks: number of chunks that lie in it, of those that are shown.
        nbytes: bytes of these chunks, before compression.
    """

    name: str
    rank: int | None
    chunks: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSummary:
    """What a checkpoint holds.

    Attributes:
        location: the checkpoint.
        backend: its format.
        version: the version of that.
        manifest: what its commit says; of a format that needs none, what stands for it.
        arrays: the arrays and objects that were asked for, sorted by key.
        files: the files that hold their chunks; empty where the format does not tell.
        rank_nbytes: bytes of these chunks by the rank that wrote them, where the format tells.
        unreadable: keys that cannot be loaded, and why.
        common: leaves of the common state, shortened, by path; of a tensor that is stored as an array, its
            key.
        content: the same of the content metadata.
        common_fault: why these two could not be read; empty if they were.
    """

    location: str
    backend: str
    version: int
    manifest: Json
    arrays: tuple[StoredArray, ...]
    files: tuple[StoredFile, ...]
    rank_nbytes: Mapping[int, int]
    unreadable: Mapping[str, str]
    common: Mapping[str, str]
    content: Mapping[str, str]
    common_fault: str

    @property
    def nbytes(self) -> int:
        """Bytes of all chunks that are shown."""
        return sum(array.nbytes for array in self.arrays)

    @property
    def world_size(self) -> int | None:
        """Number of ranks that saved, where the commit says so."""
        ranks = self.manifest.get("world_size")
        return ranks if type(ranks) is int else None


def inspect_checkpoint(
    store: Store, *, keys: Sequence[str] = (), allow_unsafe_pickle: bool = False
) -> CheckpointSummary:
    """Say what a checkpoint of any known format holds, of keys that fit one of some globs. Local.

    All keys are meant if no glob is given; allow_unsafe_pickle as for `LoadOptions`.

    Raises:
        NotACheckpointError, FormatError, IntegrityError: it is not one, or cannot be opened.
    """
    manifest = read_manifest(store)
    strategy = load_strategy(manifest, where=store.location)
    contents = strategy.open(store, manifest, allow_unsafe_pickle=allow_unsafe_pickle)
    chosen = [k for k in sorted(contents.arrays) if not keys or any(fnmatchcase(k, glob) for glob in keys)]
    chunks = contents.chunks(chosen)
    files = _files(chunks, strategy)
    ranks: dict[int, int] = {}
    for file in files:
        if file.rank is not None:
            ranks[file.rank] = ranks.get(file.rank, 0) + file.nbytes
    common, content, fault = _common(contents, store.location)
    return CheckpointSummary(
        location=store.location,
        backend=strategy.backend,
        version=strategy.version,
        manifest=manifest,
        arrays=tuple(_arrays(chunks, set(chosen), contents.array_digests)),
        files=tuple(files),
        rank_nbytes=dict(sorted(ranks.items())),
        unreadable=dict(contents.unreadable),
        common=common,
        content=content,
        common_fault=fault,
    )


def _arrays(chunks: Chunks, keys: set[str], digests: Mapping[str, int]) -> list[StoredArray]:
    table = chunks.table
    count = np.bincount(table.array, minlength=len(table.arrays))
    nbytes = np.zeros(len(table.arrays), np.int64)
    np.add.at(nbytes, table.array, table.nbytes)
    return [
        StoredArray(
            key=spec.key,
            dtype=spec.dtype,
            shape=spec.global_shape,
            chunks=int(count[number]),
            nbytes=int(nbytes[number]),
            crc64nvme=f"{digests[spec.key]:016x}" if spec.key in digests else None,
        )
        for number, spec in enumerate(table.arrays)
        if spec.key in keys
    ]


def _files(chunks: Chunks, strategy: LoadStrategy) -> list[StoredFile]:
    ranges = chunks.file_ranges()
    if ranges is None:
        return []
    count = np.bincount(ranges.file, minlength=len(ranges.files))
    nbytes = np.zeros(len(ranges.files), np.int64)
    np.add.at(nbytes, ranges.file, chunks.table.nbytes)
    return [
        StoredFile(
            name=name,
            rank=strategy.writer_of(name),
            chunks=int(count[number]),
            nbytes=int(nbytes[number]),
        )
        for number, name in enumerate(ranges.files)
        if count[number]
    ]


def _common(contents: Contents, where: str) -> tuple[dict[str, str], dict[str, str], str]:
    """Return common state and content metadata as text, and why they could not be read."""
    try:
        with carrying_unknown():  # shown as far as they are known
            common, content = read_common_and_references(contents, where=where)
        common = _as_dicts(common)
        return leaves_of(common) if common else {}, {} if content is None else leaves_of(content), ""
    except CheckpointError as error:
        return {}, {}, " ".join(str(error).split())


def _as_dicts(tree: Any) -> Any:
    """Return nested dicts and lists with dicts for OrderedDicts, so that what these hold is shown by path."""
    if type(tree) in (dict, OrderedDict):
        return {key: _as_dicts(child) for key, child in tree.items()}
    return [_as_dicts(child) for child in tree] if type(tree) is list else tree
