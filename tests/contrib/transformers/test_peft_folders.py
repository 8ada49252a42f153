"""Adapters of two ranks of tp in peft's folder, loaded by peft on the Hugging Face model, and back.

Tolerance of logits: as in tests of families, 1e-5 of the largest. Merged weights: ours and peft's are the sum
of a weight and a product of two matrices with 8 terms, in float32; both round each term and sum, so that they
differ by at most about 10 * 2^-24 = 6e-7 of the largest element. DoRA multiplies rows with a quotient, whose
relative error of the same size is that of sums of squares.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt.contrib.peft import export_peft, import_peft
from megackpt.testing.ranks import RankPool
from megackpt.training.parallel import LoRAConfig, ParallelGroups, ParallelLayout, add_adapters
from megackpt.training.parallel.adapters import (
    adapter_metadata,
    adapter_state,
    base_state,
    merge_adapter,
    reset_magnitudes,
)
from models import GPTConfig, build_gpt
from tests.support.effort import sampled
from tests.support.gpt import assert_close as assert_arrays_close
from tests.support.gpt import randomise_adapters as randomise
from tests.support.huggingface_models import (
    assert_close,
    fill,
    logits_of,
    random_config,
    random_model,
    reference,
    token_ids,
)

# peft 0.21 reads an attribute that transformers 5.23 has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

MERGED = 6e-7
TP2 = ParallelLayout(tp=2)  # experts are cut over it, too
ATTENTION = ("linear_qkv.q", "linear_qkv.v", "linear_proj")
ADAPTERS = {
    "llama": LoRAConfig(rank=8, targets=(*ATTENTION, "linear_fc1", "linear_fc2"), alpha=4),
    "qwen3": LoRAConfig(rank=4, targets=ATTENTION, alpha=2.5, rank_stabilised=True, dora=True),
    "gpt2": LoRAConfig(rank=2, targets=("linear_qkv", "mlp.linear_fc1"), dora=True),
    "mixtral": LoRAConfig(rank=2, targets=("linear_qkv.k", "experts.linear_fc1", "experts.linear_fc2")),
    "qwen2_moe": LoRAConfig(rank=2, targets=("linear_fc1", "linear_fc2")),  # also shared experts
    "qwen3_moe": LoRAConfig(rank=2, targets=("experts.linear_fc1",)),
}


def _base(config: GPTConfig, weights: Any, groups: ParallelGroups) -> Any:
    model = build_gpt(config, groups)
    arrays = {key: torch.from_numpy(array) for key, array in weights.items()}
    fill(base_state(model.sharded_state_dict()), arrays)
    return model


def _save(config: GPTConfig, weights: Any, lora: LoRAConfig, directory: Path) -> Any:
    """Save an adapter alone, with its base, and merged into it, and the base alone; return the logits."""
    groups = ParallelGroups.create(TP2)
    model = _base(config, weights, groups)
    add_adapters(model, lora, groups, seed=3)
    reset_magnitudes(model)
    declared = adapter_state(model.sharded_state_dict())
    randomise(declared)
    megackpt.save(declared, directory / "adapter", content_metadata=adapter_metadata(model))
    megackpt.save(model.sharded_state_dict(), directory / "all", content_metadata=adapter_metadata(model))
    megackpt.save(base_state(model.sharded_state_dict()), directory / "base")
    logits = logits_of(model, config, groups)
    merge_adapter(model)
    megackpt.save(model.sharded_state_dict(), directory / "merged")
    return logits


def _load(config: GPTConfig, weights: Any, lora: LoRAConfig, directory: Path) -> Any:
    """Return the logits with an adapter of a checkpoint."""
    groups = ParallelGroups.create(TP2)
    model = _base(config, weights, groups)
    add_adapters(model, lora, groups)
    megackpt.load(adapter_state(model.sharded_state_dict()), directory, strict="raise_all")
    return logits_of(model, config, groups)


def _numpy(family: str) -> tuple[GPTConfig, Any]:
    ours, arrays, _ = reference(family, 0)
    return ours, {key: value.numpy() for key, value in arrays.items()}


@sampled(6)
@pytest.mark.parametrize("family", ADAPTERS)
def test_peft_computes_what_two_ranks_of_tp_did_and_merges_as_they_do(
    rank_pool: RankPool, tmp_path: Path, family: str
) -> None:
    peft = pytest.importorskip("peft")
    ours, weights = _numpy(family)
    actual = rank_pool.run(_save, 2, ours, weights, ADAPTERS[family], tmp_path)[0]
    config = random_config(family, 0)
    base = json.loads(config.to_json_string())
    modules = export_peft(tmp_path / "adapter", tmp_path / "folder", config=base)
    assert len(modules) == len(set(modules)) > 0
    model = peft.PeftModel.from_pretrained(random_model(config, 0), tmp_path / "folder")
    with torch.no_grad():
        expected = model(token_ids(ours.vocab_size)).logits
        assert (expected - reference(family, 0)[2]).abs().max() > 0.01 * expected.abs().max()
        assert_close(actual, expected)
    megackpt.export_huggingface(tmp_path / "merged", tmp_path / "ours", config=base)
    options: dict[str, Any] = {"merge_adapters": ["default"], "config": base, "buffer_bytes": 3000}
    megackpt.export_huggingface(tmp_path / "all", tmp_path / "ours_of_all", **options)
    options["adapters_from"] = tmp_path / "adapter"
    megackpt.export_huggingface(tmp_path / "base", tmp_path / "ours_of_two", **options)
    model.merge_and_unload().save_pretrained(tmp_path / "theirs")
    merged = megackpt.load_plain_tensors(tmp_path / "theirs")
    for folder in ("ours", "ours_of_all", "ours_of_two"):
        stored = megackpt.load_plain_tensors(tmp_path / folder)
        assert stored.keys() == merged.keys()
        for key, value in stored.items():
            assert_arrays_close(value, merged[key], key, relative=MERGED)


TARGETS = {
    "llama": ["q_proj", "v_proj", "down_proj"],
    "qwen3": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj"],
    "gpt2": ["c_attn", "c_proj"],
    "mixtral": ["o_proj"],
    "qwen3_moe": ["q_proj"],
}

PARAMETERS = {
    "mixtral": ["experts.gate_up_proj", "experts.down_proj"],
    "qwen3_moe": ["mlp.experts.down_proj"],
}


@sampled(6)
@pytest.mark.parametrize("family", TARGETS)
def test_two_ranks_of_tp_compute_what_peft_does_and_write_its_folder_again(
    rank_pool: RankPool, tmp_path: Path, family: str
) -> None:
    peft = pytest.importorskip("peft")
    ours, weights = _numpy(family)
    config = random_config(family, 0)
    torch.manual_seed(0)
    choices = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=TARGETS[family], init_lora_weights=False,
        target_parameters=PARAMETERS.get(family), use_dora=family == "qwen3", task_type="CAUSAL_LM",
        fan_in_fan_out=family == "gpt2",
    )  # fmt: skip
    model = peft.get_peft_model(random_model(config, 0), choices)
    model.save_pretrained(tmp_path / "folder")
    with torch.no_grad():
        expected = model.eval()(token_ids(ours.vocab_size)).logits
    base = json.loads(config.to_json_string())
    lora = import_peft(tmp_path / "folder", tmp_path / "adapter", config=base)
    assert (lora.rank, lora.alpha, lora.dora) == (4, 6, family == "qwen3")
    assert_close(rank_pool.run(_load, 2, ours, weights, lora, tmp_path / "adapter")[0], expected)
    export_peft(tmp_path / "adapter", tmp_path / "again")
    folders = [tmp_path / name / "adapter_model.safetensors" for name in ("folder", "again")]
    first, second = (megackpt.contrib.peft.read_safetensors(path.read_bytes()) for path in folders)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
