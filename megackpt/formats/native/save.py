"""Writing the native format."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import safetensors.torch

from megackpt.codec import encode, pack
from megackpt.errors import StorageError
from megackpt.formats.native import names
from megackpt.formats.native.data_file import header_of
from megackpt.formats.native.load import read_index
from megackpt.formats.strategy import MANIFEST, MANIFEST_MAX_BYTES, Json, Pieces
from megackpt.geometry import Ints
from megackpt.metadata import (
    DIGEST_BLOCK_BYTES,
    StoredChunks,
    block_counts,
    pack_columns,
    pack_strings,
    unpack_columns,
)
from megackpt.planning import SavePlan, first_of_equal_chunks
from megackpt.storage import BlockDigester, Store, digest_of


class NativeSaveStrategy:
    """Saves format `megackpt` version 1. Source: docs/format.md."""

    backend = names.BACKEND
    version = names.VERSION
    writes_in_place = False

    def begin(self, store: Store, *, attempt: str) -> None:
        """Do nothing: files of an attempt carry its name."""

    def encode_object(self, value: Any, *, path: str) -> bytes:
        """Return a value as one blob; see `megackpt.codec`."""
        return pack(value, path=path)

    def rounds(self, plan: SavePlan, rank: int) -> list[Ints]:
        """Return all rows of a rank: every rank writes a file of its own."""
        return [plan.rows_of(rank)]

    def write_chunks(
        self, store: Store, *, attempt: str, rank: int, plan: SavePlan, rows: Ints, pieces: Pieces
    ) -> bytes:
        """Write one data file and return where its data begins and the digests of its blocks."""
        if not len(rows):
            return _receipt(0, [])
        chunks = plan.table.take(rows)
        header = header_of(chunks)
        digests = []
        with store.open_writer(
            names.data_file(attempt, rank), len(header) + int(chunks.nbytes.sum())
        ) as writer:
            writer.write(memoryview(header))
            for row in range(len(chunks)):
                digester = BlockDigester(DIGEST_BLOCK_BYTES)
                for piece in pieces(int(rows[row])):
                    digester.update(piece)
                    writer.write(piece)
                digests.append(digester.result())
        store.sync()
        return _receipt(len(header), digests)

    def write_index(self, store: Store, *, attempt: str, plan: SavePlan, receipts: list[list[bytes]]) -> Json:
        """Put the ranks' digests and file positions into the chunk table and write it."""
        writers = sorted(set(plan.writer.tolist()))
        file_of = np.zeros(len(receipts), np.int64)
        file_of[writers] = np.arange(len(writers))
        data_start = np.zeros(len(receipts), np.int64)
        blocks = block_counts(plan.table.nbytes)
        digest_start = np.cumsum(blocks) - blocks
        digests = np.zeros(int(blocks.sum()), np.uint64)
        for rank in writers:
            receipt = unpack_columns(receipts[rank][0], where=f"receipt of rank {rank}")
            data_start[rank] = receipt["data_start"][0]
            rows = plan.rows_of(rank)
            # The receipt has the digests in the order of the file, the index in the order of its rows.
            counts = blocks[rows]
            within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
            digests[np.repeat(digest_start[rows], counts) + within] = receipt["digests"]
        stored = StoredChunks(
            table=plan.table,
            file=file_of[plan.writer],
            offset_bytes=data_start[plan.writer] + plan.offset_bytes,
            digest_start=digest_start,
            digests=digests,
            files=tuple(names.data_file(attempt, rank) for rank in writers),
        )
        gone = set(stored.files) - set(store.names("data/"))
        if gone:
            raise StorageError(
                f"{store.location}: {min(gone)!r}, which this save has written, is gone. Another job "
                f"saves to the same "
                f"directory, or something cleans it up; give each its own.",
                path=store.location,
            )
        # Of a chunk that several ranks have written, which happens without validation, the first is enough.
        once = stored.take(first_of_equal_chunks(stored.table))
        return {"index": _write_index(store, names.index_file(attempt), _compact(once))}

    def publish(self, store: Store, *, attempt: str, said: Json) -> Json:
        """Return all that is known: metadata.json is the one file with a fixed name."""
        return said

    def committed_attempt(self, store: Store) -> str | None:
        """Return the attempt that metadata.json names."""
        if not store.exists(MANIFEST):
            return None
        attempt = json.loads(store.read(MANIFEST, max_bytes=MANIFEST_MAX_BYTES)).get("attempt")
        return attempt if isinstance(attempt, str) else None

    def remove_arrays(self, store: Store, manifest: Json, *, key_prefix: str) -> tuple[Json, list[str]]:
        """Write the index again without some arrays; data files that hold nothing else become stale."""
        index = read_index(store, manifest)
        kept = [i for i, a in enumerate(index.table.arrays) if not a.key.startswith(key_prefix)]
        new_number = np.full(len(index.table.arrays), -1, np.int64)
        new_number[kept] = np.arange(len(kept))
        rows = np.flatnonzero(new_number[index.table.array] >= 0)
        remaining = index.take(rows)
        table = replace(
            remaining.table,
            arrays=tuple(index.table.arrays[i] for i in kept),
            array=new_number[remaining.table.array],
        )
        stored = _compact(replace(remaining, table=table))
        old = manifest["index"]["file"]
        new = names.index_file(manifest["attempt"], revision=names.revision_of(old) + 1)
        stale = [old, *(name for name in index.files if name not in stored.files)]
        return manifest | {"index": _write_index(store, new, stored)}, stale

    def write_common(self, store: Store, *, attempt: str, common: Any) -> Json:
        """Write the tree as JSON and its tensors beside it."""
        encoded = encode(common)
        text = json.dumps(encoded.tree, ensure_ascii=False, allow_nan=False, indent=1)
        said = {"common": _write(store, names.common_file(attempt), text.encode())}
        if encoded.tensors:
            tensors = {str(i): t for i, t in enumerate(encoded.tensors)}
            blob = safetensors.torch.save(tensors)
            said["common_tensors"] = _write(store, names.common_tensors_file(attempt), blob)
        return said

    def files_of(self, manifest: Json) -> list[str]:
        """Return the index and the files of the common state."""
        entries = ("index", "common", "common_tensors")
        return [manifest[entry]["file"] for entry in entries if entry in manifest]

    def attempt_of(self, name: str) -> str | None:
        """Return the attempt in a file name of this format."""
        return names.attempt_of(name)


