"""Maps of Megatron-Core's keys: every spelling has the same elements, and each is moved once."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import megackpt
from megackpt import (
    LoadOptions,
    load,
    load_common_state_dict,
    load_plain_tensors,
    load_sharded_metadata,
    save,
)
from megackpt.comm import Group
from megackpt.contrib.megatron.resuming import MegatronProgress, resume_from_megatron
from megackpt.entities import ShardedStateDict
from megackpt.errors import MapError, MismatchError, MissingKeyError
from megackpt.maps import (
    RegionMap,
    bound_to,
    checkpoint_map,
    family,
    family_of,
    has_megatron_keys,
    megatron_map,
)
from megackpt.testing.world import SimulatedWorld
from megackpt.training.optim import DistributedOptimizer, initialise_state
from megackpt.training.parallel import ModelChunks, ParallelGroups, ParallelLayout
from models import GPTConfig, build_gpt, init_weights
from models.megatron import megatron_state
from tests.support.effort import few
from tests.support.huggingface_configs import IN_MEGATRON, random_fields
from tests.support.states import assembled, random_arrays

SEEDS = range(few(2, of=5))


def config_of(model_type: str, seed: int) -> dict[str, Any]:
    config = {"model_type": model_type, **random_fields(model_type, seed)}
    # The rows of latent attention are in Megatron-Core's order only if they are interleaved.
    return config | {"rope_interleave": True} if model_type == "deepseek_v3" else config


def map_of(config: dict[str, Any], keys: tuple[str, ...] = (), prefix: str = "") -> RegionMap:
    family = family_of(config)
    made = family.region_map(config)
    return megatron_map(made.left, family.rules(config, ()).sizes, keys, prefix=prefix)


def per_layer(keys: list[str], config: dict[str, Any]) -> tuple[str, ...]:
    """Return keys with layers instead of stacked ones."""
    count = config.get("num_hidden_layers") or config.get("n_layer") or config["num_layers"]
    counts = {"encoder": count, "decoder": config.get("num_decoder_layers", count)}
    return tuple(
        re.sub(r"layers\.(?!\d)", f"layers.{layer}.", key)
        for key in keys
        for layer in range(counts[key.partition(".")[0]] if "layers." in key else 1)
    )


def singletons(keys: tuple[str, ...], config: dict[str, Any]) -> tuple[str, ...]:
    """Return keys for each expert, and each of gate and up, as `singleton_local_shards` has them."""
    spelled: list[str] = []
    for key in keys:
        halves = (key + "_w", key + "_v") if re.search(r"linear_fc1\.(weight|bias)$", key) else (key,)
        count = config.get("num_experts", config.get("n_routed_experts", 0))
        experts = range(count) if "experts.experts." in key else [None]
        for half in halves:
            spelled += [
                half if e is None else half.replace("experts.experts.", f"experts.experts.{e}.")
                for e in experts
            ]
    return tuple(spelled)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("model_type", IN_MEGATRON)
def test_every_spelling_is_picked_by_the_keys_and_holds_the_same_elements(model_type: str, seed: int) -> None:
    config = config_of(model_type, seed)
    hub = family_of(config).region_map(config)
    theirs = random_arrays(hub, seed)
    ours = assembled(hub, theirs)
    written = map_of(config)
    assert has_megatron_keys(written.right)
    spellings = [tuple(written.right), per_layer(list(written.right), config)]
    if model_type not in ("gpt2", "mt5"):  # singletons are those of gated MLPs
        spellings.append(singletons(spellings[1], config))
    for keys in spellings:
        for prefix in ("", "model."):
            named = tuple(prefix + key for key in keys)
            made = checkpoint_map(family_of(config), config, named, prefix=prefix)
            assert set(made.left) == set(named)
            stored = assembled(made, theirs)
            assert_equal(assembled(made.inverse(), stored), theirs)
            assert_equal(assembled(map_of(config, named, prefix), stored), ours)


def assert_equal(arrays: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert arrays.keys() == expected.keys()
    for key, array in expected.items():
        assert torch.equal(arrays[key], array), key


def in_both_names(config: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return random arrays of a config in our names, and in those of Megatron-Core."""
    hub = family_of(config).region_map(config)
    ours = assembled(hub, random_arrays(hub, 0))
    return ours, assembled(map_of(config).inverse(), ours)


HEADS = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 4}
ONE_LAYER = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}


