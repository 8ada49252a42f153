"""Training on several ranks against plain torch in one process, and Muon with owners of whole matrices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from megackpt import load, save
from megackpt.entities import ShardedStateDict, ShardedTensor
from megackpt.testing.ranks import RankPool
from megackpt.training.optim import DistributedOptimizer, MixedPrecisionOptimizer, WholeMatrixOptimizer
from megackpt.training.optim.master_optimizer import MasterOptimizer
from megackpt.training.parallel.groups import ParallelGroups
from megackpt.training.parallel.layout import ParallelLayout
from tests.benchmarks.peers.collectives import COLLECTIVE_METHODS, MESSAGE_METHODS, observed
from tests.support.optimizers import (
    SHAPES,
    Arrays,
    loaded,
    make_model,
    model_state,
    random_arrays,
    tensors_of,
)

Kind = type[MasterOptimizer]
KINDS = [DistributedOptimizer, MixedPrecisionOptimizer]


def toy(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 11), nn.Tanh(), nn.Linear(11, 3)).to(
        dtype
    )


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    return [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0, "lr": 0.02}]


def adamw(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.01)


def backward(model: nn.Module, step: int, sample: int) -> None:
    generator = torch.Generator().manual_seed(1000 * step + sample)
    x = torch.randn(5, 7, generator=generator).to(next(model.parameters()).dtype)
    model(x).square().mean().backward()


def reference_run(steps: int, *, ranks: int, clip_grad: float) -> tuple[list[Tensor], list[float]]:
    """Plain torch: the mean over ranks of each rank's gradient, which is that of one sample."""
    model = toy()
    optimizer, norms = adamw(groups_of(model)), []
    params = list(model.parameters())
    for step in range(steps):
        total = [torch.zeros_like(p) for p in params]
        for rank in range(ranks):
            optimizer.zero_grad()
            backward(model, step, rank)
            for t, p in zip(total, params, strict=True):
                t += p.grad
        for t, p in zip(total, params, strict=True):
            p.grad = t / ranks
        if clip_grad:
            norms.append(float(nn.utils.clip_grad_norm_(params, clip_grad)))
        optimizer.step()
    return [p.detach() for p in params], norms


def run_training(
    kind: Kind, steps: int, clip_grad: float, dtype: torch.dtype = torch.float32
) -> tuple[list[Tensor], list[float]]:
    model, norms = toy(dtype), []
    groups = ParallelGroups.create(ParallelLayout(dp=dist.get_world_size()))
    optimizer = kind(groups_of(model), adamw, groups, clip_grad=clip_grad, bucket_size=300)
    for step in range(steps):
        backward(model, step, dist.get_rank())
        norms.append(float(optimizer.step()))
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()], norms


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("ranks", "clip_grad", "rtol", "atol"),
    [
        (1, 0.0, 0, 0),
        # Gradients agree bit for bit; a kernel may round the end of a shard unlike its middle.
        (2, 0.0, 1e-6, 1e-7),
        (4, 0.0, 1e-6, 1e-7),
        (2, 0.05, 1e-4, 1e-6),
    ],
)
def test_training_is_that_of_plain_torch_on_the_mean_gradient_clipped_by_the_norm_over_all_ranks(
    rank_pool: RankPool, kind: Kind, ranks: int, clip_grad: float, rtol: float, atol: float
) -> None:
    expected, norms = reference_run(4, ranks=ranks, clip_grad=clip_grad)
    assert all(norm > clip_grad for norm in norms)
    for weights, got_norms in rank_pool.run(run_training, ranks, kind, 4, clip_grad):
        assert not clip_grad or got_norms == pytest.approx(norms, rel=1e-5)
        for got, want in zip(weights, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=rtol, atol=atol)


def test_sharded_and_whole_masters_train_equal_bf16_weights_on_all_ranks(rank_pool: RankPool) -> None:
    runs = [out for kind in KINDS for out in rank_pool.run(run_training, 4, kind, 4, 1.0, torch.bfloat16)]
    for weights, norms in runs:
        assert weights[0].dtype == torch.bfloat16
        assert norms == pytest.approx(runs[0][1], rel=1e-12)
        assert all(torch.equal(a, b) for a, b in zip(weights, runs[0][0], strict=True))


