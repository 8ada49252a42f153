"""DeepSeek-V3 and Qwen3-Next of the real Megatron-Core: names, shapes, and logits of transformers, both ways.

Genuine checkpoints become Hugging Face folders, with layers for further tokens too, and models of
Megatron-Core load these folders again, at other layouts. A model of ours reads such a checkpoint directly.

Tolerance: everything is fp32 and the same sums are made in another order; see `test_megatron_into_models`.
A gated delta net divides queries and keys by their lengths, which enlarges rounding errors: see
`test_gradients`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import megackpt
from megackpt.errors import MapError
from megackpt.maps import family, has_megatron_keys, megatron_map
from megackpt.testing.ranks import RankPool
from megackpt.training.parallel import ParallelGroups, ParallelLayout
from models import MTPConfig, build_gpt
from models.huggingface import gpt_config
from models.megatron import megatron_state
from tests.contrib.megatron import megatron_families as families
from tests.contrib.megatron import megatron_world as world
from tests.contrib.megatron.megatron_families import Case, Fields, Logits
from tests.contrib.megatron.megatron_world import Layout
from tests.support.effort import with_all

COMMON: Fields = {
    "vocab_size": world.VOCAB,
    "hidden_size": world.HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "moe_intermediate_size": 12,
    "norm_topk_prob": True,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,  # transformers has this one for the norms of latent features
    "tie_word_embeddings": False,
}
DEEPSEEK: Fields = COMMON | {
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "q_lora_rank": 10,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "n_routed_experts": 16,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 4,  # 2 of each group, which is how Megatron-Core scores groups
    "routed_scaling_factor": 2.5,
    "rope_interleave": True,
    "num_nextn_predict_layers": 2,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 100.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 4.0,
        "beta_slow": 1.0,
        "mscale": 0.7,
        "mscale_all_dim": 0.9,
    },
}
EQUAL_LAYERS: Fields = DEEPSEEK | {
    "first_k_dense_replace": 0,
    "q_lora_rank": None,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
}
QWEN3_NEXT: Fields = COMMON | {
    "model_type": "qwen3_next",
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 20,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
}
CASES = {
    "deepseek": Case(DEEPSEEK, False, 0, Layout(tp=2), Layout(ep=2)),
    "deepseek-mtp": Case(DEEPSEEK, False, 2, Layout(pp=2), Layout(tp=2)),
    "deepseek-fused-mtp": Case(DEEPSEEK, True, 2, Layout(tp=2), Layout(pp=2)),
    "deepseek-equal-layers": Case(EQUAL_LAYERS, False, 0, Layout(ep=2), Layout(pp=2)),
    "qwen3-next": Case(QWEN3_NEXT, True, 0, Layout(tp=2), Layout(pp=2)),
    "qwen3-next-mtp": Case(QWEN3_NEXT, True, 1, Layout(pp=2), Layout(ep=2)),
}


@with_all("it runs whole models; test_megatron_map has names and elements")
@pytest.mark.parametrize("name", CASES)
def test_a_genuine_checkpoint_becomes_a_folder_and_the_folder_a_model(
    name: str, core_ranks: RankPool, tmp_path: Path
) -> None:
    case, path, folder = CASES[name], str(tmp_path / "genuine"), tmp_path / "folder"
    saved = world.of_last_stage(core_ranks.run(families.save, case.saved.ranks, case, case.saved, path))
    assert len(saved) == 1 + case.further

    stored = {key: tuple(spec.global_shape) for key, spec in arrays_of(path).items()}
    chosen = family(case.map)
    ours, sizes = chosen.region_map(case.fields).left, chosen.rules(case.fields, ()).sizes
    assert has_megatron_keys(stored)
    read = megatron_map(ours, sizes, list(stored))
    assert stored == {key: array.stored for key, array in read.right.items()}
    if case.is_fused:  # the names that a map chooses by itself
        assert stored == {key: array.stored for key, array in megatron_map(ours, sizes).right.items()}

    megackpt.export_huggingface(path, folder, config=case.fields, map=case.map)
    assert_close(of_transformers(folder, case), saved, case)

    ranks = core_ranks.run(families.load, case.loaded.ranks, case, case.loaded, str(folder), case.map)
    assert_close(world.of_last_stage(ranks), saved, case)


@with_all("it runs whole models; test_megatron_map has names and elements")
@pytest.mark.parametrize("name", ["deepseek", "deepseek-equal-layers", "qwen3-next"])
def test_a_model_of_megatron_core_loads_what_transformers_writes(
    name: str, core_ranks: RankPool, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    case = CASES[name]
    torch.manual_seed(0)
    fields = {key: value for key, value in case.fields.items() if key != "model_type"}
    config = transformers.AutoConfig.for_model(case.fields["model_type"], **fields)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    ranks = core_ranks.run(families.load, case.loaded.ranks, case, case.loaded, str(tmp_path), case.map)
    assert_close(world.of_last_stage(ranks), of_transformers(tmp_path, case), case)


@with_all("it runs whole models; test_megatron_map has names and elements")
def test_a_model_of_ours_reads_latent_attention_and_layers_for_further_tokens(
    core_ranks: RankPool, tmp_path: Path
) -> None:
    case, path = CASES["deepseek-fused-mtp"], str(tmp_path / "genuine")
    ranks = core_ranks.run(families.save, 2, case, Layout(tp=2), path)
    config = replace(gpt_config(case.fields), mtp=MTPConfig(num_layers=case.further), make_vocab_divisible=1)
    (model,) = build_gpt(config, ParallelGroups.create(ParallelLayout()))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))  # whatever is not loaded shows
    megackpt.load(megatron_state(model, megackpt.load_sharded_metadata(path)), path)
    assert not any(parameter.isnan().any() for parameter in model.parameters())
    with torch.no_grad():
        logits = model(world.tokens()).transpose(0, 1)
    assert_close([logits], world.of_last_stage(ranks), case)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (DEEPSEEK | {"rope_interleave": False}, "rotates pairs of neighbouring rows.*interleaved=True"),
        (QWEN3_NEXT, r"out_norm\.weight' is stored zero-centred.*Load with a map"),
    ],
    ids=["rows", "norms"],
)
def test_models_of_ours_that_boxes_alone_cannot_fill_are_an_error(fields: Fields, text: str) -> None:
    chosen = family(fields["model_type"])
    keys = list(megatron_map(chosen.region_map(fields).left, chosen.rules(fields, ()).sizes).right)
    model = build_gpt(gpt_config(fields), ParallelGroups.create(ParallelLayout()))
    with pytest.raises(MapError, match=text):
        megatron_state(model, keys)


def arrays_of(path: str) -> dict[str, Any]:
    """Return the arrays of a checkpoint, without the extra states of its modules."""
    stored = megackpt.load_sharded_metadata(path)
    return {key: spec for key, spec in stored.items() if "_extra_state" not in key}


def assert_close(actual: Logits, expected: Logits, case: Case) -> None:
    """Compare logits of the next token, and of further ones that both have, where such tokens exist."""
    assert actual
    for ahead, (a, b) in enumerate(zip(actual, expected, strict=False)):
        length = world.SEQUENCE - ahead
        a, b = a[:, :length], b[:, :length]
        assert (a - b).abs().max() <= case.relative * b.abs().max(), f"{ahead} further tokens ahead"


@torch.no_grad()
def of_transformers(folder: Path, case: Case) -> Logits:
    """Return logits by transformers; those of further tokens where it has layers for them."""
    transformers = pytest.importorskip("transformers")
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokens = world.tokens()
    hidden: Tensor = model.model(tokens, use_cache=False).last_hidden_state
    logits = [model.lm_head(hidden)]
    if case.map != "deepseek_v3_mtp":
        return logits
    from transformers.modeling_layers import MtpModel

    model.config.first_k_dense_replace = 0  # it numbers its layers from 0, and makes the first ones dense
    model.config.num_mtp_layers = case.further
    count = case.fields["num_hidden_layers"]
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{count}.*", f"layers.{count + 1}"]
    positions = torch.arange(world.SEQUENCE).unsqueeze(0)
    mask = torch.full((world.SEQUENCE,) * 2, float("-inf")).triu(1)[None, None]
    for number, layer in enumerate(MtpModel.from_pretrained(model).eval().layers):
        hidden = layer(
            model.model.embed_tokens(tokens.roll(-number - 1, 1)),
            hidden,
            model.model.rotary_emb(hidden, positions),
            mask,
            positions,
            None,  # the cache, whose name differs between versions
        )
        logits.append(model.lm_head(hidden))
    return logits
