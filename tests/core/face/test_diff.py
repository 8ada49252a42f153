"""`megackpt diff`: equal whatever the layout and the format, and exact about what differs."""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt import SaveOptions, ShardedObject, ShardedTensor
from megackpt.comm import Group
from megackpt.engine.data.tensor_bytes import as_bits, byte_view
from megackpt.engine.verification.collective import verify_on_all_ranks
from megackpt.engine.verification.verify import verify_share
from megackpt.errors import DeclarationError, MissingExtraError, UnsupportedError
from megackpt.formats.damage import Damage
from megackpt.formats.index_file import read_index, write_index
from megackpt.options import VerifyOptions
from megackpt.run import remove_sharded_tensors
from megackpt.storage import open_store
from megackpt.testing.world import SimulatedWorld
from tests.support.checkpoints import COMMON, CONTENT, FORMATS, LONG, NATIVE, RANKS, files_below, flip, saved
from tests.support.command_line import CommandLine
from tests.support.worlds import saving

NUMBERS = torch.arange(48.0).reshape(6, 8)


def whole_state(**changes: Any) -> dict[str, Any]:
    """The state of `small_checkpoints`, uncut, on one rank; changes replace tensors and common values."""
    tensors = {"block": NUMBERS, "flat": NUMBERS, "long": LONG, "half": torch.ones(3).bfloat16()}
    tensors |= {key: value for key, value in changes.items() if key in tensors}
    objects = changes.get("object", [{"rank": rank, "seen": [1, 2.0]} for rank in range(RANKS)])
    sharded: dict[str, Any] = {
        key: ShardedTensor.from_rank_offsets(key, tensor.clone()) for key, tensor in tensors.items()
    }
    sharded["object"] = [
        ShardedObject("object", value, (RANKS,), (rank,)) for rank, value in enumerate(objects)
    ]
    common = {key: value for key, value in changes.items() if key not in {*tensors, "object"}}
    return {**sharded, **COMMON, **common}


def save_whole(directory: Path, **changes: Any) -> Path:
    megackpt.save(whole_state(**changes), directory, content_metadata=CONTENT)
    return directory


def saved_tensors(directory: Path, **tensors: torch.Tensor) -> Path:
    state = {key: ShardedTensor.from_rank_offsets(key, tensor) for key, tensor in tensors.items()}
    megackpt.save(state, directory)
    return directory


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_one_rank_and_two_ranks_in_any_format_are_equal_both_ways(
    tmp_path: Path, format: tuple[str, int], cli: CommandLine
) -> None:
    two, whole_path = saved(tmp_path / "two", format), save_whole(tmp_path / "one")
    for first, second in ((whole_path, two), (two, whole_path)):
        message = cli.json("diff", first, second)
        assert (message["is_equal"], message["compared"]) == (True, 5)
        assert message["nbytes"] == 48 * 4 * 2 + LONG.nbytes + 6


def test_differing_elements_are_counted_located_and_measured(tmp_path: Path, cli: CommandLine) -> None:
    changed, half = NUMBERS.clone(), torch.ones(3).bfloat16()
    changed[5, 7] += 0.25
    changed[2, 3] -= 8
    changed[4, 1] = float("nan")
    half[1] = 2
    second = save_whole(tmp_path / "b", block=changed, half=half)
    message = cli.json("diff", saved(tmp_path / "a"), second, code=1)
    assert message["arrays"] == [
        {"key": "block", "dtype": "float32", "shape": [6, 8], "elements": 3, "first": [2, 3], "largest": 8.0,
         "nan_elements": 1},
        {"key": "half", "dtype": "bfloat16", "shape": [3], "elements": 1, "first": [1], "largest": 1.0,
         "nan_elements": 0},
    ]  # fmt: skip
    assert message["values"] == []


def test_signs_of_zeros_and_bits_of_nans_differ_without_a_distance(tmp_path: Path, cli: CommandLine) -> None:
    bits = torch.tensor([0x7FC00000, 0, 5], dtype=torch.int32).view(torch.float32)
    other = torch.tensor([0x7FC00001, -(2**31), 5], dtype=torch.int32).view(torch.float32)
    first, second = saved_tensors(tmp_path / "a", w=bits), saved_tensors(tmp_path / "b", w=other)
    (array,) = cli.json("diff", first, second, code=1)["arrays"]
    assert (array["elements"], array["largest"], array["nan_elements"]) == (2, 0.0, 1)


