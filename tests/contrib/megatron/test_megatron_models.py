"""Unmodified models of Megatron-Core 0.16.1 are saved by megackpt at one layout and loaded at others.

Written in two ways: with `install()`, where the model makes our entities and what it knows as
`megatron.core.dist_checkpointing` saves them; and without, where `megackpt.save` takes Megatron-Core's own
entities.

Tolerance of logits between layouts: everything is fp32 and only the order of sums differs. A logit goes
through 4 layers of 4 products with sums of at most 64 rounded terms; random rounding errors add up to about
sqrt(4 * 4 * 64) * 2^-24 = 2e-6 of the largest logit. Weights in the wrong places differ by much more.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import megackpt
from megackpt.testing.ranks import RankPool
from tests.contrib.megatron import megatron_world as world
from tests.contrib.megatron.megatron_world import Case, Layout
from tests.support.effort import sampled

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None,
        reason="Megatron-Core is not installed: pip install megatron-core==0.16.1",
    ),
]

RELATIVE = 1e-5

GPT = Case("rmsnorm-swiglu-gqa-rope-untied")
TIED = Case("layernorm-gelu-learned-tied", norm="LayerNorm", tied=True, rope=False, swiglu=False)
TIED_ROPE = Case("rmsnorm-swiglu-rope-tied", tied=True)
MOE = Case("moe", experts=4)

TP2PP2 = Layout(tp=2, pp=2)
PP2EP2 = Layout(pp=2, ep=2)
PAIRS = [
    (GPT, TP2PP2, TP2PP2),
    (GPT, TP2PP2, Layout(pp=4)),
    (GPT, TP2PP2, Layout(tp=4)),
    (GPT, TP2PP2, Layout(tp=2, world=4)),
    (GPT, TP2PP2, Layout()),
    (TIED, TP2PP2, Layout(pp=4)),
    (TIED, TP2PP2, Layout(tp=4)),
    (TIED, TP2PP2, Layout()),
    (TIED_ROPE, TP2PP2, Layout(tp=2)),
    (MOE, PP2EP2, PP2EP2),
    (MOE, PP2EP2, Layout(ep=4)),
    (MOE, PP2EP2, Layout(tp=2, ep=2)),
    (MOE, PP2EP2, TP2PP2),
    (MOE, PP2EP2, Layout(ep=2)),
    (MOE, PP2EP2, Layout()),
    (MOE, TP2PP2, Layout(ep=2)),
    (MOE, TP2PP2, Layout(pp=4)),
    (MOE, TP2PP2, Layout(tp=4)),
    (MOE, TP2PP2, Layout()),
]


class Saved:
    """Checkpoints of filled models, each saved once, by one way of writing."""

    def __init__(self, pool: RankPool, root: Path, installed: bool) -> None:
        self.pool, self.root, self.installed = pool, root, installed
        self._logits: dict[str, torch.Tensor] = {}

    def at(self, case: Case, layout: Layout) -> tuple[str, torch.Tensor]:
        """Return the directory and the logits of a case saved at a layout."""
        path = str(self.root / f"{case.name}-{layout}")
        if path not in self._logits:
            answers = self.pool.run(world.save_filled, layout.ranks, case, layout, path, self.installed)
            self._logits[path] = next(a for a in reversed(answers) if a is not None)
        return path, self._logits[path]


@pytest.fixture(scope="module", params=[True, False], ids=["installed", "foreign"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Saved]:
    pool = RankPool()  # not the session's: what a worker has imported, it keeps
    yield Saved(pool, tmp_path_factory.mktemp("megatron"), request.param)
    pool.close()


@sampled(10)
@pytest.mark.parametrize(
    ("case", "source", "target"), PAIRS, ids=[f"{c.name}-{s}-to-{t}" for c, s, t in PAIRS]
)
def test_a_model_loaded_at_another_layout_is_the_model_that_was_saved(
    case: Case, source: Layout, target: Layout, saved: Saved
) -> None:
    path, logits_saved = saved.at(case, source)
    copy = f"{path}-to-{target}"
    answers = saved.pool.run(world.load_and_save, target.ranks, case, target, path, copy, saved.installed)

    stored, again = megackpt.load_plain_tensors(path), megackpt.load_plain_tensors(copy)
    assert stored.keys() == again.keys()
    for key, value in stored.items():
        assert torch.equal(value, world.oracle(key, tuple(value.shape))), f"{key} was not saved as it was"
        assert torch.equal(value, again[key]), f"{key} differs after loading at {target}"
    loaded, expected = next(a for a in reversed(answers) if a[0] is not None)
    assert torch.equal(loaded, expected), "the same weights at the same layout compute something else"
    limit = RELATIVE * logits_saved.abs().max()
    assert (loaded - logits_saved).abs().max() <= limit, "the weights do not mean what they meant"
    if (target.tp, target.ep) == (source.tp, source.ep):
        assert torch.equal(loaded, logits_saved), "pipelining alone must not change a bit"


def test_an_unmodified_model_makes_our_entities_after_install_and_its_own_without(saved: Saved) -> None:
    modules = {module for module, _ in saved.pool.run(world.kinds, 1, GPT, Layout(), saved.installed)[0]}
    assert all(module.startswith("megackpt.mapping.") == saved.installed for module in modules), modules


# Without install() Megatron-Core's own helpers declare the states, and they cannot declare Adam's 0-dim step.
@sampled(6)
@pytest.mark.parametrize("saved", [True], indirect=True, ids=["installed"])
@pytest.mark.parametrize("target", [Layout(pp=4), Layout(tp=4), Layout()], ids=str)
def test_adam_states_of_a_megatron_model_are_resharded_bit_for_bit(target: Layout, saved: Saved) -> None:
    path = str(saved.root / f"adam-{target}")
    saved.pool.run(world.save_adam, 4, GPT, TP2PP2, path)
    saved.pool.run(world.load_adam, target.ranks, GPT, target, path, f"{path}-loaded")
    saved.pool.run(world.save_adam, target.ranks, GPT, target, f"{path}-direct")
    stored, loaded, direct = (megackpt.load_plain_tensors(path + end) for end in ("", "-loaded", "-direct"))
    assert stored.keys() == loaded.keys() == direct.keys()
    assert any(key.startswith("optimizer.state.exp_avg_sq.") for key in stored)
    assert all(torch.equal(value, loaded[key]) for key, value in stored.items())
    assert all(torch.equal(value, direct[key]) for key, value in stored.items())
