"""Adapters: merged into the weights by an export, and folders of peft that do not fit. peft is not needed.

Tolerance: both sums have the same float32 terms, at most 8 products and the weight, perhaps in another order;
DoRA divides by lengths, whose relative errors are of the same size.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import megackpt
from megackpt import CheckpointError, DeclarationError, StorageError
from megackpt.cli import main
from megackpt.contrib.peft import export_peft, import_peft
from megackpt.errors import MapError
from megackpt.storage import LocalStore
from megackpt.testing.faulty_store import FaultyStore
from megackpt.training.parallel import LoRAConfig, ParallelGroups, ParallelLayout, add_adapters
from megackpt.training.parallel.adapters import (
    adapter_metadata,
    adapter_state,
    base_state,
    merge_adapter,
    reset_magnitudes,
)
from models import build_gpt, init_weights
from models.huggingface import gpt_config
from tests.support.effort import sampled
from tests.support.gpt import assert_close
from tests.support.gpt import randomise_adapters as randomise
from tests.support.huggingface_folders import declared, flat_ranges, folder_tensors, loaded_arrays

RELATIVE = 6e-7
CONFIG = {
    "model_type": "qwen2_moe", "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24, "num_experts": 3,
    "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 12,
}  # fmt: skip
ADAPTERS = {
    "experts": LoRAConfig(rank=4, targets=("linear_fc1", "linear_fc2"), alpha=2, rank_stabilised=True),
    "attention": LoRAConfig(rank=8, targets=("linear_qkv.v", "linear_proj"), alpha=16, dora=True),
    "queries": LoRAConfig(rank=2, targets=("linear_qkv",), dora=True),
}


def _model(names: Sequence[str], config: dict[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    """Return a model with adapters, all of random values."""
    groups = ParallelGroups.create(ParallelLayout())
    model = build_gpt(replace(gpt_config(config), params_dtype=dtype), groups)
    init_weights(model, seed=1)
    for name in names:
        add_adapters(model, ADAPTERS[name], groups, name=name, seed=2)
        reset_magnitudes(model, name)
    randomise(adapter_state(model.sharded_state_dict()))
    return model


def _saved(directory: Path, names: Sequence[str] = tuple(ADAPTERS), **options: Any) -> Path:
    """Save a model with its adapters."""
    model = _model(names, CONFIG, **options)
    megackpt.save(model.sharded_state_dict(), directory / "all", content_metadata=adapter_metadata(model))
    return directory / "all"


def _merged(directory: Path, names: Sequence[str], **options: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of the folder of a model into which these adapters were merged."""
    model = _model(tuple(ADAPTERS), CONFIG, **options)
    for name in names:
        merge_adapter(model, name)
    megackpt.save(base_state(model.sharded_state_dict()), directory / "merged")
    megackpt.export_huggingface(directory / "merged", directory / "expected", config=CONFIG)
    return folder_tensors(directory / "expected")


def _assert_close(
    actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], relative: float
) -> None:
    assert actual.keys() == expected.keys()
    for key, tensor in expected.items():
        assert_close(actual[key].float(), tensor.float(), key, relative=relative)


@sampled(6)
@pytest.mark.parametrize(
    ("names", "buffer_bytes"),
    [
        (["attention"], 50),  # rows are cut
        (["experts", "queries", "attention"], 200),
        (["experts"], 10**6),  # many weights are in one window
    ],
    ids=["one", "all", "experts"],
)
def test_adapters_are_merged_by_name_as_in_a_model(
    names: list[str], buffer_bytes: int, tmp_path: Path
) -> None:
    report = megackpt.export_huggingface(
        _saved(tmp_path), tmp_path / "folder", config=CONFIG, merge_adapters=names, buffer_bytes=buffer_bytes
    )
    assert report.merged_adapters == tuple(names)
    _assert_close(folder_tensors(tmp_path / "folder"), _merged(tmp_path, names), RELATIVE)


