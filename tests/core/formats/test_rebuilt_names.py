"""The view of files that are rebuilt from others has those of parity groups, and no others."""

from __future__ import annotations

import pytest

from megackpt.errors import StorageError
from megackpt.formats.native.parity import RebuiltFiles, write_parity_file
from megackpt.storage import MemoryStore


def test_a_lost_file_of_a_group_exists_and_a_stored_file_of_no_group_does_not() -> None:
    store = MemoryStore()
    members = [("data/0", 4), ("data/1", 9)]
    for name, nbytes in members:
        store.write(name, bytes(range(nbytes)))
    store.write("data/of no group", b"abc")
    group = write_parity_file(store, attempt="0123456789abcdef", number=0, members=members)
    store.delete(["data/1"])
    rebuilt = RebuiltFiles(store, [group])
    assert [rebuilt.exists(name) for name in ("data/0", "data/1", group.parity.name)] == [True] * 3
    assert not rebuilt.exists("data/of no group")
    assert rebuilt.names("data/") == ["data/0", "data/1"]
    assert rebuilt.names() == sorted(["data/0", "data/1", group.parity.name])
    assert rebuilt.read("data/1", max_bytes=9) == bytes(range(9))
    with pytest.raises(StorageError, match="too few for 0:10"):
        rebuilt.read_into("data/1", 0, memoryview(bytearray(10)))
