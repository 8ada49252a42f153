"""What tests of torch's own parallelism train and save: FSDP2, HSDP, FSDP over TP, and states."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import megackpt
from megackpt.contrib.dcp import (
    MegackptLoadPlanner,
    MegackptSavePlanner,
    MegackptStorageReader,
    MegackptStorageWriter,
)

COMPUTES = hasattr(torch.cpu.current_stream(), "record_event")
"""Whether this torch runs fully_shard on the CPU; older ones shard, but do not compute."""

# Old ones also reject uneven shards of what TP has cut.
VOCAB, HIDDEN, WIDE, LAYERS = 13, 8, 22 if COMPUTES else 24, 2
RANKS = {"fsdp1": 1, "fsdp2": 2, "fsdp4": 4, "hsdp2x2": 4, "fsdp2xtp2": 4}
"""Meshes by name, and the ranks they take."""


class Block(nn.Module):
    """Causal attention with one head, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.proj = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, WIDE), nn.Linear(WIDE, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        scores = (q @ k.transpose(-1, -2)).masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1) > 0, -1e9)
        x = x + self.proj(scores.softmax(-1) @ v)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Token ids `[b, s]` to logits `[b, s, VOCAB]`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.out = nn.Linear(HIDDEN, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.out(x)
        return logits * 1.0  # fully_shard warns of outputs that are views


def make(mesh: str, *, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model, sharded over the mesh of this name, and its AdamW. Collective."""
    torch.manual_seed(seed)
    model = Transformer()
    data: DeviceMesh
    if mesh == "fsdp2xtp2":
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for layer in model.layers:
            parallelize_module(layer, grid["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        data = grid["dp"]
    elif mesh == "hsdp2x2":
        data = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    else:
        data = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=data)
    fully_shard(model, mesh=data)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, *, seed: int) -> None:
    """Take one step on tokens that are the same on every rank. Collective."""
    if not COMPUTES:
        for param in model.parameters():
            param.grad = (param.detach() + seed).sin()
        optimizer.step()
        optimizer.zero_grad()
        return
    tokens = torch.randint(0, VOCAB, (2, 7), generator=torch.Generator().manual_seed(seed))
    logits = model(tokens[:, :-1])
    F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, *, flat: bool = False) -> dict[str, Any]:
    """Return the state dict of both, as torch.distributed.checkpoint's users make it. Collective."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }


def set_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any], *, flat: bool = False
) -> None:
    """Put a state dict of `state_of` back. Collective."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)


def full(state: Any, path: str = "") -> dict[str, Any]:
    """Return every leaf by its path, DTensors as the whole tensors that torch gathers. Collective."""
    if isinstance(state, (dict, list)):
        children = state.items() if isinstance(state, dict) else enumerate(state)
        return {k: v for key, child in children for k, v in full(child, f"{path}/{key}").items()}
    return {path: state.full_tensor() if isinstance(state, DTensor) else state}


def same(actual: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Return the paths at which two results of `full` differ in a bit."""
    differing = sorted(actual.keys() ^ expected.keys())
    for path in actual.keys() & expected.keys():
        a, b = actual[path], expected[path]
        if not (torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, Tensor) else a == b):
            differing.append(path)
    return differing


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


def data_nbytes(checkpoint: Path) -> int:
    """Return the bytes of tensors in a checkpoint's files, without the headers of these."""
    contents = [file.read_bytes() for file in (checkpoint / "data").iterdir()]
    return sum(len(content) - 8 - int.from_bytes(content[:8], "little") for content in contents)
