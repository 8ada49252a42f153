"""The law of the library for optimizer state: any layout of dense layers and experts loads what any saved.

Layouts have all seven axes. Dense parameters are cut into flat ranges over dp x cp, those of
experts over edp.
"""

from __future__ import annotations

import math

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megackpt import load, save
from megackpt.comm import Group
from megackpt.engine.data.tensor_bytes import as_bits
from megackpt.mapping import ShardedStateDict, ShardedTensor
from megackpt.optim import DistributedOptimizer, MixedPrecisionOptimizer
from megackpt.optim.master_optimizer import MasterOptimizer
from megackpt.parallel import ParallelGroups, ParallelLayout
from megackpt.storage import MemoryStore
from megackpt.testing.world import SimulatedWorld
from tests.support.effort import few
from tests.support.expert_world import TinyMoE
from tests.support.optimizers import Arrays, elements_of, scatter, tensors_of

Kind = type[MasterOptimizer]
KINDS = st.sampled_from([DistributedOptimizer, MixedPrecisionOptimizer])
MOST_RANKS = 8  # of a simulated world: each is a thread
EXAMPLES = few(12, of=2000)  # about 0.2 s each


def _divisors(size: int) -> list[int]:
    return [n for n in (1, 2, 4) if size % n == 0]


@st.composite
def layouts(draw: st.DrawFn) -> ParallelLayout:
    """Return a layout whose etp, ep and edp need not have anything to do with tp, cp and dp."""
    pp = draw(st.sampled_from([1, 2]))
    vpp = draw(st.sampled_from([1, 2])) if pp > 1 else 1
    tp, cp = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2]))
    dp = draw(st.integers(1, max(1, min(3, MOST_RANKS // (pp * tp * cp)))))
    stage = tp * cp * dp
    etp = draw(st.sampled_from(_divisors(stage)))
    ep = draw(st.sampled_from(_divisors(stage // etp)))
    return ParallelLayout(tp=tp, cp=cp, dp=dp, pp=pp, vpp=vpp, etp=etp, ep=ep)


def rank_state(
    kind: Kind, layout: ParallelLayout, rank: int, bucket_size: int, dtype: torch.dtype
) -> tuple[MasterOptimizer, ShardedStateDict]:
    groups = ParallelGroups.offline(layout, rank)
    model = TinyMoE(groups).to(dtype)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    optimizer = kind(
        [{"params": matrices, "name": "matrices"}, {"params": others, "name": "others"}],
        lambda g: torch.optim.AdamW(g, lr=0.1),
        groups,
        bucket_size=bucket_size,
    )
    declared = model.sharded_state_dict()
    return optimizer, {"model": declared, "optimizer": optimizer.sharded_state_dict(declared)}


def whole_arrays(dtype: torch.dtype, seed: int) -> Arrays:
    """Return global arrays of everything that is stored; bf16 weights are the rounded masters."""
    _, state = rank_state(DistributedOptimizer, ParallelLayout(), 0, 1000, dtype)
    generator = torch.Generator().manual_seed(seed)
    arrays = {}
    for tensor in tensors_of(state):
        values = torch.randn(math.prod(tensor.global_shape), generator=generator) * 100
        arrays[tensor.key] = values.view(tensor.global_shape).to(tensor.dtype)
    for key in list(arrays):
        if (master := f"optimizer.state.fp32_param.{key}") in arrays:
            arrays[key] = arrays[master].to(dtype)
    return arrays


# Bounds on time are off: the machine that runs this may be busy.
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    source=layouts(),
    target=layouts(),
    kinds=st.tuples(KINDS, KINDS),
    bucket_sizes=st.tuples(st.integers(1, 400), st.integers(1, 400)),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    seed=st.integers(0, 2**16),
)
def test_any_layout_of_experts_loads_the_optimizer_that_any_other_saved(
    source: ParallelLayout,
    target: ParallelLayout,
    kinds: tuple[Kind, Kind],
    bucket_sizes: tuple[int, int],
    dtype: torch.dtype,
    seed: int,
) -> None:
    arrays, store = whole_arrays(dtype, seed), MemoryStore()

    def save_rank(group: Group) -> None:
        _, state = rank_state(kinds[0], source, group.rank, bucket_sizes[0], dtype)
        scatter(state, arrays)
        save(state, store, group=group)

    def load_rank(group: Group) -> list[ShardedTensor]:
        optimizer, state = rank_state(kinds[1], target, group.rank, bucket_sizes[1], dtype)
        loaded = load(state, store, group=group)
        optimizer.load_sharded_state_dict(loaded["optimizer"])
        return tensors_of(
            {"optimizer": optimizer.sharded_state_dict(state["model"]), "model": state["model"]}
        )

    SimulatedWorld(source.world_size).run(save_rank)
    for loaded in SimulatedWorld(target.world_size).run(load_rank):
        for tensor in loaded:
            wanted = arrays[tensor.key].reshape(-1)[elements_of(tensor)]
            assert tensor.data is not None
            assert torch.equal(as_bits(tensor.data).reshape(-1), as_bits(wanted)), tensor.key
