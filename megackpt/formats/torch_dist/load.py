"""Reading the format torch_dist, whoever wrote it. Everything in a file is checked before it is used."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from megackpt.errors import FormatError
from megackpt.formats.contents import Contents, FileChunks
from megackpt.formats.damage import Damage
from megackpt.formats.documents import (
    CONTENT_METADATA,
    damaged,
    read_document,
    read_small_file,
    split_common,
    unpadded_shapes,
)
from megackpt.formats.index_reader import open_index
from megackpt.formats.safe_pickle import load_value, warn_of_unsafe_pickle
from megackpt.formats.strategy import Json, LoadStrategy
from megackpt.formats.torch_dist import names
from megackpt.formats.torch_dist.checking import (
    COMMON_MAX_BYTES,
    MANIFEST_CONTENT,
    check_files,
    find_note,
    read_metadata,
)
from megackpt.formats.torch_dist.item_chunks import LISTED_OBJECT, ItemChunks
from megackpt.formats.torch_dist.metadata_reader import COMMON_STATE, DcpMetadata
from megackpt.formats.torch_dist.metadata_unpickler import load_metadata
from megackpt.ground.notices import notice
from megackpt.storage import Store, digest_of

log = logging.getLogger(__name__)

COMMON_OBJECT = f"{COMMON_STATE}/shard_0_1"


class TorchDistLoadStrategy(LoadStrategy):
    """Loads checkpoints of torch.distributed.checkpoint, and of Megatron-Core or megackpt as `torch_dist`."""

    backend = names.BACKEND
    version = names.VERSION

    def detect(self, store: Store) -> Json | None:
        """Recognise a directory by its `.metadata`: plain DCP writes no metadata.json."""
        return dict(MANIFEST_CONTENT) if store.exists(names.METADATA) else None

    def published_entries(self, store: Store, manifest: Json) -> Json:
        """Return the note about the present `.metadata`; the manifest if another library has written it."""
        note = find_note(store, digest_of(read_metadata(store)))
        return manifest if note is None else note[0]

    def check_files(self, store: Store, manifest: Json, *, deep: bool) -> Iterator[Damage]:
        """Yield what is wrong with documents, the index and zip records, if megackpt wrote the checkpoint."""
        return check_files(store, manifest)

    def writer_of(self, name: str) -> int | None:
        """Return the rank in the name of a data file."""
        return names.rank_of(name)

    def open(self, store: Store, manifest: Json, *, allow_unsafe_pickle: bool) -> Contents:
        """Open with our own index if it belongs to the present `.metadata`, else with `.metadata` alone."""
        if allow_unsafe_pickle:
            warn_of_unsafe_pickle(store.location)
        data = read_metadata(store)
        digest = digest_of(data)
        note = find_note(store, digest)
        if note is not None:
            return _open_own(store, *note, identity=digest, allow_unsafe=allow_unsafe_pickle)
        where = f"{store.location}/{names.METADATA}"
        metadata = load_metadata(data, where=where, allow_unsafe=allow_unsafe_pickle)
        dcp_metadata = DcpMetadata(metadata, location=store.location)
        return _open_foreign(store, dcp_metadata, identity=digest, allow_unsafe=allow_unsafe_pickle)


def _open_own(store: Store, note: Json, name: str, *, identity: str, allow_unsafe: bool) -> Contents:
    index = open_index(store, note, document_name=name)

    def common() -> Json:
        data, where = read_small_file(store, note, "common", document_name=name)
        state = load_value(data, where=where, allow_unsafe=allow_unsafe)
        return split_common(state, where=where, has_content_metadata=bool(note.get(CONTENT_METADATA)))

    arrays = {a.key: a for a in index.arrays}
    return Contents(
        arrays=arrays,
        chunks=lambda keys: FileChunks(store, index.of_keys(keys)),
        chunks_overlapping=lambda wanted: FileChunks(store, index.of_boxes(wanted)),
        common=common,
        decode_object=lambda data, where: _only_one(
            load_value(data, where=where, allow_unsafe=allow_unsafe), where
        ),
        identity=identity,
        unpadded=unpadded_shapes(note, arrays, where=f"{store.location}/{name}"),
    )


def _open_foreign(store: Store, metadata: DcpMetadata, *, identity: str, allow_unsafe: bool) -> Contents:
    # A copy: `_foreign_common` takes the object with common state out of it.
    arrays = dict(metadata.arrays)

    def decode(data: bytes, where: str) -> Any:
        # The first byte is not in the file: `ItemChunks` puts it before the item, to say how the object is
        # stored.
        value = load_value(memoryview(data)[1:], where=where, allow_unsafe=allow_unsafe)
        return _only_one(value, where) if data[0] == LISTED_OBJECT else value

    def chunks(keys: Iterable[str]) -> ItemChunks:
        table, items = metadata.chunks(keys)
        return ItemChunks(store, table, items, allow_unsafe=allow_unsafe)

    common = _foreign_common(store, metadata, arrays, allow_unsafe)
    return Contents(
        arrays=arrays,
        chunks=chunks,
        common=common,
        decode_object=decode,
        identity=identity,
        unreadable=metadata.unreadable,
        names_save=False,  # .metadata of DCP is the same for all saves of one structure
    )


def _foreign_common(
    store: Store, metadata: DcpMetadata, arrays: dict[str, Any], allow_unsafe: bool
) -> Callable[[], Json]:
    """Return a function that reads common state; the object with common state is removed from arrays."""
    # Megatron-Core writes the file in each save, possibly with the same bytes; DCP alone never writes it.
    by_megatron = metadata.is_of_megatron
    if store.exists(names.COMMON) and (by_megatron or not _is_of_another_save(store)):
        return partial(_common_of_file, store, allow_unsafe)
    if metadata.has_object(COMMON_OBJECT) and COMMON_STATE in arrays:
        del arrays[COMMON_STATE]
        return partial(_common_of_object, store, metadata, allow_unsafe)
    return lambda: {"state_dict": {}, "content_metadata": None}


def _common_of_file(store: Store, allow_unsafe: bool) -> Json:
    where = f"{store.location}/{names.COMMON}"
    data = store.read(names.COMMON, max_bytes=COMMON_MAX_BYTES)
    return split_common(load_value(data, where=where, allow_unsafe=allow_unsafe), where=where)


def _common_of_object(store: Store, metadata: DcpMetadata, allow_unsafe: bool) -> Json:
    item = metadata.object_item(COMMON_OBJECT, is_listed=True)
    table, items = metadata.chunks([COMMON_STATE])
    row = items.index(item)
    data = bytearray(int(table.nbytes[row]))
    chunks = ItemChunks(store, table, items, allow_unsafe=allow_unsafe)
    chunks.read_into(row, 0, memoryview(data), verify=False)
    where = f"{store.location}: object {COMMON_OBJECT!r}"
    value = load_value(memoryview(data)[1:], where=where, allow_unsafe=allow_unsafe)
    return split_common(_only_one(value, where), where=where)


def _is_of_another_save(store: Store) -> bool:
    """Return whether a save of ours wrote common.pt, and another library has replaced its `.metadata`."""
    digest = digest_of(store.read(names.COMMON, max_bytes=COMMON_MAX_BYTES))
    for name in store.names("megackpt-"):
        if names.note_of(name) is None:
            continue
        try:
            noted_digest = read_document(store, name)["common"]["xxh3_128"]
        except (FormatError, KeyError, TypeError):
            continue  # a damaged note of another `.metadata` must not prevent the load
        if noted_digest == digest:
            notice(
                log,
                f"{store.location}: {names.COMMON} was written with another {names.METADATA}, which "
                f"has been replaced since. There is no common state.",
            )
            return True
    return False


def _only_one(value: Any, where: str) -> Any:
    """Return an object from the list that stores it.

    Source: Megatron-Core `mcore_to_pyt_state_dict`: objects of one key on one rank are saved as a list.
    """
    if not isinstance(value, list) or not value:
        raise damaged(f"a list with the object was expected, found a {type(value).__name__}", where)
    return value[0]
