"""BERT: logits, pooled outputs and gradients of transformers at several layouts, and folders both ways.

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
from megackpt import DeclarationError, MapError
from megackpt.maps import family
from megackpt.parallel import MicroBatch, ParallelGroups, ParallelLayout, context_share, join_context
from megackpt.testing.ranks import RankPool
from models import BertConfig, LearnedPositions, build_bert
from models.huggingface_bert import bert_config
from tests.support.effort import few, sampled
from tests.support.encoder_models import (
    OF_GRADIENTS,
    Case,
    case_of,
    check,
    randomise,
    real_tokens,
    run,
)
from tests.support.gpt import Box, assert_all_close, gradient_boxes, join
from tests.support.huggingface_encoders import random_fields
from tests.support.huggingface_folders import assert_same_tensors, declared
from tests.support.huggingface_models import assert_close
from tests.support.optimizers import tensors_of

pytest.importorskip("transformers", reason="the extra huggingface is not installed")

SEEDS = range(few(2, of=6))
TOKENS = 24
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


def random_config(seed: int) -> Any:
    from transformers import AutoConfig

    config = AutoConfig.for_model("bert", **random_fields("bert", seed))
    config._attn_implementation = "eager"
    return config


def random_model(seed: int) -> Any:
    """Return a random `BertForMaskedLM` of transformers."""
    from transformers import AutoModelForMaskedLM

    model: Any = AutoModelForMaskedLM.from_config(random_config(seed)).eval()
    randomise(model, seed)
    return model


def for_cp(config: BertConfig) -> BertConfig:
    """Return a config whose longest sequence, of 24 or 28 tokens, can be cut over 2 ranks of cp."""
    return replace(config, seq_length=config.seq_length // 4 * 4)


@functools.cache
def case(seed: int, *, is_padded: bool = False) -> Case:
    """Return a random model, and what transformers computes; with padding, it gets an `attention_mask`."""
    model = random_model(seed)
    fields = json.loads(model.config.to_json_string())
    config, generator = for_cp(bert_config(fields)), torch.Generator().manual_seed(seed)
    draw = functools.partial(torch.randint, generator=generator)
    # Not token 0, that of padding, whose embedding has no gradient in transformers.
    ids = draw(1, config.vocab_size, (2, TOKENS))
    types = draw(0, config.token_types, (2, TOKENS))
    labels = draw(0, config.vocab_size, (2, TOKENS))
    labels[:, ::5] = -100  # tokens without loss; as many in each sequence, and not on each rank of cp
    masks = {}
    if is_padded:
        is_real = real_tokens(2, TOKENS, seed)
        ids.masked_fill_(~is_real, 0)
        config, masks = replace(config, pad_token_id=0), {"attention_mask": is_real.long()}
        labels = draw(0, config.vocab_size, (2, TOKENS))
        labels.masked_fill_(~is_real | (is_real.cumsum(1) > 4), -100)  # on one of two ranks of cp: none
    outputs = model(input_ids=ids, token_type_ids=types, labels=labels, **masks)
    return case_of(model, fields, config, MicroBatch(torch.stack([ids, types], dim=-1), labels), outputs)


def cases() -> list[Case]:
    return [case(seed, is_padded=is_padded) for seed in SEEDS for is_padded in (False, True)]


def test_one_rank_computes_logits_and_gradients_of_transformers() -> None:
    check(cases(), [run(build_bert, cases(), ParallelLayout())], ParallelLayout())


@sampled(3)
@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_compute_logits_and_gradients_of_transformers(rank_pool: RankPool, name: str) -> None:
    layout = LAYOUTS[name]
    ranks = rank_pool.run(run, layout.world_size, build_bert, cases(), layout, name.endswith("sequence"))
    check(cases(), ranks, layout)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_model_is_exported_as_transformers_reads_it_and_imported_again(seed: int, tmp_path: Path) -> None:
    from transformers import AutoModelForMaskedLM

    model = random_model(seed)
    fields = json.loads(model.config.to_json_string())
    arrays = {key: torch.from_numpy(array) for key, array in case(seed).weights.items()}
    megackpt.save(declared(arrays, 0, 1), tmp_path / "saved", content_metadata={"huggingface_config": fields})
    megackpt.export_huggingface(tmp_path / "saved", tmp_path / "folder")
    read: Any = AutoModelForMaskedLM.from_pretrained(tmp_path / "folder")
    assert_same_tensors(dict(read.state_dict()), dict(model.state_dict()))
    megackpt.import_huggingface(tmp_path / "folder", tmp_path / "imported")
    assert_same_tensors(megackpt.load_plain_tensors(tmp_path / "imported"), arrays)


def pooled(folder: Path, config: BertConfig, tokens: torch.Tensor, layout: ParallelLayout) -> tuple[Any, ...]:
    """Return hidden states, pooled outputs and their gradients of a model that is loaded from a folder."""
    groups = ParallelGroups.create(layout)
    model = build_bert(config, groups, sequence_parallel=layout.tp > 1)
    entities = model.sharded_state_dict()
    megackpt.load({"model": entities}, folder, maps="auto")
    (chunk,) = model
    hidden = chunk(context_share(tokens, groups.cp, dim=1))
    output = chunk.pooler(hidden)
    output.square().sum().backward()
    boxes = [(*box[:3], box.data.numpy()) for box in gradient_boxes(model, entities, groups)]
    return hidden.detach().numpy(), output.detach().numpy(), boxes


def test_the_model_without_head_has_a_pooler_and_is_exported_so(rank_pool: RankPool, tmp_path: Path) -> None:
    from transformers import AutoModel

    model: Any = AutoModel.from_config(random_config(0)).eval()
    randomise(model, 0)
    model.save_pretrained(tmp_path / "folder")
    fields = json.loads((tmp_path / "folder" / "config.json").read_text())
    config = for_cp(bert_config(fields, has_token_head=False))
    tokens = case(0).batch.tokens[..., 0]
    with torch.no_grad():
        expected = model(input_ids=tokens)
    gradients: list[dict[str, torch.Tensor]] = []
    for layout in (ParallelLayout(), ParallelLayout(tp=2), ParallelLayout(cp=2)):
        answers = rank_pool.run(pooled, layout.world_size, tmp_path / "folder", config, tokens, layout)
        shares = [torch.from_numpy(own) for own, _, _ in answers]
        hidden = join_context(shares, dim=0) if layout.cp > 1 else torch.cat(shares)
        assert_close(hidden.transpose(0, 1).numpy(), expected.last_hidden_state)
        for _, output, _ in answers:
            assert_close(output, expected.pooler_output)
        boxes = [Box(*box[:3], torch.from_numpy(box[3])) for _, _, boxes in answers for box in boxes]
        joined = {key: array for key, array in join(boxes).items() if not key.endswith("bias.k")}  # is 0
        words = "embedding.word_embeddings.weight"
        gradients.append({**joined, words: joined[words][: config.vocab_size]})  # without padding
    for others in gradients[1:]:
        # The derivative of tanh, 1 minus a square, rounds 1: small ones lose further digits.
        assert_all_close(others, gradients[0], relative=4 * OF_GRADIENTS)
    megackpt.import_huggingface(tmp_path / "folder", tmp_path / "imported")
    megackpt.export_huggingface(tmp_path / "imported", tmp_path / "exported")
    read: Any = AutoModel.from_pretrained(tmp_path / "exported")
    assert_same_tensors(dict(read.state_dict()), dict(model.state_dict()))


def test_a_folder_that_transformers_wrote_is_loaded(tmp_path: Path) -> None:
    random_model(1).save_pretrained(tmp_path)
    model = build_bert(case(1).config, ParallelGroups.create(ParallelLayout()))
    megackpt.load({"model": model.sharded_state_dict()}, tmp_path, maps="auto")
    for tensor in tensors_of(model.sharded_state_dict()):
        box = torch.from_numpy(case(1).weights[tensor.key])[tensor.global_slice()]
        box = box.view(-1, *tensor.data.shape[1:])  # a layer has no axis over layers
        assert torch.equal(tensor.data[: len(box)], box), tensor.key  # without padding of the vocabulary


def small(**changes: Any) -> BertConfig:
    sizes = {"vocab_size": 31, "hidden_size": 16, "num_heads": 4, "num_layers": 2, "seq_length": 8}
    return BertConfig(**{**sizes, "positions": LearnedPositions(count=8), **changes})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"positions": None}, r"positions is None. Give LearnedPositions"),
        ({"token_types": 0}, r"token_types is 0"),
        ({"tied_embeddings": False}, r"tied_embeddings is False, but has_token_head is True"),
        ({"num_query_groups": 2}, r"BertConfig has no num_query_groups"),
        ({"pad_token_id": -1}, r"BertConfig.pad_token_id is -1, but vocab_size is 31"),
        ({"logit_softcap": 2.0}, r"BertConfig has no logit_softcap"),
    ],
)
def test_a_config_that_bert_cannot_have_is_an_error(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(DeclarationError, match=named):
        small(**changes)


def test_layouts_and_sequences_that_bert_cannot_have_are_errors() -> None:
    with pytest.raises(DeclarationError, match=r"BertConfig does not fit .*seq_length 6 is not"):
        small(seq_length=6).check_layout(ParallelLayout(cp=2))
    (chunk,) = build_bert(small(), ParallelGroups.create(ParallelLayout()))
    with pytest.raises(DeclarationError, match=r"have 9 tokens, but BertConfig.seq_length is 8"):
        chunk(torch.zeros(1, 9, dtype=torch.int64))
    with pytest.raises(MapError, match=r"tie_word_embeddings is false"):
        family("bert").region_map({"model_type": "bert", "tie_word_embeddings": False})