def run_world(kind: Kind, layout: ParallelLayout) -> tuple[float, list[tuple[Tensor, Tensor]]]:
    """Step the small sharded model once on known gradients; return the norm and (got, wanted) weights."""
    groups = ParallelGroups.create(layout)
    weights = random_arrays(SHAPES, seed=1)
    params = make_model(groups, weights, torch.float32)
    optimizer = kind([p.param for p in params], adamw, groups, clip_grad=1.0, bucket_size=400)
    grads = random_arrays(SHAPES, seed=10 + groups.dp.rank)
    for p in params:
        share = 1.0
        if getattr(p.param, "sequence_parallel", False) and layout.tp == 2:
            share *= (
                0.25 if groups.tp.rank == 0 else 0.75
            )  # what this rank's part of the sequence contributes
        if getattr(p.param, "shared_embedding", False) and layout.pp > 1:
            share *= 0.5
        p.param.grad = p.cut(grads) * share
    norm = float(optimizer.step())
    _, wanted = world_reference(layout.dp)
    return norm, [(p.param.detach(), p.cut(wanted)) for p in params]


def world_reference(dp: int) -> tuple[float, Arrays]:
    arrays = random_arrays(SHAPES, seed=1)
    for key, array in arrays.items():
        array.grad = sum(random_arrays(SHAPES, seed=10 + r)[key] for r in range(dp)) / dp
    norm = float(nn.utils.clip_grad_norm_(list(arrays.values()), 1.0))
    adamw(list(arrays.values())).step()
    return norm, arrays


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "layout", [ParallelLayout(tp=2, pp=2), ParallelLayout(tp=2, dp=2), ParallelLayout(pp=2, dp=2)], ids=str
)
def test_tied_replicated_and_sequence_parallel_parameters_count_once(
    rank_pool: RankPool, kind: Kind, layout: ParallelLayout
) -> None:
    norm, _ = world_reference(layout.dp)
    for got_norm, pairs in rank_pool.run(run_world, 4, kind, layout):
        assert got_norm == pytest.approx(norm, rel=1e-5)
        for got, want in pairs:
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def run_touched() -> list[list[float]]:
    groups = ParallelGroups.create(ParallelLayout(dp=2))
    never, here, both = (Parameter(torch.ones(100)) for _ in range(3))
    optimizer = DistributedOptimizer(
        [never, here, both], lambda g: torch.optim.SGD(g, lr=1.0, weight_decay=0.5), groups
    )
    both.sum().backward()
    if groups.dp.rank == 1:
        here.sum().backward()
    optimizer.step()
    return [sorted(set(p.tolist())) for p in (never, here, both)]


def test_a_parameter_is_updated_where_any_rank_has_a_gradient(rank_pool: RankPool) -> None:
    # 1 - (mean gradient + 0.5 * 1): 1 - 1.0 and 1 - 1.5; without a gradient there is no decay either.
    assert rank_pool.run(run_touched, 2) == [[[1.0], [0.0], [-0.5]]] * 2


def run_touched_by_one_model_rank(layout: ParallelLayout, flag: str) -> list[list[float]]:
    groups = ParallelGroups.create(layout)
    marked, plain = (Parameter(torch.ones(10)) for _ in range(2))
    setattr(marked, flag, True)
    optimizer = DistributedOptimizer([marked, plain], lambda g: torch.optim.SGD(g, lr=1.0), groups)
    if groups.rank == 1:
        (2.0 * marked).sum().backward()
        (2.0 * plain).sum().backward()
    optimizer.step()
    return [sorted(set(p.tolist())) for p in (marked, plain)]


@pytest.mark.parametrize(
    ("layout", "flag"),
    [(ParallelLayout(tp=2), "sequence_parallel"), (ParallelLayout(pp=2), "shared_embedding")],
)
def test_a_summed_gradient_of_one_rank_updates_the_parameter_on_all(
    rank_pool: RankPool, layout: ParallelLayout, flag: str
) -> None:
    ranks = rank_pool.run(run_touched_by_one_model_rank, 2, layout, flag)
    assert ranks == [[[-1.0], [1.0]], [[-1.0], [-1.0]]]


