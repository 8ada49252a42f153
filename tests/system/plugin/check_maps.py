"""Families of names of a third party, as they are installed; not collected by itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from megackpt_npyfiles.names import LLAMA, NANO
from safetensors.torch import save_file

import megackpt
from megackpt import MapError, ShardedTensor
from megackpt.cli import main
from megackpt.maps import family, family_of, known_families

CONFIG = {"model_type": "nano", "vocab": 5, "width": 3}


def test_it_is_known_by_name_and_by_model_type(capsys: pytest.CaptureFixture[str]) -> None:
    assert family("nano") is NANO
    assert family_of(CONFIG) is NANO
    assert main(["maps", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["families"]["nano"] == ["nano"]


def test_its_map_is_shown_and_loads_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head = torch.randn(3, 5)
    save_file({"embed": torch.randn(5, 3), "head": head}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert main(["maps", "show", "--config", str(tmp_path)]) == 0
    assert "every element of 2 arrays of ours and 2 of nano" in capsys.readouterr().out
    keys = ("embedding.word_embeddings.weight", "output_layer.weight")
    request = {key: ShardedTensor.from_rank_offsets(key, torch.zeros(5, 3)) for key in keys}
    assert torch.equal(megackpt.load(request, tmp_path, maps="auto")["output_layer.weight"], head.T)


def test_a_package_does_not_replace_our_families() -> None:
    assert family("llama") is not LLAMA
    with pytest.raises(MapError, match="model_type 'llama-of-nano'"):
        family_of({"model_type": "llama-of-nano"})


def test_what_cannot_be_used_is_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    known_families.cache_clear()
    known = known_families()
    assert {"nano", "llama", "gpt2"} <= known.keys()
    assert not {"broken", "text"} & known.keys()
    assert "Map broken (megackpt_npyfiles.names:nothing) cannot be used" in caplog.text
    assert "Map text (megackpt_npyfiles.names:NO_FAMILY) cannot be used: it is a str, not a" in caplog.text
