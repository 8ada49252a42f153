"""`megackpt.inspect`: the content of a checkpoint, without reading any tensor."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megackpt.codec import ArrayReference, keep_unknown_values, leaves
from megackpt.codec.arrays import tensor_fault
from megackpt.engine.checkpoint.manifest import read_manifest
from megackpt.engine.checkpoint.opening import read_common_and_references
from megackpt.errors import CheckpointError
from megackpt.formats.contents import Chunks, Contents
from megackpt.formats.registry import load_strategy
from megackpt.formats.strategy import Json, LoadStrategy
from megackpt.ground.arguments import check_flag
from megackpt.storage import Location, Store, opened_store
from megackpt.whole.arguments import checked_globs, matching

# Values of a checkpoint as text for human readers: one shortened line for each leaf.
#
# Paths are those of `megackpt.codec.leaf_digests`, so that a leaf whose digest differs can be shown.

_MOST_CHARACTERS = 120
_MOST_ELEMENTS = 8


def leaves_as_text(value: object) -> dict[str, str]:
    """Return each leaf of a value as text of bounded length, by its path."""
    return {path: leaf_as_text(leaf) for path, leaf in leaves(value).items()}


def leaf_as_text(value: object) -> str:
    """Return a value as text of bounded length; a tensor as its dtype, shape and first elements."""
    try:
        text = _as_text(value)
    except Exception as error:  # noqa: BLE001 - of any class: a torch.Size beyond 64 bits, a sparse tensor
        text = f"{type(value).__name__} that cannot be shown: {error}"
    return text if len(text) <= _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 3] + "..."


def _as_text(value: object) -> str:
    if isinstance(value, torch.Tensor) and (fault := tensor_fault(value.detach())) is not None:
        return f"{value.dtype} {value.layout}: {fault}"
    if isinstance(value, (torch.Tensor, np.ndarray)):
        flat = (value.detach() if isinstance(value, torch.Tensor) else value).reshape(-1)
        first = ", ".join(map(str, flat[:_MOST_ELEMENTS].tolist()))
        kind = "ndarray " if isinstance(value, np.ndarray) else ""
        more = ", ..." if len(flat) > _MOST_ELEMENTS else ""
        return f"{kind}{value.dtype} {list(value.shape)}: {first}{more}"
    if isinstance(value, (bytes, bytearray)):
        return f"{type(value).__name__} of {len(value)}: {bytes(value[:_MOST_ELEMENTS])!r}"
    return f"array {value.key!r}" if isinstance(value, ArrayReference) else repr(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredArray:
    """An array of a checkpoint, or an array of objects.

    Attributes:
        key: the key of the array.
        dtype: the dtype of its elements; `object` for objects.
        shape: its global shape.
        chunks: number of its chunks.
        nbytes: bytes of its chunks.
        crc64nvme: CRC-64/NVME of its elements as 16 hexadecimal digits; None if it was saved without
            `array_digests`.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    chunks: int
    nbytes: int
    crc64nvme: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file of a checkpoint that has chunks.

    Attributes:
        name: its name in the checkpoint.
        rank: the rank that wrote it; None if its name does not contain a rank.
        chunks: number of shown chunks in it.
        nbytes: bytes of these chunks, before compression.
    """

    name: str
    rank: int | None
    chunks: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSummary:
    """The result of `megackpt.inspect`.

    Attributes:
        location: the checkpoint.
        backend: its format.
        version: the version of its format.
        manifest: the content of `metadata.json`; for a format without that file, its equivalent.
        arrays: the chosen arrays and objects, sorted by key.
        files: the files with their chunks; empty if the format does not know them.
        rank_nbytes: bytes of these chunks by the rank that wrote them, as far as the format knows it.
        unreadable: keys that cannot be loaded, with the reason.
        common: leaves of the common state as shortened text, by path. A tensor that is stored as an array
            appears as `array 'KEY'`.
        content: leaves of the content metadata, in the same form.
        left_out: other values of the files, which cannot be loaded, each with the reason.
        common_error: why common state and content metadata could not be read; empty if they were read.
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
    left_out: tuple[str, ...]
    common_error: str

    @property
    def nbytes(self) -> int:
        """Bytes of all chunks that are shown."""
        return sum(array.nbytes for array in self.arrays)

    @property
    def world_size(self) -> int | None:
        """Number of ranks that saved the checkpoint; None if its commit does not name it."""
        ranks = self.manifest.get("world_size")
        return ranks if type(ranks) is int else None


