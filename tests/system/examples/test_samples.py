"""What a run of the examples goes on with: every sample once, at whatever layouts, and the same model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from training.arguments import Arguments
from training.saved_model import differences, plain_fields
from training.text import END_OF_TEXT, NoTextError, Text

from megackpt.testing.ranks import RankPool
from megackpt.training.parallel import ParallelLayout, SwiGLU
from models import AttentionConfig, GPTConfig, MoEConfig, NormConfig, SlidingWindow
from tests.system.examples.training_runs import (
    LAYOUTS,
    arguments_for,
    make_trainer,
    metrics_of,
    train,
    write_text,
)

PHASES = ("PP2xDP2", "DP4", "TP4", "TP2xDP2")
STEPS_PER_PHASE = 2
STEPS = STEPS_PER_PHASE * len(PHASES)
BATCH = 8

Consumed = list[list[int]]  # step -> numbers of the samples that went into the model


class RecordingText(Text):
    """A text that remembers which samples it was asked for."""

    asked: list[int]

    def batch(self, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        self.asked += numbers
        return super().batch(numbers)


def run_and_record(arguments: Arguments) -> Consumed:
    """Train in a worker rank; return what this very rank consumed in each step."""
    trainer = make_trainer(arguments)
    text = trainer.text
    text.__class__, text.asked = RecordingText, []
    steps: Consumed = []
    train_step = trainer.train_step

    def recording_step() -> dict[str, Any]:
        text.asked.clear()
        measured = train_step()
        steps.append(sorted(text.asked))
        return measured

    trainer.train_step = recording_step
    trainer.run()
    return steps


def global_batches(layout: ParallelLayout, per_rank: Sequence[Consumed]) -> Consumed:
    """Join what the dp ranks consumed; ranks that differ in tp and pp only have to consume the same."""
    coordinates = [layout.coordinates(rank) for rank in range(layout.world_size)]
    batches: Consumed = []
    for step in range(len(per_rank[0])):
        of_dp = [
            [per_rank[rank][step] for rank, where in enumerate(coordinates) if where.dp == dp]
            for dp in range(layout.dp)
        ]
        assert all(samples == same[0] for same in of_dp for samples in same)
        batches.append(sorted(number for same in of_dp for number in same[0]))
    return batches


def test_changes_of_layout_neither_skip_nor_repeat_nor_move_a_sample(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    flags = [f"--data={write_text(tmp_path / 'text')}", f"--steps={STEPS}", "--log-samples"]
    flags += [f"--global-batch-size={BATCH}"]
    train(rank_pool, "1 rank", tmp_path / "whole", *flags)
    consumed: Consumed = []
    for phase, name in enumerate(PHASES):
        until = f"--exit-after={STEPS_PER_PHASE * (phase + 1)}"
        arguments = arguments_for(LAYOUTS[name], [f"--ckpt={tmp_path / 'elastic'}", *flags, until])
        consumed += global_batches(LAYOUTS[name], rank_pool.run(run_and_record, 4, arguments))

    assert [number for batch in consumed for number in batch] == list(range(STEPS * BATCH))
    logged = {
        run: [m["sample_numbers"] for m in metrics_of(tmp_path / run).values()]
        for run in ("whole", "elastic")
    }
    assert consumed == logged["elastic"] == logged["whole"]


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
