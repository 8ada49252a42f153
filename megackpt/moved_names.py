"""Public names that have moved. For one version, the old place gives them, too, and says where they are now.

The next version removes this module and its uses in `megackpt` and `megackpt.parallel`.
"""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from typing import Any

_NEW_MODULES = {
    "megackpt": {
        "megackpt.api": ("PlanCache", "check_is_distributed_checkpoint", "remove_sharded_tensors"),
        "megackpt.checkpointer": ("Groups", "Tier"),
        "megackpt.codec": ("ForeignMember", "ForeignNamedTuple", "ForeignObject"),
        "megackpt.config": ("CheckpointConfig",),
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
        "megackpt.maintenance": (
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
        "megackpt.mapping": ("ShardedBase",),
        "megackpt.validation": ("ArrayReport",),
    },
    "megackpt.parallel": {
        "megackpt.parallel.adapters": (
            "adapter_metadata",
            "adapter_parameters",
            "adapter_state",
            "base_state",
            "merge_adapter",
            "reset_magnitudes",
            "set_active_adapters",
        ),
        "megackpt.parallel.attention": ("join_heads", "split_heads"),
        "megackpt.parallel.attributes": (
            "ParameterFlag",
            "RowRange",
            "copied_rows",
            "is_marked",
            "mark",
            "mark_copied_rows",
        ),
        "megackpt.parallel.causal_conv": ("CausalConv1d",),
        "megackpt.parallel.collectives": (
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
        "megackpt.parallel.context": (
            "AttentionPart",
            "attention_parts",
            "gather_context",
            "gather_keys_and_values",
            "heads_to_tokens",
            "join_context",
            "own_heads",
            "tokens_to_heads",
        ),
        "megackpt.parallel.delta_net": ("gated_delta_rule",),
        "megackpt.parallel.dispatch": ("TokenDispatcher",),
        "megackpt.parallel.embedding": ("padded_vocab_size",),
        "megackpt.parallel.experts": (
            "GroupedColumnLinear",
            "GroupedReplicatedLinear",
            "GroupedRowLinear",
            "divide_over_ep",
        ),
        "megackpt.parallel.foreign_modules": ("ForeignDeclaration", "Metadata", "register_package"),
        "megackpt.parallel.layout": ("Coordinates", "ExpertCoordinates"),
        "megackpt.parallel.lora": ("LoRA",),
        "megackpt.parallel.mamba": ("GatedGroupNorm",),
        "megackpt.parallel.mixin": ("declare_module", "declare_tensor", "second_copy"),
        "megackpt.parallel.moe": ("Experts",),
        "megackpt.parallel.mtp": ("mean_over_tokens_ahead", "tokens_ahead"),
        "megackpt.parallel.pipeline": ("PipelineStage", "exchange", "forward_only"),
        "megackpt.parallel.rng": ("dropout", "stable_seed"),
        "megackpt.parallel.router": ("mean_auxiliary_losses", "set_auxiliary_loss_scale"),
        "megackpt.parallel.routing": ("Routing",),
        "megackpt.parallel.scan": ("selective_scan",),
        "megackpt.parallel.schedule": (
            "Action",
            "Backward",
            "Forward",
            "Transfer",
            "plan_1f1b",
            "plan_forward",
            "plan_interleaved",
        ),
        "megackpt.parallel.tp_sharding": ("Declarations",),
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
