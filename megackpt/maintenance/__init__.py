"""Public functions on whole checkpoints: inspect, verify, diff, convert and repair.

`megackpt` exports the functions. This package exports the classes of what they return, and imports each at
its first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megackpt.engine.verification.verify import VerifyReport
    from megackpt.formats.damage import Damage
    from megackpt.maintenance.copy import CopyReport
    from megackpt.maintenance.diff import CheckpointDifference, ValueDifference
    from megackpt.maintenance.diff_arrays import ArrayDifference
    from megackpt.maintenance.export_huggingface import HuggingFaceExport
    from megackpt.maintenance.inspect import CheckpointSummary, StoredArray, StoredFile
    from megackpt.maintenance.repair import RepairReport
    from megackpt.maintenance.repair_search import RepairedFile

__all__ = [
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
]

_LAZY_IMPORTS = {
    "ArrayDifference": "megackpt.maintenance.diff_arrays",
    "CheckpointDifference": "megackpt.maintenance.diff",
    "CheckpointSummary": "megackpt.maintenance.inspect",
    "CopyReport": "megackpt.maintenance.copy",
    "Damage": "megackpt.formats.damage",
    "HuggingFaceExport": "megackpt.maintenance.export_huggingface",
    "RepairReport": "megackpt.maintenance.repair",
    "RepairedFile": "megackpt.maintenance.repair_search",
    "StoredArray": "megackpt.maintenance.inspect",
    "StoredFile": "megackpt.maintenance.inspect",
    "ValueDifference": "megackpt.maintenance.diff",
    "VerifyReport": "megackpt.engine.verification.verify",
}


def __getattr__(name: str) -> Any:
    """Import a class at its first use."""
    if name not in _LAZY_IMPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY_IMPORTS[name]), name)
