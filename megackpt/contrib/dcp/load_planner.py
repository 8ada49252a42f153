"""A load planner for DCP that knows megackpt's entities.

It turns the request of each rank into read items, and rebuilds the state dict in place when the last item
has been read. It works with any storage reader.
"""

from __future__ import annotations

import dataclasses
import io
import logging
import threading
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megackpt.codec import unpack
from megackpt.contrib.dcp.location import rank_and_size
from megackpt.contrib.dcp.state_dicts import Rectangle, flatten, rectangles, replace_leaves, update
from megackpt.engine.data.tensor_bytes import check_target
from megackpt.entities import ShardedObject, ShardedTensor
from megackpt.entities.flatten import flatten_state
from megackpt.entities.tree import dotted, empty_containers, keys_by_container
from megackpt.errors import MismatchError, MissingKeyError
from megackpt.ground.notices import notice

log = logging.getLogger(__name__)


class MegackptLoadPlanner(LoadPlanner):
    """Plans a `dcp.load` into DTensors, megackpt's entities, plain tensors and values.

    As DCP does, it loads what the state dict names and nothing else, and writes it into the state dict:
    tensors are filled in place, entities are replaced by what they stand for, other values by the stored
    ones.

    Args:
        allow_partial_load: leave out what the checkpoint does not have, instead of raising an error.
        process_group: the group that `dcp.load` is given; None for all ranks.
    """

    def __init__(
        self, *, allow_partial_load: bool = False, process_group: dist.ProcessGroup | None = None
    ) -> None:
        self._allow_partial_load = allow_partial_load
        self._process_group = process_group
        self._lock = threading.Lock()

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take the state dict apart. DCP calls it on every rank.

        Raises:
            DeclarationError: an entity that cannot be filled.
        """
        assert metadata is not None  # DCP's invariant: the storage reader has given it
        self._state_dict = state_dict
        self._stored = metadata.state_dict_metadata
        arrays = {name for name, entry in self._stored.items() if isinstance(entry, TensorStorageMetadata)}
        rank, ranks = rank_and_size(self._process_group)
        self._flattened = flatten_state(state_dict, rank=rank, ranks=ranks, stored=arrays)
        self._values = {name: value for name, (_, value) in flatten(self._flattened.common).items()}
        self._objects = {entity.unique_key: entity for entity in self._flattened.objects}
        self._rectangles: list[Rectangle] = []
        self._missing: set[str] = set()
        self._loaded: dict[str, Any] = {}

    def create_local_plan(self) -> LoadPlan:
        """Return the reads that fill this rank's tensors and values. DCP calls it on every rank.

        Raises:
            MissingKeyError: a key is asked for that the checkpoint lacks.
            MismatchError: an array is stored with another dtype or global shape.
        """
        items = [item for tensor in self._flattened.tensors for item in self._reads_of(tensor)]
        for entity in self._flattened.objects:
            items += self._read_of_value(entity.unique_key, entity)
        for name in self._values:
            items += self._read_of_value(name, None)
        empty = {dotted(steps) for steps in empty_containers(self._state_dict)} - {""}
        return LoadPlan(items, planner_data=sorted(keys_by_container(self._stored, empty)))

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are. DCP calls it on the coordinator.

        Raises:
            MissingKeyError: an empty dict or list of the request has stored keys below it that no rank reads.
        """
        if not self._allow_partial_load:
            empty = {name for plan in global_plan for name in plan.planner_data or ()}
            asked = {item.storage_index.fqn for plan in global_plan for item in plan.items}
            lost = keys_by_container(self._stored, empty, asked)
            if lost:
                raise _nothing_asked(*min(lost.items()))
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Note how much is to be read. DCP calls it on every rank."""
        self._outstanding = len(central_plan.items)
        if not self._outstanding:
            self._rebuild()
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take a value that MegackptSavePlanner has stored through a writer that is not megackpt's. Local.

        Raises:
            FormatError: another planner has stored it.
        """
        name = read_item.storage_index.fqn
        self.load_value(read_item, unpack(value.getvalue(), where=f"value {name!r}"))

    def load_value(self, read_item: ReadItem, value: Any) -> None:
        """Take a value that is no tensor. Local."""
        name = read_item.dest_index.fqn
        entity = self._objects.get(name)
        if entity is not None:
            entity.data = value
        else:
            self._loaded[name] = value
        self._count_down()

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Return the view that a read fills. Local, thread-safe."""
        assert read_item.dest_index.index is not None  # set by create_local_plan
        data = self._rectangles[read_item.dest_index.index].data
        assert data is not None  # allocated by create_local_plan
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            data = data.narrow(dim, start, length)
        return data

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Note that a read is done. Local."""
        self._count_down()

    def _reads_of(self, tensor: ShardedTensor) -> list[ReadItem]:
        entry = self._stored.get(tensor.key)
        if entry is None:
            return self._reads_of_missing(tensor.key)
        tensor.init_data()
        check_target(tensor)
        _check_matches(tensor, entry)
        assert isinstance(entry, TensorStorageMetadata)
        if tuple(entry.size) != tensor.global_shape and tensor.data is not None:
            tensor.data.detach().zero_()  # what is not stored: padding
        items: list[ReadItem] = []
        for part in rectangles(tensor):
            number = len(self._rectangles)
            self._rectangles.append(part)
            chunk = ChunkStorageMetadata(torch.Size(part.box.start), torch.Size(part.box.shape))
            index = MetadataIndex(tensor.key, chunk.offsets, number)
            items += [
                dataclasses.replace(item, dest_index=index)
                for item in create_read_items_for_chunk_list(tensor.key, entry, [chunk])
                if all(item.lengths)
            ]
        return items

    def _read_of_value(self, name: str, entity: ShardedObject | None) -> list[ReadItem]:
        entry = self._stored.get(name)
        if entry is None:
            per_rank = None if entity is None else self._flattened.per_rank.get(entity.key)
            if per_rank is not None and per_rank.elsewhere == "keep":
                notice(log, f"{name!r} was stored for another number of ranks: every rank keeps its own.")
                return []
            if entity is not None and entity.elsewhere == "keep" and self._has_objects(entity.key):
                return []
            return self._reads_of_missing(name if entity is None else entity.key)
        if not isinstance(entry, BytesStorageMetadata):
            raise MismatchError(
                f"{name!r} is stored as a tensor, and asked for as something else. Ask for a tensor of shape "
                f"{tuple(entry.size)}.",
                key=name,
            )
        offset = torch.Size((0,))
        index = MetadataIndex(name)
        return [ReadItem(LoadItemType.BYTE_IO, index, offset, index, offset, offset)]

    def _has_objects(self, key: str) -> bool:
        """Whether there is an array of objects of this key, of whatever shape."""
        return any(name.startswith(f"{key}/shard_") for name in self._stored)

    def _reads_of_missing(self, key: str) -> list[ReadItem]:
        if not self._allow_partial_load:
            raise MissingKeyError(
                f"The checkpoint has no {key!r}. Ask for what was saved, or make the planner with "
                f"allow_partial_load=True to keep what it does not have.",
                key=key,
            )
        self._missing.add(key)
        return []

    def _count_down(self) -> None:
        with self._lock:
            self._outstanding -= 1
            is_last = not self._outstanding
        if is_last:
            self._rebuild()

    def _rebuild(self) -> None:
        """Write everything into the state dict, in place: a planner is not notified of the end of a load."""
        common = replace_leaves(self._flattened.common, self._loaded)
        update(self._state_dict, self._flattened.unflatten(common, self._missing))


