"""Every format of ours passes the suite that a third party's has to pass."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megackpt.formats import native, torch_dist
from megackpt.formats.strategy import Format
from megackpt.formats.zarr import version_1, version_3
from megackpt.storage import MemoryStore, Store
from megackpt.testing.format_suite import FormatConformance


class TestNative(FormatConformance):
    @pytest.fixture
    def format(self) -> Format:
        return native.FORMAT


class TestNativeInMemory(FormatConformance):
    @pytest.fixture
    def format(self) -> Format:
        return native.FORMAT

    @pytest.fixture
    def new_store(self) -> Callable[[], Store]:
        return MemoryStore


class TestZarr1(FormatConformance):
    @pytest.fixture
    def format(self) -> Format:
        return version_1.FORMAT


class TestZarr3(FormatConformance):
    @pytest.fixture
    def format(self) -> Format:
        return version_3.FORMAT


class TestZarr3InMemory(FormatConformance):
    @pytest.fixture
    def format(self) -> Format:
        return version_3.FORMAT

    @pytest.fixture
    def new_store(self) -> Callable[[], Store]:
        return MemoryStore


class TestTorchDist(FormatConformance):
    @pytest.fixture
    def format(self) -> Format:
        return torch_dist.FORMAT