def run_without_communication(kind: Kind) -> int:
    """Count calls of torch.distributed while rank 0 alone declares and loads."""
    groups = ParallelGroups.create(ParallelLayout(dp=2))
    params = make_model(groups, random_arrays(SHAPES, seed=1), torch.bfloat16)
    optimizer = kind([p.param for p in params], adamw, groups, bucket_size=400)
    dist.barrier()  # rank 1 must not take its connections down while rank 0 still makes its own
    if groups.dp.rank == 1:
        return 0
    calls: list[str] = []
    with observed(COLLECTIVE_METHODS + MESSAGE_METHODS, lambda name, _: calls.append(name)):
        state = optimizer.sharded_state_dict(model_state(params))
        optimizer.load_sharded_state_dict(loaded(state))
    assert len(tensors_of(state)) > 10
    return len(calls)


@pytest.mark.parametrize("kind", KINDS)
def test_declaring_and_loading_state_needs_no_communication(rank_pool: RankPool, kind: Kind) -> None:
    assert rank_pool.run(run_without_communication, 2, kind) == [0, 0]


def declare(model: nn.Module) -> ShardedStateDict:
    replica = (0, 0, dist.get_rank())
    state = model.state_dict(keep_vars=True)
    return {k: ShardedTensor.from_rank_offsets(k, p, replica_id=replica) for k, p in state.items()}


class MuonJob:
    """A bf16 model on every rank, Muon for its matrices and AdamW for the rest."""

    def __init__(self, dp: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(6, 12), nn.Linear(12, 8), nn.Linear(8, 8)).bfloat16()
        self.groups = ParallelGroups.create(ParallelLayout(dp=dp))
        params = list(self.model.parameters())
        self.muon = WholeMatrixOptimizer([p for p in params if p.ndim == 2], _muon, self.groups)
        self.adam = DistributedOptimizer([p for p in params if p.ndim == 1], adamw, self.groups)

    def state(self) -> ShardedStateDict:
        model = declare(self.model)
        optimizers = {"muon": self.muon, "adam": self.adam}
        return {"model": model, **{name: o.sharded_state_dict(model) for name, o in optimizers.items()}}

    def train(self, steps: range) -> list[Tensor]:
        for step in steps:
            # Each rank has the same gradient, and dp is a power of two: their mean is exact at any dp.
            generator = torch.Generator().manual_seed(step)
            for p in self.model.parameters():
                p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
            self.muon.step()
            self.adam.step()
            self.muon.zero_grad()
            self.adam.zero_grad()
        return self.weights()

    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]


def _muon(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon(groups, lr=0.02)


def run_and_save(path: Path) -> tuple[list[Tensor], list[Tensor], int]:
    job = MuonJob(2, seed=0)
    job.train(range(2))
    save(job.state(), path)
    saved = job.weights()
    return saved, job.train(range(2, 5)), len(job.muon.inner.state)


def resume(dp: int, path: Path) -> tuple[list[Tensor], list[Tensor], int]:
    job = MuonJob(dp, seed=1)
    state = load(job.state(), path)
    if job.groups.dp.rank:  # as if this rank had not loaded the parameters that others own
        owned = {id(o.param) for o in job.muon._owned_params}
        for p in job.model.parameters():
            if p.ndim == 2 and id(p) not in owned:
                p.detach().zero_()
    job.muon.load_sharded_state_dict(state["muon"])
    job.adam.load_sharded_state_dict(state["adam"])
    restored = job.weights()
    return restored, job.train(range(2, 5)), len(job.muon.inner.state)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize("dp", [1, 2, 4])
def test_a_run_with_owners_of_matrices_that_is_resumed_equals_the_uninterrupted_one_bit_for_bit(
    rank_pool: RankPool, dp: int, memory_path: Path
) -> None:
    whole = rank_pool.run(run_and_save, 2, memory_path)
    assert sorted(owned for *_, owned in whole) == [1, 2]  # of three matrices, packed by size
    for rank, (restored, weights, owned) in enumerate(rank_pool.run(resume, dp, dp, memory_path)):
        assert owned == {1: [3], 2: [1, 2], 4: [1, 1, 1, 0]}[dp][rank]
        assert all(torch.equal(a, b) for a, b in zip(restored, whole[0][0], strict=True))
        assert all(torch.equal(a, b) for a, b in zip(weights, whole[0][1], strict=True))
