"""Checks of declarations, requests and replicas before a byte is read or written. Pure."""

from megackpt.plans.validation.coverage import check_coverage, check_merged_coverage, coverage_faults
from megackpt.plans.validation.equality import check_common_equal, check_copies_equal, check_replicated_equal
from megackpt.plans.validation.globs import globs_for
from megackpt.plans.validation.report import ArrayReport, LoadReport, LoadTimes, PhaseTimes, RecoveredBytes
from megackpt.plans.validation.request import (
    AllowedDifferences,
    LoadRules,
    UnpaddedShapes,
    check_dtypes_and_shapes,
    check_resharding,
    check_unexpected_keys,
    report_arrays,
)
from megackpt.plans.validation.strictness import ReturnsKeys, ReturnsState, StrictHandling

__all__ = [
    "AllowedDifferences",
    "ArrayReport",
    "LoadReport",
    "LoadRules",
    "LoadTimes",
    "PhaseTimes",
    "RecoveredBytes",
    "ReturnsKeys",
    "ReturnsState",
    "StrictHandling",
    "UnpaddedShapes",
    "check_common_equal",
    "check_copies_equal",
    "check_coverage",
    "check_dtypes_and_shapes",
    "check_merged_coverage",
    "check_replicated_equal",
    "check_resharding",
    "check_unexpected_keys",
    "coverage_faults",
    "globs_for",
    "report_arrays",
]
