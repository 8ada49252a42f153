"""BERT, T5 and mT5: logits, gradients and folders of transformers, at several layouts.

The tolerance is explained in tests/support/huggingface_models.py.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import megackpt
from megackpt import DeclarationError
from megackpt.errors import MapError
from megackpt.maps import family
from megackpt.testing.ranks import RankPool
from megackpt.training.parallel import MicroBatch, ParallelGroups, ParallelLayout, context_share
from megackpt.training.parallel.context import join_context
from models import GPT, BertConfig, LearnedPositions, T5Config, build_bert, build_t5
from models.huggingface import bert_config, t5_config
from tests.support.effort import few, sampled
from tests.support.gpt import Box, assert_all_close, gradient_boxes, join
from tests.support.huggingface_configs import random_fields, untie
from tests.support.huggingface_folders import assert_same_tensors, declared
from tests.support.huggingface_models import (
    OF_GRADIENTS,
    Build,
    Case,
    assert_close,
    case_of,
    check,
    randomised,
    real_tokens,
    run,
)
from tests.support.optimizers import tensors_of

transformers = pytest.importorskip("transformers", reason="the extra huggingface is not installed")

SEEDS = range(few(2, of=6))
TOKENS = 24
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
ONE = ParallelGroups.create(ParallelLayout())


def bert_of(seed: int) -> Any:
    config = transformers.AutoConfig.for_model("bert", **random_fields("bert", seed))
    config._attn_implementation = "eager"
    return config


def random_bert(seed: int) -> Any:
    """Return a random `BertForMaskedLM` of transformers."""
    model: Any = transformers.AutoModelForMaskedLM.from_config(bert_of(seed)).eval()
    randomised(model, seed, spread=0.3)
    return model


def random_t5(seed: int) -> Any:
    """Return a random model of transformers: both families, tied or not, plain and gated MLPs."""
    family = "mt5" if seed % 3 == 2 else "t5"
    fields = random_fields(family, seed)
    config = transformers.AutoConfig.for_model(family, **fields)
    config._attn_implementation = "eager"
    model: Any = transformers.AutoModelForSeq2SeqLM.from_config(config).eval()
    untie(model, fields)
    randomised(model, seed, spread=0.3)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith(".q.weight"):  # as T5 begins: it does not scale scores
                param.mul_(config.d_kv**-0.5)
    return model


def for_cp(config: BertConfig) -> BertConfig:
    """Return a config whose longest sequence, of 24 or 28 tokens, can be cut over 2 ranks of cp."""
    return replace(config, seq_length=config.seq_length // 4 * 4)


def bert_batch(fields: Mapping[str, Any], seed: int, is_padded: bool) -> tuple[Any, MicroBatch, Any]:
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
    asked = {"input_ids": ids, "token_type_ids": types, "labels": labels, **masks}
    return config, MicroBatch(torch.stack([ids, types], dim=-1), labels), asked


def t5_batch(fields: Mapping[str, Any], seed: int, is_padded: bool) -> tuple[Any, MicroBatch, Any]:
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
    asked = {"input_ids": encoder, "decoder_input_ids": decoder, "labels": labels, **masks}
    return config, MicroBatch(tokens, labels), asked


class Encoder(NamedTuple):
    """Our models of a kind, and transformers'.

    `batch` returns our config, a batch for us, and the same for transformers.
    """

    build: Build
    random: Callable[[int], Any]
    batch: Callable[[Mapping[str, Any], int, bool], tuple[Any, MicroBatch, Any]]


ENCODERS = {
    "bert": Encoder(build_bert, random_bert, bert_batch),
    "t5": Encoder(build_t5, random_t5, t5_batch),
}


@functools.cache
def case(kind: str, seed: int, *, is_padded: bool = False) -> Case:
    """Return a random model, and what transformers computes; with padding, it gets an `attention_mask`."""
    model = ENCODERS[kind].random(seed)
    fields = json.loads(model.config.to_json_string())
    config, batch, asked = ENCODERS[kind].batch(fields, seed, is_padded)
    return case_of(model, fields, config, batch, model(**asked))


def cases(kind: str) -> list[Case]:
    return [case(kind, seed, is_padded=is_padded) for seed in SEEDS for is_padded in (False, True)]


@pytest.mark.parametrize("kind", ENCODERS)
def test_one_rank_computes_logits_and_gradients_of_transformers(kind: str) -> None:
    check(cases(kind), [run(ENCODERS[kind].build, cases(kind), ParallelLayout())], ParallelLayout())


@sampled(3)
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("kind", ENCODERS)
def test_ranks_compute_logits_and_gradients_of_transformers(
    rank_pool: RankPool, kind: str, name: str
) -> None:
    layout, build = LAYOUTS[name], ENCODERS[kind].build
    ranks = rank_pool.run(run, layout.world_size, build, cases(kind), layout, name.endswith("sequence"))
    check(cases(kind), ranks, layout)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ENCODERS)
def test_a_folder_of_transformers_is_loaded_imported_and_written_again(
    kind: str, seed: int, tmp_path: Path
) -> None:
    model = ENCODERS[kind].random(seed)
    fields = json.loads(model.config.to_json_string())
    arrays = {key: torch.from_numpy(array) for key, array in case(kind, seed).weights.items()}
    model.save_pretrained(tmp_path / "theirs")
    ours = ENCODERS[kind].build(case(kind, seed).config, ONE)
    megackpt.load({"model": ours.sharded_state_dict()}, tmp_path / "theirs", maps="auto")
    for tensor in tensors_of(ours.sharded_state_dict()):
        box = arrays[tensor.key][tensor.global_slice()]
        box = box.view(-1, *tensor.data.shape[1:])  # a layer has no axis over layers
        assert torch.equal(tensor.data[: len(box)], box), tensor.key  # without padding of the vocabulary

    megackpt.save(declared(arrays, 0, 1), tmp_path / "saved", content_metadata={"huggingface_config": fields})
    megackpt.export_huggingface(tmp_path / "saved", tmp_path / "folder")
    read: Any = type(model).from_pretrained(tmp_path / "folder")
    assert_same_tensors(dict(read.state_dict()), dict(model.state_dict()))
    megackpt.import_huggingface(tmp_path / "folder", tmp_path / "imported")
    assert_same_tensors(megackpt.load_plain_tensors(tmp_path / "imported"), arrays)


def pooled(folder: Path, config: BertConfig, tokens: torch.Tensor, layout: ParallelLayout) -> tuple[Any, ...]:
    """Return hidden states, pooled outputs and their gradients of a BERT that is loaded from a folder."""
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


def test_a_bert_without_head_has_a_pooler_and_is_exported_so(rank_pool: RankPool, tmp_path: Path) -> None:
    model: Any = transformers.AutoModel.from_config(bert_of(0)).eval()
    randomised(model, 0, spread=0.3)
    model.save_pretrained(tmp_path / "folder")
    fields = json.loads((tmp_path / "folder" / "config.json").read_text())
    config = for_cp(bert_config(fields, has_token_head=False))
    tokens = case("bert", 0).batch.tokens[..., 0]
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
    read: Any = transformers.AutoModel.from_pretrained(tmp_path / "exported")
    assert_same_tensors(dict(read.state_dict()), dict(model.state_dict()))


def small_bert(**changes: Any) -> BertConfig:
    sizes = {"vocab_size": 31, "hidden_size": 16, "num_heads": 4, "num_layers": 2, "seq_length": 8}
    return BertConfig(**{**sizes, "positions": LearnedPositions(count=8), **changes})


def small_t5(**changes: Any) -> T5Config:
    sizes = {"vocab_size": 31, "hidden_size": 16, "num_heads": 4, "ffn_hidden_size": 8, "seq_length": 12}
    return T5Config(**{**sizes, "num_layers": 5, "num_encoder_layers": 2, "encoder_length": 8, **changes})


def forward(build: Build, config: BertConfig | T5Config, tokens: int) -> None:
    (chunk,) = build(config, ONE)
    chunk(torch.zeros(1, tokens, dtype=torch.int64))


def split_t5(stages: int, *, pp: int = 4) -> str:
    return str(small_t5().split_stages(pp=pp, encoder_stages=stages))


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: small_bert(positions=None), r"positions is None. Give LearnedPositions"),
        (lambda: small_bert(token_types=0), r"token_types is 0"),
        (lambda: small_bert(tied_embeddings=False), r"tied_embeddings is False, but has_token_head is True"),
        (lambda: small_bert(num_query_groups=2), r"BertConfig has no num_query_groups"),
        (lambda: small_bert(pad_token_id=-1), r"BertConfig.pad_token_id is -1, but vocab_size is 31"),
        (lambda: small_bert(logit_softcap=2.0), r"BertConfig has no logit_softcap"),
        (
            lambda: small_bert(seq_length=6).check_layout(ParallelLayout(cp=2)),
            r"BertConfig does not fit .*seq_length 6 is not",
        ),
        (lambda: forward(build_bert, small_bert(), 9), r"have 9 tokens, but BertConfig.seq_length is 8"),
        (lambda: small_t5(num_encoder_layers=5), r"num_encoder_layers is 5 of 5"),
        (lambda: small_t5(encoder_length=12), r"encoder_length is 12 of 12"),
        (lambda: small_t5(relative_buckets=7), r"relative_buckets is 7"),
        (lambda: small_t5(max_distance=16), r"max_distance is 16"),
        (lambda: small_t5(num_query_groups=2), r"T5Config has no num_query_groups"),
        (lambda: small_t5(pad_token_id=31), r"T5Config.pad_token_id is 31, but vocab_size is 31"),
        (
            lambda: small_t5(encoder_length=6).check_layout(ParallelLayout(cp=2)),
            r"T5Config .*encoder_length 6 is not a multiple of 2 x cp=2",
        ),
        (
            lambda: small_t5(seq_length=14).check_layout(ParallelLayout(cp=2)),
            r"T5Config .*seq_length 14 is not a multiple of 2 x cp=2",
        ),
        (lambda: small_t5().check_layout(ParallelLayout(tp=3)), r"num_heads 4 is not a multiple of tp=3"),
        (lambda: split_t5(0), r"0 of pp=4 stages cannot have the 2 layers"),
        (lambda: split_t5(3), r"3 of pp=4 stages cannot have the 2 layers"),
        (lambda: split_t5(4), r"4 of pp=4 stages cannot have the 2 layers"),
        (lambda: GPT(small_t5(), ONE), r"a T5Config does not describe a GPT"),
        (lambda: forward(build_t5, small_t5(), 8), r"8 tokens. The first 8 are those of the encoder"),
        (lambda: forward(build_t5, small_t5(), 13), r"13 tokens. The first 8 are those of the encoder"),
    ],
)
def test_what_an_encoder_cannot_have_is_an_error(call: Callable[[], object], named: str) -> None:
    with pytest.raises(DeclarationError, match=named):
        call()


def test_a_folder_of_bert_without_tied_embeddings_is_an_error() -> None:
    with pytest.raises(MapError, match=r"tie_word_embeddings is false"):
        family("bert").region_map({"model_type": "bert", "tie_word_embeddings": False})


def test_stages_of_t5_are_split_at_the_encoder() -> None:
    assert split_t5(1, pp=3) == "Ett|tt|tL"


def test_sequences_of_padding_alone_have_a_finite_loss_and_no_others_change() -> None:
    (chunk,) = build_t5(small_t5(pad_token_id=3), ONE)
    tokens = torch.full((2, 12), 3)
    tokens[1, 2:] = 5
    labels = torch.ones(2, 4, dtype=torch.int64)
    loss = chunk(tokens, labels)
    loss.backward()
    assert all(param.grad.isfinite().all() for param in chunk.parameters())
    torch.testing.assert_close(loss, (chunk(tokens[:1], labels[:1]) + chunk(tokens[1:], labels[1:])) / 2)
