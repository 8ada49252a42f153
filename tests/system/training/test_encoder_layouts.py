"""Models with an encoder at all pairs of layouts, bit-equal, and a training run that changes its layout.

A run tries one pair of one model, `--all` all 42 of each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt import LoadOptions, load_common_state_dict, load_plain_tensors
from megackpt.engine.data.tensor_bytes import as_bits
from megackpt.optim import DistributedOptimizer
from megackpt.parallel import (
    MicroBatch,
    ModelChunks,
    ParallelGroups,
    ParallelLayout,
    StageTable,
    all_reduce,
    forward_backward,
    share_losses,
)
from megackpt.testing.ranks import RankPool
from models import BertConfig, LearnedPositions, MLPConfig, T5Config, build_bert, build_t5, init_weights
from tests.support.effort import sampled, tries_all, with_all
from tests.support.encoder_models import context_share_of

VOCAB_SIZE = 29  # with tp, the vocabulary is padded
STEPS_OF_A_LAYOUT = 5
MICRO_BATCHES = 4  # in the whole job


@dataclass(frozen=True, slots=True)
class Layout:
    """A layout, and choices that change no result.

    Attributes:
        stages: layers of each chunk; None for an even table.
    """

    sizes: ParallelLayout
    sequence_parallel: bool = False
    stages: tuple[int, ...] | None = None

    def table(self) -> StageTable | None:
        return None if self.stages is None else StageTable.from_counts(self.stages, pp=self.sizes.pp)


# Of 6 layers; those of a T5 are 2 of the encoder and 4 of the decoder.
LAYOUTS = {
    "one": Layout(ParallelLayout()),
    "dp4": Layout(ParallelLayout(dp=4)),
    "tp2-dp2-sequence": Layout(ParallelLayout(tp=2, dp=2), True),
    "tp2-pp2-split": Layout(ParallelLayout(tp=2, pp=2), True, (2, 4)),
    "tp2-cp2-sequence": Layout(ParallelLayout(tp=2, cp=2), True),
    "pp4-uneven": Layout(ParallelLayout(pp=4), stages=(0, 3, 2, 1)),
    "pp2-vpp2-dp2": Layout(ParallelLayout(pp=2, vpp=2, dp=2)),
}
STEPS = STEPS_OF_A_LAYOUT * len(LAYOUTS)
SAMPLE = {"tp2-pp2-split": ["pp2-vpp2-dp2"]}  # target: sources


@dataclass(frozen=True, slots=True)
class Model:
    """A model that is trained.

    Attributes:
        config: its config.
        build: returns its chunks.
        tokens: of each sequence.
        labels: of each sequence.
    """

    config: Any
    build: Callable[..., ModelChunks]
    tokens: int
    labels: int


MODELS = {
    "t5": Model(
        T5Config(
            vocab_size=VOCAB_SIZE,
            hidden_size=32,
            num_layers=6,
            num_encoder_layers=2,
            num_heads=4,
            ffn_hidden_size=24,
            seq_length=12,
            encoder_length=8,
            relative_buckets=8,
            max_distance=6,
            make_vocab_divisible=1,
            mlp=MLPConfig(activation="gelu_tanh"),
        ),
        build_t5,
        tokens=12,
        labels=4,
    ),
    "bert": Model(
        BertConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=32,
            num_layers=6,
            num_heads=4,
            ffn_hidden_size=24,
            seq_length=8,
            positions=LearnedPositions(count=9),
            make_vocab_divisible=1,
        ),
        build_bert,
        tokens=8,
        labels=8,
    ),
}


def build(model: Model, name: str, *, seed: int) -> tuple[ModelChunks, DistributedOptimizer, ParallelGroups]:
    layout = LAYOUTS[name]
    groups = ParallelGroups.create(layout.sizes)
    chunks = model.build(
        model.config, groups, sequence_parallel=layout.sequence_parallel, stages=layout.table()
    )
    init_weights(chunks, seed=seed)
    optimizer = DistributedOptimizer(
        [
            {"name": "matrices", "params": [p for p in chunks.parameters() if p.ndim > 1]},
            {"name": "others", "params": [p for p in chunks.parameters() if p.ndim == 1], "weight_decay": 0},
        ],
        # With a small eps, Adam makes whole steps of gradients that are hardly more than rounding: losses of
        # T5 then differ by 3e-4 after 30 steps on some processors, or more.
        lambda params: torch.optim.AdamW(params, lr=0.01, betas=(0.8, 0.9), eps=1e-4),
        groups,
        bucket_size=1001,  # shards begin and end at odd places of parameters
    )
    return chunks, optimizer, groups


def state_of(chunks: ModelChunks, optimizer: DistributedOptimizer) -> dict[str, Any]:
    declared = chunks.sharded_state_dict()
    return {"model": declared, "optimizer": optimizer.sharded_state_dict(declared)}


def train(
    model: Model, name: str, source: Path | None, target: Path | None, steps: range, seed: int = 0
) -> list[float]:
    """Return the losses of some steps, from what `source` has to what `target` gets. Collective."""
    chunks, optimizer, groups = build(model, name, seed=seed)
    if source is not None:
        loaded = megackpt.load(state_of(chunks, optimizer), source, options=LoadOptions(complete=True))
        optimizer.load_sharded_state_dict(loaded["optimizer"])
    losses = []
    for step in steps:
        batches = _batches(model, step, groups)
        own = share_losses(forward_backward(chunks, batches, groups), len(batches), groups).mean()
        losses.append(float(all_reduce(own, groups.dp_cp) / groups.dp_cp.size))
        optimizer.step()
        optimizer.zero_grad()
    if target is not None:
        megackpt.save(state_of(chunks, optimizer), target)
    return losses


def _batches(model: Model, step: int, groups: ParallelGroups) -> list[MicroBatch]:
    """Return this rank's micro-batches of a step. There are 3 steps, so that something can be learned."""
    generator = torch.Generator().manual_seed(step % 3)
    draw = functools.partial(torch.randint, 0, VOCAB_SIZE, generator=generator)
    batches = [MicroBatch(draw((2, model.tokens)), draw((2, model.labels))) for _ in range(MICRO_BATCHES)]
    own = batches[groups.dp.rank :: groups.dp.size]
    return [context_share_of(model.config, batch, groups.cp) for batch in own]


