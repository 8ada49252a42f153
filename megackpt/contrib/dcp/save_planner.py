"""A save planner for DCP that knows megackpt's entities and proves what it plans.

Entities become write items. The declarations of all ranks travel with the local plans, and the engine's own
planning decides which rank writes what. It works with any storage writer; another library's writer stores
values as blobs of megackpt's codec.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from megackpt.codec import leaf_digests, pack
from megackpt.contrib.dcp.location import rank_and_size
from megackpt.contrib.dcp.state_dicts import Rectangle, flatten, rectangles
from megackpt.engine.data.tensor_bytes import check_source
from megackpt.engine.saving.copies import digests_of_unmarked_replicas
from megackpt.entities import ShardedObject, ShardedTensor, is_main_replica
from megackpt.entities.describe import describe, dtype_name
from megackpt.entities.flatten import FlattenedState, flatten_state
from megackpt.entities.plain_tensors import declare_whole, is_plain_tensor
from megackpt.entities.tree import ABSENT, PathKeys, Steps, add_step, dotted, map_leaves, without_positions
from megackpt.errors import DeclarationError
from megackpt.plans.metadata import DTYPES, DeclaredChunks, pack_columns, unpack_columns
from megackpt.plans.metadata.merge import decode_declarations, merge_declarations
from megackpt.plans.planning import plan_save
from megackpt.plans.planning.replicas import choose_lowest_rank_as_main, keep_lowest_main
from megackpt.plans.validation import (
    check_common_equal,
    check_copies_equal,
    check_coverage,
    check_replicated_equal,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankMessage:
    """What a rank sends to the coordinator in addition to its items.

    Attributes:
        columns: its declarations.
        entity_items: the items of each declared entity.
        shared: keys of arrays that may have equal copies on several ranks, without replica ids.
        replicated: digests of replicated values, by key.
        copies: digests of such copies, by chunk.
        common: digests of the leaves that are not sharded, by path; empty where nothing is to be proved.
        values: the steps to each value that is neither sharded nor a tensor, by name.
    """

    columns: bytes
    entity_items: list[list[WriteItem]]
    shared: frozenset[str]
    replicated: dict[str, str]
    copies: dict[str, str]
    common: dict[str, str]
    values: dict[str, Steps]


class MegackptSavePlanner(SavePlanner):
    """Plans a `dcp.save` of DTensors, megackpt's entities, plain tensors and values.

    A DTensor or plain tensor is a global array under its path in the state dict, joined with dots; an entity
    is one under its key. Everything else is encoded without pickle and must have a codec. `dcp.save`
    raises the planner's errors on all ranks, within its CheckpointException.

    Args:
        validate: prove before anything is written that every element has exactly one main replica, and that
            what is not sharded is equal on all ranks.
        process_group: the group that `dcp.save` is given; None for all ranks.

    Attributes:
        common: during a save, what is neither sharded nor a tensor, in the structure of the state dict.
    """

    common: Any

    def __init__(self, *, validate: bool = True, process_group: dist.ProcessGroup | None = None) -> None:
        self._validate = validate
        self._process_group = process_group

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take the state dict apart and encode what is no tensor. DCP calls it on every rank.

        Raises:
            DeclarationError, UnserializableError: a leaf that cannot be saved.
        """
        self._rank, ranks = rank_and_size(self._process_group)
        self._flattened = flatten_state(state_dict, rank=self._rank, ranks=ranks)
        plain, self.common = _plain_tensors(self._flattened.common)
        self._tensors = (*self._flattened.tensors, *plain)
        self._shared = self._flattened.on_some_ranks | {tensor.key for tensor in plain}
        _check_sources(self._tensors)
        self._values = flatten(self.common)
        _check_names_differ(self._flattened, plain, self._values)
        for name, (_, value) in self._values.items():
            pack(value, path=name)  # raises an error before anything is written if there is no codec
        self._rectangles: dict[tuple[str, torch.Size, torch.Size], Rectangle] = {}
        self._objects = _packed_objects(self._flattened)

    def create_local_plan(self) -> SavePlan:
        """Return an item for each rectangle, object and value of this rank. DCP calls it on every rank."""
        entities: list[ShardedTensor | ShardedObject] = [*self._tensors, *self._flattened.objects]
        nbytes = [len(self._objects[entity.unique_key][1]) for entity in self._flattened.objects]
        entity_items = [self._items_of(tensor) for tensor in self._tensors]
        entity_items += [[_bytes_item(entity.unique_key)] for entity in self._flattened.objects]
        present = {o.key: o.data for o in self._flattened.objects if o.key in self._flattened.replicated}
        message = _RankMessage(
            columns=pack_columns(describe(entities, rank=self._rank, object_nbytes=nbytes).to_columns()),
            entity_items=entity_items,
            shared=self._shared,
            replicated={key: str(sorted(leaf_digests(value).items())) for key, value in present.items()},
            copies=digests_of_unmarked_replicas(self._flattened) if self._validate else {},
            common=leaf_digests(self._flattened.common) if self._validate else {},
            values={name: steps for name, (steps, _) in self._values.items()},
        )
        return SavePlan([item for items in entity_items for item in items], planner_data=message)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Decide who writes what, after proving the declarations right. DCP calls it on the coordinator.

        Raises:
            CoverageError, MismatchError: the declarations of the ranks do not fit each other.
        """
        messages: list[_RankMessage] = [plan.planner_data for plan in all_plans]
        merged = _merged(messages)
        if self._validate:
            check_coverage(merged)
            check_replicated_equal([s.replicated for s in messages])
            check_copies_equal([s.copies for s in messages])
            check_common_equal([s.common for s in messages])
        chosen = _chosen_items(merged, messages)
        steps: dict[str, Steps] = {}
        # A value is written by the first rank that has it.
        for items, of_rank in zip(chosen, messages, strict=True):
            items += [_bytes_item(name) for name in of_rank.values if name not in steps]
            steps = of_rank.values | steps
        plans = [
            dataclasses.replace(plan, items=items, planner_data=None)
            for plan, items in zip(all_plans, chosen, strict=True)
        ]
        plans, metadata = create_default_global_save_plan(plans)
        return plans, dataclasses.replace(metadata, planner_data=steps)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Take the coordinator's plan as it is. DCP calls it on every rank."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the view that an item writes, or a blob of the codec. Local, thread-safe."""
        name = write_item.index.fqn
        if write_item.type == WriteItemType.BYTE_IO:
            entity = self._objects.get(name)
            return io.BytesIO(entity[1] if entity is not None else pack(self._values[name][1], path=name))
        assert write_item.tensor_data is not None  # DCP's invariant of such an item
        chunk = write_item.tensor_data.chunk
        data = self._rectangles[name, chunk.offsets, chunk.sizes].data
        assert data is not None  # checked when the planner was set up
        return data

    def lookup_entity(self, index: MetadataIndex) -> ShardedObject | None:
        """Return the object of this name; None where it is that of a value which is not sharded. Local."""
        stored = self._objects.get(index.fqn)
        return None if stored is None else stored[0]

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the value of this name that is not sharded, as DCP's default planner does. Local."""
        return self._values[index.fqn][1]

    def _items_of(self, tensor: ShardedTensor) -> list[WriteItem]:
        items = []
        for part in rectangles(tensor):
            offsets, sizes = torch.Size(part.box.start), torch.Size(part.box.shape)
            self._rectangles.setdefault((tensor.key, offsets, sizes), part)
            data = TensorWriteData(
                chunk=ChunkStorageMetadata(offsets=offsets, sizes=sizes),
                properties=TensorProperties(dtype=tensor.dtype),
                size=torch.Size(tensor.global_shape),
            )
            index = MetadataIndex(tensor.key, offsets)
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return items


