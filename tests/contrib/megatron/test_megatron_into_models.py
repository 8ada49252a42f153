"""Models of Megatron-Core 0.16.1 are loaded at other layouts, by themselves and by our GPT.

Unmodified models are saved by megackpt in two ways: with `install()`, where the model makes our entities and
what it knows as `megatron.core.dist_checkpointing` saves them; and without, where `megackpt.save` takes
Megatron-Core's own entities. Our GPT reads the checkpoints that Megatron-Core itself saves.

Tolerance of logits between layouts: everything is fp32 and only the order of sums differs. A logit goes
through 4 layers of 4 products with sums of at most 64 rounded terms; random rounding errors add up to about
sqrt(4 * 4 * 64) * 2^-24 = 2e-6 of the largest logit. Weights in the wrong places differ by much more.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import megackpt
from megackpt.errors import MapError
from megackpt.testing.ranks import RankPool
from megackpt.training.parallel import ParallelGroups, ParallelLayout, RoutingOptions
from megackpt.training.parallel.collectives import gather_from
from models import GPTConfig, LearnedPositions, MLPConfig, MoEConfig, NormConfig, build_gpt
from models.megatron import megatron_state
from tests.contrib.megatron import megatron_world as world
from tests.contrib.megatron.megatron_world import Case, Layout
from tests.support.effort import sampled

RELATIVE = 1e-5
GPT = Case("rmsnorm-swiglu-gqa-rope-untied")
TIED = Case("rmsnorm-swiglu-rope-tied", tied=True)
LEARNED = Case("layernorm-gelu-learned-tied", norm="LayerNorm", tied=True, rope=False, swiglu=False)
MOE = Case("moe", experts=4)
SIGMOID = Case("moe-sigmoid-bias-shared", experts=4, sigmoid=True, shared=16)
MIXED = Case("moe-every-other-layer", experts=4, every=2)
TP2PP2, PP2EP2 = Layout(tp=2, pp=2), Layout(pp=2, ep=2)
PAIRS = [
    (GPT, TP2PP2, TP2PP2),
    (GPT, TP2PP2, Layout(pp=4)),
    (GPT, TP2PP2, Layout(tp=4)),
    (GPT, TP2PP2, Layout(tp=2, world=4)),
    (GPT, TP2PP2, Layout()),
    (LEARNED, TP2PP2, Layout(pp=4)),
    (LEARNED, TP2PP2, Layout(tp=4)),
    (LEARNED, TP2PP2, Layout()),
    (TIED, TP2PP2, Layout(tp=2)),
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


CASES = [
    (GPT, TP2PP2, ParallelLayout()),
    (GPT, TP2PP2, ParallelLayout(tp=8)),  # two ranks for each key head
    (GPT, Layout(), ParallelLayout(tp=2, pp=2, vpp=2)),
    (TIED, Layout(pp=2), ParallelLayout(tp=2)),
    (TIED, Layout(tp=2), ParallelLayout(pp=2)),
    (LEARNED, TP2PP2, ParallelLayout()),
    (LEARNED, Layout(), ParallelLayout(tp=2, pp=2)),
    (MOE, Layout(ep=2), ParallelLayout()),
    (MOE, PP2EP2, ParallelLayout(dp=4, ep=4)),
    (MOE, PP2EP2, ParallelLayout(tp=2, dp=2, ep=2)),
    (MOE, PP2EP2, ParallelLayout(tp=2, pp=2, ep=2, etp=1)),
    (SIGMOID, PP2EP2, ParallelLayout(tp=2, ep=2, etp=1)),
    (MIXED, Layout(ep=2), ParallelLayout(pp=2, dp=2, ep=2)),
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
            self._logits[path] = world.of_last_stage(answers)
        return path, self._logits[path]


@pytest.fixture(scope="module", params=[True, False], ids=["installed", "foreign"])
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, megatron_core: None
) -> Iterator[Saved]:
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
    loaded, expected = world.of_last_stage(answers)
    assert torch.equal(loaded, expected), "the same weights at the same layout compute something else"
    limit = RELATIVE * logits_saved.abs().max()
    assert (loaded - logits_saved).abs().max() <= limit, "the weights do not mean what they meant"
    if (target.tp, target.ep) == (source.tp, source.ep):
        assert torch.equal(loaded, logits_saved), "pipelining alone must not change a bit"


def test_an_unmodified_model_makes_our_entities_after_install_and_its_own_without(saved: Saved) -> None:
    modules = {module for module, _ in saved.pool.run(world.kinds, 1, GPT, Layout(), saved.installed)[0]}
    assert all(module.startswith("megackpt.entities.") == saved.installed for module in modules), modules


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


def config_of(case: Case) -> GPTConfig:
    """Return the configuration of our model that is a case's."""
    return GPTConfig(
        vocab_size=world.VOCAB,
        hidden_size=world.HIDDEN,
        num_layers=4,
        num_heads=8,
        num_query_groups=4,
        ffn_hidden_size=48,
        seq_length=world.SEQUENCE,
        tied_embeddings=case.tied,
        make_vocab_divisible=1,
        linear_bias=not case.swiglu,
        positions=None if case.rope else LearnedPositions(count=world.SEQUENCE),
        norm=NormConfig(kind="rms" if case.norm == "RMSNorm" else "layer"),
        mlp=MLPConfig() if case.swiglu else MLPConfig(gated=False, activation="gelu"),
        moe=MoEConfig(
            num_experts=case.experts,
            ffn_hidden_size=48,
            routing=RoutingOptions(
                score_function="sigmoid" if case.sigmoid else "softmax",
                bias_rate=0.0 if case.sigmoid else None,
            ),
            shared_ffn_hidden_size=case.shared,
            layer_freq=case.every,
        )
        if case.experts
        else None,
    )


