"""The conformance suite, run on the third party's format as it is installed; not collected by itself."""

from __future__ import annotations

import megackpt_npyfiles
import pytest

from megackpt.formats.registry import load_strategy, save_strategy
from megackpt.formats.strategy import Format
from megackpt.testing.format_suite import FormatConformance


class TestNpyFiles(FormatConformance):
    @pytest.fixture
    def format(self) -> Format:
        return megackpt_npyfiles.FORMAT


def test_it_is_found_by_its_name_and_by_a_manifest() -> None:
    assert isinstance(save_strategy("npyfiles"), megackpt_npyfiles.Save)
    manifest = {"sharded_backend": "npyfiles", "sharded_backend_version": 1}
    assert isinstance(load_strategy(manifest, where="here"), megackpt_npyfiles.Load)
