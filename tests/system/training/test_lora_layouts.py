"""Adapters at every layout: values, loss and gradients of one rank; checkpoints load at every other.

Tolerance of losses and gradients: fp32, only the order of sums differs. An element of a gradient is a sum of
at most tokens * layers * width = 128 * 4 * 32 = 16384 rounded terms; random rounding errors add up to
sqrt(16384) * 2^-24 = 8e-6 of the largest element of its array, and a product of two matrices has two such
sums. A wrong or missing reduction is off by a factor of two.

A run tries two pairs of layouts, `--all` all 30.
"""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn

import megackpt
from megackpt import LoadOptions, load_plain_tensors
from megackpt.errors import DeclarationError
from megackpt.testing.ranks import RankPool
from megackpt.training.optim import DistributedOptimizer
from megackpt.training.parallel import (
    ColumnParallelLinear,
    LoRAConfig,
    MicroBatch,
    ModelChunks,
    ParallelGroups,
    ParallelLayout,
    RowParallelLinear,
    add_adapters,
    forward_backward,
    sharded_state_dict,
)
from megackpt.training.parallel.adapters import (
    adapter_metadata,
    adapter_parameters,
    adapter_state,
    base_state,
    merge_adapter,
    reset_magnitudes,
    set_active_adapters,
)
from tests.support.effort import sampled, tries_all
from tests.support.gpt import (
    ADAPTERS,
    Box,
    Case,
    assert_all_close,
    assert_equal_checkpoints,
    build,
    build_with_adapters,
    gradient_boxes,
    join,
    losses_of,
    micro_batches,
    tensors_of,
)
from tests.support.gpt import LORA_CONFIG as CONFIG
from tests.support.gpt import LORA_LAYOUTS as LAYOUTS
from tests.support.gpt import randomise_adapters as randomise

RELATIVE = 2e-5
MICRO_BATCHES = 4  # in the whole job
SAMPLE = [("tp2-dp2-ep2-sequence", "tp2-pp2-vpp2-ep2-etp1"), ("dp4-ep2-etp2", "tp4-sequence")]
PAIRS = list(itertools.permutations(LAYOUTS, 2)) if tries_all() else SAMPLE


class Result(NamedTuple):
    """What one rank has: initial values, and losses and gradients after random values were set."""

    initial: list[Box]
    losses: list[float]
    grads: list[Box]
    merged: list[float]
    inactive: list[float]


def _batches(groups: ParallelGroups) -> list[MicroBatch]:
    """Return this dp rank's share of the first few micro-batches."""
    return micro_batches(groups)[: MICRO_BATCHES // groups.dp.size]


def _losses(model: ModelChunks, groups: ParallelGroups) -> list[float]:
    return losses_of(model, _batches(groups), groups).tolist()


def _compute(name: str) -> Result:
    groups = ParallelGroups.create(LAYOUTS[name].layout)
    model = build_with_adapters(name, groups, seed=1)
    state = adapter_state(model.sharded_state_dict())
    initial = [Box(t.key, t.global_shape, t.global_slice(), t.data.clone()) for t in tensors_of(state)]
    randomise(state)
    losses = _losses(model, groups)
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    grads = gradient_boxes(model, state, groups)
    set_active_adapters(model, [])
    model.requires_grad_()  # without adapters nothing else would have a gradient
    inactive = _losses(model, groups)
    set_active_adapters(model, ADAPTERS)
    for adapter in ADAPTERS:
        merge_adapter(model, adapter)
    return Result(initial, losses, grads, _losses(model, groups), inactive)


@functools.cache
def _reference() -> Result:
    return _compute("one")


@sampled(6)
@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "one"])
def test_adapters_start_compute_learn_and_are_merged_as_on_one_rank(rank_pool: RankPool, name: str) -> None:
    results = rank_pool.run(_compute, LAYOUTS[name].layout.world_size, name)
    expected = _reference()
    initial, first = (join(box for r in side for box in r.initial) for side in (results, [expected]))
    assert initial.keys() == first.keys()
    for key, values in first.items():
        if "magnitude" in key:  # sums over tp are in another order
            torch.testing.assert_close(initial[key], values, rtol=1e-6, atol=0)
        else:
            assert torch.equal(initial[key], values), key
    assert_all_close(join(box for r in results for box in r.grads), join(expected.grads), relative=RELATIVE)
    for part in ("losses", "merged", "inactive"):
        ours = [getattr(r, part) for r in results]
        mean = sum(map(sum, ours)) / sum(map(len, ours))
        assert mean == pytest.approx(sum(getattr(expected, part)) / MICRO_BATCHES, rel=RELATIVE), part


def test_merged_weights_compute_what_the_adapters_did_and_adapters_matter() -> None:
    result = _reference()
    assert result.merged == pytest.approx(result.losses, rel=RELATIVE)
    assert result.inactive != pytest.approx(result.losses, rel=100 * RELATIVE)