def _receipt(data_start: int, digests: list[np.ndarray[Any, np.dtype[np.uint64]]]) -> bytes:
    every = np.concatenate([np.zeros(0, np.uint64), *digests])
    return pack_columns({"data_start": np.array([data_start], np.int64), "digests": every})


def _compact(stored: StoredChunks) -> StoredChunks:
    """Leave out digests and files that no row refers to, as an index has those of its rows in their order."""
    assert stored.digests is not None  # every native index has them
    used = np.unique(stored.file)
    blocks = block_counts(stored.table.nbytes)
    start = np.cumsum(blocks) - blocks
    block = np.arange(int(blocks.sum())) - np.repeat(start, blocks)
    return replace(
        stored,
        file=np.searchsorted(used, stored.file),
        digest_start=start,
        digests=stored.digests[np.repeat(stored.digest_start, blocks) + block],
        files=tuple(stored.files[i] for i in used.tolist()),
    )


def _write_index(store: Store, name: str, stored: StoredChunks) -> Json:
    assert stored.digests is not None
    columns = {
        **stored.table.to_columns(),
        **pack_strings("file_name", stored.files),
        "file": stored.file,
        "offset_bytes": stored.offset_bytes,
        "digest": stored.digests,
    }
    return _write(store, name, pack_columns(columns))


def _write(store: Store, name: str, data: bytes) -> Json:
    store.write(name, data)
    return {"file": name, "nbytes": len(data), "xxh3_128": digest_of(data)}
