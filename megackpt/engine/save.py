"""A save, as a recipe: describe, exchange, plan; then `write_out` writes and commits.

Owns what happens before the first byte is written. Each step that can fail on one rank ends in a meeting of
all, where a failure becomes the same error everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megackpt.codec import leaf_digests
from megackpt.comm import Group, together, together_at_root
from megackpt.engine import manifest
from megackpt.engine.copies import digests_of_copies, with_one_main_each, without_copies
from megackpt.engine.expand import Expanded, expand
from megackpt.engine.manifest import new_attempt
from megackpt.engine.plan_cache import PlanCache, name_of
from megackpt.engine.tensor_bytes import check_source, pieces_of
from megackpt.engine.write import Planned, write_out
from megackpt.errors import DeclarationError
from megackpt.formats.strategy import SaveStrategy
from megackpt.mapping import ShardedStateDict, is_main_replica
from megackpt.mapping.describe import describe
from megackpt.mapping.tree import ABSENT, without_empty
from megackpt.metadata import (
    ChunkTable,
    Column,
    DeclaredChunks,
    decode_declarations,
    merge_declarations,
    pack_columns,
    unpack_columns,
)
from megackpt.options import SaveOptions, Spread
from megackpt.planning import SavePlan, plan_own, plan_save, with_object_sizes
from megackpt.storage import Store, digest_of
from megackpt.validation import (
    check_common_equal,
    check_copies_equal,
    check_coverage,
    check_replicated_equal,
)


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """What is saved, besides where and how.

    Attributes:
        state: this rank's sharded state dict.
        choose: makes the strategy; called where its refusal becomes that of all ranks.
        content_metadata: a value stored beside the common state; that of rank 0 counts.
        validate: prove coverage and equality of common state before anything is written.
        common_to_compare: makes of the common state what must be equal on all ranks; None for all of it.
        plans: where plans of earlier saves are; None to plan anew.
        assume_constant_structure: take the last plan, if there is one, without comparing declarations.
        spread: who may write a chunk that several ranks hold; see `SaveOptions`.
        spread_label: returns a number that is equal on the ranks of this one's `spread_group`; 0 where there
            is none. It may refuse, as choose may.
    """

    state: ShardedStateDict
    choose: Callable[[], SaveStrategy]
    content_metadata: Any = None
    validate: bool = True
    common_to_compare: Any = None
    plans: PlanCache | None = None
    assume_constant_structure: bool = False
    spread: Spread = "world"
    spread_label: Callable[[], int] = int


@dataclass(frozen=True, slots=True)
class _Local:
    """One rank's side of a save after the first step: the state taken apart, objects encoded."""

    strategy: SaveStrategy
    expanded: Expanded
    blobs: tuple[bytes, ...]
    spread_label: int

    def pieces(self, slot: int, piece_bytes: int) -> Iterator[memoryview]:
        tensors = self.expanded.tensors
        if slot >= len(tensors):
            return iter([memoryview(self.blobs[slot - len(tensors)])])
        data = tensors[slot].data
        assert data is not None
        return pieces_of(data, piece_bytes=piece_bytes)


def save_state(request: SaveRequest, store: Store, group: Group, options: SaveOptions) -> None:
    """Save one state dict as one checkpoint. Collective over the group.

    Raises:
        CheckpointError: the same on every rank. The checkpoint at this place is the previous one, if any, or
            this one if only the last meeting, after the commit, failed; see `SaveStrategy.writes_in_place`
            for formats that may leave none.
    """
    planned, strategy = plan_state(request, store, group, options)
    write_out(planned, store, strategy, group)


