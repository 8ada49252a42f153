"""Files of the native format: what they are, what newer versions may add, and what parity rebuilds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megackpt import SaveOptions, ShardedObject, ShardedTensor, load, save
from megackpt.comm import Group
from megackpt.errors import StorageError
from megackpt.formats.documents import write_small_file
from megackpt.formats.native.parity import RebuiltFiles, read_groups, write_parity_file
from megackpt.formats.native.parity import list_of as list_of_groups
from megackpt.plans.planning.redundancy import parity_groups, parity_writer
from megackpt.storage import MemoryStore
from megackpt.storage.digests import digest_of
from megackpt.storage.views import Patch, PatchedStore
from megackpt.testing.world import SimulatedWorld


def state_of(rank: int, fill: float) -> dict[str, Any]:
    rows = ShardedTensor.from_rank_offsets("rows", torch.full((2, 3), fill), (0, rank, 2))
    loader = ShardedObject("loader", {"seen": (1, torch.ones(2))}, (2,), (rank,))
    return {"rows": rows, "loader": loader, "step": 7, "noise": torch.tensor(3.0), "names": {"a", "b"}}


def save_all(directory: Path) -> None:
    def save_rank(group: Group) -> None:
        save(state_of(group.rank, 1.0), directory, options=SaveOptions(parity=2), group=group)

    SimulatedWorld(2).run(save_rank)


def test_no_file_of_a_save_is_a_pickle(tmp_path: Path) -> None:
    """Each file is JSON or safetensors, and so is each object in a file."""
    save_all(tmp_path)
    kinds = set()
    for path in (path for path in tmp_path.rglob("*") if path.is_file()):
        kinds.add((path.relative_to(tmp_path).parts[0].partition("-")[0], path.suffix))
        if path.suffix == ".json":
            assert json.loads(path.read_text())
            continue
        for name, column in safetensors.numpy.load(path.read_bytes()).items():
            if name.startswith("loader"):
                assert set(safetensors.numpy.load(column.tobytes())) == {"0"}
    assert kinds == {
        ("metadata.json", ".json"), ("common", ".json"), ("common", ".safetensors"),
        ("index", ".safetensors"), ("data", ".safetensors"), ("parity", ".json"), ("parity", ".safetensors"),
    }  # fmt: skip


def test_fields_and_columns_of_a_newer_version_are_ignored(tmp_path: Path) -> None:
    save_all(tmp_path)
    commit = tmp_path / "metadata.json"
    manifest = json.loads(commit.read_text()) | {"of_a_newer_version": {"any": [1]}}
    commit.write_text(json.dumps(manifest))
    check_load(tmp_path)  # by the head of the index

    index = tmp_path / manifest["index"]["file"]
    columns = safetensors.numpy.load(index.read_bytes())
    columns["of_a_newer_version"] = columns["nbytes"]
    written = safetensors.numpy.save(columns)
    index.write_bytes(written)
    entry = {"file": index.name, "nbytes": len(written), "xxh3_128": digest_of(written)}
    commit.write_text(json.dumps(manifest | {"index": entry}))
    check_load(tmp_path)


def check_load(directory: Path) -> None:
    def load_rank(group: Group) -> dict[str, Any]:
        return load(state_of(group.rank, 0.0), directory, group=group)

    for loaded in SimulatedWorld(2).run(load_rank):
        assert (loaded["rows"].tolist(), loaded["step"]) == ([[1.0] * 3] * 2, 7)
        assert loaded["loader"]["seen"][0] == 1


ATTEMPT = "0123456789abcdef"


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=6),
    seed=st.integers(0, 2**32 - 1),
    step=st.integers(1, 40),
    data=st.data(),
)
def test_any_range_of_any_file_is_rebuilt_whatever_became_of_it(
    lengths: list[int], seed: int, step: int, data: st.DataObject
) -> None:
    generator = np.random.default_rng(seed)
    store = MemoryStore()
    for number, nbytes in enumerate(lengths):
        store.write(f"data/{number}", generator.bytes(nbytes))
    members = [(f"data/{number}", nbytes) for number, nbytes in enumerate(lengths)]
    with patch("megackpt.formats.native.parity.PART_BYTES", step):
        group = write_parity_file(store, attempt=ATTEMPT, number=0, members=members)
    manifest = {"parity": write_small_file(store, "parity.json", list_of_groups([group]))}
    assert read_groups(store, manifest) == (group,)
    names = [listed.name for listed in (group.parity, *group.members)]
    whole = {name: store.read(name, max_bytes=1 << 20) for name in names}

    lost = data.draw(st.sampled_from(names))
    kind = data.draw(st.sampled_from(["lost", "cut", "changed"]))
    if kind == "lost":
        store.delete([lost])
    else:
        cut = whole[lost][: data.draw(st.integers(0, len(whole[lost])))]
        store.write(lost, cut if kind == "cut" else generator.bytes(len(whole[lost])))
    rebuilt = RebuiltFiles(store, [group])
    assert rebuilt.size(lost) == len(whole[lost])
    start = data.draw(st.integers(0, len(whole[lost])))
    stop = data.draw(st.integers(start, len(whole[lost])))
    out = bytearray(generator.bytes(stop - start))
    with patch("megackpt.formats.native.parity.PART_BYTES", step):
        rebuilt.read_into(lost, start, memoryview(out))
        assert rebuilt.read(lost, max_bytes=1 << 20) == whole[lost]
    assert bytes(out) == whole[lost][start:stop]


@settings(deadline=None)
@given(ranks=st.sets(st.integers(0, 60), max_size=30), most=st.integers(1, 9))
def test_groups_hold_every_file_once_and_are_as_few_and_as_even_as_can_be(ranks: set[int], most: int) -> None:
    groups = parity_groups(np.array(sorted(ranks), np.int64), most=most)
    assert sorted(rank for group in groups for rank in group.tolist()) == sorted(ranks)
    sizes = [len(group) for group in groups]
    assert len(groups) == -(-len(ranks) // most)
    assert max(sizes, default=0) - min(sizes, default=0) <= 1
    assert all(parity_writer(group, number) in group for number, group in enumerate(groups))


@settings(deadline=None)
@given(
    file=st.binary(max_size=40),
    source=st.binary(min_size=1, max_size=60),
    cuts=st.lists(st.integers(0, 60), max_size=6),
    data=st.data(),
)
def test_a_patched_store_reads_as_the_file_with_its_ranges_replaced(
    file: bytes, source: bytes, cuts: list[int], data: st.DataObject
) -> None:
    nbytes = len(source)
    edges = sorted(min(cut, nbytes) for cut in cuts)
    ranges = [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=False)]
    if nbytes > len(file):  # what the file has not comes from the source
        ranges = [(a, b) for a, b in ranges if b <= len(file)] + [(len(file), nbytes)]
    expected = bytearray(file[:nbytes].ljust(nbytes, b"?"))
    for start, stop in ranges:
        expected[start:stop] = source[start:stop]
    store = MemoryStore(files={"f": file})
    change = Patch(nbytes=nbytes, source=MemoryStore(files={"s": source}), name="s", ranges=tuple(ranges))
    view = PatchedStore(store, {"f": change})
    start = data.draw(st.integers(0, nbytes))
    stop = data.draw(st.integers(start, nbytes))
    out = bytearray(stop - start)
    view.read_into("f", start, memoryview(out))
    assert out == expected[start:stop]
    assert view.size("f") == nbytes


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
