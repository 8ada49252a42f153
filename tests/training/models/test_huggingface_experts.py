"""The experts of a Hugging Face config.json: what is read, in both spellings, and what is an error."""

from __future__ import annotations

from typing import Any

import pytest

from megackpt.errors import DeclarationError
from megackpt.parallel import RoutingOptions, SwiGLU
from models import MoEConfig
from models.huggingface import gpt_config

SIZES = {
    "vocab_size": 16,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 4,
}
MIXTRAL = SIZES | {
    "model_type": "mixtral",
    "hidden_act": "silu",
    "intermediate_size": 20,
    "num_hidden_layers": 4,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "router_aux_loss_coef": 0.02,
    "router_jitter_noise": 0.0,
}
QWEN3 = SIZES | {
    "model_type": "qwen3_moe",
    "hidden_act": "silu",
    "intermediate_size": 20,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 4,
    "num_experts": 8,
    "num_experts_per_tok": 3,
}
QWEN2 = QWEN3 | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 28}
GPT_OSS = SIZES | {
    "model_type": "gpt_oss",
    "hidden_act": "silu",
    "intermediate_size": 20,
    "num_hidden_layers": 4,
    "num_experts_per_tok": 4,
    "num_local_experts": 32,
    "swiglu_limit": 7.0,
}


def _experts(config: dict[str, Any]) -> MoEConfig:
    moe = gpt_config(config).moe
    assert moe is not None
    return moe


def test_mixtral_normalises_and_has_no_biases() -> None:
    options = RoutingOptions(top_k=2, normalise=True)
    assert _experts(MIXTRAL) == MoEConfig(num_experts=8, ffn_hidden_size=20, routing=options, bias=False)


def test_qwen_normalises_only_with_norm_topk_prob() -> None:
    assert not _experts(QWEN3).routing.normalise
    assert _experts(QWEN3 | {"norm_topk_prob": True}).routing.normalise
    assert _experts(QWEN3).ffn_hidden_size == 12


def test_qwen2_has_shared_experts_with_a_gate() -> None:
    moe = _experts(QWEN2)
    assert (moe.shared_ffn_hidden_size, moe.shared_gate) == (28, True)
    assert not _experts(QWEN3).shared_ffn_hidden_size


def test_gpt_oss_has_biases_and_an_activation_of_its_own() -> None:
    moe = _experts(GPT_OSS)
    assert moe.bias
    assert moe.router_bias
    assert moe.activation == SwiGLU(alpha=1.702, limit=7.0, up_offset=1.0)
    assert _experts(GPT_OSS | {"swiglu_alpha": 1.5, "swiglu_limit": 3}).activation == SwiGLU(
        alpha=1.5, limit=3.0, up_offset=1.0
    )


def test_the_number_of_experts_has_two_names() -> None:
    other = {**QWEN3, "num_local_experts": 8}  # as transformers 5 writes it
    assert _experts({name: n for name, n in other.items() if name != "num_experts"}) == _experts(QWEN3)
    assert _experts(other) == _experts(QWEN3)
    with pytest.raises(
        DeclarationError, match="num_experts is 8, which must be equal to num_local_experts, 9"
    ):
        gpt_config(QWEN3 | {"num_local_experts": 9})


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({}, 1),
        ({"decoder_sparse_step": 1, "mlp_only_layers": []}, 1),
        ({"mlp_only_layers": None}, 1),
        ({"decoder_sparse_step": 2}, (0, 1, 0, 1)),
        ({"mlp_only_layers": [0, 3]}, (0, 1, 1, 0)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, (0, 1, 0, 0)),
    ],
)
def test_layers_with_experts_are_those_of_transformers(fields: dict[str, Any], pattern: object) -> None:
    assert _experts(QWEN3 | fields).layer_freq == pattern


@pytest.mark.parametrize(
    "config",
    [
        QWEN3 | {"decoder_sparse_step": 5},
        QWEN3 | {"mlp_only_layers": [0, 1, 2, 3]},
        QWEN3 | {"num_experts": 0, "norm_topk_prob": True},
        QWEN2 | {"decoder_sparse_step": 5},
    ],
)
def test_a_model_of_dense_layers_has_none(config: dict[str, Any]) -> None:
    assert gpt_config(config).moe is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MIXTRAL | {"hidden_act": "gelu"}, "hidden_act is 'gelu', which is not supported for experts"),
        (MIXTRAL | {"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1, which is not supported"),
        (MIXTRAL | {"num_experts_per_tok": 1}, "num_experts_per_tok is 1, which must be at least 2"),
        (MIXTRAL | {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, .* the number of experts, 8"),
        (MIXTRAL | {"num_local_experts": "8"}, "num_local_experts is '8', which must be a positive integer"),
        (MIXTRAL | {"num_local_experts": 0}, "num_local_experts is 0, which must be a positive integer"),
        (QWEN3 | {"moe_intermediate_size": True}, "moe_intermediate_size is True"),
        (QWEN3 | {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        (QWEN3 | {"mlp_only_layers": 2}, "mlp_only_layers is 2, which must be a list of layers"),
        (QWEN3 | {"norm_topk_prob": 1}, "norm_topk_prob is 1"),
        (QWEN3 | {"shared_expert_intermediate_size": 8}, "not supported.*shared_expert_intermediate_size"),
        (QWEN2 | {"use_sliding_window": True}, "layer_types is missing and has to list the layers"),
        (QWEN2 | {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size is 0"),
        (GPT_OSS | {"swiglu_limit": None}, "swiglu_limit is missing and must be a positive number"),
        (GPT_OSS | {"swiglu_limit": float("nan")}, "swiglu_limit is nan"),
    ],
)
def test_what_is_not_supported_is_an_error_with_its_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        gpt_config(config)


def test_a_limit_of_an_activation_is_positive() -> None:
    with pytest.raises(DeclarationError, match=r"SwiGLU\.limit is 0"):
        SwiGLU(limit=0.0)
