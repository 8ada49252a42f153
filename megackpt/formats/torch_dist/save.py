"""Writing the format torch_dist: the files that stock DCP and Megatron-Core read, and an index of our own."""

from __future__ import annotations

import contextlib
import json
import pickle
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from megackpt.errors import DeclarationError, FormatError, StorageError, UnserializableError
from megackpt.formats.documents import CONTENT_METADATA, read_manifest_file, write_small_file
from megackpt.formats.file_names import TORCH_DIST, TORCH_DIST_TEMPORARY
from megackpt.formats.index_file import (
    check_files_exist,
    compact,
    read_index,
    without_arrays,
    write_index,
)
from megackpt.formats.safe_pickle import save_value
from megackpt.formats.strategy import MANIFEST, Capabilities, ChunkParts, Json, SaveStrategy
from megackpt.formats.torch_dist import names
from megackpt.formats.torch_dist.checking import (
    COMMON_MAX_BYTES,
    MANIFEST_CONTENT,
    METADATA_MAX_BYTES,
    find_note,
    read_metadata,
)
from megackpt.formats.torch_dist.data_file import DataFile, Items, items_of, spread_evenly
from megackpt.formats.torch_dist.metadata_reader import DcpMetadata
from megackpt.formats.torch_dist.metadata_unpickler import load_metadata
from megackpt.formats.torch_dist.metadata_writer import WrittenItems, data_files_of, metadata_of, without_keys
from megackpt.formats.torch_dist.values import write_objects, write_state, written_values
from megackpt.plans.geometry import Ints
from megackpt.plans.metadata import (
    ChunkTable,
    StoredChunks,
    block_counts,
    pack_columns,
    unpack_columns,
)
from megackpt.plans.planning import SavePlan, first_of_equal_chunks
from megackpt.storage import Store, digest_of

PICKLE_PROTOCOL = 4  # the newest that the oldest supported Python of a reader knows

_TEMPORARY = re.compile(TORCH_DIST_TEMPORARY)