def plan_state(
    request: SaveRequest, store: Store, group: Group, options: SaveOptions
) -> tuple[Planned, SaveStrategy]:
    """Prove the ranks' declarations right and decide who writes what. Collective over the group.

    Raises:
        CheckpointError: the same on every rank; nothing was written.
    """
    prepared: list[_Local] = []
    earlier = [manifest.Earlier()]

    def prepare() -> bytes:
        strategy = request.choose()
        if strategy.writes_in_place and not request.validate:
            raise DeclarationError(
                f"Format {strategy.backend} version {strategy.version} needs validate_access_integrity=True: "
                f"ranks have to know of each other what they write, to keep out of each other's way."
            )
        if group.rank == 0:
            store.create()
            earlier[0] = manifest.earlier_in(store, strategy)
        prepared.append(_prepare(request, strategy, group))
        return _message(request, prepared[0], group)

    messages = [_Message.decode(m) for m in together(group, prepare, doing="preparing the save")]
    (local,) = prepared
    headers = [message.header for message in messages]
    _check_alike(headers)
    if not request.validate:
        agreed = _agree(local, headers[0]["attempt"], group)
    elif request.plans is None:
        agreed = _agree_on_all(request, local, messages, group)
    else:
        agreed = _agree_again(request, local, headers, request.plans, group)
    slots = agreed.plan.slot
    planned = Planned(
        attempt=agreed.attempt,
        plan=agreed.plan,
        pieces=lambda row: local.pieces(int(slots[row]), options.piece_bytes),
        common={"state_dict": local.expanded.common, "content_metadata": request.content_metadata},
        earlier=earlier[0],
        collect=agreed.collect,
        complete=agreed.complete,
    )
    return planned, local.strategy


@dataclass(frozen=True, slots=True)
class _Message:
    """What a rank says first, to be read before it is known that ranks do the same.

    Attributes:
        header: plain JSON.
        columns: its declarations, packed; empty where they are not exchanged.
    """

    header: dict[str, Any]
    columns: bytes = b""

    def encode(self) -> bytes:
        text = json.dumps(self.header).encode()
        return len(text).to_bytes(8, "little") + text + self.columns

    @classmethod
    def decode(cls, data: bytes) -> _Message:
        end = 8 + int.from_bytes(data[:8], "little")
        return cls(json.loads(data[8:end]), data[end:])


def _check_alike(headers: Sequence[Mapping[str, Any]]) -> None:
    """Refuse ranks that are not about to do the same; every rank comes to the same result."""
    for setting in headers[0]["settings"]:
        values = [header["settings"][setting] for header in headers]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            raise DeclarationError(
                f"Ranks save differently: {setting} is {values[0]!r} on rank 0 and {values[other]!r} on rank "
                f"{other}. Give all ranks the same arguments.",
                rank=other,
            )


@dataclass(frozen=True, slots=True)
class _Agreed:
    """What ranks have agreed on; see `Planned`."""

    attempt: str
    plan: SavePlan
    collect: Callable[[], list[bytes]] = list
    complete: Callable[[list[bytes]], SavePlan] | None = None


def _agree_on_all(request: SaveRequest, local: _Local, messages: Sequence[_Message], group: Group) -> _Agreed:
    """Plan from the declarations of all ranks, after proving them right.

    Every rank computes the same from the same, so errors are common by themselves.
    """
    headers = [message.header for message in messages]
    declared = decode_declarations(_unpack([message.columns for message in messages]))
    replicated = {key for header in headers for key in header["replicated"]}
    merged = with_one_main_each(merge_declarations(declared), replicated)
    merged = without_copies(merged, {key for header in headers for key in header["part_of_ranks"]})
    check_coverage(merged)
    _compare_values(request, local, headers, group)
    labels = np.array([header["spread_label"] for header in headers], np.int64)
    plan = plan_save(merged, ranks=group.size, spread=request.spread, labels=labels)
    return _Agreed(headers[0]["attempt"], plan)


