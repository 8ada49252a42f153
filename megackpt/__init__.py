"""Distributed checkpointing of Megatron-style training: save at one parallel layout, load at any other.

This package exports the public names. Each is imported from its module when it is first used, so that the
help of the command line and the reader without torch start quickly.
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
    from megackpt.codec.registration import register_codec
    from megackpt.config import CheckpointConfig
    from megackpt.engine.saving.plan_cache import PlanCache
    from megackpt.engine.verification.verify import VerifyReport
    from megackpt.errors import (
        CheckpointError,
        CheckpointingException,
        CommonStateError,
        CoverageError,
        DeclarationError,
        FormatError,
        GeometryError,
        IntegrityError,
        MapError,
        MismatchError,
        MissingExtraError,
        MissingKeyError,
        NotACheckpointError,
        OptimizerError,
        RankFailedError,
        StorageError,
        UnknownClassError,
        UnserializableError,
        UnsupportedError,
        WriterFailedError,
    )
    from megackpt.formats.damage import Damage
    from megackpt.maintenance.convert import ConvertReport, convert
    from megackpt.maintenance.diff import CheckpointDifference, ValueDifference, diff
    from megackpt.maintenance.diff_arrays import ArrayDifference
    from megackpt.maintenance.export_huggingface import HuggingFaceExport, export_huggingface
    from megackpt.maintenance.import_huggingface import HuggingFaceImport, import_huggingface
    from megackpt.maintenance.inspect import CheckpointSummary, StoredArray, StoredFile, inspect
    from megackpt.maintenance.repair import RepairReport, repair
    from megackpt.maintenance.repair_search import RepairedFile
    from megackpt.maintenance.verify import verify
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
    "ArrayDifference",
    "ArrayReport",
    "AsyncOptions",
    "CheckpointConfig",
    "CheckpointDifference",
    "CheckpointError",
    "CheckpointSummary",
    "Checkpointer",
    "CheckpointingException",
    "CommonStateError",
    "ComponentPlacement",
    "ConvertReport",
    "CoverageError",
    "Damage",
    "DeclarationError",
    "ForeignMember",
    "ForeignNamedTuple",
    "ForeignObject",
    "FormatError",
    "GeometryError",
    "Groups",
    "HuggingFaceExport",
    "HuggingFaceImport",
    "IntegrityError",
    "KeepBest",
    "KeyRule",
    "Layout",
    "LoadOptions",
    "LoadReport",
    "LocalNonpersistentObject",
    "LocalTier",
    "MapError",
    "MemoryTier",
    "MismatchError",
    "MissingExtraError",
    "MissingKeyError",
    "NotACheckpointError",
    "OptimizerError",
    "PerRankValue",
    "PlanCache",
    "Policy",
    "RankFailedError",
    "RepairReport",
    "RepairedFile",
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
    "StoredArray",
    "StoredFile",
    "StrictHandling",
    "Tier",
    "Tiers",
    "UnknownClassError",
    "UnserializableError",
    "UnsupportedError",
    "ValueDifference",
    "VerifyReport",
    "WriterFailedError",
    "check_is_distributed_checkpoint",
    "convert",
    "diff",
    "export_huggingface",
    "import_huggingface",
    "inspect",
    "load",
    "load_common_state_dict",
    "load_content_metadata",
    "load_plain_tensors",
    "load_sharded_metadata",
    "load_tensors_metadata",
    "load_with_report",
    "register_codec",
    "remove_sharded_tensors",
    "repair",
    "save",
    "verify",
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
    "megackpt.codec.registration": ("register_codec",),
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
        "MapError",
        "MismatchError",
        "MissingExtraError",
        "MissingKeyError",
        "NotACheckpointError",
        "OptimizerError",
        "RankFailedError",
        "StorageError",
        "UnknownClassError",
        "UnserializableError",
        "UnsupportedError",
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
    "megackpt.formats.damage": ("Damage",),
    "megackpt.engine.verification.verify": ("VerifyReport",),
    "megackpt.maintenance.convert": (
        "ConvertReport",
        "convert",
    ),
    "megackpt.maintenance.diff": (
        "CheckpointDifference",
        "ValueDifference",
        "diff",
    ),
    "megackpt.maintenance.diff_arrays": ("ArrayDifference",),
    "megackpt.maintenance.export_huggingface": (
        "HuggingFaceExport",
        "export_huggingface",
    ),
    "megackpt.maintenance.import_huggingface": (
        "HuggingFaceImport",
        "import_huggingface",
    ),
    "megackpt.maintenance.inspect": (
        "CheckpointSummary",
        "StoredArray",
        "StoredFile",
        "inspect",
    ),
    "megackpt.maintenance.repair": (
        "RepairReport",
        "repair",
    ),
    "megackpt.maintenance.repair_search": ("RepairedFile",),
    "megackpt.maintenance.verify": ("verify",),
}
"""The public names by the module that defines them. Type checkers read the imports above instead."""

_MODULE_OF = {name: module for module, names in _NAMES_OF.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name, or a module of the package, at its first use."""
    if name in _MODULE_OF:
        value = getattr(import_module(_MODULE_OF[name]), name)
        globals()[name] = value
        return value
    module = f"{__name__}.{name}"
    if not name.startswith("_"):
        try:
            return import_module(module)
        except ModuleNotFoundError as error:
            if error.name != module:  # the module exists, and lacks a package of others
                raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