def load_and_save(model: Model, name: str, sources: dict[str, Path], directory: Path) -> None:
    """Load each checkpoint into one model of another seed and its optimizer, and save it again.

    Every source was made of another seed, so what stays of the load before is seen.
    """
    chunks, optimizer, _ = build(model, name, seed=len(LAYOUTS))
    for source, path in sources.items():
        loaded = megackpt.load(state_of(chunks, optimizer), path, options=LoadOptions(complete=True))
        optimizer.load_sharded_state_dict(loaded["optimizer"])
        megackpt.save(state_of(chunks, optimizer), directory / source)


PARTS = {"vision": "bert", "language": "t5"}  # models that need not be of one layout


def save_parts(layouts: dict[str, str], source: Path | None, target: Path) -> None:
    """Save two models, each at a layout of its own: after a step, or as they are loaded."""
    optimizers, state = {}, {}
    for part, name in layouts.items():
        model = MODELS[PARTS[part]]
        chunks, optimizers[part], groups = build(model, name, seed=0 if source is None else 1)
        if source is None:
            forward_backward(chunks, _batches(model, 0, groups), groups)
            optimizers[part].step()
        declared = chunks.sharded_state_dict(prefix=f"{part}.")
        state[part] = {"model": declared, "optimizer": optimizers[part].sharded_state_dict(declared)}
    if source is not None:
        loaded = megackpt.load(state, source, options=LoadOptions(complete=True))
        for part, optimizer in optimizers.items():
            optimizer.load_sharded_state_dict(loaded[part]["optimizer"])
    megackpt.save(state, target)