class TorchDistSaveStrategy(SaveStrategy):
    """Saves format `torch_dist` version 1.

    Each rank writes thread_count files at the same time, one thread each. Arrays and objects whose key
    begins with separation_hint are written to files of their own by half of the threads, so that removing
    them later removes whole files.

    With values_for_dcp the values of common state, and objects of shape (1,), are written a second time, each
    under its own name, so that stock `dcp.load` finds them. The strict modes of Megatron-Core (`raise_all`,
    `log_all` and the like) do not know these names and raise an error: set it to False for them.

    Raises:
        DeclarationError: thread_count is below 1, or below 2 with a separation_hint.

    Source: torch.distributed.checkpoint `FileSystemWriter`, Megatron-Core `TorchDistSaveShardedStrategy`.
    """

    backend = names.BACKEND
    version = names.VERSION
    file_names = TORCH_DIST

    def __init__(
        self,
        *,
        thread_count: int = 2,
        separation_hint: str | None = None,
        values_for_dcp: bool = True,
    ) -> None:
        least = 1 if separation_hint is None else 2
        if type(thread_count) is not int or thread_count < least:
            why = "" if separation_hint is None else f": separation_hint={separation_hint!r} needs two files"
            raise DeclarationError(
                f"thread_count is {thread_count!r}; give a whole number above {least - 1}{why}."
            )
        if not isinstance(separation_hint, str | None):
            raise DeclarationError(
                f"separation_hint is {separation_hint!r}; give the beginning of keys, or None."
            )
        self.thread_count = thread_count
        self.separation_hint = separation_hint
        self.values_for_dcp = values_for_dcp
        # Several threads take the bytes of their files at the same time, and so in no order.
        self.capabilities = Capabilities(needs_own_rows_only=True, writes_in_order=thread_count == 1)

    def check_common(self, common: Any) -> None:
        """Check that common state can be pickled, and loaded without running code."""
        _encoded_common(common)

    def encode_object(self, value: Any, *, path: str) -> bytes:
        """Return the bytes of torch.save for a list with the value alone, as Megatron-Core stores objects."""
        return save_value([value], path=path)

    def write_chunks(
        self, store: Store, *, attempt: str, rank: int, plan: SavePlan, rows: Ints, parts: ChunkParts
    ) -> bytes:
        """Write the rows as items of up to thread_count files; return where they lie, and their digests."""
        if not len(rows):
            return b""
        items = items_of(plan.table, rows)
        bins = self._bins(plan.table, rows)
        files = [DataFile.of(items, rows, members) for members in bins]

        def write(number: int) -> None:
            files[number].write(store, names.data_file(attempt, rank, number), parts)

        with ThreadPoolExecutor(max_workers=len(files), thread_name_prefix="megackpt-write") as pool:
            # All files are begun before the first is waited for. The pool waits for the others if one fails.
            for done in [pool.submit(write, number) for number in range(len(files))]:
                done.result()
        store.sync()
        return _receipt(items, files)

    def _bins(self, table: ChunkTable, rows: Ints) -> list[Ints]:
        """Return the positions in rows that each file takes."""
        nbytes = table.nbytes[rows]
        if self.separation_hint is None:
            return spread_evenly(nbytes, self.thread_count)
        has_prefix = np.array([a.key.startswith(self.separation_hint) for a in table.arrays], np.bool_)
        is_apart = has_prefix[table.array[rows]]
        groups = (np.flatnonzero(~is_apart), np.flatnonzero(is_apart))
        threads = self.thread_count // 2
        return [group[bin_] for group in groups for bin_ in spread_evenly(nbytes[group], threads)]

    def write_index(self, store: Store, *, attempt: str, plan: SavePlan, receipts: list[list[bytes]]) -> Json:
        """Write our own index, and `.metadata` under a name of the attempt until it is published."""
        stored, length = _stored(attempt, plan, [r[0] for r in receipts])
        check_files_exist(store, stored, prefix="__")
        written = WrittenItems(
            stored.table,
            stored.file.tolist(),
            stored.files,
            length["item"].tolist(),
            length["nbytes"].tolist(),
        )
        entries: Json = {}
        if self.values_for_dcp:
            entries = write_objects(store, attempt=attempt, stored=stored, lengths=written.length)
        values = written_values(store, attempt=attempt)
        data = pickle.dumps(metadata_of(written, values, attempt=attempt), protocol=PICKLE_PROTOCOL)
        return entries | {
            "index": write_index(store, names.index_file(attempt), compact(stored)),
            "metadata": write_small_file(store, names.staged_metadata_file(attempt), data),
        }

    def write_common(self, store: Store, *, attempt: str, common: Any) -> Json:
        """Write this attempt's copy of common.pt, and its values as DCP stores them."""
        entries: Json = {}
        if self.values_for_dcp:
            entries = write_state(store, attempt=attempt, state=common["state_dict"])
        return entries | {
            "common": write_small_file(store, names.common_file(attempt), _encoded_common(common)),
            CONTENT_METADATA: common["content_metadata"] is not None,
        }

    def publish(self, store: Store, *, attempt: str, entries: Json) -> Json:
        """Write the note about the new `.metadata`, replace `.metadata` (the commit), then common.pt.

        megackpt reads common state from the attempt's own copy, so it finds the old checkpoint or the new one
        at any moment between. If a checkpoint of another format is replaced, replacing its metadata.json is
        the commit.
        """
        data = store.read(entries["metadata"]["file"], max_bytes=METADATA_MAX_BYTES)
        note = {key: value for key, value in entries.items() if key != "metadata"} | {"attempt": attempt}
        # The note comes first: a `.metadata` without a note counts as one of another library, without our
        # common state.
        _write_note(store, attempt, digest_of(data), note)
        store.sync()
        common = store.read(names.common_file(attempt), max_bytes=entries["common"]["nbytes"])
        others = _manifest_of_another_format(store)
        # These names are fixed, so the old content is nowhere else: it is kept in memory until all are
        # replaced.
        before = {name: _content(store, name) for name in (names.COMMON, *others, names.METADATA)}
        store.replace(names.METADATA, data)
        try:
            for name in others:  # first: common.pt may be a file of that format
                store.replace(name, json.dumps(MANIFEST_CONTENT, indent=1, sort_keys=True).encode())
            store.replace(names.COMMON, common)
        except Exception:
            # Common state first: for other readers, old metadata with new common state is no checkpoint.
            with contextlib.suppress(StorageError):
                for name, content in before.items():
                    _put_back(store, name, content)
            raise
        with contextlib.suppress(StorageError):
            stale = [n for n in store.names(".") if _TEMPORARY.fullmatch(n)]
            store.delete([entries["metadata"]["file"], *stale])
        return dict(MANIFEST_CONTENT)

    def committed_attempt(self, store: Store) -> str | None:
        """Return the attempt that wrote the note about the present `.metadata`."""
        if not store.exists(names.METADATA):
            return None
        manifest = read_manifest_file(store)
        if manifest is not None and manifest.get("sharded_backend") != names.BACKEND:
            return None
        note = find_note(store, digest_of(read_metadata(store)))
        attempt = note[0].get("attempt") if note else None
        return attempt if isinstance(attempt, str) else None

    def remove_arrays(self, store: Store, manifest: Json, *, key_prefix: str) -> tuple[Json, list[str]]:
        """Replace `.metadata` by one without some arrays, and write an index that belongs to it.

        Data files are not rewritten; those that hold nothing else become stale.
        """
        data = read_metadata(store)
        metadata = load_metadata(data, where=f"{store.location}/{names.METADATA}")
        DcpMetadata(metadata, location=store.location)  # raises an error if it is damaged
        kept = without_keys(metadata, key_prefix=key_prefix)
        new = pickle.dumps(kept, protocol=PICKLE_PROTOCOL)
        stale = sorted(data_files_of(metadata) - data_files_of(kept))
        note = find_note(store, digest_of(data))
        if note is not None:
            entries, name = note
            old = entries["index"]["file"]
            attempt = entries["attempt"]
            index = without_arrays(read_index(store, entries, document_name=name), key_prefix=key_prefix)
            file = names.index_file(attempt, revision=names.revision_of(old) + 1)
            gone = [e for e in names.VALUES_ENTRIES if e in entries and entries[e]["file"] in stale]
            entries = {key: value for key, value in entries.items() if key not in gone}
            entries = entries | {"index": write_index(store, file, index)}
            _write_note(store, attempt, digest_of(new), entries)
            # If nothing was removed, the new note has the name of the old one.
            stale += [old] if digest_of(new) == digest_of(data) else [old, name]
        # The new index and note are durable before the `.metadata` that they belong to replaces the old one.
        store.sync()
        store.replace(names.METADATA, new)
        return dict(MANIFEST_CONTENT), stale

    def files_of(self, manifest: Json) -> list[str]:
        """Return the index, `.metadata` before its publication, the attempt's common state, and copies."""
        entries = ("index", "metadata", "common", *names.VALUES_ENTRIES)
        return [manifest[entry]["file"] for entry in entries if entry in manifest]

    def fixed_names(self, store: Store) -> list[str]:
        """Return `.metadata` if a note of ours belongs to it, and common.pt if it equals a copy of ours."""
        listed = store.names()
        temporary = [n for n in listed if _TEMPORARY.fullmatch(n)]
        digests = {note[1] for note in map(names.note_of, listed) if note is not None}
        if names.METADATA not in listed or digest_of(read_metadata(store)) not in digests:
            return temporary
        copies = [n for n in listed if names.is_attempts_common(n)] if names.COMMON in listed else []
        is_ours = any(_are_equal(store, names.COMMON, copy) for copy in copies)
        return [*temporary, *([names.COMMON] if is_ours else []), names.METADATA]


