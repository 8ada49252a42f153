"""Any one file of a group is what the others and the parity file say it is, at any place."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megackpt.formats.documents import write_small_file
from megackpt.formats.native.parity import RebuiltFiles, read_groups, write_parity_file
from megackpt.formats.native.parity import list_of as list_of_groups
from megackpt.planning.redundancy import parity_groups, parity_writer
from megackpt.storage import MemoryStore
from megackpt.storage.views import Patch, PatchedStore

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
