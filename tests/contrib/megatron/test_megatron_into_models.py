"""Our GPT reads genuine checkpoints of Megatron-Core, at other layouts, and computes the same logits.

Tolerance: everything is fp32 and the same sums are made in another order; see `test_megatron_models`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import megackpt
from megackpt.errors import MapError
from megackpt.parallel import ParallelGroups, ParallelLayout, RoutingOptions, gather_from
from megackpt.testing.ranks import RankPool
from models import GPTConfig, LearnedPositions, MLPConfig, MoEConfig, NormConfig, build_gpt
from models.megatron import megatron_state
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
DENSE = Case("rmsnorm-swiglu-gqa-rope-untied")
TIED = Case("rmsnorm-swiglu-rope-tied", tied=True)
LEARNED = Case("layernorm-gelu-learned-tied", norm="LayerNorm", tied=True, rope=False, swiglu=False)
MOE = Case("moe", experts=4)
SIGMOID = Case("moe-sigmoid-bias-shared", experts=4, sigmoid=True, shared=16)
MIXED = Case("moe-every-other-layer", experts=4, every=2)
CASES = [
    (DENSE, Layout(tp=2, pp=2), ParallelLayout()),
    (DENSE, Layout(tp=2, pp=2), ParallelLayout(tp=8)),  # two ranks for each key head
    (DENSE, Layout(), ParallelLayout(tp=2, pp=2, vpp=2)),
    (TIED, Layout(pp=2), ParallelLayout(tp=2)),
    (TIED, Layout(tp=2), ParallelLayout(pp=2)),
    (LEARNED, Layout(tp=2, pp=2), ParallelLayout()),
    (LEARNED, Layout(), ParallelLayout(tp=2, pp=2)),
    (MOE, Layout(ep=2), ParallelLayout()),
    (MOE, Layout(pp=2, ep=2), ParallelLayout(dp=4, ep=4)),
    (MOE, Layout(pp=2, ep=2), ParallelLayout(tp=2, dp=2, ep=2)),
    (MOE, Layout(pp=2, ep=2), ParallelLayout(tp=2, pp=2, ep=2, etp=1)),
    (SIGMOID, Layout(pp=2, ep=2), ParallelLayout(tp=2, ep=2, etp=1)),
    (MIXED, Layout(ep=2), ParallelLayout(pp=2, dp=2, ep=2)),
]


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
    hidden = torch.randint(
        0, world.VOCAB, (world.BATCH, world.SEQUENCE), generator=torch.Generator().manual_seed(5)
    )
    tokens = hidden
    for number, chunk in enumerate(model):
        is_first, is_last = pp.is_first and number == 0, pp.is_last and number == len(model) - 1
        if not is_first:
            hidden = chunk.activation_buffer(tokens)
            dist.recv(hidden, pp.ranks[pp.rank - 1], group=pp.group)
        hidden = chunk(hidden)
        if not is_last:
            dist.send(hidden, pp.ranks[(pp.rank + 1) % pp.size], group=pp.group)
    return gather_from(hidden, groups.tp).transpose(0, 1) if pp.is_last else None


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Worker ranks that import Megatron-Core itself: what a worker has imported, it keeps."""
    own = RankPool()
    yield own
    own.close()


@sampled(8)
@pytest.mark.parametrize(("case", "source", "target"), CASES, ids=[f"{c.name}-{s}-{t}" for c, s, t in CASES])
def test_logits_are_those_of_the_model_that_was_saved(
    case: Case, source: Layout, target: ParallelLayout, pool: RankPool, rank_pool: RankPool, tmp_path: Path
) -> None:
    path = str(tmp_path / "genuine")
    saved = next(
        a for a in reversed(pool.run(world.save_genuine, source.ranks, case, source, path)) if a is not None
    )
    loaded = next(
        a for a in reversed(rank_pool.run(load_ours, target.world_size, case, target, path)) if a is not None
    )
    assert (loaded - saved).abs().max() <= RELATIVE * saved.abs().max()


def test_an_array_that_the_checkpoint_lacks_is_named() -> None:
    model = build_gpt(config_of(DENSE), ParallelGroups.create(ParallelLayout()))
    with pytest.raises(MapError, match=r"word_embeddings.*no array 'model\.embedding\.word_emb.*prefix"):
        megatron_state(model, ["embedding.word_embeddings.weight"], prefix="model.")