def test_sums_of_bfloat16_weights_are_rounded_once(tmp_path: Path) -> None:
    saved = _saved(tmp_path, dtype=torch.bfloat16)
    for dtype in ("float32", "bfloat16"):
        megackpt.export_huggingface(
            saved,
            tmp_path / dtype,
            config=CONFIG,
            dtype=dtype,
            merge_adapters=["experts"],
            buffer_bytes=10**6,
        )
    exact, rounded = folder_tensors(tmp_path / "float32"), folder_tensors(tmp_path / "bfloat16")
    for key, tensor in exact.items():
        difference = (rounded[key].float() - tensor).abs()
        # Half of the distance of two neighbours, and what another order of float32 sums may add.
        assert (difference <= tensor.abs() * 2**-8 * (1 + 2**-12)).all(), key
    assert any(not torch.equal(rounded[key].float(), tensor) for key, tensor in exact.items())


def test_masters_of_weights_and_of_adapters_are_taken(tmp_path: Path) -> None:
    arrays = loaded_arrays(_saved(tmp_path))
    rounded = {key: array.bfloat16() for key, array in arrays.items()}
    state = {"model": declared(rounded, 0, 1), "optimizer": flat_ranges(arrays, 0, 1)}
    content = megackpt.load_content_metadata(tmp_path / "all")
    megackpt.save(state, tmp_path / "low", content_metadata=content)
    options: dict[str, Any] = {"config": CONFIG, "merge_adapters": ["attention", "experts"]}
    megackpt.export_huggingface(
        tmp_path / "low", tmp_path / "folder", weights="masters", **options, dtype="float32"
    )
    _assert_close(folder_tensors(tmp_path / "folder"), _merged(tmp_path, options["merge_adapters"]), RELATIVE)


def test_layers_of_adapters_may_be_stored_otherwise_than_those_of_weights(tmp_path: Path) -> None:
    saved = _saved(tmp_path)
    content = megackpt.load_content_metadata(saved)
    arrays = {key: array for key, array in loaded_arrays(saved).items() if ".adapter." in key}
    apart = {
        key.replace(".layers.", f".layers.{layer}."): array[layer].clone()
        for key, array in arrays.items()
        for layer in range(CONFIG["num_hidden_layers"])
    }
    megackpt.save(declared(apart, 0, 1), tmp_path / "apart", content_metadata=content)
    names = ["queries", "experts"]
    report = megackpt.export_huggingface(
        saved, tmp_path / "folder", config=CONFIG, merge_adapters=names, adapters_from=tmp_path / "apart"
    )
    assert report.merged_adapters == ("queries", "experts")
    _assert_close(folder_tensors(tmp_path / "folder"), _merged(tmp_path, names), RELATIVE)


def test_files_of_an_interrupted_export_stay_only_if_the_adapters_are_the_same(tmp_path: Path) -> None:
    saved = _saved(tmp_path)
    fault = FaultyStore(
        LocalStore(tmp_path / "folder"), fail_at=lambda o: o.kind == "open_writer" and "model-00002" in o.name
    )
    options: dict[str, Any] = {"config": CONFIG, "max_file_bytes": 5000, "workers": 1}
    for names, kept in ((["queries"], 1), (["queries", "experts"], 0)):
        with pytest.raises(StorageError, match="No space left"):
            megackpt.export_huggingface(saved, fault, merge_adapters=["queries"], **options)
        report = megackpt.export_huggingface(
            saved, tmp_path / "folder", merge_adapters=names, overwrite=True, **options
        )
        assert report.kept_files == kept
        for file in (tmp_path / "folder").iterdir():
            file.unlink()


def test_the_command_merges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved, config = _saved(tmp_path), tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    export = ["convert", str(saved), str(tmp_path / "folder"), "--to", "huggingface", "--config", str(config)]
    merge = ["--merge-adapter", "experts", "--merge-adapter", "attention", "--adapters-from", str(saved)]
    assert main([*export, *merge]) == 0
    assert ", by the map qwen2_moe, with experts, attention merged; read again" in capsys.readouterr().out
    _assert_close(folder_tensors(tmp_path / "folder"), _merged(tmp_path, ["experts", "attention"]), RELATIVE)