@pytest.mark.parametrize(
    ("first", "second", "largest"),
    [
        (torch.tensor([1, 2]), torch.tensor([1, 9]), None),
        (torch.tensor([True]), torch.tensor([False]), None),
        (torch.tensor([1 + 1j]).to(torch.complex128), torch.tensor([1 - 2j]).to(torch.complex128), 3.0),
        (torch.tensor([1.0], dtype=torch.float64), torch.tensor([float("inf")], dtype=torch.float64), "inf"),
        (torch.tensor([1.0, 2]).to(torch.float8_e5m2), torch.tensor([1.0, 4]).to(torch.float8_e5m2), 2.0),
        (torch.tensor(1.5), torch.tensor(2.0), 0.5),
    ],
    ids=["int", "bool", "complex", "infinite", "float8", "scalar"],
)
def test_every_kind_of_dtype_is_measured(
    first: torch.Tensor, second: torch.Tensor, largest: Any,
    tmp_path: Path, cli: CommandLine,
) -> None:  # fmt: skip
    paths = saved_tensors(tmp_path / "a", w=first), saved_tensors(tmp_path / "b", w=second)
    (array,) = cli.json("diff", *paths, code=1)["arrays"]
    assert (array["elements"], array["largest"]) == (1, largest)


def test_keys_dtypes_and_shapes_that_differ_are_named(tmp_path: Path, cli: CommandLine) -> None:
    two, three = torch.ones(2), torch.ones(3)
    first = saved_tensors(tmp_path / "a", x=two, same=two, cast=two, grown=two)
    second = saved_tensors(tmp_path / "b", y=two, same=two, cast=two.half(), grown=three)
    message = cli.json("diff", first, second, code=1)
    assert (message["only_first"], message["only_second"], message["arrays"]) == (["x"], ["y"], [])
    declared = {"cast": ["float32 [2]", "float16 [2]"], "grown": ["float32 [2]", "float32 [3]"]}
    assert message["declared"] == declared
    cli.json("diff", first, second, "--keys", "sa*")


def test_objects_and_common_state_are_compared_by_path(tmp_path: Path, cli: CommandLine) -> None:
    objects = [{"rank": 0, "seen": [1, 2.0]}, {"rank": 1, "seen": [1, 3.0]}]
    changes = {"object": objects, "args": {"lr": 3e-4, "betas": [0.9, 0.99]}, "more": "x"}
    message = cli.json("diff", saved(tmp_path / "a"), save_whole(tmp_path / "b", **changes), code=1)
    assert message["values"] == [
        {"path": "object 'object' [1]: seen[1]", "first": "2.0", "second": "3.0"},
        {"path": "common state: args.betas[1]", "first": "0.95", "second": "0.99"},
        {"path": "common state: more", "first": None, "second": "'x'"},
    ]
    cli.json("diff", tmp_path / "a", tmp_path / "b", "--no-common", "--keys", "block")


def test_small_buffers_and_many_threads_find_the_same(tmp_path: Path) -> None:
    changed = LONG.clone()
    changed[::1000] += 1
    first, second = open_store(saved(tmp_path / "a")), open_store(save_whole(tmp_path / "b", long=changed))
    for options in ({}, {"buffer_bytes": 1000, "threads": 1}, {"threads": 5}):
        (array,) = megackpt.diff(first, second, **options).arrays
        assert (array.key, array.elements, array.first, array.largest) == ("long", 400, (0,), 1.0)


def test_a_damaged_checkpoint_is_an_error_and_no_difference(tmp_path: Path, cli: CommandLine) -> None:
    first, second = saved(tmp_path / "one"), saved(tmp_path / "two", NATIVE)
    flip(sorted((second / "data").iterdir())[0], -1)
    out, err = cli.run("diff", first, second, code=1)
    assert "digest differs" in err
    assert "different" not in out


def test_a_checkpoint_with_gaps_is_not_equal_to_one_without(tmp_path: Path, cli: CommandLine) -> None:
    half = ShardedTensor.from_rank_offsets("w", torch.zeros(4), (0, 0, 2))
    megackpt.save({"w": half}, tmp_path / "half", validate_access_integrity=False)
    megackpt.save({"w": ShardedTensor.from_rank_offsets("w", torch.zeros(8))}, tmp_path / "whole")
    err = cli.err("diff", tmp_path / "half", tmp_path / "whole", code=1)
    assert "'w': the chunks of the first checkpoint" in err
    cli.run("diff", tmp_path / "whole", tmp_path / "half", code=3)


