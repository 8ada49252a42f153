"""Documents and pickles that lie, or would be vast: an error of ours before memory is taken, or a load."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megackpt import LoadOptions, load, load_plain_tensors, save
from megackpt.codec import EncodedValue, decode, load_tree, pack, unpack
from megackpt.comm import Group
from megackpt.errors import FormatError
from megackpt.formats.documents import parse_document
from megackpt.formats.pickle_limits import check_opcodes
from megackpt.formats.safe_pickle import load_value
from megackpt.formats.torch_dist.metadata_unpickler import load_metadata
from megackpt.formats.zarr.chunks import MAX_CHUNKS
from megackpt.testing.world import SimulatedWorld
from tests.support.codec import P as _P
from tests.support.codec import integers_that_crowd_a_table, tuples_of_one_hash
from tests.support.effort import few
from tests.support.states import sharded, torch_saved
from tests.support.zarr_v1 import save_zarr_v1
from tests.system.attacks.crafting import NATIVE, Location, build_base, edit_index, edit_json, request
from tests.system.attacks.mutation import Files, checkpoint, mutated, outcome
from tests.system.attacks.opcodes import (
    dict_of,
    named,
    number_of,
    ordered_of,
    pair_of,
    pickled,
    set_of,
    zipped,
)

REPEATED = '{"key0": 0, "key9": 9, "key9": 0}'


def _tree_of_int_keys(n: int, key: Callable[[int], int]) -> EncodedValue:
    return EncodedValue({"$dict": [[{"$int": hex(key(i))}, 0] for i in range(n)]}, ())


def test_a_repeated_key_is_named() -> None:
    with pytest.raises(FormatError, match=r"the key 'key9' is repeated in one object"):
        load_tree(REPEATED, where="w")
    with pytest.raises(FormatError, match=r"the key 'key9' is repeated in one object"):
        parse_document(REPEATED.encode(), where="w")


def test_keys_of_one_hash_raise_an_error_and_others_do_not() -> None:
    with pytest.raises(FormatError, match="more than 200 keys have the same hash"):
        decode(_tree_of_int_keys(201, lambda i: i * _P + 5))
    assert len(decode(_tree_of_int_keys(200, lambda i: i * _P + 5))) == 200
    many = {i * 2**70: i for i in range(1000)}
    assert unpack(pack(many), where="w") == many
    with pytest.raises(pickle.UnpicklingError, match="integers have the same hash"):
        check_opcodes(pickle.dumps([i * _P for i in range(300)]))
    check_opcodes(pickle.dumps([7 * _P] * 300 + list(many)))


def test_keys_that_crowd_a_table_are_rejected_and_multiples_are_not() -> None:
    with pytest.raises(FormatError, match="keys collide in a hash table"):
        decode(_tree_of_int_keys(5000, integers_that_crowd_a_table(5000).__getitem__))
    with pytest.raises(FormatError, match="keys collide in a hash table"):
        load_value(zipped(dict_of(map(number_of, integers_that_crowd_a_table(5000)))), where="w")
    for shift in (0, 3, 12, 20, 33, 47, 52, 64):
        many = {i << shift: i for i in range(3000)}
        assert unpack(pack(many), where="w") == many
        assert load_value(torch_saved(many), where="w") == many


def test_keys_of_a_pickle_are_found_however_they_are_inserted() -> None:
    pairs = [pair_of(pair) for pair in tuples_of_one_hash(500)]
    in_parts = b"".join(b"h\x00(" + b"".join(key + b"K\x00" for key in pairs[i::5]) + b"u0" for i in range(5))
    by_memo = pickled(b"}q\x000" + in_parts + b"h\x00")
    one_by_one = pickled(b"}" + b"".join(key + b"K\x00s" for key in pairs[:250]))
    by_dict = pickled(b"(" + b"".join(key + b"K\x00" for key in pairs) + b"d")
    by_set = set_of(pairs)
    by_set_of_2 = by_set.replace(b"builtins", b"__builtin__")
    of_frozensets = pickled(b"}(" + b"".join(b"(" + key + b"\x91K\x00" for key in pairs) + b"u")
    padding = b"](" + b"".join(b"}K\x01K\x00s" for _ in range(1000)) + b"e0"  # so that there are many keys
    for data in (by_memo, one_by_one, by_dict, by_set, by_set_of_2, of_frozensets, ordered_of(pairs)):
        with pytest.raises(pickle.UnpicklingError, match="200 keys have the same hash"):
            check_opcodes(data[:2] + padding + data[2:])


@pytest.mark.parametrize(
    ("make", "fill"),
    [
        (b"]", b"(h%ch%ce"),
        (b"}", b"(K\x01h%cK\x02h%cu"),
        (named("collections", "OrderedDict") + b")R", b"(K\x01h%cK\x02h%cu"),
        (named("argparse", "Namespace") + b")\x81", b"}(U\x01ah%cU\x01bh%cub"),
    ],
)
@pytest.mark.parametrize("outside_in", [False, True])
def test_containers_that_are_twice_in_each_other_are_rejected(
    make: bytes, fill: bytes, outside_in: bool
) -> None:
    """A few bytes would be a value of 2**40 elements for whoever walks through it."""
    numbers = range(40) if outside_in else reversed(range(40))
    made = b"".join(make + b"q%c" % i for i in range(41))
    filled = b"".join(b"h%c" % i + fill % (i + 1, i + 1) for i in numbers)
    with pytest.raises(FormatError, match="repeated in each other without measure"):
        load_value(zipped(pickled(b"(", made, filled, b"t")), where="w")


def _renamed(data: bytes, *, keeps: bool) -> bytes:
    """Return a file of torch.save whose pickle has another name, or comes twice."""
    out = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(data)) as archive,
        zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as renamed,
    ):
        for name in archive.namelist():
            if keeps or not name.endswith("data.pkl"):
                renamed.writestr(name, archive.read(name))
            if name.endswith("data.pkl"):
                renamed.writestr(name.replace("data.pkl", "DATA.PKL"), archive.read(name))
    return out.getvalue()


def test_a_pickle_is_checked_whatever_the_letters_of_its_name() -> None:
    """Torch looks for it without regard to case."""
    crowded = zipped(dict_of(map(number_of, integers_that_crowd_a_table(5000))))
    with pytest.raises(FormatError, match="keys collide in a hash table"):
        load_value(_renamed(crowded, keeps=False), where="w")
    with pytest.raises(FormatError, match="stands twice in it"):
        load_value(_renamed(torch_saved({"a": 1}), keeps=True), where="w")


@pytest.mark.parametrize("module", [b"builtins", rb"\u0062uiltins", rb"\U00000062uiltins"])
def test_keys_of_a_set_are_checked_however_its_name_is_written(module: bytes) -> None:
    pairs = b"".join(pair_of(pair) for pair in tuples_of_one_hash(500))
    made = pickled(b"V" + module + b"\nVset\n\x93](" + pairs + b"e\x85R")
    with pytest.raises(FormatError, match="200 keys have the same hash"):
        load_metadata(made, where="w")


def test_what_several_containers_share_is_loaded() -> None:
    shared, ordered = [1, 2], OrderedDict(a=[3])
    state = {"a": shared, "b": [shared, ordered], "many": {i: (shared, ordered) for i in range(30_000)}}
    assert load_value(torch_saved(state), where="w") == state


BACKENDS = [("megackpt", 1), ("torch_dist", 1), ("zarr", 1), ("zarr", 3)]


@pytest.fixture(scope="module", params=BACKENDS, ids=lambda b: f"{b[0]}-{b[1]}")
def files(request: pytest.FixtureRequest) -> Files:
    return checkpoint(request.param)


@pytest.mark.filterwarnings("ignore")
@settings(
    max_examples=few(20, of=50),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_a_hostile_value_leads_to_an_error_of_ours_or_to_a_load(files: Files, data: st.DataObject) -> None:
    choose: Callable[[int], int] = lambda subdirectory: data.draw(st.integers(0, subdirectory - 1))  # noqa: E731
    outcome(mutated(files, choose), {})


VAST = 2**40


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (MAX_CHUNKS, "chunk '3' of .* is missing"),
        (MAX_CHUNKS + 1, "has 4,194,305 chunks, more than the 4,194,304"),
    ],
)
def test_an_array_of_zarr_with_too_many_chunks_raises_an_error_before_its_files_are_looked_for(
    tmp_path: Path, count: int, message: str
) -> None:
    save_zarr_v1({"a": sharded("a", torch.ones(3))}, tmp_path)
    before = json.loads((tmp_path / "a" / ".zarray").read_text())
    data = np.ones(1, before["dtype"]).tobytes()
    for number in range(3):
        (tmp_path / "a" / str(number)).write_bytes(data)
    edit_json(tmp_path / "a" / ".zarray", shape=[count], chunks=[1])
    with pytest.raises(FormatError, match=message):
        load({"a": sharded("a", torch.zeros(1), (0, 0, count))}, tmp_path)


@pytest.mark.parametrize("exchange", ["direct", "all_to_all"])
def test_an_object_that_is_longer_than_its_file_raises_an_error_before_memory_is_taken(
    tmp_path: Path, exchange: str
) -> None:
    build_base(NATIVE, tmp_path / "c")
    location = Location(directory=tmp_path / "c", outside=tmp_path, ran=tmp_path, other=tmp_path)

    def lie(columns: dict[str, Any]) -> None:
        wide = columns["nbytes"].astype(np.int64)
        wide[-1] = VAST
        columns["nbytes"] = wide
        columns["digest"] = np.append(columns["digest"][:-1], np.zeros(VAST // 2**18, np.uint64))

    edit_index(location, lie)

    def load_rank(group: Group) -> None:
        state = request(empty=True, ranks=(group.rank,))
        load(state, location.directory, options=LoadOptions(exchange=exchange), group=group)

    for error in SimulatedWorld(2).outcomes(load_rank):
        assert isinstance(error, FormatError), error
        assert "Rank 1 failed while" in str(error)
        assert "It was cut short" in str(error)


def test_an_array_that_ends_behind_its_file_raises_an_error_before_any_chunk_is_read(tmp_path: Path) -> None:
    save({"a": sharded("a", torch.ones(100_000))}, tmp_path)
    (file,) = (tmp_path / "data").iterdir()
    with file.open("r+b") as opened:
        opened.truncate(200_000)
    message = r"'a' .* ends at byte 200,000, before this chunk does at 4\d\d,\d\d\d"
    with pytest.raises(FormatError, match=message):
        load_plain_tensors(tmp_path)