@pytest.mark.parametrize(
    ("model_type", "changes", "name", "rows"),
    [
        ("qwen3", HEADS, "self_attention.linear_qkv", {"q": 12, "k": 4, "v": 4}),
        ("qwen3_next", HEADS | ONE_LAYER, "self_attention.linear_qkv", {"q": 12, "gate": 12, "k": 4, "v": 4}),
        ("mt5", {"num_heads": 2, "d_kv": 3}, "cross_attention.linear_kv", {"k": 3, "v": 3}),
    ],
)
def test_components_of_attention_are_joined_by_query_group(
    model_type: str, changes: dict[str, Any], name: str, rows: dict[str, int]
) -> None:
    ours, stored = in_both_names(config_of(model_type, 0) | changes)
    joined = [
        ours[f"decoder.layers.0.{name}.weight.{part}"][group * size : (group + 1) * size]
        for group in range(2)
        for part, size in rows.items()
    ]
    (key,) = (key for key in stored if key.startswith("decoder.") and key.endswith(f"{name}.weight"))
    assert torch.equal(stored[key].view(-1, *stored[key].shape[-2:])[0], torch.cat(joined))


def test_gated_delta_nets_have_the_norm_before_them_and_zero_centred_ones_inside() -> None:
    config = config_of("qwen3_next", 0) | {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
    }
    made = map_of(config)
    assert "decoder.layers.0.self_attention.in_proj.layer_norm_weight" in made.right
    assert "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight" in made.right
    added = {pair.left.key for pair in made.pairs if pair.added}
    assert added == {"decoder.layers.0.self_attention.out_norm.weight"}
    with pytest.raises(MapError, match=r"zero-centred in both\. Leave it at 0"):
        checkpoint_map(family_of(config), config, list(made.right), norm_added=1)


def test_parts_of_an_encoder_and_decoder_have_the_names_of_megatron_core() -> None:
    keys = map_of(config_of("mt5", 0)).right.keys()
    assert {
        "encoder_relative_pos_emb.relative_attention_bias.weight",
        "lm_head.output_layer.weight",
    } < keys


@pytest.mark.parametrize(
    ("model_type", "text"),
    [
        ("bert", "norms before its blocks, and this one after"),
        ("t5", "has a bias in an output layer that is tied"),
    ],
)
def test_models_that_megatron_core_has_otherwise_are_an_error(model_type: str, text: str) -> None:
    config = config_of(model_type, 0)
    with pytest.raises(MapError, match=text):
        map_of(config)


def test_gate_and_up_follow_each_other_in_each_expert() -> None:
    ours, stored = in_both_names(config_of("mixtral", 1))
    gate, up = (ours[f"decoder.layers.0.mlp.experts.linear_fc1.weight.{part}"] for part in ("gate", "up"))
    joined = stored["decoder.layers.mlp.experts.experts.linear_fc1.weight"][0]
    assert torch.equal(joined, torch.cat([gate, up], dim=1))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("model_type", ["deepseek_v3", "qwen3_next"])
def test_layers_for_further_tokens_are_named_as_those_of_the_model(model_type: str, seed: int) -> None:
    config = config_of(model_type, seed) | {"num_nextn_predict_layers": 2}
    chosen = family(f"{model_type}_mtp")
    hub, sizes = chosen.region_map(config), chosen.rules(config, ()).sizes
    theirs = random_arrays(hub, seed)
    written = megatron_map(hub.left, sizes)
    inner = "mtp.layers.0.transformer_layer"
    norm = "input_layernorm." if model_type == "deepseek_v3" else "self_attention.linear_qkv.layer_norm_"
    assert {f"{inner}.{norm}weight", f"{inner}.self_attention.linear_proj.weight"} < written.right.keys()
    assert {f"mtp.layers.0.{name}.weight" for name in ("enorm", "hnorm", "eh_proj", "final_layernorm")} < (
        written.right.keys()
    )
    stored = assembled(checkpoint_map(chosen, config, list(written.right)), theirs)
    assert_equal(assembled(written, stored), assembled(hub, theirs))
    with pytest.raises(MapError, match=r"(?s)has not: .*mtp\.layers\.0.*such as deepseek_v3_mtp"):
        checkpoint_map(family_of(config), config, list(written.right))


def test_latent_attention_whose_rows_are_not_interleaved_is_an_error() -> None:
    config = config_of("deepseek_v3", 0) | {"rope_interleave": False}
    with pytest.raises(MapError, match="rotates pairs of neighbouring rows"):
        checkpoint_map(family_of(config), config, list(map_of(config).right))


def test_zero_centred_norms_are_added_to_and_nothing_else_is() -> None:
    config = config_of("qwen3", 0)
    family = family_of(config)
    written = map_of(config)
    made = checkpoint_map(family, config, list(written.right), norm_added=1)
    stored = random_arrays(written, 0)
    for key, array in assembled(made.inverse(), stored).items():
        plain = assembled(checkpoint_map(family, config, list(written.right)).inverse(), stored)[key]
        assert torch.equal(array, plain + 1 if "norm" in key else plain), key


