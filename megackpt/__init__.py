"""Distributed checkpointing of Megatron-style training: save at one parallel layout, load at any other.

The public names, and nothing else; each is described where it is defined.
"""

from megackpt.api import (
    check_is_distributed_checkpoint,
    load,
    load_common_state_dict,
    load_content_metadata,
    load_plain_tensors,
    load_sharded_metadata,
    load_tensors_metadata,
    load_with_report,
    remove_sharded_tensors,
    save,
)
from megackpt.checkpointer import Checkpointer, KeepBest, LocalTier, MemoryTier, SaveInterval
from megackpt.codec import register_codec
from megackpt.config import CheckpointConfig
from megackpt.engine.plan_cache import PlanCache
from megackpt.errors import (
    CheckpointError,
    CheckpointingException,
    CommonStateError,
    CoverageError,
    DeclarationError,
    FormatError,
    GeometryError,
    IntegrityError,
    MismatchError,
    MissingKeyError,
    NotACheckpointError,
    OptimizerError,
    RankFailedError,
    StorageError,
    UnknownClassError,
    UnserializableError,
    WriterFailedError,
)
from megackpt.mapping import (
    Layout,
    LocalNonpersistentObject,
    PartPlacement,
    PerRank,
    Replicated,
    ShardedBase,
    ShardedLayout,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from megackpt.options import AsyncOptions, KeyRule, LoadOptions, Policy, SaveOptions
from megackpt.validation import ArrayReport, LoadReport, StrictHandling

__version__ = "0.1.0"

__all__ = [
    "ArrayReport",
    "AsyncOptions",
    "CheckpointConfig",
    "CheckpointError",
    "Checkpointer",
    "CheckpointingException",
    "CommonStateError",
    "CoverageError",
    "DeclarationError",
    "FormatError",
    "GeometryError",
    "IntegrityError",
    "KeepBest",
    "KeyRule",
    "Layout",
    "LoadOptions",
    "LoadReport",
    "LocalNonpersistentObject",
    "LocalTier",
    "MemoryTier",
    "MismatchError",
    "MissingKeyError",
    "NotACheckpointError",
    "OptimizerError",
    "PartPlacement",
    "PerRank",
    "PlanCache",
    "Policy",
    "RankFailedError",
    "Replicated",
    "SaveInterval",
    "SaveOptions",
    "ShardedBase",
    "ShardedLayout",
    "ShardedObject",
    "ShardedTensor",
    "ShardedTensorFactory",
    "StorageError",
    "StrictHandling",
    "UnknownClassError",
    "UnserializableError",
    "WriterFailedError",
    "check_is_distributed_checkpoint",
    "load",
    "load_common_state_dict",
    "load_content_metadata",
    "load_plain_tensors",
    "load_sharded_metadata",
    "load_tensors_metadata",
    "load_with_report",
    "register_codec",
    "remove_sharded_tensors",
    "save",
]