def inspect(
    checkpoint_dir: Location, *, keys: Sequence[str] = (), allow_unsafe_pickle: bool = False
) -> CheckpointSummary:
    """Return the content of a checkpoint of any known format. Local; no tensor is read.

    Args:
        checkpoint_dir: a path, a URL or an open store of one checkpoint (not the root of a run).
        keys: globs such as `"decoder.*"`; only arrays and objects whose key matches one of them are listed.
            All are listed if there are none.
        allow_unsafe_pickle: as in `megackpt.verify`.

    Returns:
        A summary of arrays, objects, files and common state.

    Raises:
        NotACheckpointError: there is no committed checkpoint at this location.
        FormatError, IntegrityError, StorageError: the checkpoint cannot be opened.
        DeclarationError: an argument is invalid.

    >>> [array.key for array in inspect("run/iter_0000100").arrays]  # doctest: +SKIP
    ['decoder.layers.0.weight', ...]
    """
    keys = checked_globs(keys)
    check_flag("allow_unsafe_pickle", allow_unsafe_pickle)
    with opened_store(checkpoint_dir) as store:
        return _inspect(store, keys, allow_unsafe_pickle=allow_unsafe_pickle)


def _inspect(store: Store, globs: Sequence[str], *, allow_unsafe_pickle: bool) -> CheckpointSummary:
    manifest = read_manifest(store)
    strategy = load_strategy(manifest, where=store.location)
    contents = strategy.open(store, manifest, allow_unsafe_pickle=allow_unsafe_pickle)
    keys = matching(sorted(contents.arrays), globs)
    chunks = contents.chunks(keys)
    files = _files(chunks, strategy)
    rank_nbytes: dict[int, int] = {}
    for file in files:
        if file.rank is not None:
            rank_nbytes[file.rank] = rank_nbytes.get(file.rank, 0) + file.nbytes
    common, content, error = _common_as_text(contents, store.location)
    return CheckpointSummary(
        location=store.location,
        backend=strategy.backend,
        version=strategy.version,
        manifest=manifest,
        arrays=tuple(_arrays(chunks, set(keys), contents.array_digests)),
        files=tuple(files),
        rank_nbytes=dict(sorted(rank_nbytes.items())),
        unreadable=dict(contents.unreadable),
        common=common,
        content=content,
        left_out=tuple(contents.left_out),
        common_error=error,
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


def _common_as_text(contents: Contents, where: str) -> tuple[dict[str, str], dict[str, str], str]:
    """Return common state and content metadata as text by path, and why they could not be read."""
    try:
        # Values of unknown classes are shown by the names of their classes.
        with keep_unknown_values():
            common, content = read_common_and_references(contents, where=where)
        shown_common = leaves_as_text(_with_plain_dicts(common)) if common else {}
        return shown_common, {} if content is None else leaves_as_text(content), ""
    except CheckpointError as error:
        return {}, {}, " ".join(str(error).split())


def _with_plain_dicts(tree: Any) -> Any:
    """Return nested dicts and lists with dicts in place of OrderedDicts, so that each leaf has a path."""
    if type(tree) in (dict, OrderedDict):
        return {key: _with_plain_dicts(child) for key, child in tree.items()}
    return [_with_plain_dicts(child) for child in tree] if type(tree) is list else tree
