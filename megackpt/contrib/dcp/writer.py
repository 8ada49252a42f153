"""A storage writer for DCP that writes checkpoints of the native format.

It translates DCP's plan into rows of ours, and DCP's protocol into an attempt that is committed last.
Tensors become global arrays. Other values become common state, encoded by megackpt's codec whatever the
planner: no file is a pickle.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from megackpt.codec import pack, unpack
from megackpt.contrib.dcp.location import opened
from megackpt.contrib.dcp.save_planner import MegackptSavePlanner
from megackpt.contrib.dcp.state_dicts import Stager, with_lists, with_value
from megackpt.engine.checkpoint import manifest
from megackpt.engine.data.device_copies import host_parts
from megackpt.engine.data.tensor_bytes import check_source
from megackpt.engine.saving.planned_save import PlannedSave, WrittenChunks
from megackpt.engine.saving.write import commit_attempt
from megackpt.entities import (
    LocalNonpersistentObject,
    PerRankValue,
    ReplicatedValue,
    ShardedBase,
    ShardedObject,
    ShardedTensor,
)
from megackpt.entities.describe import describe
from megackpt.errors import DeclarationError, MismatchError
from megackpt.formats.registry import save_strategy
from megackpt.formats.strategy import ChunkParts
from megackpt.options import SaveOptions
from megackpt.plans.metadata import pack_columns, unpack_columns
from megackpt.plans.metadata.merge import decode_declarations, merge_declarations
from megackpt.plans.planning import SavePlan as OwnPlan
from megackpt.plans.planning import plan_main_replicas
from megackpt.plans.validation import check_coverage
from megackpt.storage import Location, Store


@dataclass(frozen=True, slots=True)
class _Task:
    """What the coordinator sends to a rank: the attempt, and which rank of the save it is."""

    attempt: str
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Written:
    """What a rank sends to the coordinator after writing.

    Attributes:
        attempt: the attempt it has written for.
        columns: the chunks it has written.
        receipts: those of the format, by round.
        values: blobs of values that only this rank holds, by name.
    """

    attempt: str
    columns: bytes
    receipts: list[bytes]
    values: dict[str, bytes]


class MegackptStorageWriter(Stager, StorageWriter):
    """Stores what `dcp.save` and `dcp.async_save` are given as a checkpoint of megackpt's native format.

    Works with every planner that derives from DCP's default one, and with MegackptSavePlanner. The
    checkpoint appears at the end, all at once and durably; a save that fails on any rank leaves the one
    before as it was, and files that the next save to this path removes.

    Args:
        path: the directory of this one checkpoint, or an open store; None to give it to DCP as
            checkpoint_id.
        content_metadata: a value stored in addition to the common state; the coordinator's counts.
        options: tunables; of the timeouts, DCP's own process group decides.

    Raises:
        DeclarationError: the options ask for what is not done here: parity files, comparing replicas.
    """

    def __init__(
        self,
        path: Location | None = None,
        *,
        content_metadata: Any = None,
        options: SaveOptions | None = None,
    ) -> None:
        self.path = path
        self._content_metadata = content_metadata
        self._options = options or SaveOptions()
        _check_followed(self._options)

    def reset(self, checkpoint_id: Any = None) -> None:
        """Save to another directory, if one is given. DCP calls it on every rank."""
        if checkpoint_id is not None:
            self.path = checkpoint_id

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Return whether a checkpoint id can be a directory of ours. Local."""
        return isinstance(checkpoint_id, str) or hasattr(checkpoint_id, "__fspath__")

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin a save. DCP calls it on every rank.

        Raises:
            DeclarationError: DCP is to save without exchange between ranks, or there is no directory.
        """
        if kwargs.get("use_collectives") is False:
            raise DeclarationError(
                "use_collectives=False lets every rank commit by itself, but a checkpoint is committed once, "
                "as a whole. Leave it out."
            )
        self._is_coordinator = is_coordinator
        self._values: dict[str, Any] = {}
        self._base: dict[Any, Any] | None = None
        with opened(self.path):  # a path that no store serves fails here, on every rank
            pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is. DCP calls it on every rank."""
        _check_not_cached(plan)
        self._own = {item.index for item in plan.items if item.type == WriteItemType.BYTE_IO}
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Begin an attempt; values that the coordinator holds, too, it keeps itself. The coordinator only."""
        strategy = save_strategy(None)
        with opened(self.path) as store:
            store.create()
            store.sync()
            self._earlier = manifest.find_leftover_files(store, strategy)
        self._attempt = manifest.new_attempt()
        kept_here = [item for plan in plans[1:] for item in plan.items if self._is_kept_here(item)]
        prepared = []
        for rank, plan in enumerate(plans):
            _check_not_cached(plan)
            items = (
                [*plan.items, *kept_here]
                if not rank
                else [i for i in plan.items if not self._is_kept_here(i)]
            )
            prepared.append(dataclasses.replace(plan, items=items, storage_data=_Task(self._attempt, rank)))
        return prepared

    def _is_kept_here(self, item: WriteItem) -> bool:
        return item.type == WriteItemType.BYTE_IO and item.index in self._own

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's chunks, durably. DCP calls it on every rank.

        Raises:
            StorageError: the store cannot write.
            UnserializableError: a value without a codec.
            DeclarationError, MismatchError: a tensor, or a planner, that is not what the plan says.
        """
        task: _Task = plan.storage_data
        parts = _taken_apart(plan, planner)
        if self._is_coordinator:
            self._values = dict(parts.values)
            self._base = planner.common if isinstance(planner, MegackptSavePlanner) else None
        entities: list[ShardedTensor | ShardedObject] = [*parts.tensors, *parts.objects]
        declared = describe(entities, rank=task.rank, object_nbytes=[len(blob) for blob in parts.blobs])
        own = plan_main_replicas(declared)
        strategy = save_strategy(None)
        source = _PlannerParts(planner, parts, own, part_bytes=self._options.part_bytes)
        with opened(self.path) as store:
            receipts = [
                strategy.write_chunks(
                    store, attempt=task.attempt, rank=task.rank, plan=own, rows=rows, parts=source
                )
                for rows in strategy.rounds(own, task.rank)
            ]
        sent = {} if self._is_coordinator else parts.values
        written = _Written(
            attempt=task.attempt,
            columns=pack_columns(declared.to_columns()),
            receipts=receipts,
            values={name: pack(value, path=name) for name, value in sent.items()},
        )
        future: Future[list[WriteResult]] = Future()
        nbytes = int(own.table.nbytes.sum())
        future.set_result([WriteResult(MetadataIndex("megackpt"), nbytes, storage_data=written)])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Prove that everything is there, write index and common state, and commit. The coordinator only.

        Raises:
            CoverageError, MismatchError: what the ranks have written is not each array exactly once.
            StorageError, UnserializableError: see `write_data`.
        """
        written: list[_Written] = [of_rank[0].storage_data for of_rank in results]
        with opened(self.path) as store:
            try:
                self._commit(written, metadata.planner_data or {}, store)
            except Exception:
                manifest.discard(store, attempt=self._attempt, strategy=save_strategy(None))
                raise
            finally:
                self._values, self._base = {}, None

    def _commit(self, written: Sequence[_Written], paths: Mapping[str, Any], store: Store) -> None:
        if any(w.attempt != self._attempt for w in written):
            raise MismatchError(
                "Ranks have written for different attempts. Give each save a planner without a plan that is "
                "kept.",
                path=store.location,
            )
        planned = PlannedSave(
            attempt=self._attempt,
            plan=_plan_of(written),
            parts=_NoParts(),  # every rank has written its own
            common={"state_dict": self._common(written, paths), "content_metadata": self._content_metadata},
            strategy=save_strategy(None),
            leftovers=self._earlier,
        )
        chunks = WrittenChunks(planned, reports=[], receipts=[w.receipts for w in written])
        commit_attempt(planned, chunks, store, world_size=len(written))

    def _common(self, written: Sequence[_Written], paths: Mapping[str, Any]) -> Any:
        """Return common state in the structure that the state dict had, as far as the planner knows it."""
        values = dict(self._values)
        for rank, of_rank in enumerate(written):
            where = f"values of rank {rank}"
            values.update({name: unpack(blob, where=where) for name, blob in of_rank.values.items()})
        if self._base is not None:  # the structure from the planner, less what other ranks have
            tree: Any = self._base
            for name in values.keys() - self._values.keys():
                tree = with_value(tree, tuple(paths[name]), values[name])
            return tree
        tree = {}
        for name, value in values.items():
            tree = with_value(tree, tuple(paths.get(name, (name,))), value)
        return with_lists(tree)


def _plan_of(written: Sequence[_Written]) -> OwnPlan:
    """Return what all ranks have written, after proving that it is each array exactly once."""
    columns = [unpack_columns(w.columns, where=f"chunks of rank {r}") for r, w in enumerate(written)]
    merged = merge_declarations(decode_declarations(columns))
    check_coverage(merged)
    return plan_main_replicas(merged)


@dataclass(frozen=True, slots=True, eq=False)
class _Parts:
    """The items of a plan by what they are; `items[i]` writes `tensors[i]`, `blobs[i]` is `objects[i]`."""

    items: list[WriteItem]
    tensors: list[ShardedTensor]
    objects: list[ShardedObject]
    blobs: list[bytes]
    values: dict[str, Any]


def _taken_apart(plan: SavePlan, planner: SavePlanner) -> _Parts:
    parts = _Parts([], [], [], [], {})
    for item in plan.items:
        name = item.index.fqn
        if item.type == WriteItemType.BYTE_IO:
            entity = planner.lookup_entity(item.index) if isinstance(planner, MegackptSavePlanner) else None
            if entity is not None:
                parts.objects.append(dataclasses.replace(entity, replica_id=0))
                parts.blobs.append(pack(entity.data, path=entity.key))
            else:
                parts.values[name] = _value_of(planner, item)
            continue
        parts.items.append(item)
        parts.tensors.append(_declared(item))
    return parts


def _declared(item: WriteItem) -> ShardedTensor:
    """Return the tensor that an item writes, without its data."""
    name, data = item.index.fqn, item.tensor_data
    if data is None:
        raise DeclarationError(f"{name!r}: DCP's plan does not say what this tensor is.", key=name)
    return ShardedTensor(
        key=name,
        data=None,
        dtype=data.properties.dtype,
        local_shape=tuple(data.chunk.sizes),
        global_shape=tuple(data.size),
        global_offset=tuple(data.chunk.offsets),
    )


class _PlannerParts(ChunkParts):
    """The bytes of a rank's rows: tensors as DCP's planner resolves them, and blobs of objects."""

    def __init__(self, planner: SavePlanner, parts: _Parts, own: OwnPlan, *, part_bytes: int) -> None:
        self._planner, self._parts, self._own, self._part_bytes = planner, parts, own, part_bytes

    def __call__(self, row: int) -> Iterator[memoryview]:
        """Yield the parts of a row."""
        parts = self._parts
        entity = int(self._own.entity[row])
        if entity >= len(parts.tensors):
            return iter([memoryview(parts.blobs[entity - len(parts.tensors)])])
        data = _resolved(self._planner, parts.items[entity], parts.tensors[entity])
        return host_parts(data, part_bytes=self._part_bytes)


class _NoParts(ChunkParts):
    def __call__(self, row: int) -> Iterator[memoryview]:
        return iter(())


def _value_of(planner: SavePlanner, item: WriteItem) -> Any:
    """Return the value itself, because the planner would return a pickle of it."""
    lookup = getattr(planner, "lookup_object", None)
    if lookup is None:
        raise DeclarationError(
            f"{item.index.fqn!r} is no tensor, and {type(planner).__name__} gives only bytes for it, whose "
            f"meaning is not known here. Derive the planner from DefaultSavePlanner or use "
            f"MegackptSavePlanner.",
            key=item.index.fqn,
        )
    value = lookup(item.index)
    if isinstance(value, (ShardedBase, LocalNonpersistentObject, PerRankValue, ReplicatedValue)):
        raise DeclarationError(
            f"{item.index.fqn!r} is a megackpt {type(value).__name__}, which {type(planner).__name__} does "
            f"not know. Give dcp.save planner=MegackptSavePlanner().",
            key=item.index.fqn,
        )
    return value


def _resolved(planner: SavePlanner, item: WriteItem, declared: ShardedTensor) -> torch.Tensor:
    """Return the tensor that an item writes, checked against what was planned."""
    data = planner.resolve_data(item)
    if not isinstance(data, torch.Tensor):
        raise DeclarationError(f"{declared.key!r}: the planner gives no tensor for it.", key=declared.key)
    data = data.detach()
    if (data.dtype, tuple(data.shape)) != (declared.dtype, declared.local_shape):
        raise MismatchError(
            f"{declared.key!r}: planned are {declared.dtype} {declared.local_shape}, but the planner gives "
            f"{data.dtype} {tuple(data.shape)}. A planner that converts tensors must say so in the "
            f"properties of its write items.",
            key=declared.key,
        )
    check_source(dataclasses.replace(declared, data=data))
    return data


def _check_not_cached(plan: SavePlan) -> None:
    if not getattr(plan, "usable", True):  # torch before 2.7 keeps no plans
        raise DeclarationError(
            "enable_plan_caching lets DCP use the plan of an earlier save, which names that save's files. "
            "Make the planner without it."
        )


def _check_followed(options: SaveOptions) -> None:
    """Raise an error for options that a DCP save would ignore."""
    default = SaveOptions()
    names = ("parity", "compare_replicas")
    ignored = [name for name in names if getattr(options, name) != getattr(default, name)]
    if ignored:
        raise DeclarationError(
            f"MegackptStorageWriter does not follow SaveOptions.{', '.join(ignored)}: DCP brings the ranks "
            f"together, and gives them no values of each other. Leave them out, or save with megackpt.save."
        )
