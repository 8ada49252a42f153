"""T5 and mT5: logits and gradients of transformers at several layouts, and folders both ways.

The tolerance is explained in tests/support/encoder_models.py.
"""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt import DeclarationError
from megackpt.parallel import MicroBatch, ParallelGroups, ParallelLayout
from megackpt.testing.ranks import RankPool
from models import GPT, T5Config, build_t5
from models.huggingface_t5 import t5_config
from tests.support.effort import few, sampled
from tests.support.encoder_models import (
    Case,
    case_of,
    check,
    randomise,
    real_tokens,
    run,
)
from tests.support.huggingface_encoders import random_fields, untie
from tests.support.huggingface_folders import assert_same_tensors, declared
from tests.support.optimizers import tensors_of

pytest.importorskip("transformers", reason="the extra huggingface is not installed")

SEEDS = range(few(2, of=6))
ENCODER, DECODER = 24, 16  # tokens
LAYOUTS = {
    "tp2": ParallelLayout(tp=2),
    "tp2-sequence": ParallelLayout(tp=2),
    "pp2": ParallelLayout(pp=2),
    "pp2-vpp2": ParallelLayout(pp=2, vpp=2),
    "dp2": ParallelLayout(dp=2),
    "cp2": ParallelLayout(cp=2),
    "tp2-cp2": ParallelLayout(tp=2, cp=2),
    "tp2-cp2-sequence": ParallelLayout(tp=2, cp=2),
    "pp2-cp2": ParallelLayout(pp=2, cp=2),
}


def random_model(seed: int) -> Any:
    """Return a random model of transformers: both families, tied or not, plain and gated MLPs."""
    from transformers import AutoConfig, AutoModelForSeq2SeqLM

    family = "mt5" if seed % 3 == 2 else "t5"
    fields = random_fields(family, seed)
    config = AutoConfig.for_model(family, **fields)
    config._attn_implementation = "eager"
    model: Any = AutoModelForSeq2SeqLM.from_config(config).eval()
    untie(model, fields)
    randomise(model, seed)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith(".q.weight"):  # as T5 begins: it does not scale scores
                param.mul_(config.d_kv**-0.5)
    return model


@functools.cache
def case(seed: int, *, is_padded: bool = False) -> Case:
    """Return a random model, and what transformers computes; with padding, it gets an `attention_mask`."""
    model = random_model(seed)
    fields = json.loads(model.config.to_json_string())
    config = t5_config(fields, encoder_length=ENCODER, decoder_length=DECODER)
    generator, masks = torch.Generator().manual_seed(seed), {}
    tokens = torch.randint(0, config.vocab_size, (2, ENCODER + DECODER), generator=generator)
    labels = torch.randint(0, config.vocab_size, (2, DECODER), generator=generator)
    labels[:, ::5] = -100  # tokens without loss; as many in each sequence
    encoder, decoder = tokens.tensor_split([ENCODER], dim=1)
    if is_padded:
        is_real = real_tokens(2, ENCODER, seed)
        encoder.clamp_(min=1).masked_fill_(~is_real, 0)
        config, masks = replace(config, pad_token_id=0), {"attention_mask": is_real.long()}
    outputs = model(input_ids=encoder, decoder_input_ids=decoder, labels=labels, **masks)
    return case_of(model, fields, config, MicroBatch(tokens, labels), outputs)


def cases() -> list[Case]:
    return [case(seed, is_padded=is_padded) for seed in SEEDS for is_padded in (False, True)]


def test_one_rank_computes_logits_and_gradients_of_transformers() -> None:
    check(cases(), [run(build_t5, cases(), ParallelLayout())], ParallelLayout())


