"""One key for each tensor, however Transformer Engine fuses or names its modules.

TE keeps a norm in the linear layer that follows it. Our layers, Hugging Face and Megatron-Core's local layers
keep it next to that layer. A checkpoint has the second name, so that either model loads it. `"megatron"` asks
for the names of Megatron-Core's checkpoints of TE layers, which are those of the fused modules.

Source: Megatron-Core `gpt_layer_specs` (`sharded_state_dict_keys_map`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Literal, TypeAlias

from megackpt.entities import ShardedBase, ShardedLayout, ShardedStateDict, ShardedTensor
from megackpt.errors import DeclarationError

Names: TypeAlias = Literal["canonical", "megatron"]

# Part of a key with the module that TE fuses, and the same tensor on its own.
ALIASES: Mapping[str, str] = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "cross_attention.linear_q.layer_norm_": "pre_cross_attn_layernorm.",
    "self_attention.linear_q_up_proj.layer_norm_": "self_attention.q_layernorm.",
    "self_attention.linear_kv_up_proj.layer_norm_": "self_attention.kv_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
    "core_attention.softmax_offset": "softmax_offset",
}


def canonical_key(key: str) -> str:
    """Return the key under which a checkpoint of ours has a tensor that TE names `key`. Pure.

    >>> canonical_key("decoder.layers.3.self_attention.linear_qkv.layer_norm_weight")
    'decoder.layers.3.input_layernorm.weight'
    """
    return _replaced(key, ALIASES)


def fused_key(key: str) -> str:
    """Return the key that Megatron-Core's TE layers may have for a canonical one.

    Only a checkpoint tells whether it is this one: without latent attention, `q_layernorm` is a norm of
    heads, which no layer is fused with.

    >>> fused_key("decoder.layers.3.pre_mlp_layernorm.bias")
    'decoder.layers.3.mlp.linear_fc1.layer_norm_bias'
    """
    return _replaced(canonical_key(key), {own: fused for fused, own in ALIASES.items()})


def use_stored_names(state: ShardedStateDict, stored: Collection[str]) -> ShardedStateDict:
    """Return the declarations under the names that a checkpoint has. Local.

    For checkpoints whose norms are stored with the layer that follows them, or the other way round. A key
    stays as it is if the checkpoint has it, or has no other name for it.

    Args:
        state: from `sharded_state_dict`.
        stored: keys of the checkpoint, as `load_sharded_metadata` returns them.
    """
    return {name: _stored(entity, stored) for name, entity in state.items()}


def check_names(names: str) -> Names:
    """Return `names` if it is a choice.

    Raises:
        DeclarationError: it is not.
    """
    if names not in ("canonical", "megatron"):
        raise DeclarationError(f"names is {names!r}. Give 'canonical' or 'megatron'.")
    return names  # type: ignore[return-value]


def _stored(entity: ShardedBase, stored: Collection[str]) -> ShardedBase:
    if not isinstance(entity, ShardedTensor | ShardedLayout) or entity.key in stored:
        return entity
    other = {canonical_key(entity.key), fused_key(entity.key)} - {entity.key}
    alias = next((key for key in sorted(other) if key in stored), None)
    return entity if alias is None else replace(entity, key=alias)


def _replaced(key: str, names: Mapping[str, str]) -> str:
    for old, new in names.items():
        start = key.rfind(old)
        # A part of a key begins at its start or after a dot: my_mlp.linear_fc1 is another module.
        if start == 0 or (start > 0 and key[start - 1] == "."):
            return key[:start] + new + key[start + len(old) :]
    return key
