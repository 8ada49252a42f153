"""Strategies that are broken in one way each, which the suite has to fail; not collected by itself."""

from __future__ import annotations

from typing import Any

import megackpt_npyfiles
import pytest

from megackpt.formats.contents import Contents
from megackpt.formats.strategy import Format
from megackpt.testing.format_suite import FormatConformance


class AlwaysFromTheStart(megackpt_npyfiles.NpyChunks):
    """Reads the wrong part of a chunk."""

    def read_into(self, row: int, start: int, out: memoryview, *, verify: bool) -> None:
        super().read_into(row, 0, out, verify=verify)


class ReadsFromTheStart(megackpt_npyfiles.Load):
    def open(self, *args: Any, **kwargs: Any) -> Contents:
        contents = super().open(*args, **kwargs)
        broken = contents.chunks

        def chunks(keys: Any) -> Any:
            actual = broken(keys)
            actual.__class__ = AlwaysFromTheStart
            return actual

        return Contents(contents.arrays, chunks, contents.common, contents.decode_object, contents.identity)


class SameNameEverySave(megackpt_npyfiles.Save):
    """Writes over the files of the checkpoint that is committed."""

    def write_chunks(self, store: Any, *, attempt: str, **rest: Any) -> bytes:
        return super().write_chunks(store, attempt="fixed", **rest)

    def write_index(self, store: Any, *, attempt: str, **rest: Any) -> Any:
        return super().write_index(store, attempt="fixed", **rest)


class TestReadsFromTheStart(FormatConformance):
    @pytest.fixture
    def format(self) -> Format:
        return Format(backend="npyfiles", version=1, save=megackpt_npyfiles.Save, load=ReadsFromTheStart)

    @pytest.fixture(autouse=True)
    def _registered(self, monkeypatch: pytest.MonkeyPatch, format: Format) -> None:
        from megackpt.formats import registry

        monkeypatch.setattr(registry, "_format", lambda name: format)


class TestSameNameEverySave(FormatConformance):
    @pytest.fixture
    def format(self) -> Format:
        return Format(backend="npyfiles", version=1, save=SameNameEverySave, load=megackpt_npyfiles.Load)
