"""A load, as a recipe: open, describe, check, plan, read, put together.

Owns the order of the steps. Every rank reads what it needs by itself, and ranks meet only to make failures
common; or ranks read together and exchange, which is `exchange`'s affair.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch

from megackpt.comm import Group, together
from megackpt.engine.exchange import ExchangeRanks, Wanted, load_by_exchange
from megackpt.engine.expand import Expanded, expand
from megackpt.engine.manifest import read_manifest
from megackpt.engine.read import read_chunk, read_tensors
from megackpt.engine.tensor_bytes import check_target
from megackpt.errors import FormatError, MismatchError, MissingKeyError, RankFailedError, truncated_list
from megackpt.formats.registry import load_strategy
from megackpt.formats.strategy import Chunks, Contents
from megackpt.mapping import PerRank, ShardedObject, ShardedStateDict, StateDict
from megackpt.mapping.describe import describe
from megackpt.mapping.tree import iter_leaves, join_dotted
from megackpt.metadata import OBJECT, ArraySpec
from megackpt.options import LoadOptions
from megackpt.planning import Copies, plan_load
from megackpt.storage import Store
from megackpt.validation import (
    LoadReport,
    LoadTimes,
    PhaseTimes,
    Rules,
    StrictHandling,
    rename_keys,
    report_arrays,
    settle_differences,
    settle_missing,
    settle_resharded,
    settle_unexpected,
)

log = logging.getLogger(__name__)


def open_checkpoint(store: Store, *, allow_unsafe_pickle: bool = False) -> Contents:
    """Open a committed checkpoint of any known format. Local.

    Raises:
        NotACheckpointError, FormatError, IntegrityError: it is not one, or is damaged.
    """
    manifest = read_manifest(store)
    strategy = load_strategy(manifest, where=store.location)
    return strategy.open(store, manifest, allow_unsafe_pickle=allow_unsafe_pickle)


def read_common(contents: Contents, *, where: str) -> tuple[Any, Any]:
    """Return the common state dict and the content metadata of a checkpoint.

    Raises:
        FormatError: the common state is not what a save writes.
    """
    common = contents.common()
    if not isinstance(common, dict) or not {"state_dict", "content_metadata"} <= set(common):
        raise FormatError(f"{where}: the common state is malformed. The checkpoint is damaged.", path=where)
    return common["state_dict"], common["content_metadata"]


def refuse_unreadable(keys: Iterable[str], unreadable: Mapping[str, str], *, where: str) -> None:
    """Refuse keys that are stored as what cannot be loaded; unreadable is that of `Contents`.

    Raises:
        FormatError: there are such.
    """
    found = sorted(set(keys) & set(unreadable))
    if found:
        lines = truncated_list([f"{key!r} {unreadable[key]}" for key in found])
        raise FormatError(f"{where}: not all of it can be loaded:\n{lines}", key=found[0], path=where)


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a load gives.

    Attributes:
        state: the loaded state dict.
        report: what was done, as this rank saw it.
    """

    state: StateDict
    report: LoadReport


def load_state(
    state: ShardedStateDict,
    store: Store,
    group: Group,
    options: LoadOptions,
    strict: StrictHandling,
    *,
    exchange: ExchangeRanks | None = None,
) -> Loaded:
    """Load into a sharded state dict. Collective over the group.

    exchange says which ranks of the group, this one among them, exchange what they read.

    Raises:
        CheckpointError: the same on every rank. If reading had begun, the given tensors may hold anything.
    """
    rules = Rules(options.rules, strict)
    prepared: list[_Prepared] = []
    loaded: list[StateDict] = []

    def prepare() -> bytes:
        prepared.append(_Prepared(state, store, options, rules, group))
        asked = prepared[0].asked if rules.look_for_missing_keys else []
        opened = prepared[0].contents.identity
        return json.dumps({"opened": opened, "asked": asked, "exchange": options.exchange}).encode()

    def read() -> bytes:
        times = prepared[0].read(options, exchange)
        if times is None:  # another rank failed, and says so now
            return b""
        loaded.append(prepared[0].finish())
        return json.dumps([times.read, times.exchange, times.copy]).encode()

    answers = [json.loads(a) for a in together(group, prepare, doing="preparing the load")]
    _check_alike(answers, store.location)
    missing: frozenset[str] = frozenset()
    if rules.look_for_missing_keys:
        asked = {key for answer in answers for key in answer["asked"]}
        missing = settle_missing(asked, prepared[0].contents.arrays, rules, where=store.location)
    spent = together(group, read, doing="reading")
    if not all(spent):
        raise RankFailedError(f"{store.location}: the exchange of what was read broke off. Load again.")
    times = LoadTimes.over([PhaseTimes(*json.loads(said)) for said in spent])
    if options.exchange != "direct" and group.rank == 0:
        log.info("%s: loaded by %s. %s", store.location, options.exchange, times)
    return Loaded(loaded[0], replace(prepared[0].report, missing=missing, times=times))