def _encoded_common(common: Any) -> bytes:
    """Return the content of common.pt: common state, with content metadata in it."""
    state, content = dict(common["state_dict"]), common["content_metadata"]
    if content is not None:
        if CONTENT_METADATA in state:
            raise UnserializableError(
                f"{CONTENT_METADATA}: the state dict has this key, where format torch_dist stores the "
                f"content metadata that save() was given. Rename one of them.",
                path=CONTENT_METADATA,
            )
        state[CONTENT_METADATA] = content
    return save_value(state, path="common state")


def _content(store: Store, name: str) -> bytes | None:
    return store.read(name, max_bytes=COMMON_MAX_BYTES) if store.exists(name) else None


def _are_equal(store: Store, first: str, second: str) -> bool:
    if store.size(first) != store.size(second):
        return False
    return store.read(first, max_bytes=COMMON_MAX_BYTES) == store.read(second, max_bytes=COMMON_MAX_BYTES)


def _manifest_of_another_format(store: Store) -> list[str]:
    """Return metadata.json if it is there and belongs to another format."""
    with contextlib.suppress(FormatError):  # a damaged one is of no format
        manifest = read_manifest_file(store)
        return [] if manifest is None or manifest.get("sharded_backend") == names.BACKEND else [MANIFEST]
    return [MANIFEST]


