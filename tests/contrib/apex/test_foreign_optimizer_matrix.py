"""Optimizers of Apex and those that offload to the host, resumed at every change of layout.

docs/optimizers.md has the table of `expected`. Transformer Engine's FusedAdam is in
tests/contrib/transformer_engine/test_transformer_engine_fused_adam.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megackpt.contrib import apex, offload
from megackpt.entities import ShardedStateDict
from megackpt.training.parallel.attributes import is_marked
from megackpt.training.parallel.groups import ParallelGroups
from tests.contrib.apex.foreign_optimizers import CHANGES, Kind, Rank, along, outcome, row_of_docs
from tests.support import fake_apex
from tests.support import optimizers as fake_offload
from tests.support.effort import sampled


def of_apex(name: str, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Kind:
    return Kind(
        make=lambda params, groups: getattr(fake_apex, name)(params, **options),
        declare=lambda o, model, is_loading, groups: apex.sharded_state_dict(
            o, model, is_loading, groups=groups
        ),
        restore=apex.load_sharded_state_dict,
        dtype=dtype,
    )


class DenseAndExperts:
    """Two of Apex's DistributedFusedAdam: of dense parameters over dp, and of experts over edp."""

    def __init__(self, params: list[Any], groups: ParallelGroups, **options: Any) -> None:
        axes = {"dp": groups.dp, "edp": groups.edp}
        of_axis: dict[str, list[Any]] = {name: [] for name in axes}
        for param in params:
            of_axis["edp" if is_marked(param, "expert_parallel") else "dp"].append(param)
        self.of_axis = {
            name: fake_apex.DistributedFusedAdam(own, rank=axes[name].rank, size=axes[name].size, **options)
            for name, own in of_axis.items()
            if own
        }

    def step(self) -> None:
        for optimizer in self.of_axis.values():
            optimizer.step()

    def declare(self, model: ShardedStateDict) -> dict[str, Any]:
        """Return the declarations of both: for each name, what each of them has under it."""
        declared = {axis: apex.sharded_state_dict(o, model) for axis, o in self.of_axis.items()}
        names = next(iter(declared.values()))
        return {name: {axis: state[name] for axis, state in declared.items()} for name in names}

    def restore(self, loaded: Any) -> None:
        for axis, optimizer in self.of_axis.items():
            state = {name: of_axes[axis] for name, of_axes in loaded.items() if axis in of_axes}
            apex.load_sharded_state_dict(optimizer, state)


def of_fragments(bucket_size: int = 0, **options: Any) -> Kind:
    def make(params: list[Any], groups: ParallelGroups) -> DenseAndExperts:
        # As in Apex, a shard is the smaller, the more ranks there are: their fragments are others.
        shard = {"default_shard_size": bucket_size // groups.dp.size} if bucket_size else {}
        return DenseAndExperts(params, groups, **options, **shard)

    return Kind(
        make=make,
        declare=lambda o, model, is_loading, groups: o.declare(model),
        restore=DenseAndExperts.restore,
        after_step=share_fragments,
    )


def share_fragments(ranks: Sequence[Rank]) -> None:
    for axis in ranks[0].optimizer.of_axis:
        for members in along(ranks, axis):
            fake_apex.share_params([rank.optimizer.of_axis[axis] for rank in members])


def of_offload(make: Any) -> Kind:
    return Kind(
        make=lambda params, groups: make(params),
        declare=lambda o, model, is_loading, groups: offload.sharded_state_dict(o, model, is_loading),
        restore=offload.load_sharded_state_dict,
    )


KINDS = {
    "FusedAdam": of_apex("FusedAdam", torch.float16, capturable=True, master_weights=True),
    "FusedAdagrad": of_apex("FusedAdagrad", torch.float32),
    "FusedSGD": of_apex("FusedSGD", torch.float32),
    "FusedLAMB": of_apex("FusedLAMB", torch.float32),
    "FusedNovoGrad": of_apex("FusedNovoGrad", torch.float32),
    "FusedMixedPrecisionLamb": of_apex("FusedMixedPrecisionLamb", reduced_precision_dtype=torch.bfloat16),
    "DistributedFusedAdam": of_fragments(),
    "DistributedFusedAdam, remainders": of_fragments(store_params=False, store_param_remainders=True),
    "DistributedFusedAdam, float16 with scales": of_fragments(
        96, dtype=torch.float16, with_scaled_states=True
    ),
    "HybridDeviceOptimizer": of_offload(fake_offload.hybrid),
    "CPUOffloadOptimizer": of_offload(fake_offload.CPUOffload),
}


def expected(name: str, change: str) -> str:
    if "with scales" in name:  # those of a fragment, by its largest value
        return "exact" if change == "same" else "rounded"
    if change in ("tp", "ep") and "LAMB" in name.upper():
        return "state"  # the norm of a slice of a weight
    if change in ("tp", "ep") and name == "FusedNovoGrad":
        return "MismatchError"  # it has the norm of each slice
    return "exact"


CELLS = [(name, change) for name in KINDS for change in CHANGES]


@sampled(4)
@pytest.mark.parametrize(("name", "change"), CELLS)
def test_three_steps_after_a_load_equal_those_of_the_uninterrupted_run(name: str, change: str) -> None:
    assert outcome(KINDS[name], change) == expected(name, change)


def test_the_table_in_the_docs_is_that_of_the_cells() -> None:
    text = (Path(__file__).parents[3] / "docs" / "optimizers.md").read_text()
    missing = [
        name for name in KINDS if row_of_docs(f"`{name}`", [expected(name, c) for c in CHANGES]) not in text
    ]
    assert missing == []
