"""Writing the native format."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import safetensors.torch
import torch

from megackpt.codec import encode, pack
from megackpt.formats.buffered_writer import BufferedWriter
from megackpt.formats.documents import attempt_in_manifest, write_small_file
from megackpt.formats.file_names import NATIVE
from megackpt.formats.index_file import (
    check_files_exist,
    compact,
    read_index,
    without_arrays,
    write_index,
)
from megackpt.formats.native import names
from megackpt.formats.native.data_file import header_of
from megackpt.formats.native.receipts import Digesting, unpacked
from megackpt.formats.strategy import Capabilities, ChunkParts, CoverageCheck, Json, SaveStrategy
from megackpt.geometry import Ints, joined_ranges
from megackpt.metadata import StoredChunks, block_counts
from megackpt.planning import SavePlan, first_of_equal_chunks
from megackpt.storage import Store

_STEP_BYTES = 1 << 20
_RANKS_AT_ONCE = 64  # whose digests are put in order together: what is still in the processor's cache


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
        """Return one that stores digests of arrays."""
        from megackpt.storage.crc64 import Crc64

        Crc64()  # or its refusal, before anything is written
        digesting = copy.copy(self)
        digesting._covered = covered
        return digesting

    def check_common(self, common: Any) -> None:
        """Refuse what `megackpt.codec` cannot encode."""
        encode(common["state_dict"])
        encode(common["content_metadata"], path="content_metadata")

    def encode_object(self, value: Any, *, path: str) -> bytes:
        """Return a value as one blob; see `megackpt.codec`."""
        return pack(value, path=path)

    def write_chunks(
        self, store: Store, *, attempt: str, rank: int, plan: SavePlan, rows: Ints, parts: ChunkParts
    ) -> bytes:
        """Write one data file and return where its data begins and the digests of its bytes."""
        chunks = plan.table.take(rows)
        digesting = Digesting(chunks, of_arrays=self._covered is not None)
        if not len(rows):
            return digesting.receipt(data_start=0)
        header = header_of(chunks)
        with store.open_writer(
            names.data_file(attempt, rank), len(header) + int(chunks.nbytes.sum())
        ) as writer:
            buffered = BufferedWriter(writer)
            buffered.write(memoryview(header))
            for row, of_row in enumerate(parts.in_order(rows.tolist())):
                digesting.begin(row)
                for part in of_row:
                    for at in range(0, len(part), _STEP_BYTES):
                        step = part[at : at + _STEP_BYTES]
                        digesting.update(step)
                        buffered.write(step)  # from the processor's cache, where the digest has brought it
                digesting.end(row)
            buffered.flush()
        store.sync()
        return digesting.receipt(data_start=len(header))

    def write_index(self, store: Store, *, attempt: str, plan: SavePlan, receipts: list[list[bytes]]) -> Json:
        """Put the ranks' digests and file positions into the chunk table and write it."""
        writers = np.unique(plan.writer).tolist()
        file_of = np.zeros(len(receipts), np.int64)
        file_of[writers] = np.arange(len(writers))
        data_start = np.zeros(len(receipts), np.int64)
        told = [unpacked(receipts[rank][0], rank=rank) for rank in writers]
        data_start[writers] = [of_rank["data_start"][0] for of_rank in told]
        # Receipts have digests in the order of files, the index in the order of its rows.
        in_files = np.lexsort((plan.offset_bytes, plan.writer))
        blocks = block_counts(plan.table.nbytes)
        digest_start = np.cumsum(blocks) - blocks
        digests = np.empty(int(blocks.sum()), np.uint64)
        ends = [0, *np.searchsorted(plan.writer[in_files], writers, side="right").tolist()]
        for some in range(0, len(writers), _RANKS_AT_ONCE):
            last = min(some + _RANKS_AT_ONCE, len(writers))
            rows = in_files[ends[some] : ends[last]]
            found = np.concatenate([of_rank["digests"] for of_rank in told[some:last]])
            digests[joined_ranges(digest_start[rows], blocks[rows])] = found
        stored = StoredChunks(
            table=plan.table,
            file=file_of[plan.writer],
            offset_bytes=data_start[plan.writer] + plan.offset_bytes,
            digest_start=digest_start,
            digests=digests,
            files=tuple(names.data_file(attempt, rank) for rank in writers),
        )
        check_files_exist(store, stored, prefix="data/")
        # Of a chunk that several ranks have written, which happens without validation, the first is enough.
        first = first_of_equal_chunks(stored.table)
        once = stored if len(first) == len(stored) else stored.take(first)
        if self._covered is not None:
            from megackpt.formats.array_digests import ArrayDigester

            contributions = np.zeros(len(stored), np.uint64)
            due = [np.zeros(0, np.uint64), *(of_rank["contributions"] for of_rank in told)]
            contributions[in_files] = np.concatenate(due)
            digester, covered = ArrayDigester(once.table), self._covered(once.table)
            once = replace(once, array_digests=digester.combined(contributions[first], covered))
        return {"index": write_index(store, names.index_file(attempt), compact(once))}

    def plan_parity(
        self, *, attempt: str, plan: SavePlan, receipts: list[list[bytes]], most: int
    ) -> list[bytes]:
        """Return for each rank, as JSON, the numbers of the parity files it writes, and of which files."""
        from megackpt.planning.redundancy import parity_groups, parity_writer

        nbytes = np.zeros(len(receipts), np.int64)
        np.add.at(nbytes, plan.writer, plan.table.nbytes)
        writers = np.unique(plan.writer)
        for rank in writers.tolist():
            nbytes[rank] += int(unpacked(receipts[rank][0], rank=rank)["data_start"][0])
        work: list[list[Any]] = [[] for _ in receipts]
        for number, group in enumerate(parity_groups(writers, most=most)):
            members = [[names.data_file(attempt, rank), int(nbytes[rank])] for rank in group.tolist()]
            work[parity_writer(group, number)].append([number, members])
        return [json.dumps(of_rank).encode() for of_rank in work]

    def write_parity(self, store: Store, *, attempt: str, work: bytes) -> bytes:
        """Write the parity files of a rank, one after the other."""
        from megackpt.formats.native.parity import write_parity_file

        written = []
        for number, members in json.loads(work):
            named = [(name, nbytes) for name, nbytes in members]
            written.append(write_parity_file(store, attempt=attempt, number=number, members=named).to_json())
        return json.dumps(written).encode()

    def list_parity(self, store: Store, *, attempt: str, receipts: list[bytes]) -> Json:
        """Write the list of parity files."""
        from megackpt.formats.native.parity import ParityGroup, list_of

        entries = [entry for receipt in receipts for entry in json.loads(receipt)]
        where = "receipts of parity files"
        groups = [ParityGroup.from_json(entry, where=where, location=store.location) for entry in entries]
        groups.sort(key=lambda group: group.parity.name)
        return (
            {"parity": write_small_file(store, names.parity_list(attempt), list_of(groups))} if groups else {}
        )

    def committed_attempt(self, store: Store) -> str | None:
        """Return the attempt that metadata.json names."""
        return attempt_in_manifest(store)

    def remove_arrays(self, store: Store, manifest: Json, *, key_prefix: str) -> tuple[Json, list[str]]:
        """Write the index again without some arrays; data files that hold nothing else become stale.

        Those that parity needs for others stay.
        """
        index = read_index(store, manifest)
        stored = without_arrays(index, key_prefix=key_prefix)
        old = manifest["index"]["file"]
        new = names.index_file(manifest["attempt"], revision=names.revision_of(old) + 1)
        parity, needed, not_needed = self._parity_of(store, manifest, frozenset(stored.files))
        left = {name for name in index.files if name not in stored.files} - needed
        said = {name: value for name, value in manifest.items() if name != "parity"}
        said |= {"index": write_index(store, new, stored)} | parity
        return said, [old, *sorted(left | not_needed)]

    def _parity_of(
        self, store: Store, manifest: Json, files: frozenset[str]
    ) -> tuple[Json, set[str], set[str]]:
        """Leave out groups none of whose files is one of these.

        Return the entry of the others, the files that they need, and those that are not needed any more.
        """
        if "parity" not in manifest:
            return {}, set(), set()
        from megackpt.formats.native.parity import list_of, read_groups

        groups = read_groups(store, manifest)
        kept = [group for group in groups if any(member.name in files for member in group.members)]
        needed = {listed.name for group in kept for listed in (group.parity, *group.members)}
        if len(kept) == len(groups):
            return {"parity": manifest["parity"]}, needed, set()
        gone = {listed.name for g in groups for listed in (g.parity, *g.members)} - needed
        old = manifest["parity"]["file"]
        new = names.parity_list(manifest["attempt"], revision=names.revision_of(old) + 1)
        return {"parity": write_small_file(store, new, list_of(kept))} if kept else {}, needed, {*gone, old}

    def write_common(self, store: Store, *, attempt: str, common: Any) -> Json:
        """Write the tree as JSON and its tensors beside it."""
        encoded = encode(common)
        text = json.dumps(encoded.tree, ensure_ascii=False, allow_nan=False, indent=1)
        said = {"common": write_small_file(store, names.common_file(attempt), text.encode())}
        if encoded.tensors:
            tensors = {str(i): t for i, t in enumerate(_apart(encoded.tensors))}
            blob = safetensors.torch.save(tensors)
            said["common_tensors"] = write_small_file(store, names.common_tensors_file(attempt), blob)
        return said

    def files_of(self, manifest: Json) -> list[str]:
        """Return the index, the files of the common state and the list of parity files."""
        entries = ("index", "common", "common_tensors", "parity")
        return [manifest[entry]["file"] for entry in entries if entry in manifest]


def _apart(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield tensors, copies of those whose memory an earlier one has: safetensors refuses these."""
    seen: set[int] = set()
    for tensor in tensors:
        memory = tensor.untyped_storage().data_ptr()
        yield tensor.clone() if memory in seen else tensor
        seen.add(memory)
