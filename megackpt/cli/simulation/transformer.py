"""The sizes of a transformer, and its parameters.

It has the keys and the order of registration of Megatron-style layers as
`megackpt.training.parallel` declares them: the layers of a stack are one array with a leading axis, a fused
weight is one parameter of several named parts. The experts of a layer are one parameter, too. Layers of
several kinds have keys of their own, `decoder.layers.<index>`, and no axis.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megackpt.cli.simulation.arrays import Model, Stack, Weight
from megackpt.errors import DeclarationError
from megackpt.plans.metadata import DTYPES

# The sizes of a transformer, as a user gives them or picks them by name.
#
# They are checked, and may be read from a file.


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Sizes of multi-head latent attention.

    Attributes:
        q_rank: extent of the compressed queries.
        kv_rank: extent of the compressed keys and values.
        nope_dim: extent of a query or key head without positions.
        rope_dim: extent of its part with rotary positions; that of the key is shared by all heads.
        v_dim: extent of a value head.

    Source: DeepSeek-AI 2024 (DeepSeek-V2), section 2.1.
    """

    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Sizes of the mixture-of-experts layers.

    Attributes:
        count: routed experts of a layer.
        ffn_size: extent inside one of them.
        shared_ffn_size: extent inside the expert that every token goes through; 0: there is none.
        dense_layers: so many layers at the beginning have an ordinary MLP.
        router_bias: whether the router has a bias for each expert.
    """

    count: int
    ffn_size: int
    shared_ffn_size: int = 0
    dense_layers: int = 0
    router_bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """A decoder-only transformer.

    Attributes:
        vocab_size: token ids, without padding.
        hidden_size: extent of a hidden state.
        num_layers: transformer layers over all pipeline stages.
        num_heads: query heads.
        ffn_size: extent inside an ordinary MLP.
        query_groups: key and value heads; None: one for each query head.
        head_dim: extent of a head; None: `hidden_size / num_heads`.
        gated: whether the MLP has a gate in addition to its first projection.
        linear_bias: whether the linear layers of a block have biases.
        norm_bias: whether norms have a bias (LayerNorm) or not (RMSNorm).
        tied_embeddings: whether the embedding is the output weight too.
        positions: rows of a learned position embedding; 0: there is none.
        vocab_multiple: rows of the vocabulary on each tp rank are a multiple of this.
        ends_count_as_layers: whether embedding and output layer count as a layer each when layers are split
            over stages (Megatron-LM's `--account-for-embedding-in-pipeline-split` and its like for the loss).
        dtype: of the parameters.
        latent: sizes of latent attention; None: ordinary heads.
        experts: sizes of the experts; None: every layer has an ordinary MLP.

    Raises:
        DeclarationError: a size below 1, heads that do not divide, or an unknown dtype.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    ffn_size: int
    query_groups: int | None = None
    head_dim: int | None = None
    gated: bool = True
    linear_bias: bool = False
    norm_bias: bool = False
    tied_embeddings: bool = False
    positions: int = 0
    vocab_multiple: int = 128
    ends_count_as_layers: bool = False
    dtype: str = "bfloat16"
    latent: LatentAttention | None = None
    experts: Experts | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "ffn_size", "vocab_multiple"):
            _check_at_least(1, f"ModelSizes.{name}", getattr(self, name))
        _check_at_least(0, "ModelSizes.positions", self.positions)
        _check_at_least(1, "ModelSizes.head_dim", self.head_size)
        for owner in (self.latent, self.experts):
            for field in fields(owner) if owner is not None else ():
                least = 1 if field.default is MISSING else 0
                _check_at_least(
                    least, f"{type(owner).__name__}.{field.name}", int(getattr(owner, field.name))
                )
        if self.num_heads % self.kv_heads:
            raise DeclarationError(
                f"ModelSizes.query_groups {self.kv_heads} does not divide num_heads {self.num_heads}. Choose "
                f"a divisor."
            )
        if self.experts is not None and self.experts.dense_layers > self.num_layers:
            raise DeclarationError(
                f"Experts.dense_layers {self.experts.dense_layers} is more than num_layers "
                f"{self.num_layers}. Give at most that many."
            )
        if self.dtype not in DTYPES:
            raise DeclarationError(
                f"ModelSizes.dtype {self.dtype!r} is none of {', '.join(DTYPES)}. Give one of them."
            )

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads."""
        return self.num_heads if self.query_groups is None else self.query_groups

    @property
    def head_size(self) -> int:
        """Extent of one head."""
        return self.hidden_size // self.num_heads if self.head_dim is None else self.head_dim

    def to_json(self) -> dict[str, Any]:
        """Return what `sizes_from_json` reads."""
        return asdict(self)


def sizes_from_json(fields: Any, *, where: str) -> ModelSizes:
    """Return the sizes that a JSON object names by the fields of `ModelSizes`.

    Raises:
        DeclarationError: it is no object, a field is unknown, missing or of another type, or a value is bad.
    """
    values = dict(_fields_of(ModelSizes, fields, where))
    for name, kind in (("latent", LatentAttention), ("experts", Experts)):
        if values.get(name) is not None:
            values[name] = kind(**_fields_of(kind, values[name], f"{where}, {name}"))
    return ModelSizes(**values)


def read_sizes(path: Path) -> ModelSizes:
    """Read the sizes of a model from a JSON file; see `sizes_from_json`.

    Raises:
        DeclarationError: the file cannot be read, is no JSON, or not what it should be.
    """
    try:
        fields = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DeclarationError(
            f"{path}: not a description of a model ({error}). Give a JSON object with the fields of "
            f"ModelSizes, such as hidden_size.",
            path=str(path),
        ) from error
    return sizes_from_json(fields, where=str(path))


_NESTED = {"latent": dict, "experts": dict}


def _fields_of(kind: type[Any], values: Any, where: str) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise DeclarationError(
            f"{where}: a {type(values).__name__} where an object should be. Give the fields of "
            f"{kind.__name__}.",
            path=where,
        )
    known = {field.name: field for field in fields(kind)}
    unknown = sorted(set(values) - set(known))
    needed = {name for name, field in known.items() if field.default is MISSING}
    missing = sorted(needed - set(values))
    wrong = sorted(
        n for n in set(values) & set(known) if not isinstance(values[n], _types_of(n, known[n].type))
    )
    if unknown or missing or wrong:
        raise DeclarationError(
            f"{where}: unknown fields {unknown}, missing ones {missing}, of another type {wrong}. "
            f"{kind.__name__} has {', '.join(known)}.",
            path=where,
        )
    return values


def _types_of(name: str, annotation: Any) -> tuple[type, ...]:
    """Types that a JSON value of a field may have; annotations are text here."""
    may_be_none = (type(None),) if "None" in annotation else ()
    if name in _NESTED:
        return (_NESTED[name], *may_be_none)
    plain = {"int": int, "bool": bool, "str": str}[annotation.split(" ")[0]]
    return (plain, *may_be_none)


def _check_at_least(least: int, name: str, value: int) -> None:
    if value < least:
        raise DeclarationError(f"{name} is {value}. It must be at least {least}.")


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


# Published models by name. The tests have their totals and sources.

# Dubey et al. 2024, table 3.
_LLAMA3_8B = ModelSizes(
    vocab_size=128256, hidden_size=4096, num_layers=32, num_heads=32, query_groups=8, ffn_size=14336
)
# Brown et al. 2020, table 2.1; Radford et al. 2019 for what the table leaves out.
_GPT_125M = ModelSizes(
    vocab_size=50257,
    hidden_size=768,
    num_layers=12,
    num_heads=12,
    ffn_size=3072,
    gated=False,
    linear_bias=True,
    norm_bias=True,
    tied_embeddings=True,
    positions=2048,
)

PRESETS: Mapping[str, ModelSizes] = MappingProxyType(
    {
        "llama3-8b": _LLAMA3_8B,
        "llama3-70b": replace(_LLAMA3_8B, hidden_size=8192, num_layers=80, num_heads=64, ffn_size=28672),
        # Its first and last stage have one layer less each (section 3.3.2).
        "llama3-405b": replace(
            _LLAMA3_8B,
            hidden_size=16384,
            num_layers=126,
            num_heads=128,
            ffn_size=53248,
            ends_count_as_layers=True,
        ),
        # meta-llama/Llama-3.2-1B, config.json.
        "llama3-1b": replace(
            _LLAMA3_8B, hidden_size=2048, num_layers=16, ffn_size=8192, tied_embeddings=True
        ),
        "gpt3-175b": replace(_GPT_125M, hidden_size=12288, num_layers=96, num_heads=96, ffn_size=49152),
        # Jiang et al. 2024, table 1.
        "mixtral-8x7b": replace(_LLAMA3_8B, vocab_size=32000, experts=Experts(count=8, ffn_size=14336)),
        # DeepSeek-AI 2024 (DeepSeek-V3), section 4.2, without the module that predicts further tokens.
        "deepseek-v3": ModelSizes(
            vocab_size=129280,
            hidden_size=7168,
            num_layers=61,
            num_heads=128,
            ffn_size=18432,
            latent=LatentAttention(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128),
            experts=Experts(count=256, ffn_size=2048, shared_ffn_size=2048, dense_layers=3, router_bias=True),
        ),
        # Small enough to be planned in a moment.
        "gpt-125m": _GPT_125M,
    }
)
