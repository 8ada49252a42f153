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
    from megackpt.whole.copy import CopyReport
    from megackpt.whole.diff import CheckpointDifference, ValueDifference
    from megackpt.whole.diff_arrays import ArrayDifference
    from megackpt.whole.export_huggingface import HuggingFaceExport
    from megackpt.whole.inspect import CheckpointSummary, StoredArray, StoredFile
    from megackpt.whole.repair import RepairReport
    from megackpt.whole.repair_search import RepairedFile

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
    "ArrayDifference": "megackpt.whole.diff_arrays",
    "CheckpointDifference": "megackpt.whole.diff",
    "CheckpointSummary": "megackpt.whole.inspect",
    "CopyReport": "megackpt.whole.copy",
    "Damage": "megackpt.formats.damage",
    "HuggingFaceExport": "megackpt.whole.export_huggingface",
    "RepairReport": "megackpt.whole.repair",
    "RepairedFile": "megackpt.whole.repair_search",
    "StoredArray": "megackpt.whole.inspect",
    "StoredFile": "megackpt.whole.inspect",
    "ValueDifference": "megackpt.whole.diff",
    "VerifyReport": "megackpt.engine.verification.verify",
}


def __getattr__(name: str) -> Any:
    """Import a class at its first use."""
    if name not in _LAZY_IMPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY_IMPORTS[name]), name)
