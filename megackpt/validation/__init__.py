"""Proofs over declarations: pure, over columns."""

from megackpt.validation.coverage import check_coverage
from megackpt.validation.request import check_request

__all__ = ["check_coverage", "check_request"]