def _put_back(store: Store, name: str, content: bytes | None) -> None:
    if content is not None:
        store.replace(name, content)
        return
    store.delete([name])
    store.sync()


def _write_note(store: Store, attempt: str, metadata_digest: str, note: Json) -> None:
    text = json.dumps(note, indent=1, sort_keys=True)
    store.write(names.note_file(attempt, metadata_digest), text.encode())


def _receipt(items: Items, files: list[DataFile]) -> bytes:
    """Return for each item, in their order, the file, where it lies in it, and its digests."""
    count = len(items.row)
    columns = {name: np.zeros(count, np.int64) for name in ("file", "item", "nbytes", "raw")}
    digests: list[Any] = [None] * count
    for number, file in enumerate(files):
        columns["file"][file.item] = number
        columns["item"][file.item] = file.start
        columns["nbytes"][file.item] = file.length
        columns["raw"][file.item] = file.raw
        for item, digest in zip(file.item.tolist(), file.digests, strict=True):
            digests[item] = digest
    return pack_columns({**columns, "digest": np.concatenate([np.zeros(0, np.uint64), *digests])})


def _stored(attempt: str, plan: SavePlan, receipts: list[bytes]) -> tuple[StoredChunks, dict[str, Ints]]:
    """Return what ranks have written in index order, and where whole items lie."""
    tables: list[ChunkTable] = []
    columns: dict[str, list[Any]] = {name: [] for name in ("file", "item", "nbytes", "raw", "digest")}
    files: list[str] = []
    for rank, data in enumerate(receipts):
        rows = plan.rows_of(rank)
        if not len(rows):
            continue
        receipt = unpack_columns(data, where=f"receipt of rank {rank}")
        # Each rank numbers its files from 0.
        file = receipt["file"] + len(files)
        files += [names.data_file(attempt, rank, n) for n in range(int(receipt["file"].max()) + 1)]
        # Each rank has computed the same rectangles, so they are not in its receipt.
        tables.append(items_of(plan.table, rows).table)
        for name, values in columns.items():
            values.append(file if name == "file" else receipt[name])
    empty = plan.table.take(np.zeros(0, np.int64))
    table = _concatenated([empty, *tables])
    merged = {
        n: np.concatenate([np.zeros(0, np.int64), *columns[n]]) for n in ("file", "item", "nbytes", "raw")
    }
    digests = np.concatenate([np.zeros(0, np.uint64), *columns["digest"]])
    blocks = block_counts(table.nbytes)
    stored = StoredChunks(
        table, merged["file"], merged["raw"], np.cumsum(blocks) - blocks, digests, tuple(files)
    )
    # So far the items are in the order of files; an index is sorted by array, start and shape.
    order = np.lexsort((table.shape_keys(), table.start_keys()))
    # Without validation, several ranks may have written the same chunk: the first copy is listed.
    order = order[first_of_equal_chunks(table.take(order))]
    return stored.take(order), {n: merged[n][order] for n in ("item", "nbytes")}


def _concatenated(tables: list[ChunkTable]) -> ChunkTable:
    names_of = ("array", "start", "shape", "flat_start", "flat_stop", "nbytes")
    columns: dict[str, Any] = {c: np.concatenate([getattr(t, c) for t in tables]) for c in names_of}
    return replace(tables[0], **columns)
