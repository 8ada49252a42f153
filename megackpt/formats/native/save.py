"""Writing the native format."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors.torch
import torch

from megackpt.codec import encode, pack
from megackpt.formats.documents import attempt_in_manifest, write_small_file
from megackpt.formats.file_names import NATIVE
from megackpt.formats.index_file import check_files_exist, compact, read_index, without_arrays, write_index
from megackpt.formats.native import names
from megackpt.formats.native.data_file import header_of
from megackpt.formats.strategy import Capabilities, ChunkParts, CoverageCheck, Json, SaveStrategy
from megackpt.plans.geometry import Ints, joined_ranges
from megackpt.plans.metadata import (
    DIGEST_BLOCK_BYTES,
    ChunkTable,
    Column,
    StoredChunks,
    block_counts,
    pack_columns,
    unpack_columns,
)
from megackpt.plans.planning import SavePlan, first_of_equal_chunks
from megackpt.storage import BlockDigester, BufferedWriter, Store

if TYPE_CHECKING:
    from megackpt.formats.array_digests import ArrayDigester, ChunkDigest, Contributions

_STEP_BYTES = 1 << 20  # digested and then written, while they are in the processor's cache
_RANKS_AT_ONCE = 64  # whose digests are sorted at once: as many as fit into the processor's cache


class NativeSaveStrategy(SaveStrategy):
    """Saves format `megackpt` version 1. Source: docs/format.md."""

    backend = names.BACKEND
    version = names.VERSION
    file_names = NATIVE
    capabilities = Capabilities(
        needs_own_rows_only=True,
        writes_in_order=True,
        refers_to_arrays=True,
        writes_parity=True,
        digests_arrays=True,
    )

    _covered: CoverageCheck | None = None  # finds the arrays whose digests are stored; None: none are

    def with_array_digests(self, covered: CoverageCheck) -> NativeSaveStrategy:
        """Return a strategy that also stores digests of arrays."""
        from megackpt.storage.crc64 import Crc64

        Crc64()  # raises an error now, before anything is written, if its library is not installed
        # The caller may use the same strategy for saves without these digests.
        strategy = copy.copy(self)
        strategy._covered = covered
        return strategy

    def check_common(self, common: Any) -> None:
        """Check that `megackpt.codec` can encode common state and content metadata."""
        encode(common["state_dict"])
        encode(common["content_metadata"], path="content_metadata")

    def encode_object(self, value: Any, *, path: str) -> bytes:
        """Return a value as one blob; see `megackpt.codec`."""
        return pack(value, path=path)

    def write_chunks(
        self, store: Store, *, attempt: str, rank: int, plan: SavePlan, rows: Ints, parts: ChunkParts
    ) -> bytes:
        """Write the data file of a rank; the receipt has where its data begins, and digests of its bytes."""
        chunks = plan.table.take(rows)
        receipt = _ReceiptBuilder(chunks, digests_arrays=self._covered is not None)
        if not len(rows):
            return receipt.packed(data_start=0)
        # The plan has the size of every chunk, so header and length of the file are known before its data.
        header = header_of(chunks)
        name, nbytes = names.data_file(attempt, rank), len(header) + int(chunks.nbytes.sum())
        with store.open_writer(name, nbytes) as writer:
            buffered = BufferedWriter(writer)
            buffered.write(memoryview(header))
            for row, row_parts in enumerate(parts.in_order(rows.tolist())):
                receipt.begin_chunk(row)
                for part in row_parts:
                    for start in range(0, len(part), _STEP_BYTES):
                        step = part[start : start + _STEP_BYTES]
                        receipt.update(step)
                        buffered.write(step)
                receipt.end_chunk(row)
            buffered.flush()
        # Before the receipt is sent: rank 0 commits when it has all receipts.
        store.sync()
        return receipt.packed(data_start=len(header))

    def write_index(self, store: Store, *, attempt: str, plan: SavePlan, receipts: list[list[bytes]]) -> Json:
        """Add the digests and file positions of all ranks to the chunk table, and write it."""
        written = _receipts_of_writers(plan, receipts)
        # A receipt has digests in the order of the rank's file, the index in the order of its rows. The sort
        # gives all rows in file order, so that each rank's digests can be put where its rows have theirs.
        in_files = np.lexsort((plan.offset_bytes, plan.writer))
        stored = _stored_chunks(plan, in_files, written, attempt=attempt)
        check_files_exist(store, stored, prefix="data/")
        # Without validation, several ranks may have written the same chunk: the first copy is listed.
        first_copy = first_of_equal_chunks(stored.table)
        unique = stored if len(first_copy) == len(stored) else stored.take(first_copy)
        if self._covered is not None:
            contributions = np.zeros(len(stored), np.uint64)
            of_ranks = [np.zeros(0, np.uint64), *(receipt["contributions"] for receipt in written.values())]
            contributions[in_files] = np.concatenate(of_ranks)
            unique = _with_array_digests(unique, contributions[first_copy], self._covered)
        return {"index": write_index(store, names.index_file(attempt), compact(unique))}

    def plan_parity(
        self, *, attempt: str, plan: SavePlan, receipts: list[list[bytes]], most: int
    ) -> list[bytes]:
        """Return the parity files that each rank writes, with the data files that they protect, as JSON."""
        from megackpt.formats.native.parity import parity_work

        nbytes = np.zeros(len(receipts), np.int64)
        np.add.at(nbytes, plan.writer, plan.table.nbytes)
        # A file is its header, up to the start of the data, and the bytes of its rows.
        sizes = {
            rank: int(receipt["data_start"][0] + nbytes[rank])
            for rank, receipt in _receipts_of_writers(plan, receipts).items()
        }
        return parity_work(sizes, attempt=attempt, ranks=len(receipts), most=most)

    def write_parity(self, store: Store, *, attempt: str, work: bytes) -> bytes:
        """Write the parity files of a rank, one after the other."""
        from megackpt.formats.native.parity import write_parity_files

        return write_parity_files(store, attempt=attempt, work=work)

    def list_parity(self, store: Store, *, attempt: str, receipts: list[bytes]) -> Json:
        """Write the list of parity files."""
        from megackpt.formats.native.parity import write_parity_list

        return write_parity_list(store, attempt=attempt, receipts=receipts)

    def committed_attempt(self, store: Store) -> str | None:
        """Return the attempt that metadata.json names."""
        return attempt_in_manifest(store)

    def remove_arrays(self, store: Store, manifest: Json, *, key_prefix: str) -> tuple[Json, list[str]]:
        """Write a new index without some arrays; data files that hold nothing else become stale."""
        index = read_index(store, manifest)
        stored = without_arrays(index, key_prefix=key_prefix)
        old = manifest["index"]["file"]
        # A new name: the committed index stays as it is until a manifest that names the new one replaces the
        # old.
        new = names.index_file(manifest["attempt"], revision=names.revision_of(old) + 1)
        kept = frozenset(stored.files)
        stale = set(index.files) - kept
        entries = {**manifest, "index": write_index(store, new, stored)}
        if "parity" in manifest:
            from megackpt.formats.native.parity import reduced_parity

            # Data files that parity needs to compute others are kept.
            parity, needed, unneeded = reduced_parity(store, manifest, kept)
            del entries["parity"]
            entries |= parity
            stale = (stale - needed) | unneeded
        return entries, [old, *sorted(stale)]

    def write_common(self, store: Store, *, attempt: str, common: Any) -> Json:
        """Write the tree as JSON, and its tensors in a file of their own."""
        encoded = encode(common)
        text = json.dumps(encoded.tree, ensure_ascii=False, allow_nan=False, indent=1)
        entries = {"common": write_small_file(store, names.common_file(attempt), text.encode())}
        if encoded.tensors:
            tensors = {str(i): t for i, t in enumerate(_without_shared_memory(encoded.tensors))}
            blob = safetensors.torch.save(tensors)
            entries["common_tensors"] = write_small_file(store, names.common_tensors_file(attempt), blob)
        return entries

    def files_of(self, manifest: Json) -> list[str]:
        """Return the index, the files of the common state and the list of parity files."""
        entries = ("index", "common", "common_tensors", "parity")
        return [manifest[entry]["file"] for entry in entries if entry in manifest]


def _receipts_of_writers(
    plan: SavePlan, receipts: Sequence[Sequence[bytes]]
) -> dict[int, Mapping[str, Column]]:
    """Return the columns of the receipt of each rank that has written something, by rank, ascending.

    Digests and contributions are in the order of the rank's file.
    """
    return {
        rank: unpack_columns(receipts[rank][0], where=f"receipt of rank {rank}")
        for rank in np.unique(plan.writer).tolist()
    }


def _stored_chunks(
    plan: SavePlan, in_files: Ints, written: Mapping[int, Mapping[str, Column]], *, attempt: str
) -> StoredChunks:
    """Return the chunks of a plan with the places of their bytes, and with the digests of receipts.

    in_files are the rows in the order of files, and in each file in the order of bytes.
    """
    writers = list(written)
    # Files are numbered among the ranks that have one: `file_of[rank]` is the number of the rank's file.
    file_of = np.zeros(max(writers, default=-1) + 1, np.int64)
    file_of[writers] = np.arange(len(writers))
    file = file_of[plan.writer]
    data_start = np.array([receipt["data_start"][0] for receipt in written.values()], np.int64)
    blocks = block_counts(plan.table.nbytes)
    digest_start = np.cumsum(blocks) - blocks
    digests = np.empty(int(blocks.sum()), np.uint64)
    # The rows of writers[i] are in_files[ends[i] : ends[i + 1]].
    ends = [0, *np.searchsorted(plan.writer[in_files], writers, side="right").tolist()]
    for first in range(0, len(writers), _RANKS_AT_ONCE):
        last = min(first + _RANKS_AT_ONCE, len(writers))
        rows = in_files[ends[first] : ends[last]]
        in_file_order = np.concatenate([written[rank]["digests"] for rank in writers[first:last]])
        # Row r owns digests[digest_start[r] : digest_start[r] + blocks[r]]; an empty chunk has none.
        digests[joined_ranges(digest_start[rows], blocks[rows])] = in_file_order
    return StoredChunks(
        table=plan.table,
        file=file,
        offset_bytes=data_start[file] + plan.offset_bytes,
        digest_start=digest_start,
        digests=digests,
        files=tuple(names.data_file(attempt, rank) for rank in writers),
    )


def _with_array_digests(
    stored: StoredChunks, contributions: Contributions, covered: CoverageCheck
) -> StoredChunks:
    """Return the chunks with digests of the covered arrays; contributions are those of chunks, `[n]`."""
    from megackpt.formats.array_digests import ArrayDigester

    digests = ArrayDigester(stored.table).combine(contributions, covered(stored.table))
    return replace(stored, array_digests=digests)


class _ReceiptBuilder:
    """Digests the bytes of a data file, in their order, for the rank that writes the index.

    There is a digest of each block and, with digests_arrays, a contribution of each chunk to the digest of
    its array.
    """

    def __init__(self, chunks: ChunkTable, *, digests_arrays: bool) -> None:
        self._blocks = BlockDigester(DIGEST_BLOCK_BYTES)
        self._arrays: ArrayDigester | None = None
        if digests_arrays:
            from megackpt.formats.array_digests import ArrayDigester

            self._arrays = ArrayDigester(chunks)
        self._chunk: ChunkDigest | None = None
        self._contributions: Contributions = np.zeros(len(chunks), np.uint64)

    def begin_chunk(self, row: int) -> None:
        """Begin a chunk."""
        self._chunk = self._arrays.begin(row) if self._arrays is not None else None

    def update(self, data: memoryview) -> None:
        """Take the next bytes of the chunk."""
        self._blocks.update(data)
        if self._chunk is not None:
            self._chunk.update(data)

    def end_chunk(self, row: int) -> None:
        """End the chunk: its last block may be a short one."""
        self._blocks.end()
        if self._chunk is not None:
            self._contributions[row] = self._chunk.result()

    def packed(self, *, data_start: int) -> bytes:
        """Return the receipt; data_start is where the first chunk begins in the file."""
        columns: dict[str, Column] = {
            "data_start": np.array([data_start], np.int64),
            "digests": self._blocks.result(),
        }
        if self._arrays is not None:
            columns["contributions"] = self._contributions
        return pack_columns(columns)


def _without_shared_memory(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield tensors, and copies of those that share memory with an earlier one, which safetensors rejects."""
    seen: set[int] = set()
    for tensor in tensors:
        memory = tensor.untyped_storage().data_ptr()
        yield tensor.clone() if memory in seen else tensor
        seen.add(memory)
