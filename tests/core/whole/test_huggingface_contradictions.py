"""Where config.json and the tensors of a folder contradict each other, and exports that end early."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import megackpt
from megackpt import DeclarationError, FormatError
from megackpt.cli import main
from megackpt.errors import CheckpointError, MapError
from megackpt.maps import RegionMap, family_of
from megackpt.maps.family import Family
from megackpt.storage.store import temporary_name
from megackpt.whole import huggingface_writing
from megackpt.whole.huggingface_writing import ExportTarget
from tests.support.huggingface_folders import write_random_folder

CONFIG: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 24, "hidden_size": 8, "num_hidden_layers": 2,
    "num_attention_heads": 2, "intermediate_size": 12,
}  # fmt: skip
TIED = {**CONFIG, "tie_word_embeddings": True}
HEAD, EMBEDDING, BUFFER = "lm_head.weight", "model.embed_tokens.weight", "model.rotary_emb.inv_freq"


def test_a_tied_output_layer_that_is_the_embedding_is_left_out_and_listed(
    tmp_path: Path,
) -> None:
    embedding = write_random_folder(tmp_path / "hf", TIED)[EMBEDDING]
    embedding[0, 0] = torch.nan  # which is equal to itself as bytes
    write_random_folder(
        tmp_path / "hf", TIED, **{EMBEDDING: embedding, HEAD: embedding.clone(), BUFFER: torch.ones(2)}
    )
    report = megackpt.import_huggingface(tmp_path / "hf", tmp_path / "new")
    equal = f"{HEAD} (equal to {EMBEDDING}, to which the config ties it)"
    assert report.left_out == (equal, f"{BUFFER} (which models compute)")


def test_another_output_layer_is_an_error_with_a_choice(tmp_path: Path, capsys: Any) -> None:
    stored = write_random_folder(tmp_path / "hf", TIED, **{HEAD: torch.full((24, 8), 9.0)})
    with pytest.raises(MapError, match=r"has other bytes than .*tied_output='untie'"):
        megackpt.import_huggingface(tmp_path / "hf", tmp_path / "new")
    assert not (tmp_path / "new").exists()
    convert = ["convert", str(tmp_path / "hf"), str(tmp_path / "untied"), "--map", "auto"]
    assert main([*convert, "--tied-output", "untie"]) == 0
    megackpt.export_huggingface(tmp_path / "untied", tmp_path / "back")
    assert torch.equal(load_file(tmp_path / "back" / "model.safetensors")[HEAD], stored[HEAD])
    assert json.loads((tmp_path / "back" / "config.json").read_text())["tie_word_embeddings"] is False
    report = megackpt.import_huggingface(tmp_path / "hf", tmp_path / "dropped", tied_output="drop")
    assert report.left_out == (f"{HEAD} (dropped as chosen: the config ties it to the embedding)",)
    assert "output_layer.weight" not in megackpt.load_tensors_metadata(tmp_path / "dropped")


def test_a_tensor_that_cannot_be_loaded_is_not_left_out_silently(tmp_path: Path) -> None:
    write_random_folder(tmp_path / "hf", CONFIG, **{"model.extra": torch.ones((1,) * 65)})
    with pytest.raises(FormatError, match=r"'model.extra' has 65 dims"):
        megackpt.import_huggingface(tmp_path / "hf", tmp_path / "new")


def test_an_export_does_not_leave_out_what_it_cannot_read(tmp_path: Path) -> None:
    write_random_folder(tmp_path / "hf", CONFIG)
    megackpt.import_huggingface(tmp_path / "hf", tmp_path / "new")
    ours = megackpt.load_plain_tensors(tmp_path / "new")
    (tmp_path / "ours").mkdir()
    save_file(ours, tmp_path / "ours" / "model.safetensors")
    megackpt.export_huggingface(tmp_path / "ours", tmp_path / "out", config=CONFIG)
    save_file({**ours, "extra": torch.ones((1,) * 65)}, tmp_path / "ours" / "model.safetensors")
    with pytest.raises(FormatError, match=r"'extra' has 65 dims"):
        megackpt.export_huggingface(tmp_path / "ours", tmp_path / "out2", config=CONFIG)


class Leaking(Family):
    """A family of a user whose maps are made in another way, and have a hole."""

    def region_map(self, config: Any, keys: Any = ()) -> RegionMap:
        made = family_of(config).region_map(config, keys)
        return RegionMap(made.left, made.right, made.pairs[1:])


def test_a_map_of_a_family_is_proved_where_it_is_chosen(tmp_path: Path) -> None:
    write_random_folder(tmp_path / "hf", CONFIG)
    leaking = Leaking("leaking", ("llama",), family_of(CONFIG).rules)
    with pytest.raises(MapError, match="is in no pair"):
        megackpt.import_huggingface(tmp_path / "hf", tmp_path / "new", map=leaking)
    with pytest.raises(MapError, match="is in no pair"):
        megackpt.load({}, tmp_path / "hf", maps=leaking)


@pytest.mark.parametrize(
    "model",
    [
        {"num_hidden_layers": 10_000},
        {"model_type": "mixtral", "num_local_experts": 9999, "num_key_value_heads": 2},
    ],
)
def test_a_config_of_far_more_arrays_than_the_folder_has_makes_no_map(
    model: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_random_folder(tmp_path / "hf", CONFIG)
    megackpt.import_huggingface(tmp_path / "hf", tmp_path / "small")
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**CONFIG, **model}))
    monkeypatch.setattr(sys.modules["megackpt.maps.family"], "region_map", None)
    for call in (
        lambda: megackpt.import_huggingface(tmp_path / "hf", tmp_path / "new"),
        lambda: megackpt.load({}, tmp_path / "hf", maps="auto"),
        lambda: megackpt.export_huggingface(tmp_path / "small", tmp_path / "out", config={**CONFIG, **model}),
    ):
        with pytest.raises(MapError, match=r"Give the config\.json of the model that was saved"):
            call()


def test_an_error_is_a_screen_whatever_it_lists(tmp_path: Path) -> None:
    write_random_folder(tmp_path / "hf", CONFIG, **{"x" * 3000 + str(i): torch.ones(1) for i in range(50)})
    with pytest.raises(MapError, match=r"and 40 more \(50 in all\)") as raised:
        megackpt.import_huggingface(tmp_path / "hf", tmp_path / "new")
    assert len(str(raised.value)) < 2500
    long = CheckpointError("what " + "k" * 100_000 + "\n" + "l" * 100_000 + " how")
    assert str(long).startswith("what k")
    assert str(long).endswith("l how")
    assert len(str(long)) <= 2400


ROPES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"rope_type": "default", "rope_theta": 5e5}, {"rope_theta": 5e5, "rope_scaling": None}),
    (
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ),
    ({"rope_theta": 7.0, "partial_rotary_factor": 0.5}, {"rope_theta": 7.0, "partial_rotary_factor": 0.5}),
    (
        {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}},
        {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": None},
    ),
]


@pytest.mark.parametrize(("newer", "older"), ROPES)
def test_an_export_has_the_rotary_positions_in_both_spellings(
    newer: dict[str, Any], older: dict[str, Any], tmp_path: Path
) -> None:
    write_random_folder(tmp_path / "hf", {**CONFIG, "rope_parameters": newer})
    megackpt.import_huggingface(tmp_path / "hf", tmp_path / "new")
    megackpt.export_huggingface(tmp_path / "new", tmp_path / "back")
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    assert written["rope_parameters"] == newer
    assert {name: written[name] for name in older} == older


@pytest.mark.parametrize("value", [b"x", torch.ones(1), {1: 2}, {1, 2}, np.float32(1), torch.float32])
def test_a_config_that_is_no_json_is_an_error_that_names_its_path(value: Any, tmp_path: Path) -> None:
    write_random_folder(tmp_path / "hf", CONFIG)
    megackpt.import_huggingface(tmp_path / "hf", tmp_path / "new")
    with pytest.raises(DeclarationError, match=r"config.a.1 (is a|has the key)"):
        megackpt.export_huggingface(tmp_path / "new", tmp_path / "out", config={**CONFIG, "a": [0, value]})
    assert not (tmp_path / "out").exists()


class Killed(BaseException):
    pass


@pytest.mark.parametrize("steps", range(5))
def test_an_export_that_is_killed_in_its_end_keeps_its_files(
    steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_random_folder(tmp_path / "hf", CONFIG)
    megackpt.import_huggingface(tmp_path / "hf", tmp_path / "new")

    def export() -> Any:
        return megackpt.export_huggingface(tmp_path / "new", tmp_path / "out", max_file_bytes=2000)

    end = ExportTarget.end

    def killed_end(target: ExportTarget) -> None:
        left, unlink = steps, target.store.delete

        def delete(names: list[str]) -> None:
            nonlocal left
            for name in names:
                if left == 0:
                    raise Killed
                left -= 1
                unlink([name])

        monkeypatch.setattr(target.store, "delete", delete)
        end(target)

    monkeypatch.setattr(ExportTarget, "end", killed_end)
    with pytest.raises(Killed):
        export()
    monkeypatch.setattr(ExportTarget, "end", end)
    (tmp_path / "out" / temporary_name("config.json")).write_text("left")
    report = export()
    assert report.kept_files == report.files > 1
    assert not [f.name for f in (tmp_path / "out").iterdir() if f.name.startswith(".")]
    assert huggingface_writing.FOLDER.rstrip("/") not in {f.name for f in (tmp_path / "out").iterdir()}


def test_a_metadata_json_of_another_program_is_no_checkpoint(tmp_path: Path) -> None:
    stored = write_random_folder(tmp_path / "hf", CONFIG)
    (tmp_path / "hf" / "metadata.json").write_text('{"author": "somebody"}')
    assert megackpt.load_plain_tensors(tmp_path / "hf").keys() == stored.keys()
    megackpt.import_huggingface(tmp_path / "hf", tmp_path / "new")
    megackpt.export_huggingface(tmp_path / "new", tmp_path / "hf", overwrite=True)
    assert (tmp_path / "hf" / "metadata.json").read_text() == '{"author": "somebody"}'
    # One of ours that is damaged is not taken for that of another program.
    (tmp_path / "new" / "metadata.json").write_text("{}")
    with pytest.raises(FormatError):
        megackpt.load_plain_tensors(tmp_path / "new")
