"""Megatron-Core's T5 declares the arrays that the map of mT5 names, and joins keys and values as it does.

It is the real model, in its layers without kernels. Its attention without a kernel takes no bias of relative
positions, so the model is built and declares its state, and does not run as a whole.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megackpt.maps import checkpoint_map, family_of, has_megatron_keys, megatron_map
from megackpt.testing.ranks import RankPool
from tests.contrib.megatron import megatron_world
from tests.support.effort import with_all
from tests.support.states import assembled, random_arrays

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
CONFIG = {
    "model_type": "mt5",
    "vocab_size": 32,
    "d_model": 12,
    "d_kv": 5,
    "d_ff": 10,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "feed_forward_proj": "gated-gelu",
}
CROSS_ATTENTION = "decoder.layers.0.cross_attention.linear_kv.weight"


def _real_model() -> Any:
    megatron_world.without_gpu()
    from megatron.core import parallel_state
    from megatron.core.models.T5.t5_model import T5Model
    from megatron.core.models.T5.t5_spec import (
        decoder_model_with_local_spec,
        encoder_model_with_local_spec,
    )
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(1)

    def config(layers: int) -> TransformerConfig:
        return TransformerConfig(
            num_layers=layers,
            hidden_size=12,
            num_attention_heads=4,
            kv_channels=5,
            ffn_hidden_size=10,
            gated_linear_unit=True,
            activation_func=torch.nn.functional.gelu,
            use_cpu_initialization=True,
            normalization="RMSNorm",
            add_bias_linear=False,
            softmax_scale=1.0,  # the model of transformers does not divide scores
        )

    encoder, decoder = (
        TransformerBlockSubmodules([spec] * layers, layer_norm=WrappedTorchNorm)
        for spec, layers in ((encoder_model_with_local_spec(), 3), (decoder_model_with_local_spec(), 2))
    )
    return T5Model(
        config(2),
        config(3),
        encoder,
        decoder,
        vocab_size=32,
        max_sequence_length=8,
        position_embedding_type="relative",
        relative_attention_num_buckets=8,
    )


def _shapes() -> dict[str, tuple[int, ...]]:
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    shapes = {}
    for entity in nested_values(_real_model().sharded_state_dict()):
        built = entity.build() if isinstance(entity, ShardedTensorFactory) else entity
        for tensor in (
            built.values() if isinstance(built, dict) else built if isinstance(built, list) else [built]
        ):
            if isinstance(tensor, ShardedTensor):
                shapes[tensor.key] = tuple(tensor.global_shape)
    return shapes


def _keys_and_values(weight: torch.Tensor, states: torch.Tensor) -> list[torch.Tensor]:
    """Return the keys and values that Megatron-Core's cross attention has, with this joined weight."""
    attention = _real_model().decoder.layers[0].cross_attention
    with torch.no_grad():
        attention.linear_kv.weight.copy_(weight)
        _, key, value = attention.get_query_key_value_tensors(states[:1], states)
    return [key, value]


@with_all("it imports Megatron-Core in a process; test_megatron_map has the names")
def test_a_whole_t5_declares_what_the_map_names(rank_pool: RankPool) -> None:
    (actual,) = rank_pool.run(_shapes, 1)
    assert has_megatron_keys(actual)
    family = family_of(CONFIG)
    made = megatron_map(family.region_map(CONFIG).left, family.rules(CONFIG, ()).sizes, list(actual))
    copy = {"output_layer.weight": actual["lm_head.output_layer.weight"]}
    assert actual == {key: array.stored for key, array in made.right.items()} | copy
    assert set(checkpoint_map(family, CONFIG, list(actual)).left) == actual.keys() - copy.keys()


@with_all("it imports Megatron-Core in a process; test_megatron_map has the order")
def test_keys_and_values_of_cross_attention_are_where_the_map_has_them(rank_pool: RankPool) -> None:
    family = family_of(CONFIG)
    hub = family.region_map(CONFIG)
    ours = assembled(hub, random_arrays(hub, 0))
    made = megatron_map(hub.left, family.rules(CONFIG, ()).sizes)
    joined = assembled(made.inverse(), ours)["decoder.layers.cross_attention.linear_kv.weight"][0]
    states = torch.randn(6, 2, 12, generator=torch.Generator().manual_seed(0))
    (actual,) = rank_pool.run(_keys_and_values, 1, joined, states)
    for tensor, component in zip(actual, "kv", strict=True):
        expected = states @ ours[f"{CROSS_ATTENTION}.{component}"].T
        # Sums of 12 products each, in another order.
        torch.testing.assert_close(tensor.flatten(2), expected, rtol=1e-5, atol=1e-5)
