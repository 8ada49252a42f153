"""`megackpt maps`: the list of families, and the table of one for a config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megackpt.cli import main
from megackpt.cli.entry import BAD_INPUT
from megackpt.maps import family_of, known_families

CONFIG = {
    "model_type": "qwen3_moe",
    "vocab_size": 37,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "num_experts": 2,
    "moe_intermediate_size": 12,
    "mlp_only_layers": [0],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["maps", "show", *arguments, "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_every_family_is_listed_with_its_model_types(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["maps", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["families"]
    assert listed == {name: list(family.model_types) for name, family in known_families().items()}
    assert main(["maps"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in known_families())


def test_a_row_has_keys_axes_shapes_and_layers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = shown(capsys, "--config", str(folder / "config.json"))
    assert result["family"] == "qwen3_moe"
    assert result["sizes"]["expert"] == 2
    assert {
        "ours": "decoder.layers.{layer}.mlp.experts.linear_fc2.weight",
        "axes": "expert h e",
        "shape": [2, 16, 12],
        "theirs": "model.layers.{layer}.mlp.experts.{expert}.down_proj.weight",
        "their_axes": "h e",
        "their_shape": [16, 12],
        "layers": [1, 2, 3],
    } in result["rows"]


def test_the_proof_counts_all_arrays(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = family_of(CONFIG).region_map(CONFIG)
    proved = shown(capsys, "qwen3_moe", "--config", str(folder))["proved"]
    assert proved == {"ours": len(made.left), "theirs": len(made.right), "pairs": len(made.pairs)}
    assert main(["maps", "show", "--config", str(folder)]) == 0
    text = capsys.readouterr().out
    assert f"every element of {len(made.left)} arrays of ours and {len(made.right)} of qwen3_moe" in text
    assert "1-3" in text


def test_keys_of_the_first_layers_are_shown_one_by_one(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = shown(capsys, "--config", str(folder), "--layers", "2")["rows"]
    ours = {row["ours"] for row in rows}
    assert {"decoder.layers.0.mlp.linear_fc2.weight", "decoder.layers.1.mlp.router.weight"} <= ours
    assert not any("{layer}" in key or "layers.2." in key for key in ours)


def test_a_folder_with_fused_experts_is_shown_as_it_is(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file({"model.layers.1.mlp.experts.gate_up_proj": torch.ones(1)}, folder / "model.safetensors")
    rows = shown(capsys, "--config", str(folder))["rows"]
    (up,) = (row for row in rows if row["ours"].endswith("experts.linear_fc1.weight.up"))
    assert (up["theirs"], up["their_axes"], up["their_shape"]) == (
        "model.layers.{layer}.mlp.experts.gate_up_proj",
        "expert e@e/2e h",
        [2, 24, 16],
    )


def test_regions_of_megatron_core_are_shown_for_the_first_layers(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = shown(capsys, "--config", str(folder), "--megatron", "--layers", "2")
    assert {
        "ours": "decoder.layers.1.mlp.experts.linear_fc1.weight.up",
        "region": "[0:2, 0:12, 0:16]",
        "theirs": "decoder.layers.1.mlp.experts.experts.linear_fc1.weight",
        "their_region": "[0:2, 12:24, 0:16]",
    } in result["rows"]
    assert not any(row["ours"].startswith("decoder.layers.2.") for row in result["rows"])
    assert main(["maps", "show", "--config", str(folder), "--megatron"]) == 0
    text = capsys.readouterr().out
    assert "decoder.layers.0.mlp.linear_fc1.layer_norm_weight" in text
    assert f"{result['proved']['theirs']} of Megatron-Core is in exactly one" in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"),
        ("{", "cannot be read"),
        ("[]", "is no JSON object"),
        ('{"model_type": "llama"}', "has no num_hidden_layers"),
        ('{"model_type": "unheard"}', "No map is for model_type 'unheard'"),
    ],
)
def test_a_config_that_cannot_be_used_is_an_error(
    tmp_path: Path, text: str | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    assert main(["maps", "show", "--config", str(tmp_path)]) == BAD_INPUT
    assert message in capsys.readouterr().err