def test_layers_with_and_without_experts_have_keys_of_their_own() -> None:
    config = config_of("qwen3_moe", 0) | {
        "num_hidden_layers": 2,
        "mlp_only_layers": [0],
        "decoder_sparse_step": 1,
    }
    keys = set(map_of(config).right)
    assert "decoder.layers.0.mlp.linear_fc1.layer_norm_weight" in keys
    assert "decoder.layers.1.pre_mlp_layernorm.weight" in keys
    assert "decoder.layers.1.mlp.experts.experts.linear_fc2.weight" in keys
    assert not any(key.startswith("decoder.layers.mlp") for key in keys)


def test_local_layers_with_experts_may_store_their_norm_as_dense_ones_do() -> None:
    config = config_of("mixtral", 0)
    keys = tuple(
        key.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_") for key in map_of(config).right
    )
    assert set(map_of(config, keys).right) == set(keys)


def test_a_checkpoint_of_ours_is_mapped_by_its_own_keys() -> None:
    config = config_of("llama", 0)
    hub = family_of(config).region_map(config)
    keys = {re.sub(r"layers\.\d+\.", "layers.", key) for key in hub.left}
    made = checkpoint_map(family_of(config), config, keys)
    assert set(made.left) == keys
    assert made.pairs == bound_to(hub, keys).pairs


@pytest.mark.parametrize(
    ("lacking", "added", "text"),
    [
        ("decoder.layers.self_attention.linear_proj.weight", "", r"linear_proj\.weight.*has no array"),
        ("embedding.word_embeddings.weight", "", r"has no array.*prefix"),
        ("", "decoder.layers.mlp.router.expert_bias", r"has not:.*expert_bias.*Give the config"),
        ("", "output_layer.bias", r"has not:.*output_layer\.bias"),
    ],
)
def test_a_checkpoint_that_does_not_fit_the_config_is_an_error(lacking: str, added: str, text: str) -> None:
    config = config_of("llama", 0)
    keys = (
        {*map_of(config).right, "optimizer.state.exp_avg.x", "decoder.layers.mlp._extra_state"} | {added}
    ) - {lacking, ""}
    with pytest.raises(MapError, match=f"(?s){text}"):
        checkpoint_map(family_of(config), config, keys)


def test_heads_that_do_not_fit_the_arrays_are_an_error() -> None:
    config = config_of("llama", 0)
    family = family_of(config)
    sizes = {**family.rules(config, ()).sizes, "groups": 7}
    with pytest.raises(MapError, match="7 query groups with"):
        megatron_map(family.region_map(config).left, sizes)


# A run that goes on: optimizer state in Megatron-Core's names. tests/contrib/megatron has its own optimizer.

GPT = GPTConfig(
    vocab_size=30,
    hidden_size=16,
    num_layers=2,
    num_heads=4,
    num_query_groups=2,
    ffn_hidden_size=24,
    seq_length=8,
    tied_embeddings=False,
    make_vocab_divisible=1,
    params_dtype=torch.bfloat16,
)
WEIGHTS = [
    "embedding.word_embeddings.weight",
    "decoder.layers.self_attention.linear_qkv.layer_norm_weight",
    "decoder.layers.self_attention.linear_qkv.weight",
    "decoder.layers.self_attention.linear_proj.weight",
    "decoder.layers.mlp.linear_fc1.layer_norm_weight",
    "decoder.layers.mlp.linear_fc1.weight",
    "decoder.layers.mlp.linear_fc2.weight",
    "decoder.final_layernorm.weight",
    "output_layer.weight",
]
TIMES = {"fp32_param": 1, "exp_avg": 2, "exp_avg_sq": 3}
"""Each state of the optimizer is its parameter times this, so that a wrong place shows."""
DECAYED = {"wd_mult": 1.0, "lr_mult": 1.0, "lr": 0.25, "weight_decay": 0.125, "betas": (0.9, 0.98), "step": 5}
FREE = {**DECAYED, "wd_mult": 0.0, "weight_decay": 0.0}