@sampled(6)
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, MapError, r"has adapters, as 'decoder.*merge_adapters="),
        ({"merge_adapters": ["german"]}, DeclarationError, "no adapter 'german'; it has experts, attention"),
        ({"merge_adapters": "experts"}, DeclarationError, r"'experts'. Give a sequence of names"),
        ({"merge_adapters": ["experts"] * 2}, DeclarationError, "Name each adapter once"),
        ({"adapters_from": "elsewhere"}, DeclarationError, "no adapter. Name some with merge_adapters"),
    ],
)  # fmt: skip
def test_names_that_do_not_fit_are_an_error(
    options: dict[str, Any], error: type[CheckpointError], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        megackpt.export_huggingface(_saved(tmp_path), tmp_path / "folder", config=CONFIG, **options)
    assert not (tmp_path / "folder").exists()


@sampled(6)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda arrays: _without(arrays, "linear_in.weight"), "not 'decoder.*linear_in.weight'. Save all"),
        (lambda arrays: _without(arrays, "magnitude"), "not 'decoder.*magnitude.*'. Save all of the adapter"),
        (lambda arrays: {}, "no arrays of the adapter 'attention'"),
        (
            lambda arrays: {k: a[:1] for k, a in arrays.items()},
            "changes 1 of the 2 layers of .*. Give the checkpoint",
        ),
        (lambda arrays: {k: a[..., :3] for k, a in arrays.items()}, r"do not fit the weight .*\(16, 16\)"),
        (lambda arrays: {k.replace("proj", "j"): a for k, a in arrays.items()}, "that is not there"),
    ],
    ids=range(6),
)
def test_adapters_that_do_not_fit_are_an_error(change: Any, message: str, tmp_path: Path) -> None:
    saved = _saved(tmp_path)
    own = {key: array for key, array in loaded_arrays(saved).items() if ".adapter.attention." in key}
    content = megackpt.load_content_metadata(saved)
    megackpt.save(declared(change(own), 0, 1), tmp_path / "changed", content_metadata=content)
    with pytest.raises(MapError, match=message):
        megackpt.export_huggingface(
            saved,
            tmp_path / "folder",
            config=CONFIG,
            merge_adapters=["attention"],
            adapters_from=tmp_path / "changed",
        )
    assert not (tmp_path / "folder").exists()


def _without(arrays: dict[str, torch.Tensor], end: str) -> dict[str, torch.Tensor]:
    return {key: array for key, array in arrays.items() if end not in key}