def _agree_again(
    request: SaveRequest, local: _Local, headers: list[dict[str, Any]], plans: PlanCache, group: Group
) -> _Agreed:
    """Take the plan of an earlier save of the same structure; where a rank has none, plan and keep it."""
    name = headers[0]["assumed"]
    if name is None or any(header["assumed"] != name for header in headers):
        name = name_of([header["declared"] or "" for header in headers])
    if any(name not in header["kept"] for header in headers):
        answers = together(
            group, lambda: _declarations(request, local, group).encode(), doing="exchanging declarations"
        )
        messages = [_Message.decode(answer) for answer in answers]
        agreed = _agree_on_all(request, local, messages, group)
        name = name_of([message.header["declared"] for message in messages])
        plans.keep(name, agreed.plan, declared=messages[group.rank].header["declared"])
        return agreed
    if headers[0]["assumed"] is None:
        _compare_values(request, local, headers, group)
    plan = with_object_sizes(
        plans.find(name),
        first_slots=[header["tensors"] for header in headers],
        sizes=[header["object_nbytes"] for header in headers],
    )
    return _Agreed(headers[0]["attempt"], plan)


def _compare_values(request: SaveRequest, local: _Local, headers: list[dict[str, Any]], group: Group) -> None:
    """Refuse replicated values and common state that differ between ranks."""
    check_replicated_equal([header["replicated"] for header in headers])
    check_copies_equal([header["copies"] for header in headers])
    if len({h["common"] for h in headers}) > 1:
        _name_common_difference(request, local, group)


def _agree(local: _Local, attempt: str, group: Group) -> _Agreed:
    """Plan from this rank's declarations alone; rank 0 learns those of the others when all have written."""
    # Nobody knows who else holds a replicated value: every holder stores it.
    mine = with_one_main_each(_declare(local, group.rank), set(local.expanded.replicated))

    def collect() -> list[bytes]:
        return together_at_root(
            group, lambda: pack_columns(mine.to_columns()), doing="collecting declarations"
        )

    def complete(parts: list[bytes]) -> SavePlan:
        return plan_own(merge_declarations(decode_declarations(_unpack(parts))))

    return _Agreed(attempt, plan_own(mine), collect, complete)


def _prepare(request: SaveRequest, strategy: SaveStrategy, group: Group) -> _Local:
    expanded = expand(request.state, rank=group.rank, ranks=group.size)
    empty = [t.key for t in expanded.tensors if t.data is None]
    if empty:
        raise DeclarationError(
            f"{empty[0]!r} has no data to save ({len(empty)} such tensors). Declare it with its tensor.",
            key=empty[0],
        )
    for tensor in expanded.tensors:
        check_source(tensor)
    if group.rank == 0:  # it is encoded again after the chunks are written: what is refused is refused before
        strategy.check_common({"state_dict": expanded.common, "content_metadata": request.content_metadata})
    blobs = [
        strategy.encode_object(o.data, path=o.key)
        if is_main_replica(o.replica_id) or o.key in expanded.replicated
        else b""
        for o in expanded.objects
    ]
    return _Local(strategy, expanded, tuple(blobs), request.spread_label())


def _declare(local: _Local, rank: int) -> DeclaredChunks:
    return describe(local.expanded.entities, rank=rank, object_nbytes=[len(b) for b in local.blobs])


def _message(request: SaveRequest, local: _Local, group: Group) -> bytes:
    """What the others have to know first: an attempt id and, to be proved, declarations and digests."""
    if not request.validate:
        return _Message({"attempt": new_attempt(), "settings": _settings(request, local)}).encode()
    if request.plans is None:
        return _declarations(request, local, group).encode()
    assumed = request.plans.last if request.assume_constant_structure else None
    if assumed is not None:
        _check_unchanged(request, local, request.plans, assumed, group)
    return _Message(_header(request, local, group, assumed=assumed)).encode()


def _declarations(request: SaveRequest, local: _Local, group: Group) -> _Message:
    columns = _declare(local, group.rank).to_columns()
    return _Message(_header(request, local, group, assumed=None), pack_columns(columns))


def _settings(request: SaveRequest, local: _Local) -> dict[str, Any]:
    """What all ranks must be given alike, by the names that a user knows."""
    return {
        "format": [local.strategy.backend, local.strategy.version],
        "validate_access_integrity": request.validate,
        "SaveOptions.spread": request.spread,
        "plans given": request.plans is not None,
    }


