"""Comparing a model with the configuration in a checkpoint, which may be older than some of the fields."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

from training.saved_model import differences, plain_fields

from megackpt.parallel import SwiGLU
from models import AttentionConfig, GPTConfig, MoEConfig, NormConfig, SlidingWindow

MODEL = GPTConfig(
    vocab_size=8,
    hidden_size=8,
    num_layers=2,
    num_heads=2,
    moe=MoEConfig(num_experts=4, ffn_hidden_size=6, layer_freq=(0, 1)),
)


def test_a_model_does_not_differ_from_itself_but_for_dropout() -> None:
    assert differences(MODEL, plain_fields(MODEL)) == []
    assert differences(replace(MODEL, dropout=0.1), plain_fields(MODEL)) == []


def test_lists_of_a_checkpoint_are_the_tuples_of_a_model_and_the_other_way_round() -> None:
    window = SlidingWindow(size=2, layers=(True, False))
    windowed = replace(MODEL, attention=AttentionConfig(window=window))
    as_json = json.loads(json.dumps(plain_fields(windowed)))
    with_tuples = plain_fields(windowed) | {"attention": asdict(windowed.attention)}
    for saved in (as_json, with_tuples):
        assert differences(windowed, saved) == []
        assert [text.split()[0] for text in differences(MODEL, saved)] == ["attention"]


def test_what_differs_has_its_name_and_both_values() -> None:
    texts = differences(replace(MODEL, hidden_size=16, moe=None), plain_fields(MODEL))
    assert texts[0] == "hidden_size 8 instead of 16"
    assert texts[1].startswith("moe {'num_experts': 4,")


def test_fields_that_an_older_checkpoint_lacks_had_their_defaults() -> None:
    saved = plain_fields(MODEL)
    for name in ("norm", "attention", "mlp", "positions", "logit_softcap"):
        del saved[name]
    for name in ("activation", "bias", "router_bias"):
        del saved["moe"][name]
    assert differences(MODEL, saved) == []
    assert differences(replace(MODEL, norm=NormConfig(kind="layer")), saved) == [
        "norm {'kind': 'rms', 'zero_centred': False, 'after_blocks': False} instead of "
        "{'kind': 'layer', 'zero_centred': False, 'after_blocks': False}"
    ]
    assert MODEL.moe is not None
    biased = replace(MODEL, moe=replace(MODEL.moe, activation=SwiGLU(limit=7.0)))
    assert [text.split()[0] for text in differences(biased, saved)] == ["moe"]