def _layers(base: Path) -> list[Box]:
    """Return the outputs and gradients of layers with DoRA that are called with whole inputs."""
    groups = ParallelGroups.create(ParallelLayout(tp=torch.distributed.get_world_size()))
    column = ColumnParallelLinear(12, 8, groups, gather_output=True)
    layers = nn.ModuleDict({"a": column, "b": RowParallelLinear(8, 4, groups, input_is_parallel=False)})
    add_adapters(layers, LoRAConfig(rank=2, targets=("a", "b"), dora=True), groups)
    declared = sharded_state_dict(layers, groups)
    if not base.exists():
        reset_magnitudes(layers)
        randomise(declared)
        megackpt.save(declared, base)
    megackpt.load(declared, base)
    x = torch.ones(3, 12).cumsum(1).requires_grad_()
    y = layers["b"](layers["a"](x).tanh())
    y.square().sum().backward()
    assert x.grad is not None
    whole = [Box(n, t.shape, (slice(None),) * 2, t) for n, t in (("y", y.detach()), ("x.grad", x.grad))]
    return whole + gradient_boxes(layers, adapter_state(declared), groups)


def test_layers_with_whole_inputs_and_outputs_compute_and_learn_as_on_one_rank(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    (expected,) = rank_pool.run(_layers, 1, tmp_path / "base")
    results = rank_pool.run(_layers, 2, tmp_path / "base")
    assert_all_close(join(box for boxes in results for box in boxes), join(expected), relative=RELATIVE)


def _train_last_stage() -> tuple[int, dict[str, object]]:
    """Train adapters of experts, none of which are on the first stage; return their number, and metadata."""
    groups = ParallelGroups.create(ParallelLayout(pp=2))
    model = build(Case(groups.layout, stages="Et|tttL"), CONFIG, groups, seed=1)
    add_adapters(model, LoRAConfig(rank=2, targets=("experts.linear_fc2",)), groups)
    with pytest.raises(DeclarationError, match=r"ends with 'experts\.linear_fc3'"):
        add_adapters(model, LoRAConfig(rank=2, targets=("experts.linear_fc3",)), groups, name="other")
    params = adapter_parameters(model)
    optimizer = DistributedOptimizer([{"params": params}], lambda p: torch.optim.AdamW(p, lr=0.01), groups)
    before = [param.clone() for param in params]
    forward_backward(model, _batches(groups), groups)
    optimizer.step()
    assert not any(map(torch.equal, params[1::2], before[1::2]))  # B; A has no gradient while B is 0
    return len(params), adapter_metadata(model)


def test_a_stage_of_the_pipeline_may_have_no_adapter(rank_pool: RankPool) -> None:
    (first, metadata), (last, same) = rank_pool.run(_train_last_stage, 2)
    assert (first, last) == (0, 6)
    assert metadata == same


def _optimizer(model: ModelChunks, groups: ParallelGroups) -> DistributedOptimizer:
    params = [{"params": adapter_parameters(model, name), "name": name} for name in ADAPTERS]
    return DistributedOptimizer(params, lambda p: torch.optim.AdamW(p, lr=0.01), groups, bucket_size=1001)


def _train_and_save(name: str, directory: Path) -> None:
    groups = ParallelGroups.create(LAYOUTS[name].layout)
    model = build_with_adapters(name, groups, seed=1)
    optimizer = _optimizer(model, groups)
    frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    for _ in range(2):  # B is 0 before the first step, and A has no gradient
        forward_backward(model, _batches(groups), groups)
        optimizer.step()
        optimizer.zero_grad()
    params = dict(model.named_parameters())
    assert all(torch.equal(params[n], value) for n, value in frozen.items())
    declared = model.sharded_state_dict()
    megackpt.save(base_state(declared), directory / "base")
    adapters = adapter_state(declared)
    state = {"model": adapters, "optimizer": optimizer.sharded_state_dict(adapters)}
    megackpt.save(state, directory / "adapters", content_metadata=adapter_metadata(model))
    megackpt.save(declared, directory / "all", content_metadata=adapter_metadata(model))


def _load_and_save(name: str, source: Path, directory: Path) -> None:
    groups = ParallelGroups.create(LAYOUTS[name].layout)
    model = build_with_adapters(name, groups, seed=2)
    optimizer = _optimizer(model, groups)
    complete = LoadOptions(complete=True)
    base = base_state(model.sharded_state_dict())
    megackpt.load(base, source / "base", options=complete)  # every element, and nothing else is there
    adapters = adapter_state(model.sharded_state_dict())
    state = {"model": adapters, "optimizer": optimizer.sharded_state_dict(adapters)}
    loaded = megackpt.load(state, source / "adapters", options=complete)
    optimizer.load_sharded_state_dict(loaded["optimizer"])
    state = {"model": adapters, "optimizer": optimizer.sharded_state_dict(adapters)}
    megackpt.save(model.sharded_state_dict(), directory / "all")
    megackpt.save(state, directory / "adapters")


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_adapters_and_their_optimizer_load_at_another_layout_bit_for_bit(
    rank_pool: RankPool, memory_path: Path, source: str, target: str
) -> None:
    saved, again = memory_path / "saved", memory_path / "again"
    rank_pool.run(_train_and_save, LAYOUTS[source].layout.world_size, source, saved)
    rank_pool.run(_load_and_save, LAYOUTS[target].layout.world_size, target, saved, again)
    for kind in ("adapters", "all"):
        assert_equal_checkpoints(saved / kind, again / kind, CONFIG.vocab_size)
    states = load_plain_tensors(saved / "adapters")
    assert all(".adapter." in key for key in states)
    assert any(key.startswith("optimizer.state.exp_avg.") for key in states)
    stored = megackpt.load_content_metadata(saved / "adapters")["adapters"]
    assert {name: LoRAConfig.from_json(config) for name, config in stored.items()} == ADAPTERS