def test_differences_are_shown_as_tables(tmp_path: Path, cli: CommandLine) -> None:
    changed = NUMBERS.clone()
    changed[2, 3] -= 8
    second = save_whole(tmp_path / "b", block=changed, step=8)
    out = cli.out("diff", saved(tmp_path / "a"), second, code=1)
    verdict = "different: 1 of 48 elements of 1 arrays, by 8 at most, in 'block'; 1 other values; 5 arrays"
    assert [text for text in ("block", "[2, 3]", "common state: step", verdict) if text not in out] == []
    assert "equal; 6 arrays" in cli.out("diff", second, second)


def keys_shown(out: str, keys: list[str]) -> list[str]:
    """Return keys in the order in which rows of tables begin with them."""
    cells = [line.strip("│").split()[0] for line in out.splitlines() if line.startswith("│")]
    return [cell for cell in cells if cell in keys]


def test_rows_are_sorted_counted_and_limited(tmp_path: Path, cli: CommandLine) -> None:
    """Layer 10 comes after layer 2; the largest difference first, and NaNs before all."""
    keys = [f"layers.{i}.w" for i in range(12)]
    far, nan = torch.zeros(4), torch.tensor([float("nan"), 0, 0, 0])
    far[0] = 5
    changed = {2: far, 3: torch.full((4,), 0.5), 10: torch.full((4,), 0.25), 11: nan}
    for name, values in (("a", {}), ("b", changed)):
        tensors = {key: values.get(i, torch.zeros(4)) for i, key in enumerate(keys)}
        saved_tensors(tmp_path / name, **tensors, **{name: torch.zeros(1)})
    command = ["diff", str(tmp_path / "a"), str(tmp_path / "b")]
    orders = {"largest": [11, 2, 3, 10], "elements": [3, 10, 2, 11], "key": [2, 3, 10, 11]}
    for order, numbers in orders.items():
        out = cli.out(*command, "--sort", order, code=1)
        assert keys_shown(out, keys) == [keys[i] for i in numbers]
    verdict = "different: 10 of 16 elements of 4 arrays, by 5 at most, in 'layers.2.w'; 1 keys only in A; "
    assert verdict in out
    out = cli.out(*command, "--limit", "2", code=1)
    assert keys_shown(out, keys) == [keys[11], keys[2]]
    assert "4 arrays with other elements, the first 2" in out
    assert len(keys_shown(cli.out(*command, "--limit", "0", code=1), keys)) == 4


checksums = pytest.importorskip("awscrt.checksums", reason="the extra digests is not installed")

OPTIONS = SaveOptions(array_digests=True)
ARRAYS = {
    "long": torch.arange(300_000, dtype=torch.int32).reshape(300, 1000),  # several blocks
    "half": torch.arange(48).reshape(6, 8).bfloat16(),
    "twin": torch.arange(48).reshape(6, 8).flip(0).bfloat16(),
    "scalar": torch.tensor(1.5, dtype=torch.float64),
    "empty": torch.empty(0, 3),
}


def hashed(directory: Path, ranks: int = 1, options: SaveOptions = OPTIONS, **changes: torch.Tensor) -> Path:
    """Save all arrays, those of two dims cut by columns; and an object."""

    def state_of(rank: int) -> dict[str, Any]:
        state: dict[str, Any] = {"object": ShardedObject("object", {"n": 1}, (1,), (0,), rank)}
        for key, array in {**ARRAYS, **changes}.items():
            if array.numel() > 1 and ranks > 1:
                part = array.chunk(ranks, dim=1)[rank]
                state[key] = ShardedTensor.from_rank_offsets(key, part, (1, rank, ranks))
            else:
                state[key] = ShardedTensor.from_rank_offsets(key, array, replica_id=rank)
        return state

    SimulatedWorld(ranks).run(saving(state_of, directory, options=options))
    return directory


