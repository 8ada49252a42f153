"""A storage reader for DCP over checkpoints of every format that megackpt reads.

To DCP, each array is one chunk, whatever was stored. The engine reads: only the ranges that are needed,
checked, several at once.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from megackpt.contrib.dcp.load_planner import MegackptLoadPlanner
from megackpt.contrib.dcp.location import opened
from megackpt.contrib.dcp.state_dicts import flatten, name_of
from megackpt.engine.checkpoint.common_arrays import with_tensors
from megackpt.engine.checkpoint.common_reading import stored_references
from megackpt.engine.checkpoint.opening import open_checkpoint, read_common_and_references
from megackpt.engine.data.read import read_chunk, read_tensors
from megackpt.engine.data.tensor_bytes import check_target
from megackpt.engine.loading.shared_targets import SharedTargets
from megackpt.entities import ShardedObject, ShardedTensor
from megackpt.entities.describe import describe, torch_dtype
from megackpt.errors import DeclarationError, MismatchError
from megackpt.formats.contents import Contents
from megackpt.options import LoadOptions
from megackpt.plans.metadata import OBJECT
from megackpt.plans.planning import plan_load
from megackpt.plans.validation import LoadRules, StrictHandling, check_dtypes_and_shapes
from megackpt.storage import Location, Store


class MegackptStorageReader(StorageReader):
    """Lets `dcp.load` read a checkpoint of megackpt: from `megackpt.save`, or MegackptStorageWriter.

    Works with every planner. A planner that is not megackpt's is handed values that are no tensors as DCP's
    writer would have stored them: pickles, but made here, in memory, of what megackpt's codec has read.

    Args:
        path: the directory of the checkpoint, or an open store; None to give it to DCP as checkpoint_id.
        options: tunables; of the rules those on casts count (another dtype is an error by default), what else
            differs is for the planner to decide.

    Raises:
        DeclarationError: the options ask for what is not done here: other names, leaving keys out, reading
            for each other, or tensors elsewhere than where they are.
    """

    def __init__(self, path: Location | None = None, *, options: LoadOptions | None = None) -> None:
        self.path = path
        self._options = options or LoadOptions()
        _check_followed(self._options)

    def reset(self, checkpoint_id: Any = None) -> None:
        """Load from another directory, if one is given. DCP calls it on every rank."""
        if checkpoint_id is not None:
            self.path = checkpoint_id

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Return whether a checkpoint id can be a directory of ours. Local."""
        return isinstance(checkpoint_id, str) or hasattr(checkpoint_id, "__fspath__")

    def read_metadata(self) -> Metadata:
        """Return what the checkpoint holds, in DCP's terms. DCP calls it on every rank.

        Raises:
            NotACheckpointError, FormatError, IntegrityError: it is none, or is damaged.
        """
        with opened(self.path) as store:
            contents = self._open(store)
            common = _common_of(contents, store)
            entries: dict[str, Any] = {
                name: _metadata_of(value) for name, (_, value) in flatten(common).items()
            }
            steps = {name: tuple(map(_step, at)) for name, (at, _) in flatten(common).items()}
            for spec in contents.arrays.values():
                if spec.dtype == OBJECT:
                    entries.update(
                        {entity.unique_key: BytesStorageMetadata() for entity in _objects(contents, spec.key)}
                    )
                else:
                    entries[spec.key] = _array_metadata(torch_dtype(spec.dtype), spec.global_shape)
        steps |= {name: (name,) for name in entries if name not in steps}
        return Metadata(entries, planner_data=steps)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing: the checkpoint is opened when it is read. DCP calls it on every rank."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Note which commit this rank sees. DCP calls it on every rank."""
        with opened(self.path) as store:
            plan.storage_data = self._open(store).identity
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Check that all ranks see the same commit. DCP calls it on the coordinator.

        Raises:
            MismatchError: the checkpoint was saved anew meanwhile.
        """
        if len({plan.storage_data for plan in plans}) > 1:
            raise MismatchError(
                f"{self.path} was saved anew while it was being opened: ranks see different checkpoints. "
                f"Load again."
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill what the planner resolves the items to. DCP calls it on every rank.

        Raises:
            MismatchError: an array is stored in another dtype, or the checkpoint was saved anew meanwhile.
            IntegrityError: stored bytes are damaged; the text names key, file and byte range.
            StorageError, FormatError: a file cannot be read.
        """
        with opened(self.path) as store:
            contents = self._open(store)
            if contents.identity != plan.storage_data:
                raise MismatchError(f"{store.location} was saved anew while it was being read. Load again.")
            self._read_items(plan.items, planner, store, contents)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _open(self, store: Store) -> Contents:
        return open_checkpoint(store, allow_unsafe_pickle=self._options.allow_unsafe_pickle)

    def _read_items(
        self, items: Sequence[ReadItem], planner: LoadPlanner, store: Store, contents: Contents
    ) -> None:
        values = {name: value for name, (_, value) in flatten(_common_of(contents, store)).items()}
        arrays: list[ReadItem] = []
        for item in items:
            name = item.storage_index.fqn
            if item.type == LoadItemType.BYTE_IO:
                _give(item, planner, self._value(name, values, store, contents))
            elif name in contents.arrays:
                arrays.append(item)
            else:
                _copy_value(item, planner, values[name])
        self._read_arrays(arrays, planner, store, contents)

    def _read_arrays(
        self, items: list[ReadItem], planner: LoadPlanner, store: Store, contents: Contents
    ) -> None:
        targets = [planner.resolve_tensor(item) for item in items]
        tensors = [_target(item, target, contents) for item, target in zip(items, targets, strict=True)]
        shared = SharedTargets.of(tensors)
        requested = describe(tensors, rank=0)
        rules = LoadRules(self._options.rules, StrictHandling.ASSUME_OK_UNEXPECTED)
        check_dtypes_and_shapes(requested, contents.arrays, rules, where=store.location)
        chunks = contents.chunks_for([requested.table])
        copies = plan_load(requested, chunks.table, where=store.location)
        read_tensors(chunks, copies, shared.tensors, self._options)
        shared.copy_to_shared()
        shared.check(store.location)
        for item, target in zip(items, targets, strict=True):
            planner.commit_tensor(item, target)

    def _value(self, name: str, values: dict[str, Any], store: Store, contents: Contents) -> Any:
        """Return a common value, or an object by its unique key."""
        if name in values:
            return values[name]
        entity = ShardedObject.empty_from_unique_key(name)
        chunks = contents.chunks([entity.key])
        start = chunks.table.start[:, : len(entity.global_shape)]
        row = int((start == list(entity.global_offset)).all(axis=1).argmax())
        return contents.decode_object(read_chunk(chunks, row), f"{store.location}: object {name!r}")


