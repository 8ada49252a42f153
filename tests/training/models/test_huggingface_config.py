"""What is read of a Hugging Face config.json, and what in it is an error that names the field.

Files as published with well-known models are read in every spelling: versions 4 and 5 of transformers
describe the same model, also with defaults left out. Rotary frequencies, which small models would not tell
apart, are those of transformers to the last bit.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import megackpt
from megackpt import CheckpointError, DeclarationError
from megackpt.cli import main
from megackpt.errors import MapError
from megackpt.maps import family_of
from megackpt.maps.family import TextPart
from megackpt.training.parallel import RoutingOptions, SwiGLU
from models import (
    GPTConfig,
    LinearScaling,
    Llama3Scaling,
    MoEConfig,
    RotaryConfig,
    SlidingWindow,
    YarnScaling,
)
from models.blocks.attention import rotary_frequencies, rotary_magnitude
from models.huggingface import gpt_config
from tests.support.huggingface_configs import published, random_fields
from tests.support.huggingface_models import FAMILIES, SEEDS, random_config
from tests.support.states import random_arrays

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 11,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "torch_dtype": "bfloat16",
    "rope_scaling": None,
    "eos_token_id": [1, 2],
}
GEMMA3 = {**LLAMA, "model_type": "gemma3_text", "num_key_value_heads": 2, "head_dim": 4}
GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_head": 4, "n_layer": 2, "n_positions": 8, "vocab_size": 11}
QWEN2 = {**LLAMA, "model_type": "qwen2", "num_key_value_heads": 2, "max_window_layers": 1}
PHI3 = {**LLAMA, "model_type": "phi3"}
YARN = {"rope_type": "yarn", "factor": 4.0}
EXPERTS = published(16, 8, 4, 2, 2, 20, head_dim=4, hidden_act="silu")
MIXTRAL = EXPERTS | {
    "model_type": "mixtral",
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "router_aux_loss_coef": 0.02,
    "router_jitter_noise": 0.0,
}
QWEN3_MOE = EXPERTS | {
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 12,
    "num_experts": 8,
    "num_experts_per_tok": 3,
}
QWEN2_MOE = QWEN3_MOE | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 28}
GPT_OSS = EXPERTS | {
    "model_type": "gpt_oss",
    "num_experts_per_tok": 4,
    "num_local_experts": 32,
    "swiglu_limit": 7.0,
}


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (LLAMA, {"model_type": "opt"}, r"model_type 'opt' is not supported; deepseek_v3.*qwen3_moe.* are"),
        (LLAMA, {"model_type": None}, r"model_type None is not supported"),
        (LLAMA, {"model_type": ["llama"]}, r"model_type \['llama'\] is not supported"),
        (LLAMA, {"model_type": "gemma3", "text_config": {}}, r"'gemma3' is not supported.*its text_config"),
        (LLAMA, {"quantization_config": {"bits": 4}}, r"has a quantization_config.*codes.*in floating point"),
        (
            LLAMA,
            {"quantization_config": {"quant_method": "fp8"}},
            r"codes.*Dequantise it.*FineGrainedFP8Config",
        ),
        (LLAMA, {"new_kind": 1, "other": 0}, r"new_kind, other.*If they do not.*`ignored`"),
        (LLAMA, {"is_encoder_decoder": True}, r"is_encoder_decoder is True, which is not supported"),
        (LLAMA, {"hidden_act": "quick_gelu"}, r"hidden_act is 'quick_gelu', which is not supported; silu"),
        (LLAMA, {"hidden_size": "16"}, r"hidden_size is '16', which must be a positive integer"),
        (LLAMA, {"num_hidden_layers": True}, r"num_hidden_layers is True"),
        (LLAMA, {"vocab_size": 0}, r"vocab_size is 0"),
        (LLAMA, {"num_attention_heads": None}, r"num_attention_heads is missing and must be"),
        (LLAMA, {"attention_bias": "yes"}, r"attention_bias is 'yes', which must be true or false"),
        (LLAMA, {"rms_norm_eps": -1e-6}, r"rms_norm_eps is -1e-06, which must be a positive number"),
        (LLAMA, {"num_key_value_heads": 3}, r"num_query_groups 3 does not divide num_heads 4"),
        (LLAMA, {"sliding_window": 4}, r"not supported with model_type 'llama': sliding_window"),
        (LLAMA, {"partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0\.5.*do not have"),
        (LLAMA, {"rope_scaling": {"rope_type": "longrope"}}, r"rope_scaling\.rope_type is 'longrope'"),
        (LLAMA, {"rope_scaling": {"type": "mrope"}}, r"rope_scaling\.type is 'mrope'.*llama3 and yarn are"),
        (LLAMA, {"rope_scaling": {"type": "linear"}}, r"rope_scaling\.factor is missing"),
        (LLAMA, {"rope_scaling": {**YARN, "new": 1}}, r"rope_scaling\.new"),
        (LLAMA, {"rope_parameters": {**YARN, "beta_fast": "x"}}, r"rope_parameters\.beta_fast is 'x'"),
        (LLAMA, {"rope_parameters": {"full_attention": YARN}}, r"rope_parameters\.full_attention"),
        (LLAMA, {"rope_parameters": "default"}, r"rope_parameters is 'default', which must be a mapping"),
        (GEMMA3, {"use_bidirectional_attention": True}, r"use_bidirectional_attention is True"),
        (GEMMA3, {"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping is 50\.0"),
        (GEMMA3, {"layer_types": ["full_attention"]}, r"layer_types.*one type for each of 2 layers"),
        (GEMMA3, {"layer_types": ["full_attention", "chunked_attention"]}, r"layer_types.*not supported"),
        (GEMMA3, {"sliding_window": None}, r"sliding_window is missing.*as layers have a window"),
        (GEMMA3, {"rope_parameters": {"rope_type": "linear"}}, r"rope_parameters\.rope_type"),
        (
            QWEN2,
            {"layer_types": ["sliding_attention"] * 2},
            r"use_sliding_window is False, which must be true",
        ),
        (PHI3, {"rope_scaling": {"type": "yarn", "factor": 4.0}}, r"rope_scaling is .*rope_type default, is"),
        (PHI3, {"rope_parameters": {"type": "longrope"}}, r"rope_parameters\.type is 'longrope'"),
        (GPT2, {"scale_attn_by_inverse_layer_idx": True}, r"scale_attn_by_inverse_layer_idx is True"),
        (GPT2, {"add_cross_attention": True}, r"add_cross_attention is True"),
        (MIXTRAL, {"hidden_act": "gelu"}, "hidden_act is 'gelu', which is not supported for experts"),
        (MIXTRAL, {"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1, which is not supported"),
        (MIXTRAL, {"num_experts_per_tok": 1}, "num_experts_per_tok is 1, which must be at least 2"),
        (MIXTRAL, {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, .* the number of experts, 8"),
        (MIXTRAL, {"num_local_experts": "8"}, "num_local_experts is '8', which must be a positive integer"),
        (MIXTRAL, {"num_local_experts": 0}, "num_local_experts is 0, which must be a positive integer"),
        (QWEN3_MOE, {"moe_intermediate_size": True}, "moe_intermediate_size is True"),
        (QWEN3_MOE, {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        (QWEN3_MOE, {"mlp_only_layers": 2}, "mlp_only_layers is 2, which must be a list of layers"),
        (QWEN3_MOE, {"norm_topk_prob": 1}, "norm_topk_prob is 1"),
        (QWEN3_MOE, {"shared_expert_intermediate_size": 8}, "not supported.*shared_expert_intermediate_size"),
        (QWEN2_MOE, {"use_sliding_window": True}, "layer_types is missing and has to list the layers"),
        (QWEN2_MOE, {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size is 0"),
        (GPT_OSS, {"swiglu_limit": None}, "swiglu_limit is missing and must be a positive number"),
        (GPT_OSS, {"swiglu_limit": float("nan")}, "swiglu_limit is nan"),
    ],
)
def test_what_would_be_another_function_is_an_error(
    config: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    gpt_config(config)
    with pytest.raises(DeclarationError, match=message):
        gpt_config({**config, **changes})


def test_the_error_has_the_name_of_the_field_as_its_key() -> None:
    with pytest.raises(DeclarationError) as caught:
        gpt_config({**LLAMA, "rope_scaling": {"type": "linear", "factor": 0}})
    assert caught.value.key == "rope_scaling.factor"


def test_fields_that_the_caller_knows_are_ignored() -> None:
    assert gpt_config({**LLAMA, "new_kind": 1}, ignored=["new_kind"]) == gpt_config(LLAMA)


def test_empty_false_and_private_fields_change_nothing() -> None:
    empty = {"_name_or_path": "here", "pruned_heads": {}, "quantization_config": None, "use_mrope": False}
    assert gpt_config({**LLAMA, **empty}) == gpt_config(LLAMA)


# As published, without fields that decide nothing.
GPT2_PUBLISHED = {
    **{"model_type": "gpt2", "activation_function": "gelu_new", "vocab_size": 50257},
    **{"n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024},
}
LLAMA_3_1_8B = published(
    *(128256, 4096, 32, 32, 8, 14336),
    model_type="llama",
    attention_bias=False,
    max_position_embeddings=131072,
    mlp_bias=False,
    rope_scaling={
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    rope_theta=500000.0,
    tie_word_embeddings=False,
)
MISTRAL_7B = published(
    *(32000, 4096, 32, 32, 8, 14336),
    model_type="mistral",
    max_position_embeddings=32768,
    rope_theta=10000.0,
    sliding_window=4096,
    tie_word_embeddings=False,
)
QWEN2_5_05B = published(
    *(151936, 896, 24, 14, 2, 4864),
    model_type="qwen2",
    max_position_embeddings=32768,
    max_window_layers=24,
    rope_theta=1000000.0,
    sliding_window=32768,
    tie_word_embeddings=True,
    use_mrope=False,
    use_sliding_window=False,
)
GEMMA_3_4B_TEXT = {
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "model_type": "gemma3_text",
    "num_hidden_layers": 34,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024,
}
GPT_OSS_20B = published(
    *(201088, 2880, 24, 64, 8, 2880),
    model_type="gpt_oss",
    attention_bias=True,
    experts_per_token=4,
    head_dim=64,
    initial_context_length=4096,
    layer_types=["sliding_attention", "full_attention"] * 12,
    max_position_embeddings=131072,
    num_experts_per_tok=4,
    num_local_experts=32,
    rope_scaling={
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    rope_theta=150000,
    sliding_window=128,
    swiglu_limit=7.0,
    tie_word_embeddings=False,
)
OLD_GEMMA = GEMMA3 | {
    "sliding_window_pattern": 2,
    "sliding_window": 5,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}
OLD_LINEAR = {"rope_scaling": {"type": "linear", "factor": 2}, "rope_theta": 5000}
OLD_YARN = {"rope_scaling": {"type": "yarn", "factor": 4.0}}
LOCAL, GLOBAL = RotaryConfig(base=1e4), RotaryConfig(base=1e6, scaling=LinearScaling(factor=8.0))
LLAMA_SCALING = Llama3Scaling(
    factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_length=8192
)
YARN_OF_GPT_OSS = YarnScaling(factor=32.0, original_length=4096, whole_dims=False)
MOE_OF_MIXTRAL = MoEConfig(
    num_experts=8, ffn_hidden_size=20, routing=RoutingOptions(top_k=2, normalise=True), bias=False
)

# Each config with some of what ours has of it.
READ: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gpt2": (GPT2_PUBLISHED, {"tied_embeddings": True, "ffn_size": 3072, "head_dim": 64}),
    "llama 3.1": (
        LLAMA_3_1_8B,
        {
            "positions": RotaryConfig(base=500000.0, scaling=LLAMA_SCALING),
            **{"query_groups": 8, "ffn_size": 14336, "seq_length": 131072},
        },
    ),
    "mistral": (MISTRAL_7B, {"attention.window": SlidingWindow(size=4096)}),
    "qwen 2.5": (
        QWEN2_5_05B,
        {
            **{"attention.qkv_bias": True, "attention.output_bias": None, "linear_bias": False},
            **{"attention.window": None, "tied_embeddings": True},
        },
    ),
    "gemma 3": (
        GEMMA_3_4B_TEXT,
        {
            "attention.window": SlidingWindow(
                size=1024, layers=tuple(layer % 6 != 5 for layer in range(34)), rotary=LOCAL
            ),
            **{"positions": GLOBAL, "num_heads": 8, "query_groups": 4, "head_dim": 256},
            **{"vocab_size": 262208, "embedding_scale": 2560**0.5},
        },
    ),
    "gpt-oss": (
        GPT_OSS_20B,
        {
            "positions": RotaryConfig(base=150000.0, scaling=YARN_OF_GPT_OSS),
            "attention.window": SlidingWindow(size=128, layers=(True, False) * 12),
            **{"attention.sinks": True, "moe.num_experts": 32, "moe.routing.top_k": 4},
        },
    ),
    "older linear": (
        LLAMA | OLD_LINEAR,
        {"positions": RotaryConfig(base=5000.0, scaling=LinearScaling(factor=2.0))},
    ),
    "older yarn": (
        LLAMA | OLD_YARN,
        {"positions": RotaryConfig(scaling=YarnScaling(factor=4.0, original_length=64))},
    ),
    "older gemma 3": (
        OLD_GEMMA,
        {
            "attention.window": SlidingWindow(size=5, layers=(True, False), rotary=LOCAL),
            "positions": GLOBAL,
        },
    ),
    "window that is off": (QWEN2 | {"use_sliding_window": False}, {"attention.window": None}),
    "window after max_window_layers": (
        QWEN2 | {"use_sliding_window": True, "sliding_window": 3},
        {"attention.window": SlidingWindow(size=3, layers=(False, True))},
    ),
    "mixtral": (MIXTRAL, {"moe": MOE_OF_MIXTRAL}),
    "qwen3": (
        QWEN3_MOE,
        {"moe.routing.normalise": False, "moe.ffn_hidden_size": 12, "moe.shared_ffn_hidden_size": 0},
    ),
    "norm_topk_prob": (QWEN3_MOE | {"norm_topk_prob": True}, {"moe.routing.normalise": True}),
    "gate of shared experts": (QWEN2_MOE, {"moe.shared_ffn_hidden_size": 28, "moe.shared_gate": True}),
    "biases of gpt-oss": (
        GPT_OSS,
        {
            **{"moe.bias": True, "moe.router_bias": True},
            "moe.activation": SwiGLU(alpha=1.702, limit=7.0, up_offset=1.0),
        },
    ),
    "activation of gpt-oss": (
        GPT_OSS | {"swiglu_alpha": 1.5, "swiglu_limit": 3},
        {"moe.activation": SwiGLU(alpha=1.5, limit=3.0, up_offset=1.0)},
    ),
    "all layers": (QWEN3_MOE, {"moe.layer_freq": 1}),
    "step 1": (QWEN3_MOE | {"decoder_sparse_step": 1, "mlp_only_layers": []}, {"moe.layer_freq": 1}),
    "no list": (QWEN3_MOE | {"mlp_only_layers": None}, {"moe.layer_freq": 1}),
    "step 2": (QWEN3_MOE | {"decoder_sparse_step": 2}, {"moe.layer_freq": (0, 1, 0, 1)}),
    "list": (QWEN3_MOE | {"mlp_only_layers": [0, 3]}, {"moe.layer_freq": (0, 1, 1, 0)}),
    "step and list": (
        QWEN3_MOE | {"decoder_sparse_step": 2, "mlp_only_layers": [3]},
        {"moe.layer_freq": (0, 1, 0, 0)},
    ),
    "step beyond the layers": (QWEN3_MOE | {"decoder_sparse_step": 5}, {"moe": None}),
    "list of all": (QWEN3_MOE | {"mlp_only_layers": [0, 1, 2, 3]}, {"moe": None}),
    "no experts": (QWEN3_MOE | {"num_experts": 0, "norm_topk_prob": True}, {"moe": None}),
    "no shared experts": (QWEN2_MOE | {"decoder_sparse_step": 5}, {"moe": None}),
}


@pytest.mark.parametrize("name", READ)
def test_a_config_is_read_as_transformers_reads_it(name: str) -> None:
    config, expected = READ[name]
    ours = gpt_config(config)
    assert {path: attrgetter(path)(ours) for path in expected} == expected


def test_the_number_of_experts_has_two_names() -> None:
    other = {**QWEN3_MOE, "num_local_experts": 8}  # as transformers 5 writes it
    newer = {name: n for name, n in other.items() if name != "num_experts"}
    assert gpt_config(newer) == gpt_config(other) == gpt_config(QWEN3_MOE)
    with pytest.raises(
        DeclarationError, match="num_experts is 8, which must be equal to num_local_experts, 9"
    ):
        gpt_config(QWEN3_MOE | {"num_local_experts": 9})


def test_a_limit_of_an_activation_is_positive() -> None:
    with pytest.raises(DeclarationError, match=r"SwiGLU\.limit is 0"):
        SwiGLU(limit=0.0)


TEXT = {"model_type": "llama", **random_fields("llama", 0), "tie_word_embeddings": False}
WHOLE = {"model_type": "seeing", "text_config": TEXT}
SPELLINGS = {
    "in front": {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
    "behind": {"model.": "model.language_model."},
    "none": {"": ""},
}


def _spelled(key: str, spelling: str) -> str:
    for own, begin in SPELLINGS[spelling].items():
        if key.startswith(own):
            return begin + key.removeprefix(own)
    return key


def _folder(path: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_other_tensors_are_left_out_and_reported(
    spelling: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = random_arrays(family_of(TEXT).region_map(TEXT), 0)
    others = {"model.visual.weight": torch.ones(2), "vision_tower.layers.0.weight": torch.ones(3)}
    whole = {_spelled(key, spelling): tensor for key, tensor in text.items()} | others
    folder, new = _folder(tmp_path / "folder", WHOLE, whole), tmp_path / "new"
    assert main(["convert", str(folder), str(new), "--from", "huggingface", "--text-only", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["left_out"] == sorted(others)
    content = megackpt.load_content_metadata(new)
    assert content["huggingface_config"] == TEXT
    megackpt.import_huggingface(_folder(tmp_path / "alone", TEXT, text), tmp_path / "expected")
    imported, expected = (megackpt.load_plain_tensors(tmp_path / name) for name in ("new", "expected"))
    assert imported.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in imported.items())


def test_the_whole_model_decides_what_is_tied_and_else_the_folder() -> None:
    keys = ["model.language_model.norm.weight", "lm_head.weight"]
    inner = {"model_type": "llama"}
    for outer, stored, is_tied in (
        ({}, keys, False),
        ({}, keys[:1], True),
        ({"tie_word_embeddings": True}, keys, True),
        ({"tie_word_embeddings": False}, keys[:1], False),
    ):
        text = TextPart.of({"text_config": inner, **outer}, stored)
        assert text.config == {**inner, "tie_word_embeddings": is_tied}
        assert ("lm_head.weight" in text.stored) is (not is_tied and len(stored) == 2)


def test_gemma_3_leaves_out_sizes_that_its_class_has() -> None:
    config = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240}
    right = family_of(config).region_map(config | {"num_hidden_layers": 1}).right
    assert right["model.embed_tokens.weight"].stored == (262208, 2560)
    assert right["model.layers.0.self_attn.q_proj.weight"].stored == (2048, 2560)


@pytest.mark.parametrize(
    ("config", "changes", "text_only", "text"),
    [
        (WHOLE, {}, False, r"No map is for model_type 'seeing'.*text model, model_type 'llama'.*text_only"),
        (TEXT, {}, True, r"config.json has no text_config.*leave text_only out"),
        (
            WHOLE,
            {"model.language_model.new": torch.ones(1)},
            True,
            r"'model.language_model.new' .* additional",
        ),
        (WHOLE, {"model.language_model.norm.weight": None}, True, r"'model.norm.weight' .*missing"),
        ({**WHOLE, "text_config": {"model_type": "odd"}}, {}, True, r"No map is for model_type 'odd'"),
    ],
)
def test_a_folder_that_does_not_fit_is_one_error_and_nothing_is_written(
    config: dict[str, Any], changes: dict[str, Any], text_only: bool, text: str, tmp_path: Path
) -> None:
    tensors = random_arrays(family_of(TEXT).region_map(TEXT), 0)
    tensors = {_spelled(key, "behind"): tensor for key, tensor in tensors.items()} | changes
    tensors = {key: tensor for key, tensor in tensors.items() if tensor is not None}
    folder = _folder(tmp_path / "folder", config, tensors)
    with pytest.raises(CheckpointError, match=text) as raised:
        megackpt.import_huggingface(folder, tmp_path / "new", text_only=text_only)
    assert isinstance(raised.value, MapError)
    assert not (tmp_path / "new").exists()


NEEDS_TRANSFORMERS = pytest.mark.skipif(
    find_spec("transformers") is None, reason="the extra huggingface is not installed"
)


def _written(config: Any) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(config.to_json_string())
    return document


def _as_version_4(config: dict[str, Any]) -> dict[str, Any]:
    """Return what transformers 4 writes for a config that version 5 wrote."""
    config = {("torch_dtype" if name == "dtype" else name): value for name, value in config.items()}
    rope = config.pop("rope_parameters", None)
    if rope is None:
        return config
    if "full_attention" in rope:
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    config["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    return config


@NEEDS_TRANSFORMERS
@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("family", FAMILIES)
def test_both_spellings_describe_the_same_model(family: str, seed: int) -> None:
    newer = _written(random_config(family, seed))
    older = _as_version_4(json.loads(json.dumps(newer)))
    assert older.keys() != newer.keys() or family == "gpt2"
    assert gpt_config(older) == gpt_config(newer)


@NEEDS_TRANSFORMERS
@pytest.mark.parametrize("family", FAMILIES)
def test_fields_that_a_file_leaves_out_have_the_values_of_transformers(family: str) -> None:
    from transformers import AutoConfig

    written = _written(AutoConfig.for_model(family))
    assert _in_numbers(gpt_config({"model_type": family})) == _in_numbers(gpt_config(written))


def _in_numbers(config: GPTConfig) -> GPTConfig:
    """Return a config with sizes that follow from others as numbers."""
    attention = config.attention
    if attention.latent is None:
        attention = replace(attention, head_dim=config.head_dim)
    return replace(config, num_query_groups=config.query_groups, attention=attention)


@NEEDS_TRANSFORMERS
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kind", ["default", "linear", "dynamic", "llama3", "yarn"])
def test_rotary_frequencies_are_those_of_transformers(kind: str, seed: int) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    draw = random.Random(seed)
    heads, length = draw.choice([1, 2, 3]), draw.choice([4096, 8192])
    rope = {
        "rope_type": kind,
        "rope_theta": draw.choice([10000.0, 500000.0, 1e6]),
        **({} if kind == "default" else {"factor": draw.choice([1.0, 2.5, 8.0, 32.0])}),
        **_other_parameters(kind, draw),
    }
    config = LlamaConfig(
        hidden_size=heads * draw.choice([32, 80, 128]),
        num_attention_heads=heads,
        max_position_embeddings=length,
        rope_parameters=rope,
    )
    longest = draw.choice([length // 2, 3 * length])
    compute = ROPE_INIT_FUNCTIONS.get(kind, LlamaRotaryEmbedding.compute_default_rope_parameters)
    expected, magnitude = compute(config, seq_len=longest)
    positions = gpt_config(_written(config)).positions
    assert isinstance(positions, RotaryConfig)
    assert torch.equal(rotary_frequencies(positions, config.head_dim, longest), expected)
    assert rotary_magnitude(positions) == pytest.approx(magnitude, rel=1e-12)


def _other_parameters(kind: str, draw: random.Random) -> dict[str, Any]:
    original = {"original_max_position_embeddings": draw.choice([1024, 4096])}
    if kind == "llama3":
        return {"low_freq_factor": draw.choice([1.0, 2.0]), "high_freq_factor": 4.0, **original}
    if kind != "yarn":
        return {}
    magnitudes = [{}, {"attention_factor": 1.3}, {"mscale": 0.7, "mscale_all_dim": 1.0}, {"mscale": 0.7}]
    ramps = [{}, {"beta_fast": 16.0, "beta_slow": 2.0}, {"truncate": False}, {"beta_fast": 1.0}]
    return {**original, **draw.choice(magnitudes), **draw.choice(ramps)}
