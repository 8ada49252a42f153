"""`megackpt convert --to huggingface` and `--from huggingface`: folders, reports, options that do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt import ShardedTensor
from megackpt.cli import main
from megackpt.cli.entry import BAD_INPUT, UNREADABLE
from megackpt.maps import family_of
from megackpt.maps.megatron import megatron_map
from tests.support.huggingface_folders import assert_same_tensors, folder_tensors, random_config, saved_model
from tests.support.states import random_arrays

LLAMA = random_config("llama", 0)


def converted(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    code = main(["convert", *map(str, arguments), "--json"])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    result: dict[str, Any] = json.loads(captured.out)
    return result


def test_a_checkpoint_becomes_a_folder_and_a_checkpoint_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = saved_model(tmp_path / "saved", LLAMA, 1)
    export = ("--to", "huggingface", "--map", "llama", "--max-file-size", "6kB")
    report = converted(capsys, tmp_path / "saved", tmp_path / "folder", *export)
    assert (report["map"], report["is_verified"], report["tensors"]) == ("llama", True, len(expected))
    assert report["files"] == len(list((tmp_path / "folder").glob("*.safetensors"))) > 2
    assert_same_tensors(folder_tensors(tmp_path / "folder"), expected)

    into = ("--from", "huggingface", "--to", "megackpt", "--prefix", "model.")
    report = converted(capsys, tmp_path / "folder", tmp_path / "again", *into)
    assert (report["backend"], report["nbytes"]) == ("megackpt", sum(t.nbytes for t in expected.values()))

    export = ("--to", "huggingface", "--prefix", "model.", "--dtype", "bfloat16", "--no-verify")
    report = converted(capsys, tmp_path / "again", tmp_path / "narrow", *export)
    assert not report["is_verified"]
    narrow = {key: tensor.to(torch.bfloat16) for key, tensor in expected.items()}
    assert_same_tensors(folder_tensors(tmp_path / "narrow"), narrow)


def test_masters_and_a_config_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = saved_model(tmp_path / "saved", LLAMA, 2, masters=True)
    (tmp_path / "original").mkdir()
    (tmp_path / "original/config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "original/tokenizer.json").write_text("{}")
    export = ("--to", "huggingface", "--weights", "masters", "--config", tmp_path / "original")
    converted(capsys, tmp_path / "saved", tmp_path / "folder", *export)
    assert_same_tensors(folder_tensors(tmp_path / "folder"), expected)
    assert (tmp_path / "folder/tokenizer.json").exists()


def test_zero_centred_norms_of_megatron_core_are_added_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = random_config("qwen3", 1)
    family = family_of(config)
    stored = megatron_map(family.region_map(config).left, family.rules(config, ()).sizes)
    arrays = random_arrays(stored, 1)
    state = {key: ShardedTensor.from_rank_offsets(key, array) for key, array in arrays.items()}
    megackpt.save(state, tmp_path / "saved", content_metadata={"huggingface_config": config})
    folders = []
    for added in ("0", "1"):
        folder = tmp_path / added
        converted(capsys, tmp_path / "saved", folder, "--to", "huggingface", "--norm-added", added)
        folders.append(folder_tensors(folder))
    plain, expected = folders[0], {}
    for key, tensor in plain.items():
        expected[key] = tensor + 1 if "norm" in key else tensor
    assert sum("norm" in key for key in plain) == 1 + 4 * config["num_hidden_layers"]
    assert_same_tensors(folders[1], expected)


def test_the_report_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = saved_model(tmp_path / "saved", LLAMA, 3)
    folder = str(tmp_path / "folder")
    assert main(["convert", str(tmp_path / "saved"), folder, "--to", "huggingface"]) == 0
    line = capsys.readouterr().out
    assert line.startswith(f"{folder}: {len(expected)} tensors, ")
    assert line.endswith("in 1 files, as float32, by the map llama; read again and equal.\n")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--to", "zarr", "--map", "llama"), "--map cannot be used with"),
        (("--to", "huggingface", "--from", "huggingface"), "not both"),
        (("--to", "megackpt", "--from", "huggingface", "--weights", "masters"), "--weights cannot be used"),
        (("--from", "huggingface", "--norm-added", "1"), "--norm-added cannot be used"),
        (("--to", "huggingface", "--array-digests"), "--array-digests cannot be used"),
        (("--to", "huggingface", "--max-file-size", "many"), "'many' is not a size"),
        (("--to", "huggingface", "--map", "unknown"), "No map is called 'unknown'"),
    ],
)
def test_options_that_do_not_fit_are_an_error(
    options: tuple[str, ...], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved_model(tmp_path / "saved", LLAMA, 4)
    assert main(["convert", str(tmp_path / "saved"), str(tmp_path / "new"), *options]) == BAD_INPUT
    assert text in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_no_folder_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--from", "huggingface"]  # into the native format, unless --to names another
    assert main(["convert", str(tmp_path), str(tmp_path / "new"), *options]) == UNREADABLE
    assert "convert" not in capsys.readouterr().out
