"""Folders that we do not read as they are: the advice for quantised ones works, and text is taken alone."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import megackpt
from megackpt.errors import MapError
from megackpt.training.parallel import ParallelGroups, ParallelLayout
from models import build_gpt
from models.huggingface import gpt_config
from tests.support.huggingface_models import assert_close, randomised, token_ids

transformers = pytest.importorskip("transformers", reason="the extra huggingface is not installed")

SIZES = {
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
FP8 = {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 2, "layer_types": ["full_attention"] * 2}


def _in_fp8(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Return codes of 8 bits, and a scale of 1/8 for each block of 32 x 32."""
    if "_proj.weight" not in name:
        return {name: weight.bfloat16()}
    scales = torch.full([extent // 32 for extent in weight.shape], 0.125)
    return {name: (weight * 8).to(torch.float8_e4m3fn), f"{name}_scale_inv": scales}


def _in_mxfp4(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Return codes of 4 bits by two, and an exponent for each 32 inputs; both random."""
    if not name.endswith(("gate_up_proj", "down_proj")):
        return {name: weight.bfloat16()}
    experts, inputs, outputs = weight.shape
    return {
        f"{name}_blocks": torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8),
        f"{name}_scales": torch.randint(120, 130, (experts, outputs, inputs // 32), dtype=torch.uint8),
    }


QUANTISED: dict[str, tuple[str, dict[str, Any], Callable[[str, Tensor], dict[str, Tensor]]]] = {
    "fp8": ("llama", {"quantization_config": FP8}, _in_fp8),
    "mxfp4": ("gpt_oss", {**EXPERTS, "quantization_config": {"quant_method": "mxfp4"}}, _in_mxfp4),
}


@pytest.mark.parametrize("method", QUANTISED)
def test_the_advice_gives_a_folder_that_is_imported(method: str, tmp_path: Path) -> None:
    family, fields, quantised = QUANTISED[method]
    torch.manual_seed(0)
    fields = {**SIZES, **fields}
    config = transformers.AutoConfig.for_model(
        family, **{k: v for k, v in fields.items() if k != "quantization_config"}
    )
    model: Any = transformers.AutoModelForCausalLM.from_config(config)
    stored: dict[str, Tensor] = {}
    for name, weight in model.state_dict().items():
        stored |= quantised(name, weight)
    folder, plain = tmp_path / "folder", tmp_path / "plain"
    folder.mkdir()
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    written = {**json.loads(config.to_json_string()), "quantization_config": fields["quantization_config"]}
    (folder / "config.json").write_text(json.dumps(written))
    with pytest.raises(MapError, match=rf"quantised .{method};") as failed:
        megackpt.import_huggingface(folder, tmp_path / "imported")

    advice = re.search(r"transformers 5: (.*)\. Then give", str(failed.value))
    assert advice is not None
    classes = {name: getattr(transformers, name) for name in re.findall(r"\w+Config|Auto\w+", advice[1])}
    names: dict[str, Any] = {**classes, "folder": folder, "plain": plain}
    exec(advice[1], names)
    megackpt.import_huggingface(plain, tmp_path / "imported")
    megackpt.export_huggingface(tmp_path / "imported", tmp_path / "again")
    read: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    expected = names["model"].state_dict()
    assert read.state_dict().keys() == expected.keys()
    assert all(torch.equal(array, expected[key]) for key, array in read.state_dict().items())
    assert all(array.dtype == torch.bfloat16 for array in expected.values())


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
MULTIMODAL: dict[str, tuple[str, dict[str, Any]]] = {
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
    config = transformers.AutoConfig.for_model(family, **MULTIMODAL[family][1])
    config._attn_implementation = config.text_config._attn_implementation = "eager"
    model = randomised(transformers.AutoModelForImageTextToText.from_config(config).eval(), 0)
    model.save_pretrained(path)
    return model


@pytest.mark.parametrize("spelling", ["as it is written", "of the modules"])
@pytest.mark.parametrize("family", MULTIMODAL)
def test_logits_are_those_of_the_whole_model_on_text(family: str, spelling: str, tmp_path: Path) -> None:
    whole, folder = _folder(tmp_path / "folder", family), tmp_path / "folder"
    if spelling == "of the modules":  # in memory; also what some folders have
        tied = {"lm_head.weight"} if family == "gemma3" else set()
        stored = {key: value for key, value in whole.state_dict().items() if key not in tied}
        assert stored.keys() != load_file(folder / "model.safetensors").keys()
        save_file(stored, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(MapError, match=rf"model_type '{family}'.*text_only=True.*--text-only"):
        megackpt.import_huggingface(folder, tmp_path / "imported")
    report = megackpt.import_huggingface(folder, tmp_path / "imported", text_only=True)
    assert report.map == MULTIMODAL[family][0]
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
    text: Any = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "text", attn_implementation="eager"
    )
    with torch.no_grad():
        assert torch.equal(text(ids).logits, expected)
