"""A transformer's parameters from its sizes.

It has the keys and the order of registration of Megatron-style layers as
`megackpt.training.parallel` declares them: the layers of a stack are one array with a leading axis, a fused
weight is one parameter of several named parts. The experts of a layer are one parameter, too. Layers of
several kinds have keys of their own, `decoder.layers.<index>`, and no axis.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from megackpt.cli.simulation.model import Model, Stack, Weight
from megackpt.cli.simulation.sizes import ModelSizes


def build_model(sizes: ModelSizes) -> Model:
    """Return the parameters of a model, in order of registration. Pure."""
    embedding = _vocabulary("embedding.word_embeddings.weight", sizes)
    first = [embedding]
    if sizes.positions:
        key = "embedding.position_embeddings.weight"
        first.append(Weight(key=key, parts=(("", sizes.positions),), inner=(sizes.hidden_size,)))
    last = _norm("decoder.final_layernorm", sizes)
    if not sizes.tied_embeddings:
        last.append(_vocabulary("output_layer.weight", sizes))
    return Model(
        first=_typed(first, sizes),
        stacks=tuple(replace(stack, weights=_typed(stack.weights, sizes)) for stack in _stacks(sizes)),
        last=_typed(last, sizes),
        shared=_typed([embedding], sizes)[0] if sizes.tied_embeddings else None,
        vocab_multiple=sizes.vocab_multiple,
        ends_count_as_layers=sizes.ends_count_as_layers,
        heads={"num_heads": sizes.num_heads},
        query_groups=sizes.kv_heads if sizes.latent is None else None,
    )


def _vocabulary(key: str, sizes: ModelSizes) -> Weight:
    """Return the weight `[vocab, h]` of the embedding or of the output layer."""
    parts, inner = (("", sizes.vocab_size),), (sizes.hidden_size,)
    return Weight(key=key, parts=parts, inner=inner, tp_dim=0, is_vocabulary=True)


def _stacks(sizes: ModelSizes) -> tuple[Stack, ...]:
    experts = sizes.experts
    if experts is None:
        return (Stack(layers=sizes.num_layers, weights=_layer(sizes, "decoder.layers", routed=False)),)
    if not experts.dense_layers:
        return (Stack(layers=sizes.num_layers, weights=_layer(sizes, "decoder.layers", routed=True)),)
    return tuple(
        Stack(
            layers=1,
            weights=_layer(sizes, f"decoder.layers.{index}", routed=index >= experts.dense_layers),
            has_axis=False,
        )
        for index in range(sizes.num_layers)
    )


def _layer(sizes: ModelSizes, prefix: str, *, routed: bool) -> tuple[Weight, ...]:
    weights = [*_norm(f"{prefix}.input_layernorm", sizes), *_attention(f"{prefix}.self_attention", sizes)]
    weights += _norm(f"{prefix}.pre_mlp_layernorm", sizes)
    if not routed or sizes.experts is None:
        return (*weights, *_mlp(f"{prefix}.mlp", sizes, sizes.ffn_size))
    experts, router = sizes.experts, f"{prefix}.mlp.router"
    weights.append(Weight(key=f"{router}.weight", parts=(("", experts.count),), inner=(sizes.hidden_size,)))
    if experts.router_bias:
        weights.append(
            Weight(
                key=f"{router}.expert_bias",
                parts=(("", experts.count),),
                dtype="float32",
                is_trained=False,
            )
        )
    weights += _mlp(f"{prefix}.mlp.experts", sizes, experts.ffn_size, experts=experts.count)
    if experts.shared_ffn_size:
        weights += _mlp(f"{prefix}.mlp.shared_experts", sizes, experts.shared_ffn_size)
    return tuple(weights)


def _attention(prefix: str, sizes: ModelSizes) -> list[Weight]:
    if sizes.latent is not None:
        return _latent_attention(prefix, sizes)
    query, kv = sizes.num_heads * sizes.head_size, sizes.kv_heads * sizes.head_size
    qkv = _linear(f"{prefix}.linear_qkv", sizes, {"q": query, "k": kv, "v": kv}, sizes.hidden_size, tp_dim=0)
    return qkv + _linear(f"{prefix}.linear_proj", sizes, {"": sizes.hidden_size}, query, tp_dim=1)


def _latent_attention(prefix: str, sizes: ModelSizes) -> list[Weight]:
    latent, hidden, heads = sizes.latent, sizes.hidden_size, sizes.num_heads
    assert latent is not None
    q_heads = heads * (latent.nope_dim + latent.rope_dim)
    kv_heads = heads * (latent.nope_dim + latent.v_dim)
    # What compresses is small and equal on all ranks of tp.
    weights = _linear(f"{prefix}.linear_q_down_proj", sizes, {"": latent.q_rank}, hidden, tp_dim=None)
    weights += _vectors(f"{prefix}.q_layernorm", latent.q_rank, sizes)
    weights += _linear(f"{prefix}.linear_q_up_proj", sizes, {"": q_heads}, latent.q_rank, tp_dim=0)
    kv_down = {"": latent.kv_rank + latent.rope_dim}
    weights += _linear(f"{prefix}.linear_kv_down_proj", sizes, kv_down, hidden, tp_dim=None)
    weights += _vectors(f"{prefix}.kv_layernorm", latent.kv_rank, sizes)
    weights += _linear(f"{prefix}.linear_kv_up_proj", sizes, {"": kv_heads}, latent.kv_rank, tp_dim=0)
    return weights + _linear(f"{prefix}.linear_proj", sizes, {"": hidden}, heads * latent.v_dim, tp_dim=1)


def _mlp(prefix: str, sizes: ModelSizes, ffn: int, *, experts: int = 0) -> list[Weight]:
    parts = {"gate": ffn, "up": ffn} if sizes.gated else {"": ffn}
    into = _linear(f"{prefix}.linear_fc1", sizes, parts, sizes.hidden_size, tp_dim=0, experts=experts)
    out = {"": sizes.hidden_size}
    return into + _linear(f"{prefix}.linear_fc2", sizes, out, ffn, tp_dim=1, experts=experts)


def _linear(
    prefix: str,
    sizes: ModelSizes,
    parts: dict[str, int],
    columns: int,
    *,
    tp_dim: int | None,
    experts: int = 0,
) -> list[Weight]:
    rows = tuple(parts.items())
    weights = [
        Weight(key=f"{prefix}.weight", parts=rows, inner=(columns,), tp_dim=tp_dim, experts=experts),
    ]
    if sizes.linear_bias:  # of a layer cut by input features it is added after the sum over tp: equal there
        of_rows = 0 if tp_dim == 0 else None
        weights.append(Weight(key=f"{prefix}.bias", parts=rows, tp_dim=of_rows, experts=experts))
    return weights


def _norm(prefix: str, sizes: ModelSizes) -> list[Weight]:
    return _vectors(prefix, sizes.hidden_size, sizes)


def _vectors(prefix: str, extent: int, sizes: ModelSizes) -> list[Weight]:
    names = ("weight", "bias") if sizes.norm_bias else ("weight",)
    return [Weight(key=f"{prefix}.{name}", parts=(("", extent),)) for name in names]


def _typed(weights: Iterable[Weight], sizes: ModelSizes) -> tuple[Weight, ...]:
    return tuple(replace(weight, dtype=sizes.dtype) if weight.is_trained else weight for weight in weights)
