"""The arrays of Megatron-Core's GPT and T5: its keys, and where in its arrays each of ours is.

It joins some tensors that we store one by one: queries, keys and values by query group, gate and up one after
the other. A norm is stored with the projection that follows it. Layers are stacked along an axis or have keys
of their own, and so have experts; the keys of a checkpoint tell.

Source: Megatron-Core 0.12.1, 0.16.1 and 0.19.2, `GPTModel.sharded_state_dict` with its local and its
Transformer Engine layers (`gpt_layer_specs`, `transformer.mlp`, `transformer.moe.experts`,
`transformer.dot_product_attention`), also with `singleton_local_shards`; of the last two also
`transformer.multi_latent_attention`, `transformer.multi_token_prediction` and `ssm.gated_delta_net`. Read and
built, but not run: `MambaModel` of 0.16.1 (`ssm.mamba_block`, `ssm.mamba_mixer`, `mamba_layer_specs`) and its
`T5Model` (`models.T5`). Read: `CrossAttention`, and Megatron-Bridge `Qwen3NextBridge`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from megackpt.errors import MapError, truncated_list
from megackpt.maps.family import Family, map_of_family
from megackpt.maps.regions import MappedArray, Region, RegionMap, RegionPair, bound_to
from megackpt.plans.geometry import Box

_LAYER = re.compile(
    r"(?P<layer>(?:encoder|decoder)\.layers\.\d+|mtp\.layers\.\d+\.transformer_layer)\.(?P<name>.+)"
)
_COMPONENT = re.compile(r"(?P<fused>.+\.(?:weight|bias))\.(?P<component>q|k|v|gate|up)")
_SINGLETON = re.compile(r".*\.(linear_fc1\.(weight|bias)_[wv]|experts\.experts\.\d+\..*)")
_NORM = re.compile(r".*(layernorm|\.\d+\.norm|\.[eh]norm)\.weight")
_KEYS_AND_VALUES = ".cross_attention.linear_kv.weight"
_NORM_AFTER_MLP = ".mlp_layernorm.weight"  # of BERT
_FINAL_NORM = "decoder.final_norm.weight"  # of models with Mamba's mixers
_DELTA_NET = "self_attention.in_proj.weight.query"  # an array of each gated delta net
_JOINED_BY_GROUP = (".linear_qkv.weight", ".linear_qkv.bias", _KEYS_AND_VALUES)
_OUT_NORM = ".self_attention.out_norm.weight"
_OF_MODEL = re.compile(
    r"((?:en|de)coder(_relative_pos_emb)?|embedding|output_layer|lm_head|mtp)\.(?!.*_extra_state).*"
)

# The first is written, or the second for the names of `_WRITTEN_APART`.
_NAMES = {
    "input_layernorm.": ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    "self_attention.kv_layernorm.": (
        "self_attention.linear_kv_up_proj.layer_norm_",
        "self_attention.kv_layernorm.",
    ),
    "self_attention.q_layernorm.": (
        "self_attention.q_layernorm.",
        "self_attention.linear_q_up_proj.layer_norm_",
    ),
    "pre_mlp_layernorm.": ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
    "self_attention.softmax_offset": ("self_attention.core_attention.softmax_offset",),
    "mlp.experts.": ("mlp.experts.experts.",),
    "post_self_attn_layernorm.": (
        "post_self_attn_layernorm.",
        "self_attention.linear_proj.post_layernorm.",
    ),
    "norm.": ("mixer.in_proj.layer_norm_", "norm."),
    "post_mlp_layernorm.": ("post_mlp_layernorm.", "mlp.linear_fc2.post_layernorm."),
}
"""Names that Megatron-Core has for one of ours inside of a layer, by how they begin."""

_OF_T5 = {
    "encoder.relative_positions.weight": "encoder_relative_pos_emb.relative_attention_bias.weight",
    "decoder.relative_positions.weight": "decoder_relative_pos_emb.relative_attention_bias.weight",
    "output_layer.weight": "lm_head.output_layer.weight",
}
"""Names of its arrays outside of layers that others do not have, or have by another name."""

_WRITTEN_APART = {
    "pre_mlp_layernorm.": "mlp.router.weight",
    "input_layernorm.": "self_attention.linear_kv_down_proj.weight",
    "self_attention.q_layernorm.": "self_attention.linear_kv_down_proj.weight",
}
"""For each name of ours, which array a layer has where the second of its names is written."""


def has_megatron_keys(keys: Collection[str]) -> bool:
    """Return whether a checkpoint has the keys of a model of Megatron-Core, and not ours. Pure."""
    if any(key.endswith(".self_attention.linear_qkv.weight") for key in keys):
        return True
    # Latent attention and gated delta nets have the same keys in both, and what follows them is gated.
    ends = (".self_attention.linear_kv_up_proj.weight", _DELTA_NET)
    is_equal = any(key.endswith(ends) for key in keys)
    if any(key.endswith(_FINAL_NORM) for key in keys):
        return True
    fused = (".mlp.linear_fc1.weight", ".mlp.experts.experts.linear_fc1.weight")
    return is_equal and any(key.endswith(fused) or ".linear_fc1.weight_w" in key for key in keys)


def checkpoint_map(
    family: Family,
    config: Mapping[str, Any],
    keys: Collection[str],
    *,
    prefix: str = "",
    norm_added: int = 0,
) -> RegionMap:
    """Return the proved map between a checkpoint, ours or Megatron-Core's, and the arrays of a family. Pure.

    Args:
        family: the family on the right, as it is written.
        config: the model's parsed `config.json`.
        keys: of the checkpoint, which is on the left.
        prefix: of the checkpoint's keys of Megatron-Core.
        norm_added: as in `megatron_map`.

    Raises:
        MapError: the config makes no sense, or a checkpoint of Megatron-Core lacks an array of the model, has
            one more, or is of a model that Megatron-Core has otherwise.
    """
    made = map_of_family(family, config)
    if not has_megatron_keys(keys):
        return bound_to(made, keys)
    if config.get("rope_interleave") is False:
        raise MapError(
            "Megatron-Core's latent attention rotates pairs of neighbouring rows, and the rows of this model "
            "have another order (rope_interleave is false in config.json). Keep the checkpoint in its own "
            "names.",
            key="rope_interleave",
        )
    theirs = megatron_map(
        made.left, family.rules(config, ()).sizes, keys, prefix=prefix, norm_added=norm_added
    )
    unknown = sorted(
        key
        for key in keys
        if key not in theirs.right
        and key.startswith(prefix)
        and _OF_MODEL.fullmatch(key[len(prefix) :])
        # T5's output layer is a part of two modules, and stored twice.
        and key.replace("output_layer.", "lm_head.output_layer.") not in theirs.right
    )
    if unknown:
        is_further = any(key.startswith(f"{prefix}mtp.") for key in unknown)
        other = ", or a map with layers for further tokens, such as deepseek_v3_mtp" if is_further else ""
        raise MapError(
            f"The checkpoint has arrays that a model of {family.name} with this config has not: "
            f"{truncated_list(unknown)}. Give the config of the model that was saved{other}.",
            key=unknown[0],
        )
    joined = theirs.inverse().joined(made)
    joined.check(name=f"of Megatron-Core and {family.name}")
    return joined


def megatron_map(
    ours: Mapping[str, MappedArray],
    sizes: Mapping[str, int],
    keys: Collection[str] = (),
    *,
    prefix: str = "",
    norm_added: int = 0,
) -> RegionMap:
    """Return the map between our arrays and those of Megatron-Core, which are on the right. Pure.

    Args:
        ours: our arrays, with keys for each layer: the left side of the map of another family.
        sizes: `heads`, `groups` and `d` (extent of a head), as in `FamilyRules`.
        keys: of the checkpoint of Megatron-Core. For one to be written there are none, and it gets the keys
            of layers with Transformer Engine, stacked where all layers have the same arrays.
        prefix: of its keys.
        norm_added: what to add to the weights of its norms to get ours: 1 if it stores them zero-centred
            (`layernorm_zero_centered_gamma`) and the model of ours does not, which no key tells.

    Raises:
        MapError: the checkpoint has no array for one of ours, or the heads do not fit the arrays.
            `norm_added` is given for a model with gated delta nets, whose norms are zero-centred in ours.
            Megatron-Core's model of this kind is another one: BERT, and T5 with a tied output layer.
    """
    _check_model(ours)
    if norm_added and any(key.endswith(_DELTA_NET) for key in ours):
        raise MapError(
            "norm_added is 1, but the norms of a model with gated delta nets are zero-centred in both. Leave "
            "it at 0."
        )
    checkpoint = _Checkpoint(frozenset(keys), prefix, any(_SINGLETON.fullmatch(key) for key in keys))
    right: dict[str, MappedArray] = {}
    pairs = []
    for key, array in ours.items():
        has_gate = key.rpartition(".")[0] + ".gate" in ours
        for part in _parts(key, array, sizes, has_gate=has_gate):
            theirs = checkpoint.key_of(key, ours)
            for pair, stored in checkpoint.placed(key, theirs, part, array):
                right[pair.right.key] = MappedArray(stored, stored, array.is_padded)
                pairs.append(replace(pair, added=_added(key, norm_added)))
    made = RegionMap(dict(ours), right, tuple(pairs))
    made.check(name="of Megatron-Core")
    return bound_to(made.inverse(), keys or _stacked_keys(right)).inverse()


def _check_model(ours: Collection[str]) -> None:
    if any(key.endswith(_NORM_AFTER_MLP) for key in ours):
        raise MapError(
            "Megatron-Core's BERT has norms before its blocks, and this one after them: no map makes one of "
            "the other. Keep the checkpoint in its own names, or convert it to a Hugging Face folder."
        )
    if _is_t5(ours) and "output_layer.weight" not in ours:
        raise MapError(
            "Megatron-Core's T5 has a bias in an output layer that is tied to the embedding, and this model "
            "has none. Untie it (tie_word_embeddings false), or keep the checkpoint in its own names.",
            key="output_layer.weight",
        )


def _is_t5(ours: Collection[str]) -> bool:
    return any(
        key in ours for key in ("encoder.relative_positions.weight", "decoder.relative_positions.weight")
    )


def _added(key: str, norm_added: int) -> int:
    """Return what to add to their elements of one of our arrays to get ours."""
    if key.endswith(_OUT_NORM):
        # The only norm of such a model that is not zero-centred in ours; in theirs, one option is for all.
        return 1
    return norm_added if _NORM.fullmatch(key) is not None else 0


class _Part(NamedTuple):
    """Rows of one of our arrays, and of the joined array that they are in.

    Attributes:
        axis: along which arrays are joined.
        start: first row of ours.
        rows: number of rows.
        to: first row of theirs.
        extent: rows of theirs.
        component: gate or up, which may have keys of their own; '' for others.
    """

    axis: int
    start: int
    rows: int
    to: int
    extent: int
    component: str


def _parts(key: str, array: MappedArray, sizes: Mapping[str, int], *, has_gate: bool) -> Iterator[_Part]:
    match = _COMPONENT.fullmatch(key)
    if match is None:
        rows = array.viewed[0]
        yield _Part(0, 0, rows, 0, rows, "")
        return
    component = match["component"]
    axis = len(array.viewed) - (2 if match["fused"].endswith("weight") else 1)
    rows = array.viewed[axis]
    if not match["fused"].endswith(_JOINED_BY_GROUP):
        yield _Part(axis, 0, rows, rows if component == "up" else 0, 2 * rows, component)
        return
    # The rows of each query group follow each other: its queries, their output gates, its key, its value.
    groups, d = sizes["groups"], sizes["d"]
    queries = 0 if match["fused"].endswith(_KEYS_AND_VALUES) else sizes["heads"] // groups * d
    gates = queries if has_gate else 0
    count = queries if component in ("q", "gate") else d
    before = {"q": 0, "gate": queries, "k": queries + gates, "v": queries + gates + d}[component]
    if rows != groups * count:
        raise MapError(
            f"{key!r} has {rows} rows, and {groups} query groups with {count} rows each are "
            f"{groups * count}. Correct the numbers of heads.",
            key=key,
        )
    for group in range(groups):
        to = group * (queries + gates + 2 * d) + before
        yield _Part(axis, group * count, count, to, groups * (queries + gates + 2 * d), "")


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    """How a checkpoint spells the arrays.

    Attributes:
        keys: its keys; empty for one to be written.
        prefix: of its keys.
        has_singletons: whether each expert, and each of gate and up, has a key of its own.
    """

    keys: frozenset[str]
    prefix: str
    has_singletons: bool

    def key_of(self, key: str, ours: Collection[str]) -> str:
        """Return the key of the array that has one of ours, with a layer but no expert."""
        match = _COMPONENT.fullmatch(key)
        fused = key if match is None else match["fused"]
        layer = _LAYER.fullmatch(fused)
        if fused == "decoder.final_layernorm.weight" and _has_mixers(ours):
            names = [_FINAL_NORM]
        elif layer is None:
            names = [_OF_T5[fused] if fused in _OF_T5 and _is_t5(ours) else fused]
        else:
            names = [f"{layer['layer']}.{name}" for name in _megatron_names(layer["name"])]
            if f"{layer['layer']}.{_DELTA_NET}" in ours:
                names = [name.replace(".linear_qkv.layer_norm_", ".in_proj.layer_norm_") for name in names]
            apart = next((at for name, at in _WRITTEN_APART.items() if layer["name"].startswith(name)), "")
            if not self.keys and f"{layer['layer']}.{apart}" in ours:
                names = names[::-1]
        names = [self.prefix + name for name in names]
        present = next((name for name in names if not self.keys or self._has(name, match)), None)
        if present is None:
            raise MapError(
                f"{key!r}: the checkpoint has no array {' or '.join(map(repr, names))}, which are "
                f"Megatron-Core's names for it. Give a model with the same parts (experts, ties, biases), or "
                f"the prefix of its keys.",
                key=key,
            )
        return present

    def _has(self, name: str, component: re.Match[str] | None) -> bool:
        if self.has_singletons:
            name = name.replace(".experts.experts.", ".experts.experts.0.")
            is_half = component is not None and not name.endswith(_JOINED_BY_GROUP)
            name += _suffix(component["component"]) if is_half and component is not None else ""
        return name in self.keys or re.sub(r"(\blayers)\.\d+\.", r"\1.", name, count=1) in self.keys

    def placed(
        self, key: str, theirs: str, part: _Part, array: MappedArray
    ) -> Iterator[tuple[RegionPair, tuple[int, ...]]]:
        """Yield the pairs of a part, each with the shape of the array that it is in."""
        shape, axis = array.viewed, part.axis
        to, extent = part.to, part.extent
        if self.has_singletons and part.component in ("gate", "up"):
            theirs, to, extent = theirs + _suffix(part.component), 0, part.rows
        start = tuple(part.start if a == axis else 0 for a in range(len(shape)))
        count = tuple(part.rows if a == axis else n for a, n in enumerate(shape))
        other = tuple(to if a == axis else 0 for a in range(len(shape)))
        stored = tuple(extent if a == axis else n for a, n in enumerate(shape))
        axes = tuple(range(len(shape)))
        if not self.has_singletons or ".experts.experts." not in theirs:
            yield RegionPair(Region(key, Box(start, count)), Region(theirs, Box(other, count)), axes), stored
            return
        for expert in range(shape[0]):
            of_expert = theirs.replace(".experts.experts.", f".experts.experts.{expert}.")
            left = Region(key, Box((expert, *start[1:]), (1, *count[1:])))
            yield RegionPair(left, Region(of_expert, Box(other[1:], count[1:])), axes[1:]), stored[1:]


def _has_mixers(keys: Collection[str]) -> bool:
    """Return whether a model has Mamba's mixers; Megatron-Core then has another final norm."""
    return any(".mixer." in key for key in keys)


def _suffix(component: str) -> str:
    return {"gate": "_w", "up": "_v"}.get(component, "")


def _megatron_names(name: str) -> list[str]:
    for ours, theirs in _NAMES.items():
        if name.startswith(ours):
            return [other + name[len(ours) :] for other in theirs]
    return [name]


def _stacked_keys(arrays: Mapping[str, MappedArray]) -> set[str]:
    """Return the keys without layers of each stack whose layers have equal arrays, and no mixer of Mamba."""
    stacks: dict[str, dict[str, set[tuple[str, MappedArray]]]] = {}
    for key, array in arrays.items():
        match = re.fullmatch(r"(.*(?:encoder|decoder)\.layers)\.(\d+)\.(.+)", key)
        if match is not None:
            stacks.setdefault(match[1], {}).setdefault(match[2], set()).add((match[3], array))
    keys: set[str] = set()
    for stack, layers in stacks.items():
        first, *others = layers.values()
        stacked = {f"{stack}.{name}" for name, _ in first}
        if all(layer == first for layer in others) and not _has_mixers(stacked):
            keys |= stacked
    return keys
