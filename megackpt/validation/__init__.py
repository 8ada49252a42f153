"""Proofs over declarations: pure, over columns."""

from megackpt.validation.common import check_common_equal, check_copies_equal, check_replicated_equal
from megackpt.validation.coverage import check_coverage, uncovered
from megackpt.validation.load_times import LoadTimes, OverRanks, PhaseTimes
from megackpt.validation.mended import PARITY, Mended
from megackpt.validation.renaming import rename_keys
from megackpt.validation.replicas import CLAIM, Divergence, divergences
from megackpt.validation.report import ArrayReport, LoadReport
from megackpt.validation.request import (
    Rules,
    report_arrays,
    settle_differences,
    settle_missing,
    settle_resharded,
    settle_unasked,
    settle_unexpected,
)
from megackpt.validation.strictness import StrictHandling

__all__ = [
    "CLAIM",
    "PARITY",
    "ArrayReport",
    "Divergence",
    "LoadReport",
    "LoadTimes",
    "Mended",
    "OverRanks",
    "PhaseTimes",
    "Rules",
    "StrictHandling",
    "check_common_equal",
    "check_copies_equal",
    "check_coverage",
    "check_replicated_equal",
    "divergences",
    "rename_keys",
    "report_arrays",
    "settle_differences",
    "settle_missing",
    "settle_resharded",
    "settle_unasked",
    "settle_unexpected",
    "uncovered",
]