def _check_alike(answers: Sequence[Mapping[str, Any]], where: str) -> None:
    """Check what ranks must have in common before they read; all of them come to the same result."""
    if any(answer["opened"] != answers[0]["opened"] for answer in answers):
        raise MismatchError(
            f"{where} was saved anew while it was being opened: ranks see different checkpoints. Load again.",
            path=where,
        )
    ways = sorted({answer["exchange"] for answer in answers})
    if len(ways) > 1:
        raise MismatchError(
            f"{where}: ranks load by exchange={ways[0]!r} and {ways[1]!r}. Give all of them one.", path=where
        )


class _Prepared:
    """One rank's load with everything known that can be known before a tensor's bytes are read."""

    def __init__(
        self, state: ShardedStateDict, store: Store, options: LoadOptions, rules: Rules, group: Group
    ) -> None:
        where = store.location
        self.where = where
        opened = open_checkpoint(store, allow_unsafe_pickle=options.allow_unsafe_pickle)
        self.contents = _renamed(opened, options.rename)
        self.common = read_common(self.contents, where=where)[0]
        stored = _whole_arrays(self.contents, self.common)
        self.expanded: Expanded = expand(
            state,
            rank=group.rank,
            ranks=group.size,
            stored=stored,
            in_host_memory=not options.load_on_device,
        )
        self.asked = sorted({e.key for e in self.expanded.entities})
        excluded = {k for k in self.asked if any(fnmatchcase(k, glob) for glob in options.exclude)}
        refuse_unreadable(set(self.asked) - excluded, self.contents.unreadable, where=where)
        arrays = self.contents.arrays
        excluded |= _kept_elsewhere(self.expanded.per_rank, arrays, group.size, where)
        self.unexpected = settle_unexpected(set(self.asked) - excluded, arrays, rules, where=where)
        left_out = self.unexpected | excluded
        self.tensors = [t for t in self.expanded.tensors if t.key not in left_out]
        for tensor in self.tensors:
            tensor.init_data()
            check_target(tensor)
        self.objects = [o for o in self.expanded.objects if o.key not in left_out]
        requested = describe([*self.tensors, *self.objects], rank=group.rank)
        resized = settle_differences(requested, arrays, rules, where=where)
        may_resize = np.array([a.key in resized for a in requested.table.arrays], np.bool_)
        requested = replace(requested, resizable=requested.resizable | may_resize[requested.table.array])
        self.requested = requested
        self.object_bytes: list[bytes] = []
        self.chunks: Chunks = self.contents.chunks([a.key for a in requested.table.arrays])
        tensors = requested.take(np.arange(len(self.tensors)))
        self.copies: Copies = plan_load(tensors, self.chunks.table, where=where)
        self.object_rows = _object_rows(self.objects, self.chunks, where)
        reports = report_arrays(tensors, arrays, self.chunks.table, self.copies)
        settle_resharded(reports, rules, where=where)
        self.report = LoadReport(
            arrays=reports,
            objects=tuple(o.unique_key for o in self.objects),
            unexpected=self.unexpected,
            excluded=frozenset(excluded),
        )

    def read(self, options: LoadOptions, exchange: ExchangeRanks | None) -> PhaseTimes | None:
        """Fill the tensors and the bytes of objects; None if another rank that this one needs has failed."""
        padded = {a.key for a in self.report.arrays if a.padded_nbytes}
        for tensor in self.tensors:
            if tensor.key in padded and tensor.data is not None:
                tensor.data.detach().zero_()
        if exchange is not None and exchange.group.size > 1:
            lengths = self.chunks.table.nbytes[self.object_rows].tolist()
            blobs = [torch.empty(nbytes, dtype=torch.uint8) for nbytes in lengths]
            wanted = Wanted(self.requested, self.tensors, blobs)
            times = load_by_exchange(self.contents, wanted, exchange, options, where=self.where)
            self.object_bytes = [blob.numpy().tobytes() for blob in blobs]
            return times
        began = time.perf_counter()
        read_tensors(self.chunks, self.copies, self.tensors, options)
        self.object_bytes = [read_chunk(self.chunks, row) for row in self.object_rows]
        return PhaseTimes(read=time.perf_counter() - began)

    def finish(self) -> StateDict:
        """Decode the objects, and return the loaded state dict."""
        for entity, data in zip(self.objects, self.object_bytes, strict=True):
            where = f"{self.where}: object {entity.unique_key!r}"
            entity.data = self.contents.decode_object(data, where)
        loaded: StateDict = self.expanded.finish(self.common, self.unexpected)
        return loaded


