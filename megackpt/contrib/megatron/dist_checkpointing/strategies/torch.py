"""The format torch_dist. Source: Megatron-Core `dist_checkpointing.strategies.torch`, for the names."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan

from megackpt.contrib.megatron.dist_checkpointing.strategies import filesystem_async
from megackpt.contrib.megatron.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from megackpt.contrib.megatron.dist_checkpointing.strategies.base import StrategyAction, set_megackpt_strategy
from megackpt.contrib.megatron.dist_checkpointing.strategies.cached_metadata_filesystem_reader import (
    CachedMetadataFileSystemReader,
)
from megackpt.contrib.megatron.dist_checkpointing.strategies.state_dict_saver import (
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)
from megackpt.contrib.megatron.errors import unsupported_name
from megackpt.contrib.megatron.our_strategies import DetectingLoadStrategy, FormatSaveStrategy, SaveArguments
from megackpt.contrib.megatron.settings import OPTIONS
from megackpt.entities import ShardedStateDict, ShardedTensor, StateDict
from megackpt.errors import DeclarationError, MismatchError, MissingKeyError
from megackpt.formats.registry import SaveChoice, save_strategy
from megackpt.formats.torch_dist import TorchDistSaveStrategy
from megackpt.options import Spread

# Megatron-Core's planner of loads, for programs that call torch.distributed.checkpoint themselves.


class MCoreLoadPlanner(DefaultLoadPlanner):
    """torch's default planner, which also compares global shapes; `megackpt.load` needs no planner.

    Args:
        shapes_validation_sharded_tensors: entities whose global shapes must be the stored ones.
        allow_shape_mismatch_sharded_tensors: entities by key whose arrays may have another shape when stored,
            such as a vocabulary that is padded otherwise; what both have is loaded.

    Source: Megatron-Core `strategies.torch.MCoreLoadPlanner`, for names and behaviour.
    """

    def __init__(
        self,
        *args: Any,
        shapes_validation_sharded_tensors: Iterable[ShardedTensor] = (),
        allow_shape_mismatch_sharded_tensors: Mapping[str, ShardedTensor] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.shapes_validation_sharded_tensors = shapes_validation_sharded_tensors
        self.allow_shape_mismatch_sharded_tensors = allow_shape_mismatch_sharded_tensors

    def create_local_plan(self) -> LoadPlan:
        """Return the plan of this rank, after comparing shapes.

        Raises:
            MissingKeyError: an array that is to be compared is not stored.
            MismatchError: it has another shape.
        """
        stored = self.metadata
        if stored is None:
            return super().create_local_plan()
        self._validate_global_shapes(stored, self.shapes_validation_sharded_tensors)
        self.metadata = self._with_own_shapes(stored)
        try:
            return super().create_local_plan()
        finally:
            self.metadata = stored

    def _validate_global_shapes(self, metadata: Metadata, sharded_tensors: Iterable[ShardedTensor]) -> None:
        for entity in sharded_tensors:
            entry = metadata.state_dict_metadata.get(entity.key)
            if entry is None:
                raise MissingKeyError(
                    f"{entity.key!r} is not stored in the checkpoint. Ask for what was saved.", key=entity.key
                )
            shape = tuple(getattr(entry, "size", ()))
            if shape != tuple(entity.global_shape):
                raise MismatchError(
                    f"{entity.key!r} has the shape {shape} in the checkpoint, and "
                    f"{tuple(entity.global_shape)} here. Build the model with the shapes "
                    f"of the checkpoint, or set allow_shape_mismatch.",
                    key=entity.key,
                )

    def _with_own_shapes(self, metadata: Metadata) -> Metadata:
        """Return the metadata with the shapes of this program where these may differ: torch compares them."""
        entries = dict(metadata.state_dict_metadata)
        for key, entity in (self.allow_shape_mismatch_sharded_tensors or {}).items():
            if key in entries:
                size: Any = torch.Size(entity.global_shape)
                entries[key] = dataclasses.replace(entries[key], size=size)
        return dataclasses.replace(metadata, state_dict_metadata=entries)


_PLUMBING = {
    "because": "it is how Megatron-Core hands its entities to torch.distributed.checkpoint, and they are "
    "never handed there.",
    "instead": "Use save() and load(); to call that library yourself, pass entities as "
    "strategies.checkpointable.CheckpointableShardedTensor with its default planners, or MCoreLoadPlanner.",
}
MSC_PREFIX = "msc://"
"""Prefix of the object-store paths that Megatron-Core takes; megackpt takes a Store of its own instead."""


class TorchDistSaveShardedStrategy(FormatSaveStrategy):
    """Saves in the format of torch.distributed.checkpoint.

    Each of its arguments may also be set later, as Megatron-LM does, and counts from the next save on.

    Attributes:
        keep_only_main_replica: write what several ranks hold from its main replica; False lets any of these
            ranks write it, so that all write about as many bytes. A `FullyParallelSaveStrategyWrapper` around
            this strategy spreads the save whatever stands here.
        thread_count: how many files each rank writes at the same time.
        use_cached_ckpt_structure: cached_metadata, see `FormatSaveStrategy`.
        separation_hint: what has a key that begins so is written to files of its own; None for none.
        cached_global_metadata: what a load strategy of Megatron-Core has read. It is only kept here: a plan
            comes from what ranks declare, and the first save of a structure makes it.
        cpu_shm_mode: without effect: tensors are staged in memory of the host in any case.

    Raises:
        DeclarationError: thread_count is below 1, or below 2 with a separation_hint; or another format.
    """

    SETTINGS: ClassVar[tuple[str, ...]] = (
        "keep_only_main_replica",
        "thread_count",
        "separation_hint",
        "cached_global_metadata",
        "cpu_shm_mode",
    )

    def __init__(
        self,
        backend: str = "torch_dist",
        version: int = 1,
        keep_only_main_replica: bool = True,
        thread_count: int = 2,
        cached_metadata: bool = False,
        separation_hint: str | None = None,
        cpu_shm_mode: bool = False,
    ) -> None:
        super().__init__(backend, version)
        self.keep_only_main_replica = keep_only_main_replica
        self.thread_count = thread_count
        self.use_cached_ckpt_structure = cached_metadata
        self.separation_hint = separation_hint
        self.cpu_shm_mode = cpu_shm_mode
        self.cached_global_metadata: Any = None  # torch.distributed.checkpoint's
        _ = self.choice  # raises at once what is out of range

    @property
    def choice(self) -> SaveChoice:
        """The strategy argument of `megackpt.save`."""
        if (self.backend, self.version) != ("torch_dist", 1):
            raise DeclarationError(
                f"{type(self).__name__} saves format ('torch_dist', 1), and not "
                f"{(self.backend, self.version)!r}. Use get_default_save_sharded_strategy for another."
            )
        return TorchDistSaveStrategy(
            thread_count=self.thread_count,
            separation_hint=self.separation_hint,
            values_for_dcp=False,  # Megatron-Core reads it
        )

    def async_save(
        self,
        sharded_state_dict: ShardedStateDict,
        checkpoint_dir: str | os.PathLike[str],
        async_strategy: str = "nvrx",
    ) -> AsyncRequest:
        """Return a request that saves a whole checkpoint when it is scheduled or executed. Local.

        async_strategy has no effect: megackpt's own writer processes save.
        """
        return super().async_save(sharded_state_dict, checkpoint_dir)

    @property
    def save_arguments(self) -> SaveArguments:
        """The other arguments of `megackpt.save` that the current settings of this strategy give."""
        spread: Spread = "none" if self.keep_only_main_replica else "world"
        options = dataclasses.replace(OPTIONS.save_options, spread=spread)
        return {**super().save_arguments, "options": options}


def _default_save_strategy(backend: str, version: int) -> FormatSaveStrategy:
    """Return the strategy for a format by name.

    Raises:
        DeclarationError: there is no such format.
        MissingExtraError: it needs a package that is not installed.
    """
    save_strategy((backend, version))
    is_torch_dist = (backend, version) == ("torch_dist", 1)
    return (TorchDistSaveShardedStrategy if is_torch_dist else FormatSaveStrategy)(backend, version)


set_megackpt_strategy(StrategyAction.SAVE_SHARDED, _default_save_strategy)


class TorchDistLoadShardedStrategy(DetectingLoadStrategy):
    """Loads a checkpoint of any format that megackpt reads; metadata.json names the format.

    The arguments are those of Megatron-Core 0.17 and 0.19 and have no effect: index rows are read as they are
    needed, and tensors are filled one by one.
    """

    SETTINGS: ClassVar[tuple[str, ...]] = ("cache_metadata", "stream_ckpt_dequant", "checkpoint_name")

    def __init__(
        self,
        cache_metadata: bool = False,
        stream_ckpt_dequant: bool = True,
        checkpoint_name: str | None = None,
    ) -> None:
        super().__init__()
        self.cache_metadata = cache_metadata
        self.stream_ckpt_dequant = stream_ckpt_dequant
        self.checkpoint_name = checkpoint_name

    def load(
        self,
        sharded_state_dict: ShardedStateDict,
        checkpoint_dir: str | os.PathLike[str],
        async_strategy: str = "mcore",
    ) -> StateDict:
        """Return the loaded state dict, common state included. Collective. async_strategy has no effect."""
        return super().load(sharded_state_dict, checkpoint_dir)


def register_default_torch_strategies() -> None:
    """Do nothing: our strategies are there without being registered."""


def get_async_strategy(async_strategy: str = "nvrx", module: str | None = None) -> tuple[str, Any]:
    """Return `"mcore"` and what an asynchronous save needs, by name, or only what `module` names.

    They are megackpt's own for both strategies of Megatron-Core, `nvrx` and `mcore`: its writer processes
    save, and nvidia-resiliency-ext is not needed.

    Raises:
        DeclarationError: there is no such strategy, or no such name.
    """
    if async_strategy not in ("nvrx", "mcore"):
        raise DeclarationError(f"async_strategy={async_strategy!r} is not known. Give 'nvrx' or 'mcore'.")
    known = {
        "AsyncCallsQueue": AsyncCallsQueue,
        "AsyncRequest": AsyncRequest,
        "CachedMetadataFileSystemReader": CachedMetadataFileSystemReader,
        "FileSystemWriterAsync": filesystem_async.FileSystemWriterAsync,
        "_results_queue": filesystem_async._results_queue,
        "get_write_results_queue": filesystem_async.get_write_results_queue,
        "save_state_dict_async_finalize": save_state_dict_async_finalize,
        "save_state_dict_async_plan": save_state_dict_async_plan,
    }
    if module is not None and module not in known:
        raise DeclarationError(f"module={module!r} is not known. Give one of {', '.join(known)}.")
    return "mcore", known if module is None else known[module]


def _get_filesystem_reader(
    checkpoint_dir: str | os.PathLike[str], cache_metadata: bool = False, async_strategy: str = "mcore"
) -> CachedMetadataFileSystemReader:
    """Return torch's reader of a folder, for Megatron-Bridge, which imports this name."""
    return CachedMetadataFileSystemReader(checkpoint_dir, cache_metadata)


MCoreMetadata = unsupported_name("MCoreMetadata", **_PLUMBING)
MCoreSavePlan = unsupported_name("MCoreSavePlan", **_PLUMBING)
MCoreSavePlanner = unsupported_name("MCoreSavePlanner", **_PLUMBING)
flatten_state_dict = unsupported_name("flatten_state_dict", **_PLUMBING)
get_reformulation_metadata = unsupported_name("get_reformulation_metadata", **_PLUMBING)
mcore_to_pyt_state_dict = unsupported_name("mcore_to_pyt_state_dict", **_PLUMBING)
sharded_tensor_to_torch_sharded_tensor = unsupported_name(
    "sharded_tensor_to_torch_sharded_tensor", **_PLUMBING
)