def arrays_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return all arrays; those of the vocabulary without padding, whose size depends on the layout."""
    arrays = load_plain_tensors(checkpoint)
    padded = {k for k, a in arrays.items() if a.ndim and ("word_embeddings" in k or "output_layer" in k)}
    return {k: a[:VOCAB_SIZE] if k in padded else a for k, a in arrays.items()}


def assert_equal(first: Path, second: Path) -> None:
    a, b = arrays_of(first), arrays_of(second)
    assert a.keys() == b.keys()
    for key in a:
        assert torch.equal(as_bits(a[key]), as_bits(b[key])), f"{key} of {first.name}"
    assert load_common_state_dict(first) == load_common_state_dict(second)


def _ranks(name: str) -> int:
    return LAYOUTS[name].sizes.world_size


class Sources:
    """The checkpoint of each model at each layout, made when a test first asks for it."""

    def __init__(self, pool: RankPool, directory: Path) -> None:
        self._pool, self._directory = pool, directory

    def path(self, model_name: str, name: str) -> Path:
        path = self._directory / model_name / name
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            model, seed = _in_bfloat16(model_name), list(LAYOUTS).index(name)
            self._pool.run(train, _ranks(name), model, name, None, path, range(1), seed)
        return path


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory, rank_pool: RankPool) -> Sources:
    return Sources(rank_pool, tmp_path_factory.mktemp("sources"))


def _in_bfloat16(model_name: str) -> Model:
    model = MODELS[model_name]
    return replace(model, config=replace(model.config, params_dtype=torch.bfloat16))


@sampled(2)
@pytest.mark.parametrize("model_name", MODELS)
@pytest.mark.parametrize("target", LAYOUTS if tries_all() else SAMPLE)
def test_what_a_layout_saved_another_loads_and_saves_bit_equal(
    model_name: str, target: str, sources: Sources, rank_pool: RankPool, tmp_path: Path
) -> None:
    names = [name for name in LAYOUTS if name != target] if tries_all() else SAMPLE[target]
    paths = {name: sources.path(model_name, name) for name in names}
    rank_pool.run(load_and_save, _ranks(target), _in_bfloat16(model_name), target, paths, tmp_path)
    for name, path in paths.items():
        states = {key.split(".")[2] for key in arrays_of(path) if key.startswith("optimizer.state.")}
        assert {"exp_avg", "exp_avg_sq", "fp32_param"} <= states
        assert_equal(path, tmp_path / name)


@sampled(2)
@pytest.mark.parametrize("vision", ["dp4", "tp2-dp2-sequence"])
def test_two_models_of_different_layouts_are_one_checkpoint(
    vision: str, rank_pool: RankPool, tmp_path: Path
) -> None:
    first, second = {"vision": vision, "language": "pp4-uneven"}, {"vision": "one", "language": "one"}
    rank_pool.run(save_parts, 4, first, None, tmp_path / "first")
    rank_pool.run(save_parts, 1, second, tmp_path / "first", tmp_path / "second")
    assert {key.split(".")[0] for key in arrays_of(tmp_path / "first")} == {"optimizer", *PARTS}
    assert_equal(tmp_path / "first", tmp_path / "second")


@with_all("layout pairs load and save these families")
@pytest.mark.parametrize("model_name", MODELS)
def test_training_with_a_change_of_layout_every_few_steps_is_that_without(
    model_name: str, rank_pool: RankPool, tmp_path: Path
) -> None:
    model = MODELS[model_name]
    (expected,) = rank_pool.run(train, 1, model, "one", None, None, range(STEPS))
    losses: list[float] = []
    source: Path | None = None
    for name in [*list(LAYOUTS)[1:], "one"]:
        steps, target = range(len(losses), len(losses) + STEPS_OF_A_LAYOUT), tmp_path / name
        losses += rank_pool.run(train, _ranks(name), model, name, source, target, steps)[0]
        source = target
    assert len(losses) == STEPS
    assert losses[-1] < 0.9 * losses[0]  # it learns: a step that does nothing would be found
    # Float32 rounds each step at 6e-8; Adam's division by small moments makes more of it.
    assert losses == pytest.approx(expected, rel=1e-4)
