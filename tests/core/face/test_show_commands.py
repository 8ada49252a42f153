"""Commands that show: inspect a checkpoint, maps of the families, and demo."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import megackpt
from megackpt import ShardedTensor
from megackpt.cli.entry import BAD_INPUT, FAILED_CHECK
from megackpt.maps import family_of, known_families
from tests.support.checkpoints import FORMATS, RANKS, copy_of_saved, flip
from tests.support.command_line import CommandLine


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_arrays_objects_files_and_common_state_of_any_format_are_listed(
    tmp_path: Path, format: tuple[str, int], cli: CommandLine
) -> None:
    message = cli.json("inspect", copy_of_saved(tmp_path, format))
    assert (message["backend"], message["version"]) == format
    shown = {a["key"]: (a["dtype"], a["shape"]) for a in message["arrays"]}
    assert shown == {
        "block": ("float32", [6, 8]),
        "flat": ("float32", [6, 8]),
        "half": ("bfloat16", [3]),
        "long": ("float32", [400_000]),
        "object": ("object", [RANKS]),
    }
    assert {a["key"]: a["chunks"] for a in message["arrays"]}["object"] == RANKS
    assert message["common"]["args.betas[1]"] == "0.95"
    assert message["common"]["rng"] == "torch.int64 [4]: 0, 1, 2, 3"
    assert message["content"] == {"sharding": "'flat'"}
    nbytes = sum(a["nbytes"] for a in message["arrays"])
    assert sum(f["nbytes"] for f in message["files"]) == nbytes
    assert all((tmp_path / f["name"]).is_file() for f in message["files"])
    if format[0] != "zarr":
        assert set(message["rank_nbytes"]) == {"0", "1"}
        assert sum(message["rank_nbytes"].values()) == nbytes


def test_globs_choose_keys_and_their_files(tmp_path: Path, cli: CommandLine) -> None:
    message = cli.json("inspect", copy_of_saved(tmp_path), "--keys", "b*", "--keys", "half")
    assert [a["key"] for a in message["arrays"]] == ["block", "half"]
    assert sum(f["chunks"] for f in message["files"]) == 3
    assert sum(f["nbytes"] for f in message["files"]) == 48 * 4 + 6


def test_tensors_are_not_read_and_damage_of_common_state_is_shown(tmp_path: Path, cli: CommandLine) -> None:
    for file in sorted((copy_of_saved(tmp_path) / "data").iterdir()):
        file.unlink()
    (common,) = tmp_path.glob("common-*.json")
    flip(common, 10)
    message = cli.json("inspect", tmp_path)
    assert len(message["arrays"]) == 5
    assert common.name in message["common_error"]


def test_tables_show_what_a_person_looks_for(tmp_path: Path, cli: CommandLine) -> None:
    out = cli.out("inspect", copy_of_saved(tmp_path), "--limit", "2")
    for text in (
        "megackpt version 1",
        "saved by 2 ranks",
        "4 arrays, the first 2",
        "[6, 8]",
        "bytes by rank",
    ):
        assert text in out
    assert "long" not in out


def test_keys_are_printed_as_they_are_and_move_no_cursor(tmp_path: Path, cli: CommandLine) -> None:
    key = "a[bold]\x1b[2Jb :smile:"
    megackpt.save({"w": ShardedTensor.from_rank_offsets(key, torch.zeros(1))}, tmp_path)
    out = cli.out("inspect", tmp_path)
    assert "a[bold]\\x1b[2Jb :smile:" in out
    assert "\x1b" not in out


def test_bad_usage_and_a_missing_checkpoint_have_different_exit_codes(
    tmp_path: Path, cli: CommandLine
) -> None:
    cli.run("inspect", code=2)
    assert "is not a checkpoint" in cli.err("inspect", tmp_path, code=3)
    (index,) = copy_of_saved(tmp_path).glob("index-*")
    flip(index, -1)
    cli.run("inspect", tmp_path, code=1)
    (tmp_path / "metadata.json").write_text("[]")
    cli.run("inspect", tmp_path, code=3)
    assert "Exit codes: 0 done" in " ".join(cli.out("inspect", "-h").split())


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


def test_every_family_is_listed_with_its_model_types(cli: CommandLine) -> None:
    listed = cli.json("maps")["families"]
    assert listed == {name: list(family.model_types) for name, family in known_families().items()}
    text = cli.out("maps")
    assert all(name in text for name in known_families())


def test_a_row_has_keys_axes_shapes_and_layers(folder: Path, cli: CommandLine) -> None:
    result = cli.json("maps", "show", "--config", folder / "config.json")
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


def test_the_proof_counts_all_arrays(folder: Path, cli: CommandLine) -> None:
    made = family_of(CONFIG).region_map(CONFIG)
    proved = cli.json("maps", "show", "qwen3_moe", "--config", folder)["proved"]
    assert proved == {"ours": len(made.left), "theirs": len(made.right), "pairs": len(made.pairs)}
    text = cli.out("maps", "show", "--config", folder)
    assert f"every element of {len(made.left)} arrays of ours and {len(made.right)} of qwen3_moe" in text
    assert "1-3" in text


def test_keys_of_the_first_layers_are_shown_one_by_one(folder: Path, cli: CommandLine) -> None:
    rows = cli.json("maps", "show", "--config", folder, "--layers", "2")["rows"]
    ours = {row["ours"] for row in rows}
    assert {"decoder.layers.0.mlp.linear_fc2.weight", "decoder.layers.1.mlp.router.weight"} <= ours
    assert not any("{layer}" in key or "layers.2." in key for key in ours)


def test_a_folder_with_fused_experts_is_shown_as_it_is(folder: Path, cli: CommandLine) -> None:
    save_file({"model.layers.1.mlp.experts.gate_up_proj": torch.ones(1)}, folder / "model.safetensors")
    rows = cli.json("maps", "show", "--config", folder)["rows"]
    (up,) = (row for row in rows if row["ours"].endswith("experts.linear_fc1.weight.up"))
    assert (up["theirs"], up["their_axes"], up["their_shape"]) == (
        "model.layers.{layer}.mlp.experts.gate_up_proj",
        "expert e@e/2e h",
        [2, 24, 16],
    )


def test_regions_of_megatron_core_are_shown_for_the_first_layers(folder: Path, cli: CommandLine) -> None:
    result = cli.json("maps", "show", "--config", folder, "--megatron", "--layers", "2")
    assert {
        "ours": "decoder.layers.1.mlp.experts.linear_fc1.weight.up",
        "region": "[0:2, 0:12, 0:16]",
        "theirs": "decoder.layers.1.mlp.experts.experts.linear_fc1.weight",
        "their_region": "[0:2, 12:24, 0:16]",
    } in result["rows"]
    assert not any(row["ours"].startswith("decoder.layers.2.") for row in result["rows"])
    text = cli.out("maps", "show", "--config", folder, "--megatron")
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
    tmp_path: Path, text: str | None, message: str, cli: CommandLine
) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    assert message in cli.err("maps", "show", "--config", tmp_path, code=BAD_INPUT)


def test_the_numbers_are_the_ranks_of_the_layouts(cli: CommandLine) -> None:
    result = cli.json("demo")
    assert result["equal"]
    assert result["saved"]["weight"] == [[0] * 12] * 3 + [[2] * 12] * 3
    of_tp_0 = [0] * 22 + [1] * 14  # the cut of the flat range lies within the second row
    of_tp_1 = [rank + 2 for rank in of_tp_0]
    assert [rank for row in result["saved"]["exp_avg"] for rank in row] == of_tp_0 + of_tp_1
    assert result["loaded"] == {key: [[0] * 4 + [1] * 4 + [2] * 4] * 6 for key in ("weight", "exp_avg")}


def test_the_kept_checkpoint_is_a_real_one_and_nothing_is_overwritten(
    tmp_path: Path, cli: CommandLine
) -> None:
    directory = tmp_path / "demo"
    files = cli.json("demo", "--dir", directory)["files"]
    assert {name: (directory / name).stat().st_size for name in files} == files
    assert {key: tuple(t.global_shape) for key, t in megackpt.load_tensors_metadata(directory).items()} == {
        "weight": (6, 12),
        "exp_avg": (6, 12),
    }
    assert "is not empty" in cli.err("demo", "--dir", directory, code=BAD_INPUT)


def test_the_picture_fits_a_terminal(cli: CommandLine) -> None:
    lines = cli.out("demo").splitlines()
    assert max(map(len, lines)) <= 80
    assert any("equals what was saved" in line for line in lines)


def test_a_wrong_load_is_a_failed_check(monkeypatch: pytest.MonkeyPatch, cli: CommandLine) -> None:
    load = megackpt.load

    def load_all_but_one_element(state: Any, *args: Any, **kwargs: Any) -> Any:
        loaded = load(state, *args, **kwargs)
        assert isinstance(state["weight"].data, torch.Tensor)
        state["weight"].data[0, 0] += 1
        return loaded

    monkeypatch.setattr(megackpt, "load", load_all_but_one_element)
    assert "DIFFERS" in cli.out("demo", code=FAILED_CHECK)