def _nothing_asked(name: str, keys: list[str]) -> MissingKeyError:
    return MissingKeyError(
        f"The checkpoint holds {len(keys)} keys below {name!r}, {keys[0]!r} for one, where the state dict "
        f"has an empty dict or list, so none of them would be loaded. If it is the state of an optimizer "
        f"that has not taken a step yet, call megackpt.training.optim.initialise_state(optimizer) before "
        f"optimizer.state_dict(). To load without them, leave the empty container out of the state dict, or "
        f"make the planner with allow_partial_load=True.",
        key=keys[0],
    )


def _check_matches(tensor: ShardedTensor, entry: Any) -> None:
    if not isinstance(entry, TensorStorageMetadata):
        raise MismatchError(
            f"{tensor.key!r} is stored as a value, not as a tensor. Ask for a value of this name instead.",
            key=tensor.key,
        )
    shape = tuple(entry.size)
    resized = shape != tensor.global_shape
    if resized and not (tensor.allow_shape_mismatch and len(shape) == len(tensor.global_shape)):
        raise MismatchError(
            f"{tensor.key!r}: the checkpoint has global shape {shape}, asked for is {tensor.global_shape}.",
            key=tensor.key,
        )
    if entry.properties.dtype != tensor.dtype:
        raise MismatchError(
            f"{tensor.key!r}: stored as {entry.properties.dtype}, asked for as {tensor.dtype}. Load into a "
            f"tensor of the stored dtype and convert it then.",
            key=tensor.key,
        )