LLAMA_CONFIG = {
    "model_type": "llama", "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24,
}  # fmt: skip
MIXTRAL = {**LLAMA_CONFIG, "model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 2}
GPT2 = {"model_type": "gpt2", "vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 8}
MODEL = "base_model.model.model.layers.0.self_attn.q_proj."


def _saved_adapters(directory: Path, config: dict[str, Any] = LLAMA_CONFIG, *targets: str) -> Path:
    """Save an adapter of a new model; return the checkpoint."""
    groups = ParallelGroups.create(ParallelLayout())
    model = build_gpt(gpt_config(config), groups)
    add_adapters(model, LoRAConfig(rank=2, targets=targets or ("linear_qkv.q",)), groups)
    declared = adapter_state(model.sharded_state_dict())
    megackpt.save(declared, directory / "adapter", content_metadata=adapter_metadata(model))
    return directory / "adapter"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    export_peft(_saved_adapters(tmp_path), tmp_path / "folder", config=LLAMA_CONFIG)
    return tmp_path / "folder"


def _change(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "base", "message"),
    [
        ({"r": 4}, LLAMA_CONFIG, r"q_proj' have the shapes .*\(2, 16\).* rank 4 they are .*\(4, 16\)"),
        ({"use_dora": True}, LLAMA_CONFIG, r"lora_magnitude_vector': \(16,\).*compare r and use_dora"),
        ({"r": 0}, LLAMA_CONFIG, "rank of an adapter is 0"),
        ({"r": None}, LLAMA_CONFIG, "r is None"),
        ({"lora_dropout": "much"}, LLAMA_CONFIG, "lora_dropout is 'much'"),
        ({"lora_alpha": "much"}, LLAMA_CONFIG, "lora_alpha is 'much'"),
        ({"peft_type": "IA3"}, LLAMA_CONFIG, r"peft_type 'IA3' .*LORA without"),
        ({"modules_to_save": ["lm_head"]}, LLAMA_CONFIG, r"\['modules_to_save'\] special choices"),
        ({"bias": "all"}, LLAMA_CONFIG, r"\['bias'\] special choices"),
        ({}, {**LLAMA_CONFIG, "hidden_size": 32}, r"q_proj' have the shapes .*they are .*\(2, 32\)"),
        ({}, {**LLAMA_CONFIG, "num_hidden_layers": 3}, r"layers\.2\.self_attn\.q_proj' have the shapes none"),
        ({}, {**LLAMA_CONFIG, "num_hidden_layers": 1}, r"no module 'model\.layers\.1\.self_attn\.q_proj'"),
        ({}, GPT2, r"no module 'model\.layers\.0\.self_attn\.q_proj'"),
    ],
)
def test_a_config_that_does_not_fit_is_an_error(
    folder: Path, changes: dict[str, Any], base: dict[str, Any], message: str
) -> None:
    _change(folder, **changes)
    with pytest.raises(CheckpointError, match=message):
        import_peft(folder, folder.parent / "imported", config=base)
    assert not (folder.parent / "imported").exists()


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
        import_peft(folder, folder.parent / "imported", config=LLAMA_CONFIG)


def test_files_that_are_damaged_or_missing_are_errors(folder: Path) -> None:
    (folder / "adapter_model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors is damaged"):
        import_peft(folder, folder.parent / "imported", config=LLAMA_CONFIG)
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"adapter_config\.json"):
        import_peft(folder, folder.parent / "imported", config=LLAMA_CONFIG)
    (folder / "adapter_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"adapter_config\.json"):
        import_peft(folder, folder.parent / "imported", config=LLAMA_CONFIG)


def test_an_export_needs_an_adapter_of_that_name_and_an_empty_target(folder: Path) -> None:
    source = folder.parent / "adapter"
    with pytest.raises(CheckpointError, match="no adapter 'other'; it has default"):
        export_peft(source, folder.parent / "other", adapter="other", config=LLAMA_CONFIG)
    with pytest.raises(CheckpointError, match="Give config="):
        export_peft(source, folder.parent / "other")
    with pytest.raises(CheckpointError, match=r"has an adapter\. Give overwrite=True"):
        export_peft(source, folder, config=LLAMA_CONFIG)
    assert len(export_peft(source, folder, config=LLAMA_CONFIG, overwrite=True)) == 2


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
        export_peft(_saved_adapters(tmp_path, config, target), tmp_path / "folder", config=config)
    assert not (tmp_path / "folder").exists()


def test_layers_that_the_base_model_lacks_cannot_be_exported(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attention.* has no place"):
        export_peft(
            _saved_adapters(tmp_path), tmp_path / "folder", config={**LLAMA_CONFIG, "num_hidden_layers": 1}
        )


def test_matrices_that_components_share_are_copied_for_each_module(tmp_path: Path) -> None:
    names = export_peft(
        _saved_adapters(tmp_path, LLAMA_CONFIG, "linear_qkv"), tmp_path / "folder", config=LLAMA_CONFIG
    )
    assert {name.rpartition(".")[2] for name in names} == {"q_proj", "k_proj", "v_proj"}
    stored = load_file(tmp_path / "folder" / "adapter_model.safetensors")
    q, k = (stored[MODEL.replace("q_proj", name) + "lora_A.weight"] for name in ("q_proj", "k_proj"))
    assert torch.equal(q, k)
    assert stored[MODEL.replace("q_proj", "k_proj") + "lora_B.weight"].shape == (8, 2)
