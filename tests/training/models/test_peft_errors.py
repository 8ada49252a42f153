"""Adapter folders of peft that do not fit, and adapters that peft has no form for. peft is not needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import megackpt
from megackpt import CheckpointError
from megackpt.integrations.peft import export_peft, import_peft
from megackpt.parallel import (
    LoRAConfig,
    ParallelGroups,
    ParallelLayout,
    adapter_metadata,
    adapter_state,
    add_adapters,
)
from models import build_gpt
from models.huggingface import gpt_config

CONFIG = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
}
MIXTRAL = {**CONFIG, "model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 2}
GPT2 = {"model_type": "gpt2", "vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 8}
MODEL = "base_model.model.model.layers.0.self_attn.q_proj."


def _saved(directory: Path, config: dict[str, Any] = CONFIG, *targets: str) -> Path:
    """Save an adapter of a new model; return the checkpoint."""
    groups = ParallelGroups.create(ParallelLayout())
    model = build_gpt(gpt_config(config), groups)
    add_adapters(model, LoRAConfig(rank=2, targets=targets or ("linear_qkv.q",)), groups)
    declared = adapter_state(model.sharded_state_dict())
    megackpt.save(declared, directory / "adapter", content_metadata=adapter_metadata(model))
    return directory / "adapter"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    export_peft(_saved(tmp_path), tmp_path / "folder", config=CONFIG)
    return tmp_path / "folder"


def _change(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"r": 4}, r"q_proj' have the shapes .*\(2, 16\).* rank 4 they are .*\(4, 16\)"),
        ({"use_dora": True}, r"lora_magnitude_vector': \(16,\).*compare r and use_dora"),
        ({"r": 0}, "rank of an adapter is 0"),
        ({"r": None}, "rank of an adapter is None"),
        ({"lora_dropout": "much"}, "dropout of an adapter is 'much'"),
        ({"lora_alpha": "much"}, "alpha of an adapter is 'much'"),
        ({"peft_type": "IA3"}, r"peft_type 'IA3' .*LORA without"),
        ({"modules_to_save": ["lm_head"]}, r"\['modules_to_save'\] special choices"),
        ({"bias": "all"}, r"\['bias'\] special choices"),
    ],
)
def test_a_config_that_does_not_fit_is_an_error(folder: Path, changes: dict[str, Any], message: str) -> None:
    _change(folder, **changes)
    with pytest.raises(CheckpointError, match=message):
        import_peft(folder, folder.parent / "imported", config=CONFIG)
    assert not (folder.parent / "imported").exists()


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ({**CONFIG, "hidden_size": 32}, r"q_proj' have the shapes .*they are .*\(2, 32\)"),
        ({**CONFIG, "num_hidden_layers": 3}, r"layers\.2\.self_attn\.q_proj' have the shapes none"),
        ({**CONFIG, "num_hidden_layers": 1}, r"no module 'model\.layers\.1\.self_attn\.q_proj'"),
        (GPT2, r"no module 'model\.layers\.0\.self_attn\.q_proj'"),
    ],
)
def test_another_base_model_is_an_error(folder: Path, base: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        import_peft(folder, folder.parent / "imported", config=base)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (MODEL.replace("q_proj", "x_proj") + "lora_A.weight", r"no module .*x_proj"),
        ("base_model.model.lm_head.lora_A.weight", r"no module 'lm_head'"),
        (MODEL + "lora_embedding_A", "is no tensor of LoRA"),
    ],
)
def test_tensors_of_unknown_modules_are_errors(folder: Path, name: str, message: str) -> None:
    path = folder / "adapter_model.safetensors"
    save_file({**load_file(path), name: torch.zeros(2, 16)}, path)
    with pytest.raises(CheckpointError, match=message):
        import_peft(folder, folder.parent / "imported", config=CONFIG)


def test_files_that_are_damaged_or_missing_are_errors(folder: Path) -> None:
    (folder / "adapter_model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors is damaged"):
        import_peft(folder, folder.parent / "imported", config=CONFIG)
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"adapter_config\.json"):
        import_peft(folder, folder.parent / "imported", config=CONFIG)
    (folder / "adapter_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"adapter_config\.json"):
        import_peft(folder, folder.parent / "imported", config=CONFIG)


def test_an_export_needs_an_adapter_of_that_name_and_an_empty_target(folder: Path) -> None:
    source = folder.parent / "adapter"
    with pytest.raises(CheckpointError, match="no adapter 'other'; it has default"):
        export_peft(source, folder.parent / "other", adapter="other", config=CONFIG)
    with pytest.raises(CheckpointError, match="Give config="):
        export_peft(source, folder.parent / "other")
    with pytest.raises(CheckpointError, match=r"has an adapter\. Give overwrite=True"):
        export_peft(source, folder, config=CONFIG)
    assert len(export_peft(source, folder, config=CONFIG, overwrite=True)) == 2


@pytest.mark.parametrize(
    ("config", "target", "message"),
    [
        (
            GPT2,
            "linear_qkv.q",
            r"c_attn' of the base model has one adapter for all its rows, .*target 'self_att",
        ),
        (MIXTRAL, "experts.linear_fc1.up", r"experts\.gate_up_proj' of the base model has one adapter"),
    ],
)
def test_an_adapter_without_a_form_in_a_folder_is_an_error(
    tmp_path: Path, config: dict[str, Any], target: str, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        export_peft(_saved(tmp_path, config, target), tmp_path / "folder", config=config)
    assert not (tmp_path / "folder").exists()


def test_layers_that_the_base_model_lacks_cannot_be_exported(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attention.* has no place"):
        export_peft(_saved(tmp_path), tmp_path / "folder", config={**CONFIG, "num_hidden_layers": 1})


def test_matrices_that_components_share_are_copied_for_each_module(tmp_path: Path) -> None:
    names = export_peft(_saved(tmp_path, CONFIG, "linear_qkv"), tmp_path / "folder", config=CONFIG)
    assert {name.rpartition(".")[2] for name in names} == {"q_proj", "k_proj", "v_proj"}
    stored = load_file(tmp_path / "folder" / "adapter_model.safetensors")
    q, k = (stored[MODEL.replace("q_proj", name) + "lora_A.weight"] for name in ("q_proj", "k_proj"))
    assert torch.equal(q, k)
    assert stored[MODEL.replace("q_proj", "k_proj") + "lora_B.weight"].shape == (8, 2)
