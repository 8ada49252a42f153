"""Optimizers of Apex and those that offload to the host, resumed at every change of layout.

docs/optimizers.md has the table of `expected`. Transformer Engine's FusedAdam is in
tests/compat/test_transformer_engine_fused_adam.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megackpt.integrations import apex, offload
from tests import fake_apex, fake_offload
from tests.foreign_optimizers import CHANGES, Kind, outcome, row_of_docs


def of_apex(name: str, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Kind:
    return Kind(
        make=lambda params, groups: getattr(fake_apex, name)(params, **options),
        declare=lambda o, model, is_loading, groups: apex.sharded_state_dict(
            o, model, is_loading, groups=groups
        ),
        restore=apex.load_sharded_state_dict,
        dtype=dtype,
    )


def of_fragments(**options: Any) -> Kind:
    return Kind(
        make=lambda params, groups: fake_apex.DistributedFusedAdam(
            params, rank=groups.dp.rank, size=groups.dp.size, **options
        ),
        declare=lambda o, model, is_loading, groups: apex.sharded_state_dict(o, model, is_loading),
        restore=apex.load_sharded_state_dict,
        after_step=fake_apex.share_params,
    )


def of_offload(make: Any) -> Kind:
    return Kind(
        make=lambda params, groups: make(params),
        declare=lambda o, model, is_loading, groups: offload.sharded_state_dict(o, model, is_loading),
        restore=offload.load_sharded_state_dict,
    )


KINDS = {
    "FusedAdam": of_apex("FusedAdam", torch.float16, capturable=True, master_weights=True),
    "FusedSGD": of_apex("FusedSGD", torch.float32),
    "FusedLAMB": of_apex("FusedLAMB", torch.float32),
    "FusedNovoGrad": of_apex("FusedNovoGrad", torch.float32),
    "FusedMixedPrecisionLamb": of_apex("FusedMixedPrecisionLamb", reduced_precision_dtype=torch.bfloat16),
    "DistributedFusedAdam": of_fragments(),
    "DistributedFusedAdam, remainders": of_fragments(store_params=False, store_param_remainders=True),
    "HybridDeviceOptimizer": of_offload(fake_offload.hybrid),
    "CPUOffloadOptimizer": of_offload(fake_offload.CPUOffload),
}


def expected(name: str, change: str) -> str:
    if change == "ep" and name.startswith("Distributed"):
        return "one for experts, over edp"  # whose ranks have equal experts; those of dp do not
    if change in ("tp", "ep") and "LAMB" in name.upper():
        return "state"  # the norm of a slice of a weight
    if change in ("tp", "ep") and name == "FusedNovoGrad":
        return "MismatchError"  # it has the norm of each slice
    return "exact"


CELLS = [(name, change) for name in KINDS for change in CHANGES if "edp" not in expected(name, change)]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("name", "change"), CELLS)
def test_three_steps_after_a_load_equal_those_of_the_uninterrupted_run(name: str, change: str) -> None:
    assert outcome(KINDS[name], change) == expected(name, change)


def test_the_table_in_the_docs_is_that_of_the_cells() -> None:
    text = (Path(__file__).parents[2] / "docs" / "optimizers.md").read_text()
    missing = [
        name for name in KINDS if row_of_docs(f"`{name}`", [expected(name, c) for c in CHANGES]) not in text
    ]
    assert missing == []
