"""DeepSeek-V3: logits and gradients of transformers, on one rank and over tp, pp, cp and ep.

With layers for further tokens too, whose losses are computed here with transformers' `MtpLayer`.

Tolerance: everything is float32 and only the order of sums differs. `RELATIVE` of test_huggingface_logits is
used for logits; an element of a gradient is a sum of some 2 * 24 * 50 rounded terms, whose random errors are
sqrt(2400) * 2^-24 = 3e-6 of the largest element of its array. A missing sum is off by a factor of 2.
"""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megackpt
from megackpt import CheckpointError, KeyRule, LoadOptions, MapError, Policy
from megackpt.maps import family
from megackpt.parallel import MicroBatch, ParallelGroups, ParallelLayout
from megackpt.testing.ranks import RankPool
from models import GPTConfig, MTPConfig, build_gpt
from models.huggingface import gpt_config
from tests.contrib.transformers.huggingface_cases import Case, batch, check, run
from tests.support.effort import few, sampled
from tests.support.huggingface_configs import random_fields
from tests.support.huggingface_experts import experts_in_our_names, randomise
from tests.support.huggingface_folders import assert_same_tensors, declared, write_folder
from tests.support.huggingface_models import (
    RELATIVE,
    arrays_in_our_names,
    random_config,
    random_model,
    reference,
    renamed,
)
from tests.support.optimizers import tensors_of
from tests.support.states import assembled, random_arrays

pytest.importorskip("transformers", reason="the extra huggingface is not installed")

WEIGHT = 0.3  # of the losses of further tokens
SEEDS = range(few(2, of=6))


@functools.cache
def case(seed: int, further: int) -> Case:
    """Return a random model, with layers for so many further tokens."""
    config, _, logits = reference("deepseek_v3", seed)
    model: Any = random_model(random_config("deepseek_v3", seed), seed)
    layers = [further_layer(model, seed + depth) for depth in range(further)]
    arrays = {**arrays_in_our_names(model), **further_arrays(layers, model.config)}
    weights = {key: array.detach().numpy().copy() for key, array in arrays.items()}
    loss_of(model, layers, batch(config)).backward()
    with torch.no_grad():
        for param in [p for module in (model, *layers) for p in module.parameters()]:
            param.copy_(torch.zeros_like(param) if param.grad is None else param.grad)
    gradients = {**arrays_in_our_names(model), **further_arrays(layers, model.config)}
    gradients = {key: gradient for key, gradient in gradients.items() if "expert_bias" not in key}
    mtp = MTPConfig(num_layers=further, loss_weight=WEIGHT) if further else None
    return Case(replace(config, mtp=mtp), weights, logits, gradients)


def further_layer(model: Any, seed: int) -> nn.Module:
    from transformers.modeling_layers import MtpLayer

    last = model.model.layers[-1]
    layer: nn.Module = MtpLayer(
        model.config, type(last), type(last.input_layernorm), model.config.num_hidden_layers - 1
    )
    randomise(layer, seed)
    return layer


def further_arrays(layers: list[nn.Module], config: Any) -> dict[str, Tensor]:
    """Return the weights of layers for further tokens as our arrays."""
    arrays = {}
    for number, layer in enumerate(layers):
        state, ours = layer.state_dict(), f"mtp.layers.{number}."
        for name in ("enorm.weight", "hnorm.weight", "eh_proj.weight"):
            arrays[ours + name] = state[name]
        arrays[f"{ours}final_layernorm.weight"] = state["post_norm.weight"]
        inner = f"{ours}transformer_layer."
        for name, value in state.items():
            if name.startswith("mtp_block.") and ".mlp." not in name:
                for key, part in renamed(name.replace("mtp_block.", "model.layers.0."), value, config):
                    arrays[key.replace("decoder.layers.0.", inner)] = part
        arrays |= experts_in_our_names(state, "mtp_block.mlp.", f"{inner}mlp.")
    return arrays


def loss_of(model: Any, layers: list[nn.Module], whole: MicroBatch) -> Tensor:
    """Return the loss of the next token, and the weighted mean of those of further ones."""
    tokens, labels = whole
    hidden = model.model(tokens).last_hidden_state
    loss = F.cross_entropy(model.lm_head(hidden).flatten(0, 1), labels.flatten())
    positions = torch.arange(tokens.shape[1]).unsqueeze(0)
    mask = torch.full((tokens.shape[1],) * 2, float("-inf")).triu(1)[None, None]
    for number, layer in enumerate(layers):
        hidden = layer(
            model.model.embed_tokens(labels.roll(-number, 1)),
            hidden,
            model.model.rotary_emb(hidden, positions),
            mask,
            positions,
            None,  # the cache, whose name differs between versions
        )
        ahead = labels[:, number + 1 :]
        logits = model.lm_head(hidden[:, : ahead.shape[1]])
        further = F.cross_entropy(logits.flatten(0, 1), ahead.flatten())
        loss = loss + further * WEIGHT / len(layers)
    return loss


