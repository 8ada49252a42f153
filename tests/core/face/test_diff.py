"""`megackpt diff`: equal whatever the layout and the format, and exact about what differs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt import ShardedObject, ShardedTensor
from megackpt.cli import main
from megackpt.storage import open_store
from tests.support.checkpoints import COMMON, CONTENT, FORMATS, LONG, NATIVE, RANKS, flip, saved

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


def diff(first: Path, second: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, Any]:
    code = main(["diff", str(first), str(second), "--json", *flags])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_one_rank_and_two_ranks_in_any_format_are_equal_both_ways(
    tmp_path: Path, format: tuple[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    two, whole_path = saved(tmp_path / "two", format), save_whole(tmp_path / "one")
    for first, second in ((whole_path, two), (two, whole_path)):
        code, message = diff(first, second, capsys)
        assert (code, message["is_equal"], message["compared"]) == (0, True, 5)
        assert message["nbytes"] == 48 * 4 * 2 + LONG.nbytes + 6


def test_differing_elements_are_counted_located_and_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed, half = NUMBERS.clone(), torch.ones(3).bfloat16()
    changed[5, 7] += 0.25
    changed[2, 3] -= 8
    changed[4, 1] = float("nan")
    half[1] = 2
    code, message = diff(saved(tmp_path / "a"), save_whole(tmp_path / "b", block=changed, half=half), capsys)
    assert code == 1
    assert message["arrays"] == [
        {"key": "block", "dtype": "float32", "shape": [6, 8], "elements": 3, "first": [2, 3], "largest": 8.0,
         "nan_elements": 1},
        {"key": "half", "dtype": "bfloat16", "shape": [3], "elements": 1, "first": [1], "largest": 1.0,
         "nan_elements": 0},
    ]  # fmt: skip
    assert message["values"] == []


def test_signs_of_zeros_and_bits_of_nans_differ_without_a_distance(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bits = torch.tensor([0x7FC00000, 0, 5], dtype=torch.int32).view(torch.float32)
    other = torch.tensor([0x7FC00001, -(2**31), 5], dtype=torch.int32).view(torch.float32)
    for name, tensor in (("a", bits), ("b", other)):
        megackpt.save({"w": ShardedTensor.from_rank_offsets("w", tensor)}, tmp_path / name)
    code, message = diff(tmp_path / "a", tmp_path / "b", capsys)
    (array,) = message["arrays"]
    assert (code, array["elements"], array["largest"], array["nan_elements"]) == (1, 2, 0.0, 1)


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
    tmp_path: Path, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    for name, tensor in (("a", first), ("b", second)):
        megackpt.save({"w": ShardedTensor.from_rank_offsets("w", tensor)}, tmp_path / name)
    code, message = diff(tmp_path / "a", tmp_path / "b", capsys)
    (array,) = message["arrays"]
    assert (code, array["elements"], array["largest"]) == (1, 1, largest)


def test_keys_dtypes_and_shapes_that_differ_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, tensors in (
        ("a", {"x": torch.zeros(2), "same": torch.ones(2), "cast": torch.ones(2), "grown": torch.ones(2)}),
        (
            "b",
            {
                "y": torch.zeros(2),
                "same": torch.ones(2),
                "cast": torch.ones(2).half(),
                "grown": torch.ones(3),
            },
        ),
    ):
        state = {key: ShardedTensor.from_rank_offsets(key, tensor) for key, tensor in tensors.items()}
        megackpt.save(state, tmp_path / name)
    code, message = diff(tmp_path / "a", tmp_path / "b", capsys)
    assert code == 1
    assert (message["only_first"], message["only_second"], message["arrays"]) == (["x"], ["y"], [])
    assert message["declared"] == {
        "cast": ["float32 [2]", "float16 [2]"],
        "grown": ["float32 [2]", "float32 [3]"],
    }
    assert diff(tmp_path / "a", tmp_path / "b", capsys, "--keys", "sa*")[0] == 0


def test_objects_and_common_state_are_compared_by_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    objects = [{"rank": 0, "seen": [1, 2.0]}, {"rank": 1, "seen": [1, 3.0]}]
    changes = {"object": objects, "args": {"lr": 3e-4, "betas": [0.9, 0.99]}, "more": "x"}
    code, message = diff(saved(tmp_path / "a"), save_whole(tmp_path / "b", **changes), capsys)
    assert code == 1
    assert message["values"] == [
        {"path": "object 'object' [1]: seen[1]", "first": "2.0", "second": "3.0"},
        {"path": "common state: args.betas[1]", "first": "0.95", "second": "0.99"},
        {"path": "common state: more", "first": None, "second": "'x'"},
    ]
    assert diff(tmp_path / "a", tmp_path / "b", capsys, "--no-common", "--keys", "block")[0] == 0


def test_small_buffers_and_many_threads_find_the_same(tmp_path: Path) -> None:
    changed = LONG.clone()
    changed[::1000] += 1
    first, second = open_store(saved(tmp_path / "a")), open_store(save_whole(tmp_path / "b", long=changed))
    for options in ({}, {"buffer_bytes": 1000, "threads": 1}, {"threads": 5}):
        (array,) = megackpt.diff(first, second, **options).arrays
        assert (array.key, array.elements, array.first, array.largest) == ("long", 400, (0,), 1.0)


def test_a_damaged_checkpoint_is_an_error_and_no_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = saved(tmp_path / "one"), saved(tmp_path / "two", NATIVE)
    flip(sorted((second / "data").iterdir())[0], -1)
    assert main(["diff", str(first), str(second)]) == 1
    message = capsys.readouterr()
    assert "digest differs" in message.err
    assert "different" not in message.out


def test_a_checkpoint_with_gaps_is_not_equal_to_one_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    half = ShardedTensor.from_rank_offsets("w", torch.zeros(4), (0, 0, 2))
    megackpt.save({"w": half}, tmp_path / "half", validate_access_integrity=False)
    megackpt.save({"w": ShardedTensor.from_rank_offsets("w", torch.zeros(8))}, tmp_path / "whole")
    assert main(["diff", str(tmp_path / "half"), str(tmp_path / "whole")]) == 1
    assert "'w': the chunks of the first checkpoint" in capsys.readouterr().err
    assert main(["diff", str(tmp_path / "whole"), str(tmp_path / "half")]) == 3


def test_differences_are_shown_as_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed = NUMBERS.clone()
    changed[2, 3] -= 8
    second = save_whole(tmp_path / "b", block=changed, step=8)
    assert main(["diff", str(saved(tmp_path / "a")), str(second)]) == 1
    out = capsys.readouterr().out
    for text in (
        "block",
        "[2, 3]",
        "common state: step",
        "different: 1 of 48 elements of 1 arrays, by 8 at most, in 'block'; 1 other values; 5 arrays",
    ):
        assert text in out
    assert main(["diff", str(second), str(second)]) == 0
    assert "equal; 6 arrays" in capsys.readouterr().out


def keys_shown(out: str, keys: list[str]) -> list[str]:
    """Return keys in the order in which rows of tables begin with them."""
    cells = [line.strip("│").split()[0] for line in out.splitlines() if line.startswith("│")]
    return [cell for cell in cells if cell in keys]


def test_rows_are_sorted_counted_and_limited(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Layer 10 comes after layer 2; the largest difference first, and NaNs before all."""
    keys = [f"layers.{i}.w" for i in range(12)]
    far, nan = torch.zeros(4), torch.tensor([float("nan"), 0, 0, 0])
    far[0] = 5
    changed = {2: far, 3: torch.full((4,), 0.5), 10: torch.full((4,), 0.25), 11: nan}
    for name, values in (("a", {}), ("b", changed)):
        state = {
            key: ShardedTensor.from_rank_offsets(key, values.get(i, torch.zeros(4)))
            for i, key in enumerate(keys)
        }
        megackpt.save(state | {name: ShardedTensor.from_rank_offsets(name, torch.zeros(1))}, tmp_path / name)
    command = ["diff", str(tmp_path / "a"), str(tmp_path / "b")]
    orders = {
        "largest": [11, 2, 3, 10],
        "elements": [3, 10, 2, 11],
        "key": [2, 3, 10, 11],
    }
    for order, numbers in orders.items():
        assert main([*command, "--sort", order]) == 1
        out = capsys.readouterr().out
        assert keys_shown(out, keys) == [keys[i] for i in numbers]
    assert (
        "different: 10 of 16 elements of 4 arrays, by 5 at most, in 'layers.2.w'; 1 keys only in A; " in out
    )
    assert main([*command, "--limit", "2"]) == 1
    out = capsys.readouterr().out
    assert keys_shown(out, keys) == [keys[11], keys[2]]
    assert "4 arrays with other elements, the first 2" in out
    assert main([*command, "--limit", "0"]) == 1
    assert len(keys_shown(capsys.readouterr().out, keys)) == 4
