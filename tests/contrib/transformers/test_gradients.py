"""Models of transformers at any layout: logits and gradients of one step, and their folders both ways.

With layers for further tokens too, whose losses are computed here with transformers' `MtpLayer`.

Tolerance: everything is float32 and only the order of sums differs. `RELATIVE` of test_huggingface_logits is
used for logits. An element of a gradient is a sum of some 2 * 24 * 50 rounded terms, whose random errors are
sqrt(2400) * 2^-24 = 3e-6 of the largest element of its array. A recurrence multiplies them: in the scan they
are products of exponentials of differences of sums, and a delta net divides queries and keys by their
lengths. Errors of up to 4e-5 of the largest element were seen. A missing sum is off by a factor of 2.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megackpt
from megackpt import CheckpointError, KeyRule, LoadOptions, Policy
from megackpt.errors import MapError
from megackpt.maps import family
from megackpt.testing.ranks import RankPool
from megackpt.training.parallel import MicroBatch, ParallelGroups, ParallelLayout
from models import MTPConfig, build_gpt
from models.huggingface import gpt_config
from tests.support.effort import few, sampled
from tests.support.huggingface_configs import random_fields
from tests.support.huggingface_folders import assert_same_tensors, declared, folder_tensors, write_folder
from tests.support.huggingface_models import (
    RELATIVE,
    SCAN_RELATIVE,
    Case,
    arrays_in_our_names,
    check,
    part_in_our_names,
    random_config,
    random_model,
    randomise,
    run,
    token_ids,
)
from tests.support.optimizers import Arrays, tensors_of
from tests.support.states import assembled, random_arrays

transformers = pytest.importorskip("transformers", reason="the extra huggingface is not installed")

WEIGHT = 0.3  # of the losses of further tokens
ONE = ParallelGroups.create(ParallelLayout())
LAYOUTS = {
    "tp2": ParallelLayout(tp=2),
    "tp2-sequence": ParallelLayout(tp=2),
    "tp4": ParallelLayout(tp=4),
    "pp2": ParallelLayout(pp=2),
    "ep2": ParallelLayout(dp=2, ep=2),
    "cp2": ParallelLayout(cp=2),
    "cp4": ParallelLayout(cp=4),
    "tp2-cp2": ParallelLayout(tp=2, cp=2),
    "tp2-cp2-sequence": ParallelLayout(tp=2, cp=2),
}


class Family(NamedTuple):
    """Random models of a kind: those to compare on one rank, and those to cut over more."""

    alone: Iterable[int]  # seeds
    cut: Iterable[int]
    layouts: str
    relative: float  # tolerance of gradients
    name: str
    further: int = 0  # layers for further tokens


FEW = range(few(2, of=6))
OF_MAMBA = "tp2 tp2-sequence tp4 pp2 ep2 cp2 cp4 tp2-cp2-sequence"
OF_QWEN = "tp2 tp2-sequence pp2 ep2 cp2 tp2-cp2 tp2-cp2-sequence"
OF_DEEPSEEK = "tp2 tp2-sequence pp2 cp2 ep2"
MODELS = {
    "mamba2": Family(range(5), range(5), OF_MAMBA, SCAN_RELATIVE, "mamba2"),
    "nemotron_h": Family(range(5), range(5), OF_MAMBA, SCAN_RELATIVE, "nemotron_h"),
    # 2 ranks of tp and of cp can have the models of these seeds.
    "qwen3_next": Family(FEW, [100 * seed for seed in FEW], OF_QWEN, SCAN_RELATIVE, "qwen3_next"),
    "deepseek_v3": Family(FEW, FEW, OF_DEEPSEEK, RELATIVE, "deepseek_v3"),
    "deepseek_v3, further tokens": Family(FEW, FEW, OF_DEEPSEEK, RELATIVE, "deepseek_v3", 2),
}


def arrays_of(model: Any, layers: Sequence[nn.Module] = ()) -> Arrays:
    """Return the weights of a model, and of its layers for further tokens, as our arrays."""
    return arrays_in_our_names(model) | (further_arrays(layers, model.config) if layers else {})


@functools.cache
def case(name: str, seed: int, further: int) -> Case:
    """Return a random model, with layers for so many further tokens."""
    model: Any = random_model(random_config(name, seed), seed)
    layers = [further_layer(model, seed + depth) for depth in range(further)]
    mtp = MTPConfig(num_layers=further, loss_weight=WEIGHT) if further else None
    config = replace(gpt_config(json.loads(model.config.to_json_string())), make_vocab_divisible=1, mtp=mtp)
    weights = {key: array.detach().numpy().copy() for key, array in arrays_of(model, layers).items()}
    tokens = token_ids(config.vocab_size)
    batch = MicroBatch(tokens, tokens.flip(1).roll(3, 1))
    with torch.no_grad():
        logits = model(tokens, use_cache=False).logits
    loss_of(model, layers, batch).backward()
    with torch.no_grad():
        for param in [p for module in (model, *layers) for p in module.parameters()]:
            param.copy_(torch.zeros_like(param) if param.grad is None else param.grad)
    gradients = {key: g for key, g in arrays_of(model, layers).items() if "expert_bias" not in key}
    return Case(config, weights, batch, logits, gradients)


def further_layer(model: Any, seed: int) -> nn.Module:
    from transformers.modeling_layers import MtpLayer

    last = model.model.layers[-1]
    layer: nn.Module = MtpLayer(
        model.config, type(last), type(last.input_layernorm), model.config.num_hidden_layers - 1
    )
    randomise(layer, seed)
    return layer


def further_arrays(layers: Sequence[nn.Module], config: Any) -> Arrays:
    """Return the weights of layers for further tokens as our arrays; in a folder they follow the others."""
    document = json.loads(config.to_json_string()) | {"num_nextn_predict_layers": len(layers)}
    state = {
        f"model.layers.{number}."
        + name.replace("mtp_block.", "").replace("post_norm", "shared_head.norm"): value
        for number, layer in enumerate(layers, config.num_hidden_layers)
        for name, value in layer.state_dict().items()
    }
    made = family(f"{config.model_type}_mtp").region_map(document, list(state))
    return part_in_our_names(made, state)


def loss_of(model: Any, layers: list[nn.Module], whole: MicroBatch) -> Tensor:
    """Return the loss of the next token, and the weighted mean of those of further ones."""
    tokens, labels = whole
    if not layers:
        return F.cross_entropy(model(tokens, use_cache=False).logits.flatten(0, 1), labels.flatten())
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


def cases_of(model: str, seeds: Iterable[int]) -> list[Case]:
    return [case(MODELS[model].name, seed, MODELS[model].further) for seed in seeds]


@pytest.mark.parametrize("model", MODELS)
def test_one_rank_computes_logits_and_gradients_of_transformers(model: str) -> None:
    cases = cases_of(model, MODELS[model].alone)
    answers = run(build_gpt, cases, ParallelLayout())
    check(cases, [answers], ParallelLayout(), relative=MODELS[model].relative)


@sampled(5)
@pytest.mark.parametrize(
    ("model", "name"), [(model, name) for model, row in MODELS.items() for name in row.layouts.split()]
)
def test_more_ranks_compute_logits_and_gradients_of_transformers(
    rank_pool: RankPool, model: str, name: str
) -> None:
    layout, cases = LAYOUTS[name], cases_of(model, MODELS[model].cut)
    ranks = rank_pool.run(run, layout.world_size, build_gpt, cases, layout, name.endswith("sequence"))
    check(cases, ranks, layout, relative=MODELS[model].relative)


def test_the_layer_for_further_tokens_of_published_folders_is_loaded_and_written(tmp_path: Path) -> None:
    fields = {"model_type": "qwen3_next", **random_fields("qwen3_next", 0), "num_hidden_layers": 2}
    fields |= {"num_experts": 4, "num_experts_per_tok": 2}
    fields["layer_types"] = ["linear_attention", "full_attention"]
    made = family("qwen3_next_mtp").region_map(fields)
    tensors = random_arrays(made, 0)
    assert tensors["mtp.fc.weight"].shape == (fields["hidden_size"], 2 * fields["hidden_size"])
    write_folder(tmp_path / "folder", fields, tensors)

    config = replace(gpt_config(fields), make_vocab_divisible=1)
    expected = assembled(made, tensors)
    for mtp in (MTPConfig(num_layers=1), None):
        model = build_gpt(replace(config, mtp=mtp), ONE)
        state = {"model": model.sharded_state_dict()}
        rules = () if mtp is not None else (KeyRule(keys="mtp.*", missing=Policy.IGNORE),)
        megackpt.load(state, tmp_path / "folder", maps="auto", options=LoadOptions(rules=rules))
        loaded = {tensor.key: tensor.data for tensor in tensors_of(state)}
        assert loaded.keys() == {key for key in expected if mtp is not None or not key.startswith("mtp.")}
        assert all(torch.equal(data, expected[key]) for key, data in loaded.items())

    megackpt.import_huggingface(tmp_path / "folder", tmp_path / "imported")
    megackpt.export_huggingface(tmp_path / "imported", tmp_path / "again", map="qwen3_next_mtp")
    assert_same_tensors(folder_tensors(tmp_path / "again"), tensors)


def test_layers_for_further_tokens_are_exported_as_transformers_reads_them(tmp_path: Path) -> None:
    from transformers.modeling_layers import MtpModel

    # All layers have experts: `MtpModel` numbers its layers from 0, and makes the first ones dense.
    config = random_config("deepseek_v3", 0)
    config.first_k_dense_replace, config.num_mtp_layers = 0, 2
    model: Any = random_model(config, 0)
    layers = [further_layer(model, depth) for depth in range(2)]
    arrays = arrays_of(model, layers)
    fields = json.loads(config.to_json_string())
    state = declared({key: array.detach() for key, array in arrays.items()}, 0, 1)
    megackpt.save(state, tmp_path / "saved", content_metadata={"huggingface_config": fields})
    folder = tmp_path / "folder"
    megackpt.export_huggingface(tmp_path / "saved", folder, map="deepseek_v3_mtp")

    read: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
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
    model = build_gpt(ours, ONE)
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