def test_seeds_have_all_kinds_of_the_family() -> None:
    configs = [random_config("deepseek_v3", seed) for seed in range(6)]
    for field in (
        "q_lora_rank",
        "rope_interleave",
        "attention_bias",
        "norm_topk_prob",
        "tie_word_embeddings",
    ):
        assert {bool(getattr(config, field)) for config in configs} == {True, False}, field
    assert {config.rope_parameters["rope_type"] for config in configs} == {"default", "yarn"}
    assert {0, 1} <= {config.first_k_dense_replace for config in configs}
    assert any(config.topk_group < config.n_group for config in configs)


@pytest.mark.parametrize("further", [0, 2])
def test_one_rank_computes_logits_and_gradients_of_transformers(further: int) -> None:
    check([run(cases(further), ParallelLayout())], ParallelLayout(), expected(further), relative=RELATIVE)


LAYOUTS = {
    "tp2": ParallelLayout(tp=2),
    "tp2-sequence": ParallelLayout(tp=2),
    "pp2": ParallelLayout(pp=2),
    "cp2": ParallelLayout(cp=2),
    "ep2": ParallelLayout(dp=2, ep=2),
}


@sampled(3)
@pytest.mark.parametrize("further", [0, 2])
@pytest.mark.parametrize("name", LAYOUTS)
def test_two_ranks_compute_logits_and_gradients_of_transformers(
    rank_pool: RankPool, name: str, further: int
) -> None:
    ranks = rank_pool.run(run, 2, cases(further), LAYOUTS[name], name.endswith("sequence"))
    check(ranks, LAYOUTS[name], expected(further), relative=RELATIVE)


def expected(further: int) -> list[Case]:
    return [case(seed, further) for seed in SEEDS]


def cases(further: int) -> list[tuple[GPTConfig, Any]]:
    return [(made.config, made.weights) for made in expected(further)]


def test_layers_for_further_tokens_are_exported_as_transformers_reads_them(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM
    from transformers.modeling_layers import MtpModel

    # All layers have experts: `MtpModel` numbers its layers from 0, and makes the first ones dense.
    config = random_config("deepseek_v3", 0)
    config.first_k_dense_replace, config.num_mtp_layers = 0, 2
    model: Any = random_model(config, 0)
    layers = [further_layer(model, depth) for depth in range(2)]
    arrays = {**arrays_in_our_names(model), **further_arrays(layers, config)}
    fields = json.loads(config.to_json_string())
    state = declared({key: array.detach() for key, array in arrays.items()}, 0, 1)
    megackpt.save(state, tmp_path / "saved", content_metadata={"huggingface_config": fields})
    folder = tmp_path / "folder"
    megackpt.export_huggingface(tmp_path / "saved", folder, map="deepseek_v3_mtp")

    read: Any = AutoModelForCausalLM.from_pretrained(folder)
    assert_same_tensors(dict(read.state_dict()), dict(model.state_dict()))
    read._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{config.num_hidden_layers}.*", "layers.4"]
    further: Any = MtpModel.from_pretrained(read)
    for number, layer in enumerate(layers):
        assert_same_tensors(dict(further.layers[number].state_dict()), dict(layer.state_dict()))

    megackpt.import_huggingface(folder, tmp_path / "imported")  # the keys tell that there are such layers
    imported = megackpt.load_plain_tensors(tmp_path / "imported")
    assert_same_tensors(imported, {key: array.detach() for key, array in arrays.items()})


def test_copies_of_the_embedding_in_a_folder_can_be_tolerated(tmp_path: Path) -> None:
    config = {"model_type": "deepseek_v3", **random_fields("deepseek_v3", 0), "num_nextn_predict_layers": 1}
    config["tie_word_embeddings"] = False
    made = family("deepseek_v3_mtp").region_map(config)
    tensors = random_arrays(made, 0)
    copies = f"model.layers.{config['num_hidden_layers']}."
    tensors[f"{copies}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{copies}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    write_folder(tmp_path / "folder", config, tensors)
    ours = replace(gpt_config(config), mtp=MTPConfig(num_layers=1), make_vocab_divisible=1)
    model = build_gpt(ours, ParallelGroups.create(ParallelLayout()))
    state = {"model": model.sharded_state_dict()}
    with pytest.raises(CheckpointError, match=r"shared_head.head.weight"):
        megackpt.load(state, tmp_path / "folder", maps="auto")
    copied = ("model.layers.*.embed_tokens.weight", "model.layers.*.shared_head.head.weight")
    rules = tuple(KeyRule(keys=keys, missing=Policy.IGNORE) for keys in copied)
    megackpt.load(state, tmp_path / "folder", maps="auto", options=LoadOptions(rules=rules))
    expected = assembled(made, tensors)
    boxes = [tensor for tensor in tensors_of(state) if tensor.key.startswith("mtp.")]
    assert len(boxes) == sum(key.startswith("mtp.") for key in made.left)
    for tensor in boxes:
        assert tensor.data is not None
        assert torch.equal(tensor.data.detach(), expected[tensor.key]), tensor.key


def test_a_folder_whose_further_layers_do_not_follow_is_an_error() -> None:
    config = {"model_type": "deepseek_v3", **random_fields("deepseek_v3", 0)}
    with pytest.raises(MapError, match=r"numbers \[9\], which do not follow the \d layers of config.json"):
        family("deepseek_v3").region_map(config, ["model.layers.9.enorm.weight"])