def trainer(groups: ParallelGroups, config: GPTConfig = GPT) -> tuple[ModelChunks, DistributedOptimizer]:
    model = build_gpt(config, groups)
    init_weights(model, seed=3)
    of_groups: list[dict[str, Any]] = [
        {"name": "decay", "params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.5},
        {"name": "free", "params": [p for p in model.parameters() if p.ndim == 1], "wd_mult": 0.0},
    ]
    return model, DistributedOptimizer(of_groups, lambda g: torch.optim.AdamW(g, lr=1.0), groups)


def on_one_rank() -> tuple[ModelChunks, DistributedOptimizer, ShardedStateDict]:
    """Return a model, its optimizer, and what it declares of the optimizer."""
    model, optimizer = trainer(ParallelGroups.offline(ParallelLayout(), 0))
    return model, optimizer, optimizer.sharded_state_dict(model.sharded_state_dict())


def stored_run(path: Path, *, names: Mapping[str, str], common: dict[str, Any]) -> None:
    """Save what Megatron-Core would have stored; names are those of states, with what stands before them."""
    model, _, declared = on_one_rank()
    keys = [*WEIGHTS, *(f"{name}.{key}" for name in names.values() for key in WEIGHTS)]
    for states in declared["state"].values():
        for name, times in TIMES.items():
            states[name].data.copy_(times * states["fp32_param"].data)
    boxes = megatron_state(model, keys, optimizer=declared)
    save({**boxes, **common}, path)
    arrays = load_plain_tensors(path)
    for name, stored in names.items():
        for key in WEIGHTS:
            assert torch.equal(arrays[f"{stored}.{key}"], TIMES[name] * arrays[key].float()), (name, key)


STATES = {name: f"optimizer.state.{name}" for name in TIMES}
BY_DISTRIBUTED = {**STATES, "fp32_param": "optimizer.state.param"}
IN_A_CHAIN = {name: f"chained_0.{key}" for name, key in BY_DISTRIBUTED.items()}
ONE = {"optimizer": {"optimizer": {"param_groups": [DECAYED, FREE]}}}
OF_EXPERTS = [{**group, "is_expert_parallel": True} for group in (DECAYED, FREE)]
CHAIN = {"optimizer": {0: {"optimizer": {"param_groups": [DECAYED, FREE]}}, 1: {"param_groups": OF_EXPERTS}}}
WITHOUT_STEP = [{k: v for k, v in group.items() if k != "step"} for group in (DECAYED, FREE)]
WHOLE = {"optimizer": {"state": {"common_step": torch.tensor(5.0)}, "param_groups": WITHOUT_STEP}}


@pytest.mark.parametrize(
    ("names", "common", "layout", "divisible"),
    [
        (BY_DISTRIBUTED, ONE, ParallelLayout(dp=2), 1),
        (BY_DISTRIBUTED, ONE, ParallelLayout(tp=2), 20),
        (IN_A_CHAIN, CHAIN, ParallelLayout(pp=2), 1),
        (STATES, WHOLE, ParallelLayout(dp=3), 32),
    ],
    ids=["distributed-dp", "distributed-tp", "chain-pp", "whole-dp"],
)
def test_masters_moments_and_groups_go_on_at_any_layout(
    names: dict[str, str], common: dict[str, Any], layout: ParallelLayout, divisible: int, tmp_path: Path
) -> None:
    stored_run(tmp_path / "theirs", names=names, common=common)
    keys = load_sharded_metadata(tmp_path / "theirs")

    def go_on(group: Group) -> None:
        groups = ParallelGroups.offline(layout, group.rank)
        model, optimizer = trainer(groups, replace(GPT, make_vocab_divisible=divisible))
        for parameter in model.parameters():
            parameter.data.fill_(float("nan"))  # whatever is not loaded shows, padding too
        optimizer.reload_model_params()
        declared = optimizer.sharded_state_dict(model.sharded_state_dict())
        load(megatron_state(model, keys, optimizer=declared), tmp_path / "theirs", group=group)
        resume_from_megatron(optimizer, declared, load_common_state_dict(tmp_path / "theirs"))
        state = model.sharded_state_dict()
        save({**state, "optimizer": optimizer.sharded_state_dict(state)}, tmp_path / "ours", group=group)

    SimulatedWorld(layout.world_size).run(go_on)
    ours, theirs = load_plain_tensors(tmp_path / "ours"), load_plain_tensors(tmp_path / "theirs")
    weights = {key: value for key, value in ours.items() if not key.startswith("optimizer.")}
    for key, value in weights.items():
        for name, times in TIMES.items():
            assert torch.equal(ours[f"optimizer.state.{name}.{key}"], times * value.float()), (name, key)
    assert torch.equal(weights["output_layer.weight"][:30], theirs["output_layer.weight"])
    assert not weights["output_layer.weight"][30:].any(), "padding is 0"
    assert all((value == 5).all() for key, value in ours.items() if key.startswith("optimizer.state.step."))
    groups = load_common_state_dict(tmp_path / "ours")["optimizer"]["param_groups"]
    continued = {name: (group["lr"], group["weight_decay"], group["betas"]) for name, group in groups.items()}
    assert continued == {"decay": (0.25, 0.125, (0.9, 0.98)), "free": (0.25, 0.0, (0.9, 0.98))}


@pytest.mark.parametrize("names", [BY_DISTRIBUTED, IN_A_CHAIN])
def test_a_request_in_our_names_is_an_error_with_the_lines_that_load_it(
    names: dict[str, str], tmp_path: Path
) -> None:
    stored_run(tmp_path / "run", names=names, common=ONE)
    model, _, declared = on_one_rank()
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    with pytest.raises(MissingKeyError) as raised:
        load({"optimizer": declared}, tmp_path / "run")
    lines = (
        str(raised.value).rpartition("The checkpoint is Megatron-Core's. In a clone: ")[2].removesuffix(".")
    )
    exec(lines, {"megackpt": megackpt, "model": model, "declared": declared})
    assert not any(parameter.isnan().any() for parameter in model.parameters())
    assert all((s["exp_avg"].data == 2 * s["fp32_param"].data).all() for s in declared["state"].values())


def test_a_missing_moment_is_named_as_megatron_core_names_it(tmp_path: Path) -> None:
    stored_run(tmp_path / "run", names=BY_DISTRIBUTED, common=ONE)
    keys = set(load_sharded_metadata(tmp_path / "run"))
    model, _, declared = on_one_rank()
    options = LoadOptions(rename={"optimizer.state.exp_avg.output*": "lost*"})
    with pytest.raises(MissingKeyError, match=r"optimizer\.state\.exp_avg\.output_layer\.weight"):
        load(megatron_state(model, keys, optimizer=declared), tmp_path / "run", options=options)


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        (
            ["optimizer.distributed.dp_group_idx_0.gbuf_idx_0.exp_avg"],
            "Load it once with Megatron-Core.*fully",
        ),
        ([], "no state of an optimizer.*Leave optimizer= out"),
    ],
)
def test_state_of_one_layout_is_rejected_with_the_way_to_another(keys: list[str], error: str) -> None:
    model, _, declared = on_one_rank()
    with pytest.raises(MapError, match=f"(?s){error}"):
        megatron_state(model, [*WEIGHTS, *keys], optimizer=declared)