def _packed_objects(flattened: FlattenedState) -> dict[str, tuple[ShardedObject, bytes]]:
    """Return the objects by unique key, with their blobs; empty ones of replicas that are not stored."""
    objects: dict[str, tuple[ShardedObject, bytes]] = {}
    for entity in flattened.objects:
        stored = is_main_replica(entity.replica_id) or entity.key in flattened.replicated
        blob = pack(entity.data, path=entity.key) if stored else b""
        objects.setdefault(entity.unique_key, (entity, blob))
    return objects


def _check_sources(tensors: Iterable[ShardedTensor]) -> None:
    for tensor in tensors:
        if tensor.data is None:
            raise DeclarationError(
                f"{tensor.key!r} has no data to save. Declare it with its tensor.", key=tensor.key
            )
        check_source(tensor)


def _plain_tensors(common: Any) -> tuple[list[ShardedTensor], Any]:
    """Return the plain tensors among common values as whole arrays, and the rest."""
    arrays = {name for name, (_, value) in flatten(common).items() if _is_array(value)}
    tensors: list[ShardedTensor] = []
    names = PathKeys()

    def taken(steps: Steps, leaf: Any) -> Any:
        if not is_plain_tensor(leaf) or dotted(steps) not in arrays:
            return leaf
        tensors.append(declare_whole(names.key_of(steps), leaf))
        return ABSENT

    rest = map_leaves(taken, common, (), step=add_step)
    return tensors, {} if rest is ABSENT else without_positions(rest)


def _check_names_differ(
    flattened: FlattenedState, plain: Iterable[ShardedTensor], values: Mapping[str, object]
) -> None:
    """Check that nothing that is named by its path has the name of an entity or a DTensor.

    Raises:
        DeclarationError: something has.
    """
    keys = {tensor.key for tensor in flattened.tensors} | {entity.unique_key for entity in flattened.objects}
    twice = sorted(keys & ({tensor.key for tensor in plain} | values.keys()))
    if twice:
        raise DeclarationError(
            f"{twice[0]!r}: a plain tensor or value of the state dict has this name, which is its path "
            f"joined with dots, and so has a sharded tensor or object. Rename one of the dict keys on the "
            f"way to it.",
            key=twice[0],
        )


def _is_array(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and not value.is_quantized
        and dtype_name(value.dtype) in DTYPES
    )


def _merged(messages: Sequence[_RankMessage]) -> DeclaredChunks:
    """Return the declarations of all ranks, with one main replica where entities have no replica ids."""
    columns = [unpack_columns(s.columns, where=f"declarations of rank {r}") for r, s in enumerate(messages)]
    merged = merge_declarations(decode_declarations(columns))
    merged = choose_lowest_rank_as_main(merged, {key for s in messages for key in s.replicated})
    return keep_lowest_main(merged, {key for s in messages for key in s.shared})


def _chosen_items(merged: DeclaredChunks, messages: list[_RankMessage]) -> list[list[WriteItem]]:
    """Return the items that each rank writes."""
    plan = plan_save(merged, ranks=len(messages), part_bytes=None)
    entity_items = [plan.entity[plan.rows_of(rank)].tolist() for rank in range(len(messages))]
    planned = set(plan.table.array.tolist())
    for number in range(len(merged.table.arrays)):
        if number not in planned:  # an array without elements: only its name is stored
            row = int(np.flatnonzero(merged.table.array == number)[0])
            entity_items[int(merged.rank[row])].append(int(merged.entity[row]))
    return [
        [item for entity in of_rank for item in s.entity_items[entity]]
        for of_rank, s in zip(entity_items, messages, strict=True)
    ]


def _bytes_item(name: str) -> WriteItem:
    return WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO)
