"""Reading a folder of safetensors files. Only headers and small JSON files are read when it is opened."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megackpt.errors import CheckpointError, FormatError
from megackpt.formats.contents import Contents, FileChunks
from megackpt.formats.damage import Damage, damage_of
from megackpt.formats.documents import read_document
from megackpt.formats.huggingface import names
from megackpt.formats.huggingface.folder import Folder, read_folder
from megackpt.formats.index_file import WholeIndex
from megackpt.formats.strategy import Json, LoadStrategy
from megackpt.storage import Store

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
        model = names.find_model(store.names())
        if model is None:
            return None
        return {"sharded_backend": self.backend, "sharded_backend_version": self.version, "model": model}

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
        return _contents(store, folder)


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


def _contents(store: Store, folder: Folder) -> Contents:
    index = WholeIndex(folder.stored)
    return Contents(
        arrays={spec.key: spec for spec in index.arrays},
        chunks=lambda keys: FileChunks(store, index.of_keys(keys)),
        common=lambda: _read_common(store),
        decode_object=_reject_object,
        identity=folder.identity,
        unreadable=folder.unreadable,
        names_save=False,  # headers are equal for all models of one architecture
    )


def _read_common(store: Store) -> Json:
    content = {key: read_document(store, name) for key, name in CONTENT_FILES.items() if store.exists(name)}
    return {"state_dict": {}, "content_metadata": content}


def _reject_object(data: bytes, where: str) -> Any:
    raise FormatError(f"{where}: a Hugging Face folder has no objects.", path=where)
