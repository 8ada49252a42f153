"""The tensors of a Hugging Face folder: its index and the headers of its files, which have to agree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from errno import ENOENT
from functools import partial
from typing import Any

import numpy as np

from megackpt.errors import CheckpointError, FormatError, StorageError, truncated_list
from megackpt.formats.contents import Contents, FileChunks
from megackpt.formats.damage import Damage, damage_of
from megackpt.formats.documents import parse_document, read_document
from megackpt.formats.huggingface import names
from megackpt.formats.index_file import WholeIndex
from megackpt.formats.safetensors_encoding import DTYPE_NAMES
from megackpt.formats.safetensors_header import Header, HeaderEntry, read_header
from megackpt.formats.strategy import Json, LoadStrategy
from megackpt.plans.metadata import ArraySpec, ChunkTable, StoredChunks, pad_shapes
from megackpt.plans.metadata.chunk_table import MAX_NUMEL
from megackpt.storage import Store, digest_of, is_allowed_name

_INDEX_MAX_BYTES = 100_000_000  # one of a million tensors
_MAX_DIMS = 64  # those of numpy; more would also make every row of the chunk table wider
_THREADS = 16


@dataclass(frozen=True, slots=True)
class Folder:
    """The tensors of a folder.

    Attributes:
        stored: a chunk for each tensor that has elements, without digests.
        unreadable: names of tensors that cannot be loaded, with the reason.
        identity: digest of names, dtypes, shapes, files and offsets.
    """

    stored: StoredChunks
    unreadable: Mapping[str, str]
    identity: str


def read_folder(store: Store, model: str) -> Folder:
    """Return the tensors of a folder. Reads the index and the header of each file, no tensor. Local.

    Args:
        store: the folder.
        model: name of the index, which ends with `.json`, or of the only safetensors file.

    Raises:
        FormatError: the index or a header is damaged, or they contradict each other.
        StorageError: a file cannot be read.
    """
    if model.endswith(".json"):
        weight_map = _read_weight_map(store, model)
        headers = _read_headers(store, sorted(set(weight_map.values())), index=model)
        _check_weight_map(store, model, weight_map, headers)
    else:
        headers = {model: read_header(store, model)}
    return _folder_of(headers)


def _read_weight_map(store: Store, index: str) -> dict[str, str]:
    """Return the file of each tensor by the index of a folder.

    `total_size` in the index is not checked: transformers itself has written wrong ones (tied weights), and
    does not look at it.
    """
    where = f"{store.location}/{index}"
    document = parse_document(store.read(index, max_bytes=_INDEX_MAX_BYTES), where=where)
    weight_map = document.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise FormatError(
            f"{where}: its weight_map is not an object of file names. The file is damaged: fetch it again.",
            path=where,
        )
    # Each name once: tensors are many, files are few.
    bad = next((file for file in dict.fromkeys(weight_map.values()) if not is_allowed_name(file)), None)
    if bad is not None:
        key = next(name for name, file in weight_map.items() if file == bad)
        raise FormatError(
            f"{where}: {key!r:.200} is in {bad!r:.200}, which is not the name of a file in this folder. The "
            f"index is damaged or forged: fetch it again.",
            key=key,
            path=where,
        )
    return weight_map


def _read_headers(store: Store, files: Sequence[str], *, index: str) -> dict[str, Header]:
    """Return the header of each file, which several threads read."""
    read = partial(_read_listed_header, store, index)
    # Headers are small: in an object store their time is latency, which threads hide.
    if len(files) < 2:
        return dict(zip(files, map(read, files), strict=True))
    with ThreadPoolExecutor(min(len(files), _THREADS), thread_name_prefix="megackpt-headers") as pool:
        return dict(zip(files, pool.map(read, files), strict=True))


def _read_listed_header(store: Store, index: str, name: str) -> Header:
    try:
        return read_header(store, name)
    except StorageError as error:
        if error.errno != ENOENT:
            raise
        where = f"{store.location}/{name}"
        raise FormatError(
            f"{where}: the file is missing, and {index} has tensors in it. Fetch the folder again.",
            path=where,
        ) from error


def _check_weight_map(
    store: Store, index: str, weight_map: Mapping[str, str], headers: Mapping[str, Header]
) -> None:
    """Check that each tensor is in the file that the index names, and in no other file of the index."""
    listed = {(name, file) for name, file in weight_map.items()}
    stored = {(entry.name, file) for file, header in headers.items() for entry in header.entries}
    missing, unlisted = sorted(listed - stored), sorted(stored - listed)
    if not missing and not unlisted:
        return
    lines = [f"{name!r:.200} is not in {file}" for name, file in missing]
    for name, file in unlisted:
        other = f"in {weight_map[name]} by the index" if name in weight_map else "not in the index"
        lines.append(f"{name!r:.200} is in {file}, and {other}")
    raise FormatError(
        f"{store.location}/{index} contradicts the headers of files:\n{truncated_list(lines)}\nFiles of "
        f"different models or versions are mixed, or one is damaged: fetch the whole folder again.",
        key=(missing or unlisted)[0][0],
        path=f"{store.location}/{index}",
    )


def _folder_of(headers: Mapping[str, Header]) -> Folder:
    """Return the tensors of files as a chunk table."""
    files = tuple(sorted(headers))
    entries = sorted(
        (entry, number) for number, file in enumerate(files) for entry in headers[file].entries
    )  # by name, which is in one file only
    unreadable = {entry.name: reason for entry, _ in entries if (reason := _why_unreadable(entry))}
    readable = [(entry, number) for entry, number in entries if entry.name not in unreadable]
    starts = [headers[file].data_start for file in files]
    # From headers alone: ranks compare the identity of what they open, and no tensor is read for that.
    identity = [f"{file}\n{headers[file].digest}\n" for file in files]
    return Folder(_chunks_of(readable, files, starts), unreadable, digest_of("".join(identity).encode()))


def _why_unreadable(entry: HeaderEntry) -> str:
    """Return why a tensor cannot be loaded; "" if it can."""
    if not entry.name:
        return "has an empty name, which is no key"
    if entry.dtype not in DTYPE_NAMES:
        return f"is stored as {entry.dtype}, which cannot be loaded"
    if len(entry.shape) > _MAX_DIMS:
        return f"has {len(entry.shape)} dims; at most {_MAX_DIMS} can be loaded"
    if max(entry.shape, default=0) > MAX_NUMEL:
        return f"has the extent {max(entry.shape)}, which cannot be loaded"
    return ""


def _chunks_of(
    entries: Sequence[tuple[HeaderEntry, int]], files: tuple[str, ...], data_starts: Sequence[int]
) -> StoredChunks:
    """Return a chunk for each tensor with elements.

    Args:
        entries: tensors sorted by name, each with the number of its file.
        files: names of files.
        data_starts: where data begins in each file.
    """
    arrays = tuple(ArraySpec(entry.name, DTYPE_NAMES[entry.dtype], entry.shape) for entry, _ in entries)
    dims = max((len(spec.global_shape) for spec in arrays), default=1) or 1
    # Offsets in a header count from the beginning of the data; `data_starts` makes them offsets in files.
    start = np.array([entry.start for entry, _ in entries], np.int64)
    stop = np.array([entry.stop for entry, _ in entries], np.int64)
    file = np.array([number for _, number in entries], np.int64)
    # Padding dims have extent 1, so the product of all extents is the number of elements.
    shape = pad_shapes([spec.global_shape for spec in arrays], dims, fill=1)
    number = np.flatnonzero(stop > start)  # an array without elements has no chunk
    # From here on, row r of each column is the array number[r], stored whole as one chunk.
    table = ChunkTable(
        arrays,
        array=number,
        start=np.zeros((len(number), dims), np.int64),
        shape=shape[number],
        flat_start=np.zeros(len(number), np.int64),
        flat_stop=shape[number].prod(axis=1),
        nbytes=(stop - start)[number],
    )
    return StoredChunks(
        table,
        file=file[number],
        offset_bytes=(np.array(data_starts, np.int64)[file] + start)[number],
        digest_start=np.zeros(len(number), np.int64),
        digests=None,
        files=files,
    )


# Reading a folder of safetensors files. Only headers and small JSON files are read when it is opened.

CONTENT_FILES = {
    "huggingface_config": names.CONFIG,
    "huggingface_generation_config": names.GENERATION_CONFIG,
}
"""Keys of the content metadata, and the files whose content they have; a key is missing if its file is."""


class HuggingFaceLoadStrategy(LoadStrategy):
    """Reads a Hugging Face folder. Arrays have the names of its tensors; each is one chunk."""

    backend = names.BACKEND
    version = names.VERSION

    def detect(self, store: Store) -> Json | None:
        """Recognise a folder by its index, or by its only safetensors file."""
        listed = store.names()
        model = names.find_model(listed)
        if model is None:
            return None
        left_out = dict.fromkeys(names.training_state(listed), "state of a Trainer or of accelerate")
        manifest = {"sharded_backend": self.backend, "sharded_backend_version": self.version, "model": model}
        return {**manifest, "left_out": left_out} if left_out else manifest

    def check_files(self, store: Store, manifest: Json, *, deep: bool) -> Iterator[Damage]:
        """Yield what is wrong with config.json and generation_config.json; `open` checks everything else."""
        try:
            _read_common(store)
        except CheckpointError as error:
            yield damage_of(error, location=store.location)

    def open(self, store: Store, manifest: Json, *, allow_unsafe_pickle: bool) -> Contents:
        """Read the index, if there is one, and the header of each file. There are no pickles.

        Raises:
            FormatError: the index or a header is damaged, or they do not fit to each other.
            StorageError: a file cannot be read.
        """
        folder = read_folder(store, _model_of(store, manifest))
        left_out = manifest.get("left_out")  # absent in a metadata.json of somebody else
        texts = [f"{name} ({why})" for name, why in left_out.items()] if isinstance(left_out, dict) else []
        return _contents(store, folder, left_out=texts)


def _model_of(store: Store, manifest: Json) -> str:
    """Return the index or the only file of a folder."""
    model = manifest.get("model")
    if model is None:  # a metadata.json of somebody else names the format, and not the file
        model = names.find_model(store.names())
    if not isinstance(model, str):
        raise FormatError(
            f"{store.location}: there is neither {names.MODEL} nor {names.INDEX}, so it is no Hugging Face "
            f"folder. Name the folder that has one of them.",
            path=store.location,
        )
    return model


def _contents(store: Store, folder: Folder, *, left_out: Sequence[str]) -> Contents:
    index = WholeIndex(folder.stored)
    return Contents(
        arrays={spec.key: spec for spec in index.arrays},
        chunks=lambda keys: FileChunks(store, index.of_keys(keys)),
        common=lambda: _read_common(store),
        decode_object=_reject_object,
        identity=folder.identity,
        unreadable=folder.unreadable,
        left_out=left_out,
        names_save=False,  # headers are equal for all models of one architecture
    )


def _read_common(store: Store) -> Json:
    content = {key: read_document(store, name) for key, name in CONTENT_FILES.items() if store.exists(name)}
    return {"state_dict": {}, "content_metadata": content}


def _reject_object(data: bytes, where: str) -> Any:
    raise FormatError(f"{where}: a Hugging Face folder has no objects.", path=where)
