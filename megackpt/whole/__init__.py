"""Public functions on whole checkpoints: inspect, verify, diff, convert and repair.

`megackpt` exports the functions. This package exports the classes of what they return, and imports each at
its first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megackpt.ground.lazy_names import lazy_names

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
else:  # type checkers would accept any name
    __getattr__ = lazy_names(
        __name__,
        {
            "megackpt.engine.verification.verify": ("VerifyReport",),
            "megackpt.formats.damage": ("Damage",),
            "megackpt.whole.copy": ("CopyReport",),
            "megackpt.whole.diff": ("CheckpointDifference", "ValueDifference"),
            "megackpt.whole.diff_arrays": ("ArrayDifference",),
            "megackpt.whole.export_huggingface": ("HuggingFaceExport",),
            "megackpt.whole.inspect": ("CheckpointSummary", "StoredArray", "StoredFile"),
            "megackpt.whole.repair": ("RepairReport",),
            "megackpt.whole.repair_search": ("RepairedFile",),
        },
    )

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
