"""A part of a store is a store, and nothing leads out of it."""

from __future__ import annotations

import pytest

from megackpt import StorageError
from megackpt.storage import MemoryStore
from megackpt.storage.views import PrefixStore
from megackpt.testing.store_suite import StoreConformance


class TestPrefixStore(StoreConformance):
    checks_wording = True

    @pytest.fixture
    def store(self) -> PrefixStore:
        whole = MemoryStore()
        whole.write("runs", b"")
        whole.write("run-a", b"")
        return PrefixStore(whole, "run/a")


def test_names_stay_below() -> None:
    whole = MemoryStore(files={"run/a": b"1", "runs/a": b"2", "a": b"3"})
    part = PrefixStore(whole, "run")
    assert part.names() == ["a"]
    assert part.names("a") == ["a"]
    part.delete(["a"])
    assert whole.names() == ["a", "runs/a"]
    for name in ("../a", "/a", "b/../../a", ""):
        with pytest.raises(StorageError):
            part.write(name, b"")
    with pytest.raises(StorageError):
        PrefixStore(whole, "..")
