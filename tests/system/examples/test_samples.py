"""Every sample is trained on once, in the same global batches, whatever the layouts of a run were."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from training.arguments import Arguments
from training.text import END_OF_TEXT, NoTextError, Text

from megackpt.parallel import ParallelLayout
from megackpt.testing.ranks import RankPool
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