def test_diff_does_not_read_arrays_whose_digests_are_equal(tmp_path: Path, cli: CommandLine) -> None:
    first, second = hashed(tmp_path / "one"), hashed(tmp_path / "two", ranks=2)
    message = cli.json("diff", first, second, "--read")
    assert (message["compared"], message["by_digest"], message["by_digest_nbytes"]) == (6, 0, 0)
    assert message["nbytes"] == 1_200_000 + 2 * 96 + 8
    for directory in (first, second):
        shutil.rmtree(directory / "data")
    keys = [flag for key in ARRAYS for flag in ("--keys", key)]  # the object has no such digest
    message = cli.json("diff", first, second, *keys)
    assert (message["is_equal"], message["compared"], message["nbytes"]) == (True, 5, 0)
    assert (message["by_digest"], message["by_digest_nbytes"]) == (5, 1_200_000 + 2 * 96 + 8)
    assert "5 arrays, 1.2 MB, are equal by their digests" in cli.out("diff", first, second, *keys)
    cli.run("diff", first, second, *keys, "--read", code=1)


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("long", lambda t: t ^ (t == 299_999)),
        ("half", lambda t: t[[1, 0, 2, 3, 4, 5]]),
        ("half", lambda t: t[:, [0, 1, 2, 3, 4, 5, 7, 6]]),
        ("scalar", lambda t: -t),
    ],
    ids=["bit", "rows", "columns", "sign"],
)  # fmt: skip
def test_diff_reads_and_measures_the_array_that_differs_and_no_other(
    key: str, change: Any, tmp_path: Path, cli: CommandLine
) -> None:
    first = hashed(tmp_path / "one", ranks=2)
    two = hashed(tmp_path / "two", **{key: change(ARRAYS[key])})
    message = cli.json("diff", first, two, code=1)
    assert (message["by_digest"], [a["key"] for a in message["arrays"]]) == (4, [key])
    assert message["nbytes"] == ARRAYS[key].nbytes


def test_arrays_that_have_changed_positions_differ(tmp_path: Path, cli: CommandLine) -> None:
    first = hashed(tmp_path / "one")
    two = hashed(tmp_path / "two", half=ARRAYS["twin"], twin=ARRAYS["half"])
    message = cli.json("diff", first, two, code=1)
    assert [a["key"] for a in message["arrays"]] == ["half", "twin"]


def test_arrays_of_another_dtype_or_without_digests_are_not_taken_for_equal(
    tmp_path: Path, cli: CommandLine
) -> None:
    first = hashed(tmp_path / "one")
    two = hashed(tmp_path / "two", half=ARRAYS["half"].view(torch.float16))
    message = cli.json("diff", first, two, code=1)
    assert (message["by_digest"], list(message["declared"])) == (4, ["half"])
    message = cli.json("diff", first, hashed(tmp_path / "bare", options=SaveOptions()))
    assert (message["by_digest"], message["nbytes"]) == (0, 1_200_000 + 2 * 96 + 8)


def test_inspect_shows_what_anybody_can_compute_from_the_array(tmp_path: Path, cli: CommandLine) -> None:
    message = cli.json("inspect", hashed(tmp_path / "two", ranks=2))
    expected = {
        key: f"{checksums.crc64nvme(bytes(byte_view(as_bits(array.contiguous())))):016x}"
        for key, array in ARRAYS.items()
    }
    assert {a["key"]: a["crc64nvme"] for a in message["arrays"]} == {**expected, "object": None}
    assert expected["half"] in cli.out("inspect", tmp_path / "two")
    message = cli.json("inspect", hashed(tmp_path / "bare", options=SaveOptions()))
    assert {a["crc64nvme"] for a in message["arrays"]} == {None}


def with_digest(directory: Path, key: str, change: int) -> Path:
    """Store another digest of an array, in an index that is right otherwise."""
    store = open_store(directory)
    message = json.loads((directory / "metadata.json").read_text())
    index = read_index(store, message)
    digests = {**index.array_digests, key: index.array_digests[key] ^ change}
    message["index"] = write_index(store, message["index"]["file"], replace(index, array_digests=digests))
    (directory / "metadata.json").write_text(json.dumps(message))
    return directory


