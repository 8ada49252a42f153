"""Old places of modules and names. For one version they still work, and a notice says what to write instead.

The next version removes this module and its uses in `megackpt` and `megackpt.training.parallel`.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

_NEW_MODULE_NAMES = {
    "api": "run",
    "arguments": "ground.arguments",
    "bench": "cli.benchmark",
    "checkpointer": "run.checkpointer",
    "compat": "contrib",
    "config": "contrib.megatron.config",
    "geometry": "plans.geometry",
    "integrations": "contrib",
    "maintenance": "whole",
    "mapping": "entities",
    "metadata": "plans.metadata",
    "notices": "ground.notices",
    "optim": "training.optim",
    "parallel": "training.parallel",
    "planning": "plans.planning",
    "simulation": "cli.simulation",
    "training_state": "training.state",
    "validation": "plans.validation",
}
"""By the old name of a module in `megackpt`. Modules in it moved with it, but for those below."""

_JOINED = {
    "training.parallel.dispatch": "training.parallel.moe",
    "training.parallel.scan": "training.parallel.mamba",
}
"""Documented modules that have joined another one, both by their new place."""


class MovedModules(MetaPathFinder):
    """Finds modules of `megackpt` under their old names: the module itself, not a second copy of it.

    It stands before the finder of files: the old name of a package has the path of its new folder, where
    that finder would load a module again, with other classes.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module that has moved, with a DeprecationWarning; None for any other."""
        if not fullname.startswith("megackpt."):
            return None
        _, old, *inner = fullname.split(".")
        if old not in _NEW_MODULE_NAMES:
            return None
        new_name = ".".join((_NEW_MODULE_NAMES[old], *inner))
        new = f"megackpt.{_JOINED.get(new_name, new_name)}"
        module = import_module(new)
        warnings.warn(
            f"`{fullname}` will not work in the next version. Write: {new}",
            DeprecationWarning,
            stacklevel=2,  # the import that is to be changed: frames of importlib do not count
        )
        return ModuleSpec(fullname, _MovedModule(module), is_package=hasattr(module, "__path__"))


def moved_module(name: str) -> ModuleType | None:
    """Return a module of `megackpt` by its old name, and warn whoever asks for it; None for other names.

    For `__getattr__` of the package.
    """
    if name not in _NEW_MODULE_NAMES:
        return None
    new = f"megackpt.{_NEW_MODULE_NAMES[name]}"
    warnings.warn(
        f"`megackpt.{name}` will not work in the next version. Write: {new}",
        DeprecationWarning,
        stacklevel=3,  # this function, `__getattr__`, and the line that is to be changed
    )
    return import_module(new)


class _MovedModule(Loader):
    """Loads a module that is imported already, under an old name of it."""

    def __init__(self, module: ModuleType):
        self.module = module
        self.spec = module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.module

    def get_code(self, name: str) -> CodeType | None:
        """Return the code of the module, which `python -m` runs."""
        loader: Any = self.spec.loader if self.spec else None
        code: CodeType | None = loader.get_code(self.module.__name__)
        return code

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec  # the import system has just put the old name's here


_NEW_MODULES = {
    "megackpt": {
        "megackpt.run": ("PlanCache", "check_is_distributed_checkpoint", "remove_sharded_tensors"),
        "megackpt.run.checkpointer": ("Groups", "Tier"),
        "megackpt.codec": ("ForeignMember", "ForeignNamedTuple", "ForeignObject"),
        "megackpt.contrib.megatron.config": ("CheckpointConfig",),
        "megackpt.errors": (
            "CheckpointingException",
            "CommonStateError",
            "GeometryError",
            "MapError",
            "MissingExtraError",
            "OptimizerError",
            "UnknownClassError",
            "UnserializableError",
            "UnsupportedError",
            "WriterFailedError",
        ),
        "megackpt.whole": (
            "ArrayDifference",
            "CheckpointDifference",
            "CheckpointSummary",
            "CopyReport",
            "Damage",
            "HuggingFaceExport",
            "RepairReport",
            "RepairedFile",
            "StoredArray",
            "StoredFile",
            "ValueDifference",
            "VerifyReport",
        ),
        "megackpt.entities": ("ShardedBase",),
        "megackpt.plans.validation": ("ArrayReport",),
    },
    "megackpt.training.parallel": {
        "megackpt.training.parallel.adapters": (
            "adapter_metadata",
            "adapter_parameters",
            "adapter_state",
            "base_state",
            "merge_adapter",
            "reset_magnitudes",
            "set_active_adapters",
        ),
        "megackpt.training.parallel.attention": ("join_heads", "split_heads"),
        "megackpt.training.parallel.attributes": (
            "ParameterFlag",
            "RowRange",
            "copied_rows",
            "is_marked",
            "mark",
            "mark_copied_rows",
        ),
        "megackpt.training.parallel.causal_conv": ("CausalConv1d",),
        "megackpt.training.parallel.collectives": (
            "all_reduce",
            "collect_rows",
            "collect_sequence",
            "copy_to",
            "copy_to_neighbours",
            "exchange_rows",
            "gather_from",
            "gather_rows",
            "gather_sequence",
            "reduce_from",
            "reduce_scatter_rows",
            "reduce_scatter_sequence",
            "scatter_rows",
            "scatter_sequence",
            "scatter_to",
        ),
        "megackpt.training.parallel.context": (
            "AttentionPart",
            "attention_parts",
            "gather_context",
            "gather_keys_and_values",
            "heads_to_tokens",
            "join_context",
            "own_heads",
            "tokens_to_heads",
        ),
        "megackpt.training.parallel.delta_net": ("gated_delta_rule",),
        "megackpt.training.parallel.embedding": ("padded_vocab_size",),
        "megackpt.training.parallel.experts": (
            "GroupedColumnLinear",
            "GroupedReplicatedLinear",
            "GroupedRowLinear",
            "divide_over_ep",
        ),
        "megackpt.training.parallel.foreign_modules": ("ForeignDeclaration", "Metadata", "register_package"),
        "megackpt.training.parallel.layout": ("Coordinates", "ExpertCoordinates"),
        "megackpt.training.parallel.lora": ("LoRA",),
        "megackpt.training.parallel.mamba": ("GatedGroupNorm", "selective_scan"),
        "megackpt.training.parallel.mixin": ("declare_module", "declare_tensor", "second_copy"),
        "megackpt.training.parallel.moe": ("Experts", "TokenDispatcher"),
        "megackpt.training.parallel.mtp": ("mean_over_tokens_ahead", "tokens_ahead"),
        "megackpt.training.parallel.pipeline": ("PipelineStage", "exchange", "forward_only"),
        "megackpt.training.parallel.rng": ("dropout", "stable_seed"),
        "megackpt.training.parallel.router": ("mean_auxiliary_losses", "set_auxiliary_loss_scale"),
        "megackpt.training.parallel.routing": ("Routing",),
        "megackpt.training.parallel.schedule": (
            "Action",
            "Backward",
            "Forward",
            "Transfer",
            "plan_1f1b",
            "plan_forward",
            "plan_interleaved",
        ),
        "megackpt.training.parallel.tp_sharding": ("Declarations",),
    },
}
"""By the package that had the names, and by the module that has them."""

_OTHER_NAMES = {
    "ConvertReport": "CopyReport",
    "FolderImport": "CopyReport",
    "HuggingFaceImport": "CopyReport",
}
"""Names of `megackpt` that were second names of one class, by the name that it keeps."""


def moved_names(package: str) -> dict[str, tuple[str, str]]:
    """Return the names that a package no longer has, each with its new module and its name there."""
    new = {name: (module, name) for module, names in _NEW_MODULES[package].items() for name in names}
    others = {old: new[name] for old, name in _OTHER_NAMES.items() if name in new}
    return {**new, **others}


def moved_name(package: str, name: str) -> Any:
    """Return what has moved, and warn whoever asks the package for it. For `__getattr__` of a package.

    The package keeps the name, so that there is one warning for each name.

    Raises:
        AttributeError: the package never had the name.
    """
    moved = moved_names(package)
    if name not in moved:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    module, new_name = moved[name]
    warnings.warn(
        f"`from {package} import {name}` will not work in the next version. "
        f"Write: from {module} import {new_name}",
        DeprecationWarning,
        stacklevel=3,  # this function, `__getattr__`, and the line that is to be changed
    )
    value = getattr(import_module(module), new_name)
    setattr(sys.modules[package], name, value)
    return value
