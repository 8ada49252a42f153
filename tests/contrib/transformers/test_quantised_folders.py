"""What the error on a quantised folder advises works: transformers dequantises it, and we import that."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import megackpt
from megackpt import MapError

pytest.importorskip("transformers", reason="the extra huggingface is not installed")

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


CASES: dict[str, tuple[str, dict[str, Any], Callable[[str, Tensor], dict[str, Tensor]]]] = {
    "fp8": ("llama", {"quantization_config": FP8}, _in_fp8),
    "mxfp4": ("gpt_oss", {**EXPERTS, "quantization_config": {"quant_method": "mxfp4"}}, _in_mxfp4),
}


@pytest.mark.parametrize("method", CASES)
def test_the_advice_gives_a_folder_that_is_imported(method: str, tmp_path: Path) -> None:
    import transformers

    family, fields, quantised = CASES[method]
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