@pytest.mark.parametrize("ranks", [1, 2])
def test_verify_names_an_array_whose_blocks_are_right_and_whose_digest_is_not(
    ranks: int, tmp_path: Path, cli: CommandLine
) -> None:
    message = cli.json("verify", hashed(tmp_path, ranks=ranks), "--deep")
    assert message["damages"] == []
    assert (message["array_digests"], message["compared_array_digests"]) == (5, 5)
    with_digest(with_digest(tmp_path, "long", 1 << 63), "empty", 1)
    cli.json("verify", tmp_path)  # nothing was read
    message = cli.json("verify", tmp_path, "--deep", code=1)
    assert [d["key"] for d in message["damages"]] == ["empty", "long"]
    assert all("the digest that is stored of the whole array" in d["what"] for d in message["damages"])


@pytest.mark.parametrize("ranks", [2, 5])
def test_ranks_that_each_verify_a_share_combine_their_digests(ranks: int, tmp_path: Path) -> None:
    def verify(group: Group) -> list[Damage]:
        look = partial(verify_share, open_store(tmp_path), VerifyOptions(deep=True))
        return verify_on_all_ranks(group, look, timeout_s=60)

    hashed(tmp_path, ranks=2)
    assert SimulatedWorld(ranks).run(verify) == [[]] * ranks
    with_digest(with_digest(tmp_path, "twin", 2), "long", 1)
    results = SimulatedWorld(ranks).run(verify)
    assert [damage.key for damage in results[0]] == ["long", "twin"]
    assert results == [results[0]] * ranks
    assert all("the digest that is stored of the whole array" in damage.what for damage in results[0])


def test_a_damaged_block_is_reported_once(tmp_path: Path, cli: CommandLine) -> None:
    file = files_below(hashed(tmp_path) / "data", "*")[0]
    flip(file, file.read_bytes().index(ARRAYS["long"].numpy().tobytes()))
    message = cli.json("verify", tmp_path, "--deep", code=1)
    (damage,) = message["damages"]
    assert (damage["key"], message["compared_array_digests"]) == ("long", 4)
    assert "their digest differs" in damage["what"]


def test_removing_and_converting_keep_or_make_digests(tmp_path: Path, cli: CommandLine) -> None:
    first = hashed(tmp_path / "one", ranks=2)
    cli.run("convert", first, tmp_path / "new", "--to", "megackpt", "--array-digests")
    message = cli.json("diff", first, tmp_path / "new")
    assert message["by_digest"] == 5
    remove_sharded_tensors(tmp_path / "new", "half")
    message = cli.json("diff", first, tmp_path / "new", code=1)
    assert (message["only_first"], message["by_digest"]) == (["half"], 4)
    command = ("convert", first, tmp_path / "z", "--to", "torch_dist", "--array-digests")
    assert "stores no digests of arrays" in cli.err(*command, code=2)


def test_a_save_that_cannot_have_digests_is_an_error_on_all_ranks_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save_rank(group: Group) -> None:
        state = {"x": ShardedTensor.from_rank_offsets("x", torch.ones(2), (0, group.rank, 2))}
        with pytest.raises(UnsupportedError, match="Format torch_dist version 1 stores no digests of arrays"):
            megackpt.save(state, tmp_path / "a", "torch_dist", options=OPTIONS, group=group)
        options = replace(OPTIONS, array_digests=group.rank == 1)
        with pytest.raises(DeclarationError, match=r"array_digests is False on rank 0 and True on rank 1"):
            megackpt.save(state, tmp_path / "b", options=options, group=group)

    SimulatedWorld(2).run(save_rank)
    monkeypatch.setitem(sys.modules, "awscrt.checksums", None)
    with pytest.raises(MissingExtraError, match=re.escape("pip install 'megackpt[digests]'")):
        hashed(tmp_path / "c", ranks=2)
    assert not any((tmp_path / name / "metadata.json").exists() for name in "abc")
    assert not files_below(tmp_path, "*.safetensors")


def test_without_the_library_digests_are_compared_with_each_other_and_verify_reports_what_it_left_out(
    tmp_path: Path, cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = hashed(tmp_path / "one", ranks=2), hashed(tmp_path / "two")
    monkeypatch.setitem(sys.modules, "awscrt.checksums", None)
    assert cli.json("diff", first, second)["by_digest"] == 5
    message = cli.json("verify", first, "--deep")
    assert (message["array_digests"], message["compared_array_digests"]) == (5, 0)
    out = cli.out("verify", first, "--deep")
    assert "0 of 5 digests of whole arrays were compared" in " ".join(out.split())
