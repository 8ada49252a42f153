"""Reading the native format. Everything in a file is checked before it is used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import safetensors.torch
from safetensors import SafetensorError

from megackpt.codec import EncodedValue, decode, load_tree, unpack
from megackpt.formats.contents import Contents, FileChunks
from megackpt.formats.documents import damaged, read_small_file, unpadded_shapes
from megackpt.formats.index_file import StoredIndex
from megackpt.formats.index_reader import open_index
from megackpt.formats.native import names
from megackpt.formats.strategy import MANIFEST, Json, LoadStrategy, WholeFile
from megackpt.storage import Store

if TYPE_CHECKING:
    from megackpt.formats.damage import Damage


class NativeLoadStrategy(LoadStrategy):
    """Loads format `megackpt` version 1. Source: docs/format.md."""

    backend = names.BACKEND
    version = names.VERSION

    def check_files(self, store: Store, manifest: Json, *, deep: bool) -> Iterator[Damage]:
        """Yield what is wrong with documents, the index and the headers of data files."""
        from megackpt.formats.native.checking import check_files

        return check_files(store, manifest)

    def whole_files(self, store: Store, manifest: Json) -> Sequence[WholeFile]:
        """Return parity files and the files they protect."""
        from megackpt.formats.native.checking import whole_files

        return whole_files(store, manifest)

    def writer_of(self, name: str) -> int | None:
        """Return the rank in the name of a data file."""
        return names.rank_of(name)

    def open(self, store: Store, manifest: Json, *, allow_unsafe_pickle: bool) -> Contents:
        """Read and check the head of the index. Rows and common state are read when they are needed.

        There are no pickles in this format.
        """
        index = open_index(store, manifest)

        # A function, so that the list of parity files is read only when something is damaged.
        def rebuilt() -> Contents:
            from megackpt.formats.native.parity import RebuiltFiles, read_groups

            return _contents(RebuiltFiles(store, read_groups(store, manifest)), index, manifest)

        contents = _contents(store, index, manifest)
        return replace(contents, rebuilt=rebuilt) if "parity" in manifest else contents

    def rebuilt_files(self, store: Store, manifest: Json) -> Store | None:
        """Return a view of data files and parity files, each computed from the others of its group."""
        from megackpt.formats.native.parity import RebuiltFiles, read_groups

        groups = read_groups(store, manifest)
        return RebuiltFiles(store, groups) if groups else None


def _contents(store: Store, index: StoredIndex, manifest: Json) -> Contents:
    arrays = {a.key: a for a in index.arrays}
    return Contents(
        arrays=arrays,
        chunks=lambda keys: FileChunks(store, index.of_keys(keys)),
        chunks_overlapping=lambda wanted: FileChunks(store, index.of_boxes(wanted)),
        common=lambda: _read_common(store, manifest),
        decode_object=lambda data, where: unpack(data, where=where),
        identity=str(manifest.get("attempt")),
        array_digests=index.array_digests,
        unpadded=unpadded_shapes(manifest, arrays, where=f"{store.location}/{MANIFEST}"),
    )


def _read_common(store: Store, manifest: Json) -> Any:
    data, where = read_small_file(store, manifest, "common")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise damaged(f"not UTF-8 ({error})", where) from error
    tensors: dict[str, Any] = {}
    if "common_tensors" in manifest:
        blob, where_tensors = read_small_file(store, manifest, "common_tensors")
        try:
            tensors = safetensors.torch.load(blob)
        except SafetensorError as error:
            raise damaged(f"not a safetensors file ({error})", where_tensors) from error
    # The tree refers to tensors by their numbers, which are their names in the file.
    try:
        ordered = tuple(tensors[str(i)] for i in range(len(tensors)))
    except KeyError as error:
        raise damaged(f"tensor {error} of the common state is missing", where) from error
    return decode(EncodedValue(tree=load_tree(text, where=where), tensors=ordered), where=where)
