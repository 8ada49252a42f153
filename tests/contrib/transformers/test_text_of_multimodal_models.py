"""The text model of a multimodal folder is imported alone, and computes the logits of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import megackpt
from megackpt import MapError
from megackpt.parallel import ParallelGroups, ParallelLayout
from models import build_gpt
from models.huggingface import gpt_config
from tests.support.huggingface_models import assert_close, randomised, token_ids

pytest.importorskip("transformers", reason="the extra huggingface is not installed")

TEXT = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 64,
    "sliding_window": 5,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
IMAGE = {"mm_tokens_per_image": 4, "boi_token_index": 37, "eoi_token_index": 38, "image_token_index": 39}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": (
        "gemma3",
        {"text_config": TEXT | {"layer_types": LAYER_TYPES}, "vision_config": VISION, **IMAGE},
    ),
    "mistral3": (
        "mistral",
        {
            "text_config": TEXT | {"model_type": "mistral"},
            "vision_config": VISION | {"model_type": "pixtral"},
            "image_token_index": 39,
            "tie_word_embeddings": False,
        },
    ),
}


def _folder(path: Path, family: str) -> Any:
    """Write a random multimodal model; return it."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.for_model(family, **CASES[family][1])
    config._attn_implementation = config.text_config._attn_implementation = "eager"
    model = randomised(AutoModelForImageTextToText.from_config(config).eval(), 0)
    model.save_pretrained(path)
    return model


@pytest.mark.parametrize("spelling", ["as it is written", "of the modules"])
@pytest.mark.parametrize("family", CASES)
def test_logits_are_those_of_the_whole_model_on_text(family: str, spelling: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    whole, folder = _folder(tmp_path / "folder", family), tmp_path / "folder"
    if spelling == "of the modules":  # in memory; also what some folders have
        tied = {"lm_head.weight"} if family == "gemma3" else set()
        stored = {key: value for key, value in whole.state_dict().items() if key not in tied}
        assert stored.keys() != load_file(folder / "model.safetensors").keys()
        save_file(stored, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(MapError, match=rf"model_type '{family}'.*text_only=True.*--text-only"):
        megackpt.import_huggingface(folder, tmp_path / "imported")
    report = megackpt.import_huggingface(folder, tmp_path / "imported", text_only=True)
    assert report.map == CASES[family][0]
    all_names = megackpt.load_tensors_metadata(folder).keys()
    assert set(report.left_out) == {name for name in all_names if "language" not in name} - {"lm_head.weight"}
    assert any("vision_tower" in name for name in report.left_out)

    content = megackpt.load_content_metadata(tmp_path / "imported")
    config = gpt_config(content["huggingface_config"])
    model = build_gpt(config, ParallelGroups.create(ParallelLayout()))
    megackpt.load({"model": model.sharded_state_dict()}, tmp_path / "imported")
    ids = token_ids(config.vocab_size) % 37  # no tokens of images
    with torch.no_grad():
        expected = whole(ids).logits
    (chunk,) = model
    with torch.no_grad():
        assert_close(chunk(ids).transpose(0, 1)[..., : config.vocab_size].numpy(), expected)

    # Exported, it is a model of text alone.
    megackpt.export_huggingface(tmp_path / "imported", tmp_path / "text")
    text: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "text", attn_implementation="eager")
    with torch.no_grad():
        assert torch.equal(text(ids).logits, expected)
