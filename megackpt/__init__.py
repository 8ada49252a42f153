"""Distributed checkpointing of Megatron-style training: save at one parallel layout, load at any other.

The public names, and nothing else; each is described where it is defined, and is imported when it is first
used: the command line's help and the reader without torch need none of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from megackpt.checkpointer import (
        Checkpointer,
        Groups,
        KeepBest,
        LocalTier,
        MemoryTier,
        Retention,
        SaveSchedule,
        Tier,
        Tiers,
    )
    from megackpt.codec import ForeignMember, ForeignNamedTuple, ForeignObject
    from megackpt.codec.registering import register_codec
    from megackpt.config import CheckpointConfig
    from megackpt.engine.saving.plan_cache import PlanCache
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
        ComponentPlacement,
        Layout,
        LocalNonpersistentObject,
        PerRankValue,
        ReplicatedValue,
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
    "ComponentPlacement",
    "CoverageError",
    "DeclarationError",
    "ForeignMember",
    "ForeignNamedTuple",
    "ForeignObject",
    "FormatError",
    "GeometryError",
    "Groups",
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
    "PerRankValue",
    "PlanCache",
    "Policy",
    "RankFailedError",
    "ReplicatedValue",
    "Retention",
    "SaveOptions",
    "SaveSchedule",
    "ShardedBase",
    "ShardedLayout",
    "ShardedObject",
    "ShardedTensor",
    "ShardedTensorFactory",
    "StorageError",
    "StrictHandling",
    "Tier",
    "Tiers",
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

_NAMES_OF = {
    "megackpt.api": (
        "check_is_distributed_checkpoint",
        "load",
        "load_common_state_dict",
        "load_content_metadata",
        "load_plain_tensors",
        "load_sharded_metadata",
        "load_tensors_metadata",
        "load_with_report",
        "remove_sharded_tensors",
        "save",
    ),
    "megackpt.checkpointer": (
        "Checkpointer",
        "Groups",
        "KeepBest",
        "LocalTier",
        "MemoryTier",
        "Retention",
        "SaveSchedule",
        "Tier",
        "Tiers",
    ),
    "megackpt.codec": ("ForeignMember", "ForeignNamedTuple", "ForeignObject"),
    "megackpt.codec.registering": ("register_codec",),
    "megackpt.config": ("CheckpointConfig",),
    "megackpt.engine.saving.plan_cache": ("PlanCache",),
    "megackpt.errors": (
        "CheckpointError",
        "CheckpointingException",
        "CommonStateError",
        "CoverageError",
        "DeclarationError",
        "FormatError",
        "GeometryError",
        "IntegrityError",
        "MismatchError",
        "MissingKeyError",
        "NotACheckpointError",
        "OptimizerError",
        "RankFailedError",
        "StorageError",
        "UnknownClassError",
        "UnserializableError",
        "WriterFailedError",
    ),
    "megackpt.mapping": (
        "Layout",
        "LocalNonpersistentObject",
        "ComponentPlacement",
        "PerRankValue",
        "ReplicatedValue",
        "ShardedBase",
        "ShardedLayout",
        "ShardedObject",
        "ShardedTensor",
        "ShardedTensorFactory",
    ),
    "megackpt.options": (
        "AsyncOptions",
        "KeyRule",
        "LoadOptions",
        "Policy",
        "SaveOptions",
    ),
    "megackpt.validation": ("ArrayReport", "LoadReport", "StrictHandling"),
}
"""Where each public name is defined: what type checkers see above."""

_HOMES = {name: module for module, names in _NAMES_OF.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name, or a module of the package, at its first use."""
    if name in _HOMES:
        found = getattr(import_module(_HOMES[name]), name)
        globals()[name] = found
        return found
    module = f"{__name__}.{name}"
    if not name.startswith("_"):
        try:
            return import_module(module)
        except ModuleNotFoundError as error:
            if error.name != module:  # a module of ours lacks one of another package
                raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
