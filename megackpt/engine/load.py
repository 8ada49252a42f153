"""A load, as a recipe: open, describe, check, plan, read, put together.

Owns the order of the steps. Every rank reads what it needs by itself; ranks meet only to make failures
common.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megackpt.codec import unpack
from megackpt.comm import Group, together
from megackpt.engine.expand import Expanded, expand
from megackpt.engine.manifest import read_manifest
from megackpt.engine.read import read_chunk, read_tensors
from megackpt.errors import FormatError, MissingKeyError
from megackpt.formats.registry import load_strategy
from megackpt.formats.strategy import Contents
from megackpt.mapping import ShardedObject, ShardedStateDict, StateDict
from megackpt.mapping.describe import describe
from megackpt.metadata import StoredChunks
from megackpt.options import LoadOptions
from megackpt.planning import Copies, plan_load
from megackpt.storage import Store
from megackpt.validation import check_request


def open_checkpoint(store: Store) -> Contents:
    """Open a committed checkpoint of any known format. Local.

    Raises:
        NotACheckpointError, FormatError, IntegrityError: it is not one, or is damaged.
    """
    manifest = read_manifest(store)
    return load_strategy(manifest, where=store.location).open(store, manifest)


def read_common(contents: Contents, *, where: str) -> tuple[Any, Any]:
    """Return the common state dict and the content metadata of a checkpoint.

    Raises:
        FormatError: the common state is not what a save writes.
    """
    common = contents.common()
    if not isinstance(common, dict) or not {"state_dict", "content_metadata"} <= set(common):
        raise FormatError(f"{where}: the common state is malformed. The checkpoint is damaged.", path=where)
    return common["state_dict"], common["content_metadata"]


def load_state(state: ShardedStateDict, store: Store, group: Group, options: LoadOptions) -> StateDict:
    """Load into a sharded state dict. Collective over the group.

    Raises:
        CheckpointError: the same on every rank. If reading had begun, the given tensors may hold anything.
    """
    prepared: list[_Prepared] = []
    loaded: list[StateDict] = []

    def prepare() -> bytes:
        prepared.append(_Prepared(state, store, group.rank))
        return b""

    def read() -> bytes:
        loaded.append(prepared[0].read(options))
        return b""

    together(group, prepare, doing="preparing the load")
    together(group, read, doing="reading")
    return loaded[0]


class _Prepared:
    """One rank's load with everything known that can be known before a tensor's bytes are read."""

    def __init__(self, state: ShardedStateDict, store: Store, rank: int) -> None:
        where = store.location
        contents = open_checkpoint(store)
        self.store = store
        self.expanded: Expanded = expand(state)
        for tensor in self.expanded.tensors:
            tensor.init_data()
        requested = describe(self.expanded.entities, rank=rank)
        check_request(requested, contents.arrays, where=where)
        self.chunks: StoredChunks = contents.chunks([a.key for a in requested.table.arrays])
        tensors = requested.take(np.arange(len(self.expanded.tensors)))
        self.copies: Copies = plan_load(tensors, self.chunks.table, where=where)
        self.object_rows = _object_rows(self.expanded.objects, self.chunks, where)
        self.common = read_common(contents, where=where)[0]

    def read(self, options: LoadOptions) -> StateDict:
        """Fill the tensors and objects, and return the loaded state dict."""
        read_tensors(self.store, self.chunks, self.copies, self.expanded.tensors, options)
        for entity, row in zip(self.expanded.objects, self.object_rows, strict=True):
            where = f"{self.store.location}: object {entity.unique_key!r}"
            entity.data = unpack(read_chunk(self.store, self.chunks, row), where=where)
        loaded: StateDict = self.expanded.finish(self.common)
        return loaded


def _object_rows(objects: Sequence[ShardedObject], chunks: StoredChunks, where: str) -> list[int]:
    """Return the stored row of each object."""
    if not objects:
        return []
    rows = _rows_by_place(chunks)
    absent = [o.unique_key for o in objects if (o.key, o.global_offset) not in rows]
    if absent:
        raise MissingKeyError(
            f"{where} has no object {absent[0]!r} ({len(absent)} are missing). Ask for the offsets that "
            f"were saved; "
            f"megackpt.load_sharded_metadata() lists them.",
            key=absent[0],
            path=where,
        )
    return [rows[o.key, o.global_offset] for o in objects]


def _rows_by_place(chunks: StoredChunks) -> Mapping[tuple[str, tuple[int, ...]], int]:
    table = chunks.table
    places = {}
    for row in range(len(chunks)):
        spec = table.arrays[int(table.array[row])]
        places[spec.key, tuple(table.start[row, : len(spec.global_shape)].tolist())] = row
    return places
