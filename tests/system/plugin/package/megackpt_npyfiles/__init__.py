"""A format of a third party: every chunk is a .npy file that numpy opens by itself.

What a package has to bring to add a format to megackpt: a class that saves, a class that loads, and a
`Format` that names them, found through the entry point in pyproject.toml.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from typing import Any

import numpy as np

from megackpt.codec import pack, unpack
from megackpt.errors import FormatError, IntegrityError
from megackpt.formats.contents import Chunks, Contents
from megackpt.formats.file_names import FileNames
from megackpt.formats.strategy import (
    MANIFEST,
    MANIFEST_MAX_BYTES,
    ChunkParts,
    Format,
    Json,
    LoadStrategy,
    SaveStrategy,
)
from megackpt.plans.metadata import ChunkTable, column, pack_columns, unpack_columns
from megackpt.plans.planning import SavePlan, first_of_equal_chunks
from megackpt.storage import Store, digest_of

BACKEND, VERSION = "npyfiles", 1
FILE_ENTRIES = ("index", "common")
FILE_NAMES = FileNames(
    attempt=r"chunk-([0-9a-f]{16})-\d+-\d+\.npy|common-([0-9a-f]{16})|index-([0-9a-f]{16})(?:-less)*"
)


def npy_header(nbytes: int) -> bytes:
    """Return what stands before nbytes bytes in a .npy file of unsigned bytes."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": (nbytes,)})
    return header.getvalue()


class Save(SaveStrategy):
    """Writes one file a chunk, named after the attempt and the chunk's place in the plan's index."""

    backend, version, file_names = BACKEND, VERSION, FILE_NAMES

    def check_common(self, common: Any) -> None:
        """Reject what megackpt's own codec cannot hold."""
        pack(common, path="common state")

    def encode_object(self, value: Any, *, path: str) -> bytes:
        """Encode as megackpt's own format does."""
        return pack(value, path=path)

    def write_chunks(
        self, store: Store, *, attempt: str, rank: int, plan: SavePlan, rows: Any, parts: ChunkParts
    ) -> bytes:
        """Write this rank's chunks; the receipt says their digests."""
        digests = []
        for number, row in enumerate(rows.tolist()):
            nbytes = int(plan.table.nbytes[row])
            data = b"".join(bytes(part) for part in parts(row))  # a whole chunk: simple, not frugal
            header = npy_header(nbytes)
            with store.open_writer(_name(attempt, rank, number), len(header) + nbytes) as writer:
                writer.write(memoryview(header))
                writer.write(memoryview(data))
            digests.append(digest_of(data))
        store.sync()
        return json.dumps(digests).encode()

    def write_index(self, store: Store, *, attempt: str, plan: SavePlan, receipts: list[list[bytes]]) -> Json:
        """Write boxes, file names and digests."""
        names, digests = [""] * len(plan.table), [""] * len(plan.table)
        for rank, (receipt,) in enumerate(receipts):
            for number, (row, digest) in enumerate(
                zip(plan.rows_of(rank).tolist(), json.loads(receipt), strict=True)
            ):
                names[row], digests[row] = _name(attempt, rank, number), digest
        once = first_of_equal_chunks(plan.table)
        files = [[names[row], digests[row]] for row in once.tolist()]
        return _write_index(store, f"index-{attempt}", plan.table.take(once), files)

    def write_common(self, store: Store, *, attempt: str, common: Any) -> Json:
        """Write common state as one blob."""
        data = pack(common, path="common state")
        store.write(f"common-{attempt}", data)
        return {"common": f"common-{attempt}", "common_digest": digest_of(data)}

    def committed_attempt(self, store: Store) -> str | None:
        """Return what metadata.json says."""
        if not store.exists(MANIFEST):
            return None
        return str(json.loads(store.read(MANIFEST, max_bytes=MANIFEST_MAX_BYTES))["attempt"])

    def remove_arrays(self, store: Store, manifest: Json, *, key_prefix: str) -> tuple[Json, list[str]]:
        """Write an index without them; their files are stale."""
        table, files = _read_index(store, manifest)
        goes = np.array([a.key.startswith(key_prefix) for a in table.arrays], np.bool_)
        rows = np.flatnonzero(~goes[table.array])
        kept = np.flatnonzero(~goes)
        number = np.full(len(goes), -1)
        number[kept] = np.arange(len(kept))
        left = table.take(rows)
        smaller = ChunkTable(
            tuple(table.arrays[i] for i in kept.tolist()),
            number[left.array],
            left.start,
            left.shape,
            left.flat_start,
            left.flat_stop,
            left.nbytes,
        )
        name = manifest["index"] + "-less"
        message = _write_index(store, name, smaller, [files[r] for r in rows.tolist()])
        stale = {name for name, _ in files} - {files[r][0] for r in rows.tolist()}
        return manifest | message, [manifest["index"], *sorted(stale)]

    def files_of(self, manifest: Json) -> list[str]:
        """Return index and common state."""
        return [manifest[entry] for entry in FILE_ENTRIES]


