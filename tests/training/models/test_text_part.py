"""The text model of a multimodal folder: which arrays it has in which spelling, and what is an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import megackpt
from megackpt import CheckpointError, MapError
from megackpt.cli import main
from megackpt.maps import family_of
from megackpt.maps.text_part import TextPart
from tests.support.huggingface_folders import random_config
from tests.support.states import random_arrays

TEXT = random_config("llama", 0) | {"tie_word_embeddings": False}
WHOLE = {"model_type": "seeing", "text_config": TEXT}
SPELLINGS = {
    "in front": {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
    "behind": {"model.": "model.language_model."},
    "none": {"": ""},
}


def _spelled(key: str, spelling: str) -> str:
    for own, begin in SPELLINGS[spelling].items():
        if key.startswith(own):
            return begin + key.removeprefix(own)
    return key


def _folder(path: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_other_tensors_are_left_out_and_reported(
    spelling: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = random_arrays(family_of(TEXT).region_map(TEXT), 0)
    others = {"model.visual.weight": torch.ones(2), "vision_tower.layers.0.weight": torch.ones(3)}
    whole = {_spelled(key, spelling): tensor for key, tensor in text.items()} | others
    folder, new = _folder(tmp_path / "folder", WHOLE, whole), tmp_path / "new"
    assert main(["convert", str(folder), str(new), "--from", "huggingface", "--text-only", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["left_out"] == sorted(others)
    content = megackpt.load_content_metadata(new)
    assert content["huggingface_config"] == TEXT
    megackpt.import_huggingface(_folder(tmp_path / "alone", TEXT, text), tmp_path / "expected")
    imported, expected = (megackpt.load_plain_tensors(tmp_path / name) for name in ("new", "expected"))
    assert imported.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in imported.items())


def test_the_whole_model_decides_what_is_tied_and_else_the_folder() -> None:
    keys = ["model.language_model.norm.weight", "lm_head.weight"]
    inner = {"model_type": "llama"}
    for outer, stored, is_tied in (
        ({}, keys, False),
        ({}, keys[:1], True),
        ({"tie_word_embeddings": True}, keys, True),
        ({"tie_word_embeddings": False}, keys[:1], False),
    ):
        text = TextPart.of({"text_config": inner, **outer}, stored)
        assert text.config == {**inner, "tie_word_embeddings": is_tied}
        assert ("lm_head.weight" in text.stored) is (not is_tied and len(stored) == 2)


def test_gemma_3_leaves_out_sizes_that_its_class_has() -> None:
    config = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240}
    right = family_of(config).region_map(config | {"num_hidden_layers": 1}).right
    assert right["model.embed_tokens.weight"].stored == (262208, 2560)
    assert right["model.layers.0.self_attn.q_proj.weight"].stored == (2048, 2560)


@pytest.mark.parametrize(
    ("config", "changes", "text_only", "text"),
    [
        (WHOLE, {}, False, r"No map is for model_type 'seeing'.*text model, model_type 'llama'.*text_only"),
        (TEXT, {}, True, r"config.json has no text_config.*leave text_only out"),
        (
            WHOLE,
            {"model.language_model.new": torch.ones(1)},
            True,
            r"'model.language_model.new' .* additional",
        ),
        (
            WHOLE,
            {"model.language_model.norm.weight": None},
            True,
            r"'model.norm.weight' .*missing",
        ),
        ({**WHOLE, "text_config": {"model_type": "odd"}}, {}, True, r"No map is for model_type 'odd'"),
    ],
)
def test_a_folder_that_does_not_fit_is_one_error_and_nothing_is_written(
    config: dict[str, Any], changes: dict[str, Any], text_only: bool, text: str, tmp_path: Path
) -> None:
    tensors = random_arrays(family_of(TEXT).region_map(TEXT), 0)
    tensors = {_spelled(key, "behind"): tensor for key, tensor in tensors.items()} | changes
    tensors = {key: tensor for key, tensor in tensors.items() if tensor is not None}
    folder = _folder(tmp_path / "folder", config, tensors)
    with pytest.raises(CheckpointError, match=text) as raised:
        megackpt.import_huggingface(folder, tmp_path / "new", text_only=text_only)
    assert isinstance(raised.value, MapError)
    assert not (tmp_path / "new").exists()