def _check_followed(options: LoadOptions) -> None:
    """Raise an error for options that a DCP load would ignore.

    Raises:
        DeclarationError: naming them, and what to do instead.
    """
    default = LoadOptions()
    names = ("rename", "exclude", "complete", "load_on_device", "on_corrupt")
    ignored = [name for name in names if getattr(options, name) != getattr(default, name)]
    ignored += [] if options.exchange in ("auto", "direct") else ["exchange"]
    if ignored:
        raise DeclarationError(
            f"MegackptStorageReader does not follow LoadOptions.{', '.join(ignored)}: with DCP the planner "
            f"chooses what is loaded under which name, and each rank reads by itself. Leave them out, or "
            f"load with megackpt.load."
        )


def _target(item: ReadItem, target: torch.Tensor, contents: Contents) -> ShardedTensor:
    """Declare what an item fills; DCP's offsets into the one chunk are those into the array."""
    key = item.storage_index.fqn
    tensor = ShardedTensor(
        key=key,
        data=target.detach(),
        dtype=target.dtype,
        local_shape=tuple(item.lengths),
        global_shape=contents.arrays[key].global_shape,
        global_offset=tuple(item.storage_offsets),
    )
    check_target(tensor)
    return tensor


def _copy_value(item: ReadItem, planner: LoadPlanner, value: torch.Tensor) -> None:
    """Fill what an item resolves to from a tensor of the common state."""
    target = planner.resolve_tensor(item)
    if target.dtype != value.dtype:
        raise MismatchError(
            f"{item.storage_index.fqn!r} is stored as {value.dtype} in common state and asked for as "
            f"{target.dtype}. Ask for what was stored, and convert it then.",
            key=item.storage_index.fqn,
        )
    for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        value = value.narrow(dim, start, length)
    target.detach().copy_(value)
    planner.commit_tensor(item, target)


def _give(item: ReadItem, planner: LoadPlanner, value: Any) -> None:
    if isinstance(planner, MegackptLoadPlanner):
        planner.load_value(item, value)
        return
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    planner.load_bytes(item, stream)


def _objects(contents: Contents, key: str) -> list[ShardedObject]:
    shape = contents.arrays[key].global_shape
    starts = contents.chunks([key]).table.start[:, : len(shape)].tolist()
    return [ShardedObject(key, None, shape, tuple(start)) for start in starts]


def _common_of(contents: Contents, store: Store) -> Any:
    """Return common state, with tensors on meta in the place of those that are stored as arrays.

    So it is flattened as if they were there; DCP reads them as arrays.
    """
    common, _ = read_common_and_references(contents, where=store.location)
    arrays = {
        steps: contents.arrays[key]
        for steps, key in stored_references(common, contents).items()
        if name_of(steps) == key
    }
    return with_tensors(
        common,
        {
            steps: torch.empty(spec.global_shape, dtype=torch_dtype(spec.dtype), device="meta")
            for steps, spec in arrays.items()
        },
    )


def _metadata_of(value: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if isinstance(value, torch.Tensor):
        return _array_metadata(value.dtype, tuple(value.shape))
    return BytesStorageMetadata()


def _array_metadata(dtype: torch.dtype, shape: tuple[int, ...]) -> TensorStorageMetadata:
    whole = ChunkStorageMetadata(offsets=torch.Size([0] * len(shape)), sizes=torch.Size(shape))
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), [whole])


def _step(step: Any) -> Any:
    """A step as DCP has it: a list index, or a dict key as text."""
    return step if type(step) is int else str(step)
