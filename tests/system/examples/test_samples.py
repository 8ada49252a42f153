"""What a run of the examples goes on with: every window of the text once an epoch, and the same model."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import torch
from hypothesis import given
from hypothesis import strategies as st
from training.saved_model import differences, plain_fields
from training.text import END_OF_TEXT, NoTextError, Text

from megackpt.training.parallel import SwiGLU
from models import AttentionConfig, GPTConfig, MoEConfig, NormConfig, SlidingWindow


@given(
    texts=st.lists(st.binary(max_size=200), max_size=4),
    seq_length=st.integers(1, 40),
    seed=st.integers(0, 2**32),
)
def test_an_epoch_has_every_window_of_the_text_once(texts: list[bytes], seq_length: int, seed: int) -> None:
    tokens = [token for text in texts for token in (*text, END_OF_TEXT)]
    try:
        text = Text(texts, seq_length=seq_length, seed=seed)
    except NoTextError:
        assert len(tokens) <= seq_length
        return
    windows = [
        tuple(tokens[at : at + seq_length + 1]) for at in range(0, len(tokens) - seq_length, seq_length)
    ]
    assert text.windows == len(windows)
    for epoch in (0, 3):
        numbers = range(epoch * text.windows, (epoch + 1) * text.windows)
        samples = [(*tokens.tolist(), int(labels[-1])) for tokens, labels in map(text.sample, numbers)]
        assert sorted(samples) == sorted(windows)


@given(number=st.integers(0, 10**9), seed=st.integers(0, 100))
def test_a_sample_is_a_function_of_text_seed_and_number(number: int, seed: int) -> None:
    texts = [bytes(range(256)), b"and another one"]
    text, other = (Text(texts, seq_length=16, seed=seed) for _ in range(2))
    expected = other.sample(number)
    text.sample(number + 1)
    for actual in (text.sample(number), text.sample(number), [row[0] for row in text.batch([number])]):
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    tokens, labels = expected
    assert torch.equal(tokens[1:], labels[:-1])
    assert text.order == other.order


def test_orders_differ_where_samples_are_numbered_otherwise() -> None:
    texts = [b"one text of some length", b"another text"]
    known = Text(texts, seq_length=4, seed=1).order
    others = [
        Text([texts[0] + b" ", texts[1]], seq_length=4, seed=1),
        Text([b"\0".join(texts)], seq_length=4, seed=1),
        Text(texts, seq_length=5, seed=1),
        Text(texts, seq_length=4, seed=2),
    ]
    assert len({tuple(order.items()) for order in (known, *(text.order for text in others))}) == 5


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
