"""The law of maps: for any sizes, each element of a family is one element of ours, and of Megatron-Core's."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megackpt.maps import bound_to, checkpoint_map, family_of, megatron_map
from tests.support import huggingface_encoders as encoders
from tests.support import huggingface_recurrent as mamba
from tests.support.effort import few
from tests.support.huggingface_configs import FAMILIES, IN_MEGATRON, random_fields
from tests.support.states import assembled, random_arrays

EXAMPLES = few(100, of=1000)
SIZE = st.integers(1, 5)
LATENT_DIMS = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """Return a config of any family, with sizes down to 1 and any of the entries that decide about arrays."""
    model_type = draw(st.sampled_from(FAMILIES))
    if model_type in (*encoders.FAMILIES, *mamba.FAMILIES):
        return {"model_type": model_type, **random_fields(model_type, draw(st.integers(0, 10**6)))}
    layers, groups, heads_of_group, d = (draw(SIZE) for _ in range(4))
    heads = groups * heads_of_group
    if model_type == "gpt2":
        fields = {"n_layer": layers, "n_head": heads, "n_embd": heads * d, "n_positions": draw(SIZE)}
        fields |= {"n_inner": draw(st.none() | SIZE), "vocab_size": draw(SIZE)}
    else:
        fields = {
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": groups,
            "head_dim": d,
            "hidden_size": draw(SIZE),
            "intermediate_size": draw(SIZE),
            "vocab_size": draw(SIZE),
            "num_experts": draw(SIZE),
            "moe_intermediate_size": draw(SIZE),
            "shared_expert_intermediate_size": draw(SIZE),
            "decoder_sparse_step": draw(st.integers(1, 3)),
            "mlp_only_layers": draw(st.lists(st.integers(0, layers - 1))),
        }
    if model_type == "qwen3_next":
        keys = draw(SIZE)
        fields |= {"linear_num_key_heads": keys, "linear_num_value_heads": keys * draw(SIZE)}
        dims = ("linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim")
        fields |= {name: draw(SIZE) for name in (*dims, "full_attention_interval")}
    if model_type == "deepseek_v3":
        fields |= {name: draw(SIZE) for name in ("kv_lora_rank", "n_routed_experts", *LATENT_DIMS)}
        fields |= {"q_lora_rank": draw(st.none() | SIZE), "first_k_dense_replace": draw(SIZE)}
    for name in ("tie_word_embeddings", "attention_bias", "mlp_bias", "qkv_bias"):
        if draw(st.booleans()):
            fields[name] = draw(st.booleans())
    return {"model_type": model_type, **fields}


@given(config=configs(), is_fused=st.booleans())
@settings(max_examples=EXAMPLES, deadline=None)
def test_arrays_go_to_every_family_and_back_bit_for_bit(config: dict[str, Any], is_fused: bool) -> None:
    family = family_of(config)
    # Of an encoder, any keys would say whether the output layer is tied.
    is_fused = is_fused and config["model_type"] not in encoders.FAMILIES
    keys = ("model.layers.0.mlp.experts.gate_up_proj",) if is_fused else ()
    made = family.region_map(config, keys)  # which proves it
    theirs = random_arrays(made, 0)
    ours = assembled(made, theirs)
    back = assembled(made.inverse(), ours)
    assert all(torch.equal(back[key], array) for key, array in theirs.items())
    assert sum(a.numel() for a in ours.values()) == sum(a.numel() for a in theirs.values())

    if config["model_type"] not in IN_MEGATRON:
        return
    megatron = megatron_map(made.left, family.rules(config, keys).sizes)
    megatron.check(name="Megatron-Core")
    stored = assembled(megatron.inverse(), ours)
    back = assembled(megatron, stored)
    assert all(torch.equal(back[key], array) for key, array in ours.items())

    # Through ours, it is the same as through no map of ours at all.
    direct = checkpoint_map(family, config, list(megatron.right))
    written = assembled(direct.inverse(), stored)
    expected = assembled(family.region_map(config).inverse(), ours)
    assert all(torch.equal(written[key], array) for key, array in expected.items())


@given(config=configs())
@settings(max_examples=EXAMPLES, deadline=None)
def test_stacked_layers_have_the_same_elements_as_single_ones(config: dict[str, Any]) -> None:
    made = family_of(config).region_map(config)
    theirs = random_arrays(made, 0)
    single = assembled(made, theirs)
    layers = [key.split(".", 3)[2:] for key in made.left if key.startswith("decoder.layers.")]
    numbers = {number for number, _ in layers}
    everywhere = {
        name for _, name in layers if all(f"decoder.layers.{n}.{name}" in made.left for n in numbers)
    }
    bound = bound_to(made, {f"decoder.layers.{name}" for name in everywhere})
    bound.check(name="stacked")
    stacked = assembled(bound, theirs)
    for name in everywhere:
        for layer, array in enumerate(stacked[f"decoder.layers.{name}"]):
            assert torch.equal(array, single[f"decoder.layers.{layer}.{name}"])