def _whole_arrays(contents: Contents, common: Any) -> set[str]:
    """Return the keys of arrays that a plain tensor may stand for: common state has nothing of that path."""
    arrays = {key for key, spec in contents.arrays.items() if spec.dtype != OBJECT}
    if isinstance(common, dict):
        arrays -= {key for key, _ in iter_leaves(common, step=join_dotted)}
    return arrays


def _kept_elsewhere(
    per_rank: Mapping[str, PerRank], stored: Mapping[str, ArraySpec], ranks: int, where: str
) -> set[str]:
    """Return the keys of per-rank values that were stored by another number of ranks and may be kept.

    Raises:
        MismatchError: one of them may not.
    """
    kept = set()
    for key, value in per_rank.items():
        if key not in stored or stored[key].global_shape == (ranks,):
            continue
        before = stored[key].global_shape
        said = f"{where}: {key!r} was stored for each of {before} ranks and this job has {ranks}"
        if value.elsewhere == "error":
            raise MismatchError(
                f"{said}. A value of one rank belongs to no other: load on as many ranks, leave the key "
                f"out, or "
                f'declare it with elsewhere="keep" and set it anew.',
                key=key,
                path=where,
            )
        log.warning("%s: every rank keeps its own value.", said)
        kept.add(key)
    return kept


def _renamed(contents: Contents, patterns: Mapping[str, str]) -> Contents:
    """Return the same contents with stored keys under other names."""
    if not patterns:
        return contents
    new_name = rename_keys(contents.arrays, patterns)
    old_name = {new: old for old, new in new_name.items()}

    def chunks(keys: Iterable[str]) -> Chunks:
        return _RenamedChunks(contents.chunks([old_name[key] for key in keys]), new_name)

    arrays = {new_name[key]: replace(spec, key=new_name[key]) for key, spec in contents.arrays.items()}
    return replace(contents, arrays=arrays, chunks=chunks)


class _RenamedChunks:
    """The same chunks with their arrays under other names."""

    def __init__(self, chunks: Chunks, new_name: Mapping[str, str]) -> None:
        arrays = tuple(replace(a, key=new_name[a.key]) for a in chunks.table.arrays)
        self.table = replace(chunks.table, arrays=arrays)
        self.block_bytes, self.place = chunks.block_bytes, chunks.place
        self.describe, self.read_into = chunks.describe, chunks.read_into


def _object_rows(objects: Sequence[ShardedObject], chunks: Chunks, where: str) -> list[int]:
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


def _rows_by_place(chunks: Chunks) -> Mapping[tuple[str, tuple[int, ...]], int]:
    table = chunks.table
    places = {}
    for row in range(len(table)):
        spec = table.arrays[int(table.array[row])]
        places[spec.key, tuple(table.start[row, : len(spec.global_shape)].tolist())] = row
    return places