@sampled(3)
@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_compute_logits_and_gradients_of_transformers(rank_pool: RankPool, name: str) -> None:
    layout = LAYOUTS[name]
    ranks = rank_pool.run(run, layout.world_size, build_t5, cases(), layout, name.endswith("sequence"))
    check(cases(), ranks, layout)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_model_is_exported_as_transformers_reads_it_and_imported_again(seed: int, tmp_path: Path) -> None:
    from transformers import AutoModelForSeq2SeqLM

    model = random_model(seed)
    fields = json.loads(model.config.to_json_string())
    arrays = {key: torch.from_numpy(array) for key, array in case(seed).weights.items()}
    megackpt.save(declared(arrays, 0, 1), tmp_path / "saved", content_metadata={"huggingface_config": fields})
    megackpt.export_huggingface(tmp_path / "saved", tmp_path / "folder")
    read: Any = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "folder")
    assert_same_tensors(dict(read.state_dict()), dict(model.state_dict()))
    megackpt.import_huggingface(tmp_path / "folder", tmp_path / "imported")
    assert_same_tensors(megackpt.load_plain_tensors(tmp_path / "imported"), arrays)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_folder_that_transformers_wrote_is_loaded(seed: int, tmp_path: Path) -> None:
    random_model(seed).save_pretrained(tmp_path)
    model = build_t5(case(seed).config, ParallelGroups.create(ParallelLayout()))
    megackpt.load({"model": model.sharded_state_dict()}, tmp_path, maps="auto")
    for tensor in tensors_of(model.sharded_state_dict()):
        box = torch.from_numpy(case(seed).weights[tensor.key])[tensor.global_slice()]
        box = box.view(-1, *tensor.data.shape[1:])  # a layer has no axis over layers
        assert torch.equal(tensor.data[: len(box)], box), tensor.key  # without padding of the vocabulary


def small(**changes: Any) -> T5Config:
    sizes = {"vocab_size": 31, "hidden_size": 16, "num_heads": 4, "ffn_hidden_size": 8, "seq_length": 12}
    return T5Config(**{**sizes, "num_layers": 5, "num_encoder_layers": 2, "encoder_length": 8, **changes})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_encoder_layers": 5}, r"num_encoder_layers is 5 of 5"),
        ({"encoder_length": 12}, r"encoder_length is 12 of 12"),
        ({"relative_buckets": 7}, r"relative_buckets is 7"),
        ({"max_distance": 16}, r"max_distance is 16"),
        ({"num_query_groups": 2}, r"T5Config has no num_query_groups"),
        ({"pad_token_id": 31}, r"T5Config.pad_token_id is 31, but vocab_size is 31"),
    ],
)
def test_a_config_that_t5_cannot_have_is_an_error(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(DeclarationError, match=named):
        small(**changes)


def test_layouts_that_t5_cannot_have_are_errors() -> None:
    with pytest.raises(DeclarationError, match=r"T5Config .*encoder_length 6 is not a multiple of 2 x cp=2"):
        small(encoder_length=6).check_layout(ParallelLayout(cp=2))
    with pytest.raises(DeclarationError, match=r"T5Config .*seq_length 14 is not a multiple of 2 x cp=2"):
        small(seq_length=14).check_layout(ParallelLayout(cp=2))
    with pytest.raises(DeclarationError, match=r"num_heads 4 is not a multiple of tp=3"):
        small().check_layout(ParallelLayout(tp=3))
    for stages in (0, 3, 4):
        with pytest.raises(DeclarationError, match=rf"{stages} of pp=4 stages cannot have the 2 layers"):
            small().split_stages(pp=4, encoder_stages=stages)
    assert str(small().split_stages(pp=3, encoder_stages=1)) == "Ett|tt|tL"
    with pytest.raises(DeclarationError, match=r"a T5Config does not describe a GPT"):
        GPT(small(), ParallelGroups.create(ParallelLayout()))


def test_sequences_without_tokens_for_the_decoder_are_an_error() -> None:
    (chunk,) = build_t5(small(), ParallelGroups.create(ParallelLayout()))
    for length in (8, 13):
        with pytest.raises(DeclarationError, match=rf"{length} tokens. The first 8 are those of the encoder"):
            chunk(torch.zeros(1, length, dtype=torch.int64))


def test_sequences_of_padding_alone_have_a_finite_loss_and_no_others_change() -> None:
    (chunk,) = build_t5(small(pad_token_id=3), ParallelGroups.create(ParallelLayout()))
    tokens = torch.full((2, 12), 3)
    tokens[1, 2:] = 5
    labels = torch.ones(2, 4, dtype=torch.int64)
    loss = chunk(tokens, labels)
    loss.backward()
    assert all(param.grad.isfinite().all() for param in chunk.parameters())
    torch.testing.assert_close(loss, (chunk(tokens[:1], labels[:1]) + chunk(tokens[1:], labels[1:])) / 2)
