"""Saves and loads with torch_xla on four CPU devices; run by test_xla.py with an interpreter that has it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch_xla.experimental.distributed_checkpoint import SPMDSavePlanner

import megackpt
from megackpt.contrib.xla import XlaLoadPlanner, XlaSavePlanner
from megackpt.storage import MemoryStore
from tests.support.dcp_alone import ALONE

ARRAYS = {
    "rows": (torch.arange(20.0).reshape(10, 2), ("x", None), (4,)),  # 3, 3, 3 and 1 of 10: padded
    "few": (torch.arange(5.0), ("x",), (4,)),  # the last device has nothing
    "partial": (torch.arange(16.0).reshape(4, 4), ("x", None), (2, 2)),  # devices 0 and 1 hold the same
    "columns": (torch.arange(16.0).reshape(4, 4), (None, "y"), (2, 2)),
    "both": (torch.arange(12, dtype=torch.bfloat16).reshape(3, 4), ("x", "y"), (2, 2)),
    "same": (torch.arange(4.0), (None,), (4,)),  # replicated
}
OTHER = {
    "rows": ((None, "x"), (4,)),
    "few": (("x",), (2, 2)),
    "partial": (("y", "x"), (2, 2)),
    "columns": (("x", None), (4,)),
    "both": ((None, None), (4,)),
    "same": (("x",), (4,)),
}


def on_devices(
    array: torch.Tensor, spec: tuple[str | None, ...], mesh_shape: tuple[int, ...]
) -> torch.Tensor:
    mesh = xs.Mesh(np.arange(4), mesh_shape, ("x", "y")[: len(mesh_shape)])
    tensor = array.to(torch_xla.device())
    xs.mark_sharding(tensor, mesh, spec)
    return tensor


def sources() -> dict[str, Any]:
    return {key: on_devices(*of) for key, of in ARRAYS.items()}


def targets() -> dict[str, Any]:
    return {key: on_devices(torch.zeros_like(of[0]), *OTHER[key]) for key, of in ARRAYS.items()}


def check(loaded: dict[str, Any], face: str) -> None:
    for key, (array, _, _) in ARRAYS.items():
        assert torch.equal(loaded[key].cpu(), array), (face, key)
        for shard in xs.wrap_if_sharded(loaded[key]).local_shards:
            box = ... if shard.indices is Ellipsis else tuple(shard.indices)
            assert torch.equal(shard.unpadded_data, array[box]), (face, key, shard)


def main(directory: Path) -> None:
    xr.use_spmd()
    assert xr.global_runtime_device_count() == 4

    theirs = SPMDSavePlanner()
    theirs.set_up_planner({"partial": sources()["partial"]}, True)
    (kept,), _ = theirs.create_global_plan([theirs.create_local_plan()])
    print(f"partial replication on one host: torch_xla's planner keeps {len(kept.items)} of 2 shards")

    megackpt.save({"model": sources(), "step": 3}, directory / "ours")
    target = {"model": targets()}
    loaded = megackpt.load(target, directory / "ours")
    assert loaded["step"] == 3
    assert all(loaded["model"][key] is target["model"][key] for key in ARRAYS)
    check(target["model"], "megackpt")

    dcp.save(sources(), checkpoint_id=directory / "dcp", planner=XlaSavePlanner(), **ALONE)
    target = targets()
    dcp.load(target, checkpoint_id=directory / "dcp", planner=XlaLoadPlanner(), **ALONE)
    check(target, "dcp")

    model = torch.nn.Linear(256, 512).to(torch_xla.device())
    xs.mark_sharding(model.weight, xs.Mesh(np.arange(4), (4,), ("x",)), ("x", None))
    before = model.weight.detach().cpu().clone()
    megackpt.save({"model": model.state_dict()}, directory / "model")
    with torch.no_grad():
        model.weight.mul_(0)
    torch_xla.sync()
    megackpt.load({"model": model.state_dict()}, directory / "model")
    assert torch.equal(model.weight.detach().cpu(), before)
    for step in range(100):  # without waiting, about one in ten of these copies fails
        store = MemoryStore()
        with torch.no_grad():
            model.weight.add_(1)
        torch_xla.sync()
        megackpt.save({"w": model.weight}, store)
        result = megackpt.load_plain_tensors(store)["w"]
        assert torch.equal(result, model.weight.detach().cpu()), step
    print("every device has what was saved")


main(Path(sys.argv[1]))