class Load(LoadStrategy):
    """Reads what `Save` writes."""

    backend, version = BACKEND, VERSION

    def open(self, store: Store, manifest: Json, *, allow_unsafe_pickle: bool) -> Contents:
        """Read the index."""
        table, files = _read_index(store, manifest)

        def chunks(keys: Iterable[str]) -> NpyChunks:
            wanted = set(keys)
            rows = [r for r in range(len(table)) if table.arrays[int(table.array[r])].key in wanted]
            return NpyChunks(store, table.take(np.array(rows, np.int64)), [files[r] for r in rows])

        def common() -> Any:
            data = store.read(manifest["common"], max_bytes=1 << 30)
            if digest_of(data) != manifest["common_digest"]:
                raise IntegrityError(f"{store.location}: the common state is damaged.", path=store.location)
            return unpack(data, where=store.location)

        return Contents(
            arrays={a.key: a for a in table.arrays},
            chunks=chunks,
            common=common,
            decode_object=lambda data, where: unpack(data, where=where),
            identity=manifest["attempt"],
        )


class NpyChunks(Chunks):
    """Chunks in files of their own. A digest covers a whole one, so a whole one is what is read."""

    def __init__(self, store: Store, table: ChunkTable, files: list[list[str]]) -> None:
        self._store = store
        self._files = files
        self.table = table
        self.position = np.arange(len(table))

    def describe(self, row: int) -> str:
        """Name the file."""
        return f"{self._store.location}/{self._files[row][0]}"

    def read_into(self, row: int, start: int, out: memoryview, *, verify: bool) -> None:
        """Read the chunk, check it, and hand over the part that is asked for."""
        name, digest = self._files[row]
        nbytes = int(self.table.nbytes[row])
        data = bytearray(nbytes)
        self._store.read_into(name, len(npy_header(nbytes)), memoryview(data))
        if verify and digest_of(data) != digest:
            raise IntegrityError(f"{self.describe(row)} is damaged.", path=self.describe(row))
        out[:] = data[start : start + len(out)]


def _name(attempt: str, rank: int, number: int) -> str:
    return f"chunk-{attempt}-{rank:05d}-{number:06d}.npy"


def _write_index(store: Store, name: str, table: ChunkTable, files: list[list[str]]) -> Json:
    text = np.frombuffer(json.dumps(files).encode(), np.uint8)
    data = pack_columns({**table.to_columns(), "files": text})
    store.write(name, data)
    return {"index": name, "index_digest": digest_of(data)}


def _read_index(store: Store, manifest: Json) -> tuple[ChunkTable, list[list[str]]]:
    where = f"{store.location}/{manifest['index']}"
    data = store.read(manifest["index"], max_bytes=1 << 30)
    if digest_of(data) != manifest["index_digest"]:
        raise IntegrityError(f"{where} is damaged.", path=where)
    columns = unpack_columns(data, where=where)
    table = ChunkTable.from_columns(columns, where=where)
    files = json.loads(column(columns, "files", where=where).tobytes())
    if len(files) != len(table):
        raise FormatError(f"{where}: {len(files)} files for {len(table)} chunks.", path=where)
    return table, files


FORMAT = Format(backend=BACKEND, version=VERSION, save=Save, load=Load, file_names=FILE_NAMES)
