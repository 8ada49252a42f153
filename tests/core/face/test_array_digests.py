"""Digests of whole arrays, as commands use them: arrays of equal digests are not read, all others are."""

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
from tests.support.checkpoints import files_below, flip
from tests.support.command_line import CommandLine

checksums = pytest.importorskip("awscrt.checksums", reason="the extra digests is not installed")

OPTIONS = SaveOptions(array_digests=True)
ARRAYS = {
    "long": torch.arange(300_000, dtype=torch.int32).reshape(300, 1000),  # several blocks
    "half": torch.arange(48).reshape(6, 8).bfloat16(),
    "twin": torch.arange(48).reshape(6, 8).flip(0).bfloat16(),
    "scalar": torch.tensor(1.5, dtype=torch.float64),
    "empty": torch.empty(0, 3),
}


def saved(directory: Path, ranks: int = 1, options: SaveOptions = OPTIONS, **changes: torch.Tensor) -> Path:
    """Save all arrays, those of two dims cut by columns; and an object."""

    def save_rank(group: Group) -> None:
        state: dict[str, Any] = {"object": ShardedObject("object", {"n": 1}, (1,), (0,), group.rank)}
        for key, array in {**ARRAYS, **changes}.items():
            if array.numel() > 1 and ranks > 1:
                part = array.chunk(ranks, dim=1)[group.rank]
                state[key] = ShardedTensor.from_rank_offsets(key, part, (1, group.rank, ranks))
            else:
                state[key] = ShardedTensor.from_rank_offsets(key, array, replica_id=group.rank)
        megackpt.save(state, directory, options=options, group=group)

    SimulatedWorld(ranks).run(save_rank)
    return directory


def test_diff_does_not_read_arrays_whose_digests_are_equal(tmp_path: Path, cli: CommandLine) -> None:
    first, second = saved(tmp_path / "one"), saved(tmp_path / "two", ranks=2)
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
    cli.run("diff", first, second, *keys, "--read", code=2)


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
    first = saved(tmp_path / "one", ranks=2)
    two = saved(tmp_path / "two", **{key: change(ARRAYS[key])})
    message = cli.json("diff", first, two, code=1)
    assert (message["by_digest"], [a["key"] for a in message["arrays"]]) == (4, [key])
    assert message["nbytes"] == ARRAYS[key].nbytes


def test_arrays_that_have_changed_positions_differ(tmp_path: Path, cli: CommandLine) -> None:
    first = saved(tmp_path / "one")
    two = saved(tmp_path / "two", half=ARRAYS["twin"], twin=ARRAYS["half"])
    message = cli.json("diff", first, two, code=1)
    assert [a["key"] for a in message["arrays"]] == ["half", "twin"]


def test_arrays_of_another_dtype_or_without_digests_are_not_taken_for_equal(
    tmp_path: Path, cli: CommandLine
) -> None:
    first = saved(tmp_path / "one")
    two = saved(tmp_path / "two", half=ARRAYS["half"].view(torch.float16))
    message = cli.json("diff", first, two, code=1)
    assert (message["by_digest"], list(message["declared"])) == (4, ["half"])
    message = cli.json("diff", first, saved(tmp_path / "bare", options=SaveOptions()))
    assert (message["by_digest"], message["nbytes"]) == (0, 1_200_000 + 2 * 96 + 8)


def test_inspect_shows_what_anybody_can_compute_from_the_array(tmp_path: Path, cli: CommandLine) -> None:
    message = cli.json("inspect", saved(tmp_path / "two", ranks=2))
    expected = {
        key: f"{checksums.crc64nvme(bytes(byte_view(as_bits(array.contiguous())))):016x}"
        for key, array in ARRAYS.items()
    }
    assert {a["key"]: a["crc64nvme"] for a in message["arrays"]} == {**expected, "object": None}
    assert expected["half"] in cli.out("inspect", tmp_path / "two")
    message = cli.json("inspect", saved(tmp_path / "bare", options=SaveOptions()))
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
    message = cli.json("verify", saved(tmp_path, ranks=ranks), "--deep")
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

    saved(tmp_path, ranks=2)
    assert SimulatedWorld(ranks).run(verify) == [[]] * ranks
    with_digest(with_digest(tmp_path, "twin", 2), "long", 1)
    results = SimulatedWorld(ranks).run(verify)
    assert [damage.key for damage in results[0]] == ["long", "twin"]
    assert results == [results[0]] * ranks
    assert all("the digest that is stored of the whole array" in damage.what for damage in results[0])


def test_a_damaged_block_is_reported_once(tmp_path: Path, cli: CommandLine) -> None:
    file = files_below(saved(tmp_path) / "data", "*")[0]
    flip(file, file.read_bytes().index(ARRAYS["long"].numpy().tobytes()))
    message = cli.json("verify", tmp_path, "--deep", code=1)
    (damage,) = message["damages"]
    assert (damage["key"], message["compared_array_digests"]) == ("long", 4)
    assert "their digest differs" in damage["what"]


def test_removing_and_converting_keep_or_make_digests(tmp_path: Path, cli: CommandLine) -> None:
    first = saved(tmp_path / "one", ranks=2)
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
        saved(tmp_path / "c", ranks=2)
    assert not any((tmp_path / name / "metadata.json").exists() for name in "abc")
    assert not files_below(tmp_path, "*.safetensors")


def test_without_the_library_digests_are_compared_with_each_other_and_verify_reports_what_it_left_out(
    tmp_path: Path, cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = saved(tmp_path / "one", ranks=2), saved(tmp_path / "two")
    monkeypatch.setitem(sys.modules, "awscrt.checksums", None)
    assert cli.json("diff", first, second)["by_digest"] == 5
    message = cli.json("verify", first, "--deep")
    assert (message["array_digests"], message["compared_array_digests"]) == (5, 0)
    out = cli.out("verify", first, "--deep")
    assert "0 of 5 digests of whole arrays were compared" in " ".join(out.split())
