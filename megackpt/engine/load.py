"""A load, as a recipe: open, describe, check, plan, read, put together.

Owns the order of the steps. Every rank reads what it needs by itself, and ranks meet only to make failures
common; or ranks read together and exchange, which is `exchange`'s affair.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import numpy as np
import torch

from megackpt.comm import GivenGroup, Group, subgroup_members, together
from megackpt.engine.agree_on_load import check_alike, check_exchange, exchange_ranks
from megackpt.engine.exchange import ExchangeRanks, Wanted, load_by_exchange
from megackpt.engine.expand import Expanded, expand
from megackpt.engine.fallback import Fallback
from megackpt.engine.manifest import read_manifest
from megackpt.engine.read import probe_chunk, read_chunk, read_tensors
from megackpt.engine.tensor_bytes import check_target
from megackpt.errors import FormatError, MismatchError, MissingKeyError, RankFailedError, truncated_list
from megackpt.formats.registry import load_strategy
from megackpt.formats.strategy import Chunks, Contents, LiesInFiles, NamesFiles
from megackpt.mapping import PerRank, ShardedObject, ShardedStateDict, StateDict
from megackpt.mapping.describe import describe
from megackpt.mapping.plain import filled_in_place, plain_tensors
from megackpt.mapping.tree import iter_leaves, join_dotted
from megackpt.metadata import OBJECT, ArraySpec, ChunkTable
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
    open_store: Callable[[], Store],
    group: Group,
    options: LoadOptions,
    strict: StrictHandling | str,
    *,
    exchange_group: GivenGroup | None = None,
    holders: Mapping[str, Sequence[int]] | None = None,
) -> Loaded:
    """Load into a sharded state dict. Collective over the group.

    Arguments are checked here, where a failure becomes common. exchange_group are the ranks of the group,
    this one among them, that exchange what they read; None for all. holders are those of `ExchangeRanks`.

    Raises:
        CheckpointError: the same on every rank. If reading had begun, the given tensors may hold anything.
    """
    with ExitStack() as opened:
        return _load(state, open_store, group, options, strict, exchange_group, holders, opened)


def _load(
    state: ShardedStateDict,
    open_store: Callable[[], Store],
    group: Group,
    options: LoadOptions,
    strict: StrictHandling | str,
    exchange_group: GivenGroup | None,
    holders: Mapping[str, Sequence[int]] | None,
    opened: ExitStack,
) -> Loaded:
    prepared: list[_Prepared] = []
    exchanging: list[ExchangeRanks] = []
    loaded: list[StateDict] = []

    def prepare() -> bytes:
        rules = Rules(options.rules, StrictHandling.of(strict))
        check_exchange(options, group, exchange_group)
        fallback = opened.enter_context(_fallback(open_store(), options))
        prepared.append(_Prepared(state, fallback, options, rules, group))
        said = {
            "opened": prepared[0].contents.identity,
            "where": prepared[0].where,
            "timeout_s": float(options.timeout_s),
            "asked": prepared[0].asked if rules.look_for_missing_keys else [],
            "missing": [rules.about_missing_keys, dict(options.rename) if rules.look_for_missing_keys else 0],
            "exchange": options.exchange,
            "cpu_transfer": options.cpu_transfer,
            "has_exchange_group": exchange_group is not None,
            "members": "" if exchange_group is None else subgroup_members(exchange_group),
        }
        return json.dumps(said).encode()

    def connect() -> bytes:
        exchanging.append(replace(exchange_ranks(options, group, exchange_group), holders=holders))
        prepared[0].make_room(exchanging[0])
        return b""

    def read() -> bytes:
        times = prepared[0].read(options, exchanging[0] if exchanging else None)
        if times is None:  # another rank failed, and says so now
            return b""
        loaded.append(prepared[0].finish())
        return json.dumps([times.read, times.exchange, times.copy]).encode()

    answers = [json.loads(a) for a in together(group, prepare, doing="preparing the load")]
    where, rules = prepared[0].where, prepared[0].rules
    check_alike(answers, where)
    missing: frozenset[str] = frozenset()
    if rules.look_for_missing_keys:
        asked = {key for answer in answers for key in answer["asked"]}
        missing = settle_missing(asked, prepared[0].contents.arrays, rules, where=where)
    if options.exchange != "direct":
        together(group, connect, doing="connecting the ranks that exchange")
    spent = together(group, read, doing="reading")
    if not all(spent):
        raise RankFailedError(f"{where}: the exchange of what was read broke off. Load again.")
    times = LoadTimes.over([PhaseTimes(*json.loads(said)) for said in spent])
    if options.exchange != "direct" and group.rank == 0:
        log.info("%s: loaded by %s. %s", where, options.exchange, times)
    mended = prepared[0].fallback.mended
    if mended:
        log.warning(
            "%s is damaged; rank %d has loaded from elsewhere:\n%s",
            where,
            group.rank,
            truncated_list([str(record) for record in mended]),
        )
    return Loaded(loaded[0], replace(prepared[0].report, missing=missing, mended=mended, times=times))


def _fallback(store: Store, options: LoadOptions) -> Fallback:
    opens = partial(open_checkpoint, allow_unsafe_pickle=options.allow_unsafe_pickle)
    return Fallback(store, options.copies, opens, is_allowed=options.on_corrupt == "fallback")


class _Prepared:
    """One rank's load with everything known that can be known before a tensor's bytes are read."""

    def __init__(
        self, state: ShardedStateDict, fallback: Fallback, options: LoadOptions, rules: Rules, group: Group
    ) -> None:
        where = fallback.location
        self.where = where
        self.rules = rules
        self.fallback = fallback
        self.contents = _renamed(fallback.open(), options.rename)
        self.common = read_common(self.contents, where=where)[0]
        paths = _paths(self.common)
        objects = {key for key, spec in self.contents.arrays.items() if spec.dtype == OBJECT}
        self.expanded: Expanded = expand(
            state,
            rank=group.rank,
            ranks=group.size,
            stored=_AllBut(paths | objects),
            in_host_memory=not options.load_on_device,
        )
        plain = plain_tensors(state)
        self.asked = sorted({e.key for e in self.expanded.entities})
        excluded = {k for k in self.asked if any(fnmatchcase(k, glob) for glob in options.exclude)}
        refuse_unreadable(set(self.asked) - excluded, self.contents.unreadable, where=where)
        arrays = self.contents.arrays
        excluded |= _kept_elsewhere(self.expanded.per_rank, arrays, group.size, where)
        excluded |= _kept_objects(self.expanded.objects, arrays)
        self.unexpected = settle_unexpected(
            set(self.asked) - excluded,
            arrays,
            rules,
            where=where,
            plain=_plain_only(self.expanded, plain.keys() - paths - objects),
        )
        self.plain = {path: t for path, t in plain.items() if path in paths and _is_filled(path, t, options)}
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
        self.blobs: list[torch.Tensor] = []
        self.chunks: Chunks = self.contents.chunks_for([requested.table])
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

    def make_room(self, exchange: ExchangeRanks) -> None:
        """Take memory for the objects that an exchange brings, before it begins: others wait in it.

        Raises:
            FormatError: an object is longer than its file.
        """
        if exchange.group.size == 1:
            return
        if exchange.holders is None:  # else files may be with other ranks, and have been looked at there
            for row in self.object_rows:
                probe_chunk(self.chunks, row)
        lengths = self.chunks.table.nbytes[self.object_rows].tolist()
        self.blobs = [torch.empty(nbytes, dtype=torch.uint8) for nbytes in lengths]

    def read(self, options: LoadOptions, exchange: ExchangeRanks | None) -> PhaseTimes | None:
        """Fill the tensors and the bytes of objects; None if another rank that this one needs has failed."""
        padded = {a.key for a in self.report.arrays if a.padded_nbytes}
        for tensor in self.tensors:
            if tensor.key in padded and tensor.data is not None:
                tensor.data.detach().zero_()
        if exchange is not None and exchange.group.size > 1:
            wanted = Wanted(self.requested, self.tensors, self.blobs)
            times = load_by_exchange(self.contents, wanted, exchange, options, where=self.where)
            self.object_bytes = [blob.numpy().tobytes() for blob in self.blobs]
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
        common = filled_in_place(self.common, self.plain)
        loaded: StateDict = self.expanded.finish(common, self.unexpected)
        return loaded


@dataclass(frozen=True, slots=True)
class _AllBut(Container[str]):
    """All keys but some."""

    others: Set[str]

    def __contains__(self, key: object) -> bool:
        return key not in self.others


def _paths(common: Any) -> set[str]:
    """Return the paths of leaves of common state, joined with dots, and of the dicts and lists on the way."""
    found: set[str] = set()
    if isinstance(common, (dict, list)):
        for path, _ in iter_leaves(common, step=join_dotted):
            while path and path not in found:
                found.add(path)
                path = path.rpartition(".")[0]
    return found


def _plain_only(expanded: Expanded, plain: Iterable[str]) -> set[str]:
    """Return the paths of plain tensors that are asked for, and no entity besides asks for the same key."""
    asked = Counter(entity.key for entity in expanded.entities)
    return {path for path in plain if asked[path] == 1}


def _is_filled(path: str, tensor: torch.Tensor, options: LoadOptions) -> bool:
    """Say whether a plain tensor for which there is common state is filled with it in place."""
    is_here = options.load_on_device or tensor.device.type == "cpu"
    return is_here and not any(fnmatchcase(path, glob) for glob in options.exclude)


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


def _kept_objects(objects: Iterable[ShardedObject], stored: Mapping[str, ArraySpec]) -> set[str]:
    """Return the keys of objects that were stored in an array of another shape and may be kept."""
    return {
        o.key
        for o in objects
        if o.elsewhere == "keep" and o.key in stored and stored[o.key].global_shape != o.global_shape
    }


def _renamed(contents: Contents, patterns: Mapping[str, str]) -> Contents:
    """Return the same contents with stored keys under other names."""
    if not patterns:
        return contents
    new_name = rename_keys(contents.arrays, patterns)
    old_name = {new: old for old, new in new_name.items()}

    def chunks(keys: Iterable[str]) -> Chunks:
        return _RenamedChunks(contents.chunks([old_name[key] for key in keys]), new_name)

    def chunks_meeting(wanted: Sequence[ChunkTable]) -> Chunks:
        return _RenamedChunks(
            contents.chunks_for([_with_keys(table, old_name) for table in wanted]), new_name
        )

    arrays = {new_name[key]: replace(spec, key=new_name[key]) for key, spec in contents.arrays.items()}
    return replace(contents, arrays=arrays, chunks=chunks, chunks_meeting=chunks_meeting)


class _RenamedChunks:
    """The same chunks with their arrays under other names; what else formats give is passed on."""

    def __init__(self, chunks: Chunks, new_name: Mapping[str, str]) -> None:
        self.table = _with_keys(chunks.table, new_name)
        self.block_bytes, self.place = chunks.block_bytes, chunks.place
        self.describe, self.read_into = chunks.describe, chunks.read_into
        if isinstance(chunks, LiesInFiles):
            self.file, self.offset_bytes, self.lend = chunks.file, chunks.offset_bytes, chunks.lend
        if isinstance(chunks, NamesFiles):
            self.file_ranges = chunks.file_ranges


def _with_keys(table: ChunkTable, new_name: Mapping[str, str]) -> ChunkTable:
    """Return the same table with arrays under other names."""
    return replace(table, arrays=tuple(replace(a, key=new_name[a.key]) for a in table.arrays))


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
    """Return the rows of objects by their keys and offsets."""
    table = chunks.table
    is_object = np.array([a.dtype == OBJECT for a in table.arrays], np.bool_)
    places = {}
    for row in np.flatnonzero(is_object[table.array]).tolist():
        spec = table.arrays[int(table.array[row])]
        places[spec.key, tuple(table.start[row, : len(spec.global_shape)].tolist())] = row
    return places
