"""What tests of the DCP face save, and by which library."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import megackpt
from megackpt.integrations.dcp import (
    MegackptLoadPlanner,
    MegackptSavePlanner,
    MegackptStorageReader,
    MegackptStorageWriter,
)


def save_by(state: dict[str, Any], path: str, by: str) -> None:
    if by == "megackpt":
        megackpt.save(state, path)
    else:
        planner = DefaultSavePlanner() if by == "stock" else MegackptSavePlanner()
        dcp.save(state, storage_writer=MegackptStorageWriter(path), planner=planner)


def load_by(state: dict[str, Any], path: str, by: str) -> dict[str, Any]:
    if by == "megackpt":
        return megackpt.load(state, path)
    planner = DefaultLoadPlanner() if by == "stock" else MegackptLoadPlanner()
    dcp.load(state, storage_reader=MegackptStorageReader(path), planner=planner)
    return state


def arguments_of(of: Any) -> Any:
    """What a function or class of some torch releases takes."""
    return inspect.signature(of).parameters


def six_sharded(value: float = 1.0) -> dict[str, Any]:
    """Return six equal numbers, sharded over all ranks, and a common value."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"w": distribute_tensor(torch.full((6,), value), mesh, [Shard(0)]), "epoch": int(value)}
