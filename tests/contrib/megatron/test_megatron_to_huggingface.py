"""Genuine checkpoints of Megatron-Core become Hugging Face folders with the same logits, and the other way.

Tolerance: everything is fp32 and the same sums are made in another order; see `test_megatron_into_models`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import megackpt
from megackpt.testing.ranks import RankPool
from tests.contrib.megatron import megatron_world as world
from tests.contrib.megatron.megatron_world import Case, Layout
from tests.support.effort import sampled

RELATIVE = 1e-5
LLAMA = {
    "model_type": "llama",
    "vocab_size": world.VOCAB,
    "hidden_size": world.HIDDEN,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": world.HIDDEN // 8,
    "intermediate_size": 48,
    "max_position_embeddings": world.SEQUENCE,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_experts": 4, "num_experts_per_tok": 2}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": world.VOCAB,
    "n_positions": world.SEQUENCE,
    "n_embd": world.HIDDEN,
    "n_layer": 4,
    "n_head": 8,
    "n_inner": 48,
    "activation_function": "gelu",
}
QWEN3_MOE = MIXTRAL | {
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
    "mlp_only_layers": [1, 3],
}
CASES = [
    (Case("llama"), Layout(tp=2, pp=2), LLAMA),
    (Case("llama-tied", tied=True), Layout(pp=2), LLAMA | {"tie_word_embeddings": True}),
    (Case("gpt2", norm="LayerNorm", tied=True, rope=False, swiglu=False, groups=8), Layout(tp=2), GPT2),
    (Case("qwen3", qk_norm=True), Layout(tp=2), LLAMA | {"model_type": "qwen3"}),
    (Case("mixtral", experts=4), Layout(pp=2, ep=2), MIXTRAL),
    (Case("singletons", experts=4, singletons=True), Layout(ep=2), MIXTRAL),
    (Case("qwen3-moe-mixed", experts=4, every=2, qk_norm=True), Layout(ep=2), QWEN3_MOE),
]


@torch.no_grad()
def logits_of(folder: Path) -> torch.Tensor:
    """Return the logits `[b, s, vocab]` of the tokens that `megatron_world` uses, by transformers."""
    transformers = pytest.importorskip("transformers")
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not report["unexpected_keys"]
    assert set(report["missing_keys"]) <= {"lm_head.weight"}
    logits: torch.Tensor = model.eval()(world.tokens()).logits
    return logits


@sampled(8)
@pytest.mark.parametrize(("case", "layout", "fields"), CASES, ids=[case[0].name for case in CASES])
def test_logits_of_the_folder_are_those_of_the_model_that_was_saved(
    case: Case, layout: Layout, fields: dict[str, Any], core_ranks: RankPool, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    path, folder = str(tmp_path / "genuine"), tmp_path / "folder"
    saved = world.of_last_stage(core_ranks.run(world.save_genuine, layout.ranks, case, layout, path))
    stored = megackpt.load_sharded_metadata(path)
    assert any(key.endswith("experts.0.linear_fc1.weight_w") for key in stored) is case.singletons
    transformers.AutoConfig.for_model(**fields).save_pretrained(tmp_path / "config")
    megackpt.export_huggingface(path, folder, config=tmp_path / "config")
    assert (logits_of(folder) - saved).abs().max() <= RELATIVE * saved.abs().max()


def test_rows_that_pad_the_vocabulary_are_left_out_of_the_folder(
    core_ranks: RankPool, tmp_path: Path
) -> None:
    path, folder = str(tmp_path / "genuine"), tmp_path / "folder"
    core_ranks.run(world.save_genuine, 2, Case("padded"), Layout(tp=2), path)
    megackpt.export_huggingface(path, folder, config=LLAMA | {"vocab_size": world.VOCAB - 3})
    arrays = load_file(folder / "model.safetensors")
    for ours, theirs in (("embedding.word_embeddings", "model.embed_tokens"), ("output_layer", "lm_head")):
        whole = world.oracle(f"{ours}.weight", (world.VOCAB, world.HIDDEN))
        assert torch.equal(arrays[f"{theirs}.weight"], whole[:-3])


@sampled(4)
@pytest.mark.parametrize("number", [0, 2, 4, 6], ids=lambda number: CASES[number][0].name)
def test_a_model_of_megatron_core_loads_a_folder(number: int, core_ranks: RankPool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    case, _, fields = CASES[number]
    layout = Layout(ep=2) if case.experts else Layout(tp=2)
    config = transformers.AutoConfig.for_model(**fields)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    expected = logits_of(tmp_path)
    answers = core_ranks.run(world.load_folder, layout.ranks, case, layout, str(tmp_path), config.to_dict())
    loaded = world.of_last_stage(answers)
    assert (loaded - expected).abs().max() <= RELATIVE * expected.abs().max()
