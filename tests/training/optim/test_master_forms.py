"""Masters in every form that optimizers keep them in, at every layout: the stored arrays are the same bits.

Each form at each layout is loaded from one set of arrays and declared again. All forms have the same keys, so
whatever one of them saved at one layout, any other loads at any other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from megackpt.integrations import apex
from megackpt.mapping import ShardedStateDict, ShardedTensor
from megackpt.optim import (
    DistributedOptimizer,
    MixedPrecisionOptimizer,
    WholeMatrixOptimizer,
    declare_remainder_masters,
    restore_remainder_masters,
)
from megackpt.parallel.attributes import mark
from megackpt.parallel.groups import ParallelGroups
from megackpt.parallel.layout import ParallelLayout
from tests.support import fake_apex
from tests.support.optimizers import Arrays, gather, loaded, scatter
from tests.training.optim.test_remainders import RemainderSGD, random_patterns, special_values

ROWS, COLUMNS = 12, 10
MASTER = "optimizer.state.fp32_param.weight"
LAYOUTS = [
    *(ParallelLayout(), ParallelLayout(dp=3), ParallelLayout(tp=2), ParallelLayout(tp=3, dp=2)),
    *(ParallelLayout(dp=2, ep=2), ParallelLayout(dp=6, ep=3)),
]
"""Where ep is larger than 1, the rows are experts."""

Declare = Callable[[ShardedStateDict], ShardedStateDict]
Restore = Callable[[Any], None]
Form = Callable[[Parameter, ParallelGroups], tuple[Declare, Restore]]


def of_wrapper(kind: Any) -> Form:
    def make(param: Parameter, groups: ParallelGroups) -> tuple[Declare, Restore]:
        optimizer = kind([param], lambda g: torch.optim.SGD(g, lr=0.1), groups)

        def declare(model: ShardedStateDict) -> ShardedStateDict:
            return {"state": optimizer.sharded_state_dict(model)["state"]}

        return declare, optimizer.load_sharded_state_dict

    return make


def remainders(param: Parameter, groups: ParallelGroups) -> tuple[Declare, Restore]:
    optimizer = RemainderSGD([param])
    return (
        lambda model: declare_remainder_masters(optimizer, model),
        lambda state: restore_remainder_masters(optimizer, state),
    )


def of_apex(build: Callable[[Parameter, ParallelGroups], Any]) -> Form:
    def make(param: Parameter, groups: ParallelGroups) -> tuple[Declare, Restore]:
        optimizer = build(param, groups)

        def restore(state: Any) -> None:
            settings = apex.sharded_state_dict(optimizer, {"weight": param_entity(param, groups)})
            apex.load_sharded_state_dict(optimizer, {**settings, **state})

        return lambda model: {"state": apex.sharded_state_dict(optimizer, model, True)["state"]}, restore

    return make


def fragments(param: Parameter, groups: ParallelGroups, **options: Any) -> Any:
    dp = groups.edp if groups.ep.size > 1 else groups.dp
    return fake_apex.DistributedFusedAdam(
        [param], rank=dp.rank, size=dp.size, default_shard_size=16, **options
    )


FORMS: dict[str, Form] = {
    "DistributedOptimizer": of_wrapper(DistributedOptimizer),
    "MixedPrecisionOptimizer": of_wrapper(MixedPrecisionOptimizer),
    "WholeMatrixOptimizer": of_wrapper(WholeMatrixOptimizer),
    "int16 remainders": remainders,
    "Apex FusedAdam": of_apex(lambda p, g: fake_apex.FusedAdam([p], capturable=True, master_weights=True)),
    "Apex fragments": of_apex(fragments),
    "Apex fragments of remainders": of_apex(
        lambda p, g: fragments(p, g, store_params=False, store_param_remainders=True)
    ),
}


def param_entity(param: Parameter, groups: ParallelGroups) -> ShardedTensor:
    cut, copies = (groups.ep, groups.edp) if groups.ep.size > 1 else (groups.tp, groups.dp)
    return ShardedTensor.from_rank_offsets(
        "weight", param, (0, cut.rank, cut.size), replica_id=(0, 0, copies.rank)
    )


def make_param(groups: ParallelGroups) -> Parameter:
    slices = groups.ep.size * groups.tp.size
    param = Parameter(torch.zeros(ROWS // slices, COLUMNS, dtype=torch.bfloat16))
    of_experts = ("expert_parallel", "stacked_experts")
    mark(param, *(of_experts if groups.ep.size > 1 else ("tensor_model_parallel",)))
    return param


def stored_arrays() -> Arrays:
    special = special_values()
    masters = torch.cat([special, random_patterns(ROWS * COLUMNS - len(special))]).view(ROWS, COLUMNS)
    return {"weight": masters.bfloat16(), MASTER: masters}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_masters_are_the_same_bits_in_every_form_at_every_layout(form: str, layout: ParallelLayout) -> None:
    arrays, world = stored_arrays(), []
    for rank in range(layout.world_size):
        groups = ParallelGroups.offline(layout, rank)
        param = make_param(groups)
        model = {"weight": param_entity(param, groups)}
        declare, restore = FORMS[form](param, groups)
        scatter(model, arrays)
        request = only_masters(declare(model))
        scatter(request, arrays)
        restore(loaded(request))
        world.append(only_masters(declare(model)))
    (key, masters), *others = gather(world).items()
    assert not others
    assert key == MASTER
    assert torch.equal(masters.view(torch.int32), arrays[MASTER].view(torch.int32))


def only_masters(state: Any) -> Any:
    """Leave out moments and counts of steps."""
    if not isinstance(state, dict):
        return state
    kept = {key: only_masters(value) for key, value in state.items()}
    return {k: v for k, v in kept.items() if isinstance(v, dict) or v.key == MASTER}