@pytest.mark.parametrize(
    ("stored", "error"),
    [
        ([], "no parameter groups of an optimizer.*--dist-ckpt-optim-fully-reshardable"),
        (
            [DECAYED],
            "The parameter group 'free': no stored group has wd_mult 0.0.*wd_mult 1.0.*Give",
        ),
        ([DECAYED, FREE, {**DECAYED, "lr": 0.5}], "'decay': not one, but several.*lr 0.25.*lr 0.5"),
        ([DECAYED, {**DECAYED, "step": 6}, FREE], "'decay': not one, but several.*step 5.*step 6"),
        (WITHOUT_STEP, "'decay': not one"),
    ],
    ids=["none", "no-match", "two-rates", "two-steps", "no-step"],
)
def test_groups_that_do_not_match_are_shown(stored: list[dict[str, Any]], error: str) -> None:
    _, optimizer, declared = on_one_rank()
    with pytest.raises(MismatchError, match=f"(?s){error}"):
        resume_from_megatron(optimizer, declared, {"optimizer": {"optimizer": {"param_groups": stored}}})
    assert optimizer.param_groups[0]["lr"] == 1.0, "nothing has changed"


def test_a_stored_group_that_nothing_continues_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight], lr=1.0, weight_decay=0.5)
    resume_from_megatron(optimizer, {}, ONE)
    assert "No parameter group goes on as these" in caplog.text
    assert "wd_mult 0.0" in caplog.text
    assert optimizer.param_groups[0]["weight_decay"] == 0.125


def test_a_torch_optimizer_takes_steps_groups_and_progress() -> None:
    weight, bias = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([{"params": [weight]}, {"params": [bias], "weight_decay": 0.0}], lr=1.0)
    initialise_state(optimizer)
    rate = {"max_lr": 0.5, "num_steps": 40}
    common = {
        **ONE,
        "iteration": 5,
        "args": Namespace(consumed_train_samples=40),
        "opt_param_scheduler": rate,
    }
    progress = resume_from_megatron(optimizer, {}, common)
    assert progress == MegatronProgress(iteration=5, consumed_samples=40, schedule=rate)
    assert [optimizer.state[p]["step"].item() for p in (weight, bias)] == [5.0, 5.0]
    assert [(g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [(0.25, 0.125), (0.25, 0.0)]
