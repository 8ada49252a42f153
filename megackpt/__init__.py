"""Distributed checkpointing of Megatron-style training: save at one parallel layout, load at any other.

This package exports the public names. Each is imported from its module when it is first used, so that the
help of the command line and the reader without torch start quickly.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from megackpt.ground.moved import MovedModules, moved_module, moved_name

# First: another thread may import a module by its old name while this one is imported.
sys.meta_path.insert(0, MovedModules())

if TYPE_CHECKING:
    from megackpt.codec.registration import register_codec as register_codec
    from megackpt.entities import ComponentPlacement as ComponentPlacement
    from megackpt.entities import Layout as Layout
    from megackpt.entities import LocalNonpersistentObject as LocalNonpersistentObject
    from megackpt.entities import PerRankValue as PerRankValue
    from megackpt.entities import ReplicatedValue as ReplicatedValue
    from megackpt.entities import ShardedLayout as ShardedLayout
    from megackpt.entities import ShardedObject as ShardedObject
    from megackpt.entities import ShardedTensor as ShardedTensor
    from megackpt.entities import ShardedTensorFactory as ShardedTensorFactory
    from megackpt.errors import CheckpointError as CheckpointError
    from megackpt.errors import CoverageError as CoverageError
    from megackpt.errors import DeclarationError as DeclarationError
    from megackpt.errors import FormatError as FormatError
    from megackpt.errors import IntegrityError as IntegrityError
    from megackpt.errors import MismatchError as MismatchError
    from megackpt.errors import MissingKeyError as MissingKeyError
    from megackpt.errors import NotACheckpointError as NotACheckpointError
    from megackpt.errors import RankFailedError as RankFailedError
    from megackpt.errors import StorageError as StorageError
    from megackpt.options import AsyncOptions as AsyncOptions
    from megackpt.options import KeyRule as KeyRule
    from megackpt.options import LoadOptions as LoadOptions
    from megackpt.options import Policy as Policy
    from megackpt.options import SaveOptions as SaveOptions
    from megackpt.plans.validation import LoadReport as LoadReport
    from megackpt.plans.validation import StrictHandling as StrictHandling
    from megackpt.run.check import check as check
    from megackpt.run.checkpointer import Checkpointer as Checkpointer
    from megackpt.run.checkpointer import KeepBest as KeepBest
    from megackpt.run.checkpointer import LocalTier as LocalTier
    from megackpt.run.checkpointer import MemoryTier as MemoryTier
    from megackpt.run.checkpointer import Retention as Retention
    from megackpt.run.checkpointer import SaveSchedule as SaveSchedule
    from megackpt.run.checkpointer import Tiers as Tiers
    from megackpt.run.collective import load as load
    from megackpt.run.collective import load_with_report as load_with_report
    from megackpt.run.collective import save as save
    from megackpt.run.local import load_common_state_dict as load_common_state_dict
    from megackpt.run.local import load_content_metadata as load_content_metadata
    from megackpt.run.local import load_plain_tensors as load_plain_tensors
    from megackpt.run.local import load_sharded_metadata as load_sharded_metadata
    from megackpt.run.local import load_tensors_metadata as load_tensors_metadata
    from megackpt.whole.convert import convert as convert
    from megackpt.whole.convert import import_deepspeed as import_deepspeed
    from megackpt.whole.convert import import_nvrx as import_nvrx
    from megackpt.whole.convert import import_torch as import_torch
    from megackpt.whole.diff import diff as diff
    from megackpt.whole.export_huggingface import export_huggingface as export_huggingface
    from megackpt.whole.import_huggingface import import_huggingface as import_huggingface
    from megackpt.whole.inspect import inspect as inspect
    from megackpt.whole.repair import repair as repair
    from megackpt.whole.verify import verify as verify

__version__ = "0.1.0"

_NAMES_OF = {
    "megackpt.run.check": ("check",),
    "megackpt.run.collective": ("load", "load_with_report", "save"),
    "megackpt.run.local": (
        "load_common_state_dict",
        "load_content_metadata",
        "load_plain_tensors",
        "load_sharded_metadata",
        "load_tensors_metadata",
    ),
    "megackpt.run.checkpointer": (
        "Checkpointer",
        "KeepBest",
        "LocalTier",
        "MemoryTier",
        "Retention",
        "SaveSchedule",
        "Tiers",
    ),
    "megackpt.codec.registration": ("register_codec",),
    "megackpt.errors": (
        "CheckpointError",
        "CoverageError",
        "DeclarationError",
        "FormatError",
        "IntegrityError",
        "MismatchError",
        "MissingKeyError",
        "NotACheckpointError",
        "RankFailedError",
        "StorageError",
    ),
    "megackpt.whole.convert": ("convert", "import_deepspeed", "import_nvrx", "import_torch"),
    "megackpt.whole.diff": ("diff",),
    "megackpt.whole.export_huggingface": ("export_huggingface",),
    "megackpt.whole.import_huggingface": ("import_huggingface",),
    "megackpt.whole.inspect": ("inspect",),
    "megackpt.whole.repair": ("repair",),
    "megackpt.whole.verify": ("verify",),
    "megackpt.entities": (
        "ComponentPlacement",
        "Layout",
        "LocalNonpersistentObject",
        "PerRankValue",
        "ReplicatedValue",
        "ShardedLayout",
        "ShardedObject",
        "ShardedTensor",
        "ShardedTensorFactory",
    ),
    "megackpt.options": ("AsyncOptions", "KeyRule", "LoadOptions", "Policy", "SaveOptions"),
    "megackpt.plans.validation": ("LoadReport", "StrictHandling"),
}
"""The public names by the module that defines them. Type checkers read the imports above instead."""

_MODULE_OF = {name: module for module, names in _NAMES_OF.items() for name in names}

# Type checkers need no list: `import name as name`, above, re-exports a name.
__all__ = sorted(_MODULE_OF)


if not TYPE_CHECKING:  # type checkers would accept any name

    def __getattr__(name: str) -> Any:
        """Import a public name, or a module of the package, at its first use."""
        if name in _MODULE_OF:
            value = getattr(import_module(_MODULE_OF[name]), name)
            globals()[name] = value
            return value
        if (moved := moved_module(name)) is not None:
            return moved
        module = f"{__name__}.{name}"
        if not name.startswith("_"):
            try:
                return import_module(module)
            except ModuleNotFoundError as error:
                if error.name != module:  # the module exists, and lacks a package of others
                    raise
        return moved_name(__name__, name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