def _header(request: SaveRequest, local: _Local, group: Group, *, assumed: str | None) -> dict[str, Any]:
    """What is compared between ranks, and what a plan of an earlier save does not know.

    Where the structure is assumed to be that of the last save, nothing is compared.
    """
    values = {o.key: o.data for o in local.expanded.objects if o.key in local.expanded.replicated}
    compared = assumed is None
    return {
        "attempt": new_attempt(),
        "settings": _settings(request, local),
        "assumed": assumed,
        "tensors": len(local.expanded.tensors),
        "object_nbytes": [len(blob) for blob in local.blobs],
        "kept": request.plans.names if request.plans is not None else [],
        "replicated": {k: digest_of(_leaves(v)) for k, v in values.items()} if compared else {},
        "part_of_ranks": sorted(local.expanded.part_of_ranks),
        "copies": digests_of_copies(local.expanded) if compared else {},
        "common": digest_of(_common_leaves(request, local)) if compared else "",
        "spread_label": local.spread_label,
        "declared": _structure(request, local, group) if compared and request.plans is not None else None,
    }


def _structure(request: SaveRequest, local: _Local, group: Group) -> str:
    """Digest of everything that this rank adds to a plan but the sizes of its objects."""
    structure = describe(
        local.expanded.entities, rank=group.rank, object_nbytes=[bool(blob) for blob in local.blobs]
    )
    replicated, parts = sorted(local.expanded.replicated), sorted(local.expanded.part_of_ranks)
    besides = json.dumps([request.spread, local.spread_label, replicated, parts]).encode()
    return digest_of(pack_columns(structure.to_columns()) + besides)


def _check_unchanged(request: SaveRequest, local: _Local, plans: PlanCache, name: str, group: Group) -> None:
    """Refuse a state that is not declared on this rank as the one that was planned for.

    Raises:
        DeclarationError: it differs; an array that this rank writes is named where there is one.
    """
    if plans.declared(name) == _structure(request, local, group):
        return
    planned, now = plans.peek(name), _declare(local, group.rank).table
    moved = [
        planned.table.arrays[int(planned.table.array[row])].key
        for row in planned.rows_of(group.rank).tolist()
        if not _is_same(planned.table, row, now, int(planned.slot[row]))
    ]
    what = f"{moved[0]!r}: the" if moved else "The"
    raise DeclarationError(
        f"{what} structure of the state dict has changed since the last save, which "
        f"assume_constant_structure rules out. Save without it once, or leave it out.",
        key=moved[0] if moved else None,
        rank=group.rank,
    )


def _is_same(table: ChunkTable, row: int, other: ChunkTable, slot: int) -> bool:
    """Whether a row of one table is that of another but for its size."""
    if slot >= len(other):
        return False
    arrays = table.arrays[int(table.array[row])], other.arrays[int(other.array[slot])]
    return arrays[0] == arrays[1] and table.describe(row) == other.describe(slot)


def _unpack(messages: Sequence[bytes]) -> list[dict[str, Column]]:
    return [unpack_columns(m, where=f"declarations of rank {rank}") for rank, m in enumerate(messages)]


def _common_leaves(request: SaveRequest, local: _Local) -> bytes:
    """Digests of the leaves of this rank's common state, as sorted JSON."""
    prune = request.common_to_compare or (lambda common: common)
    # A container that is empty on one rank may hold sharded entities of another.
    compared = without_empty(prune(local.expanded.common))
    return _leaves({} if compared is ABSENT else compared)


def _leaves(value: Any) -> bytes:
    """Digests of the leaves of a value, as sorted JSON: equal for equal values."""
    return json.dumps(leaf_digests(value), sort_keys=True).encode()


def _name_common_difference(request: SaveRequest, local: _Local, group: Group) -> None:
    leaves = together(group, lambda: _common_leaves(request, local), doing="comparing common state")
    check_common_equal([json.loads(text) for text in leaves])