@torch.no_grad()
def load_ours(case: Case, layout: ParallelLayout, path: str) -> torch.Tensor | None:
    """Load a checkpoint into our model; return the logits `[b, s, vocab]` on the last stage. Collective."""
    groups = ParallelGroups.create(layout)
    model = build_gpt(config_of(case), groups)
    for parameter in model.parameters():
        parameter.fill_(float("nan"))  # whatever is not loaded shows
    megackpt.load(megatron_state(model, megackpt.load_sharded_metadata(path)), path)
    pp = groups.pp
    tokens = hidden = world.tokens()
    for number, chunk in enumerate(model):
        is_first, is_last = pp.is_first and number == 0, pp.is_last and number == len(model) - 1
        if not is_first:
            hidden = chunk.activation_buffer(tokens)
            dist.recv(hidden, pp.ranks[pp.rank - 1], group=pp.group)
        hidden = chunk(hidden)
        if not is_last:
            dist.send(hidden, pp.ranks[(pp.rank + 1) % pp.size], group=pp.group)
    return gather_from(hidden, groups.tp).transpose(0, 1) if pp.is_last else None


@sampled(8)
@pytest.mark.parametrize(("case", "source", "target"), CASES, ids=[f"{c.name}-{s}-{t}" for c, s, t in CASES])
def test_logits_are_those_of_the_model_that_was_saved(
    case: Case,
    source: Layout,
    target: ParallelLayout,
    core_ranks: RankPool,
    rank_pool: RankPool,
    tmp_path: Path,
) -> None:
    path = str(tmp_path / "genuine")
    saved = world.of_last_stage(core_ranks.run(world.save_genuine, source.ranks, case, source, path))
    loaded = world.of_last_stage(rank_pool.run(load_ours, target.world_size, case, target, path))
    assert (loaded - saved).abs().max() <= RELATIVE * saved.abs().max()


def test_an_array_that_the_checkpoint_lacks_is_named() -> None:
    model = build_gpt(config_of(GPT), ParallelGroups.create(ParallelLayout()))
    with pytest.raises(MapError, match=r"word_embeddings.*no array 'model\.embedding\.word_emb.*prefix"):
        megatron_state(model, ["embedding.word_embeddings.weight"], prefix="model.")
