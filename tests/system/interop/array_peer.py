"""Peers that write and read the arrays of a checkpoint by key: megackpt, DCP, tensorstore, zarr.

    python array_peer.py JOBS.json RESULTS.json --as=megackpt|dcp|tensorstore|zarr [--ranks=4]

A rank is at (tp, dp, pp) with tp running fastest, as in Megatron-Core.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.system.interop.jobs import Job, main
from tests.system.interop.oracle import STEP, Array, arrays_of, check_equal, common

_peer: list[str] = []
_meshes: dict[tuple[int, ...], Any] = {}  # making one is collective, and slow


def start(flags: list[str]) -> None:
    warnings.simplefilter("ignore")
    _peer[:] = [f.removeprefix("--as=") for f in flags if f.startswith("--as=")]


def run(job: Job) -> None:
    """Write or read one checkpoint, all ranks together."""
    peers = {
        "megackpt": (write_megackpt, read_megackpt),
        "dcp": (write_dcp, read_dcp),
        "tensorstore": (write_zarr, read_zarr),
        "zarr": (write_zarr, read_zarr),
    }
    write, read = peers[_peer[0]]
    arrays = arrays_of(job.kind, naming=job.naming, optimizer_format=job.optimizer_format)
    if _peer[0] == "dcp":  # its modules are cut over dp like their optimizers
        arrays = [replace(array, flat=job.kind == "distopt") for array in arrays]
    (write if job.op == "write" else read)(job, arrays)


def coordinates(job: Job) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    rank, dp = dist.get_rank(), job.dp(dist.get_world_size())
    return ((rank % job.tp, job.tp), (rank // job.tp % dp, dp), (rank // (job.tp * dp), job.pp))


# ---- megackpt -------------------------------------------------------------------------------------------


def declare(job: Job, array: Array) -> tuple[Any, torch.Tensor]:
    """Return this rank's ShardedTensor of zeros and what it should hold."""
    from megackpt import ShardedTensor

    tp, dp, pp = coordinates(job)
    where = array.part(tp, pp)
    expected = array.value()[where].clone()
    shape = tuple(expected.shape)
    grid = tuple(n // m for n, m in zip(array.shape, shape, strict=True))
    flat = None
    replica = (0 if array.layers else pp[0], 0 if array.tp_dim is not None else tp[0], dp[0])
    if array.flat:
        flat = flat_range(expected.numel(), *dp)
        replica = (*replica[:2], 0)
        expected = expected.reshape(-1)[flat]
    entity = ShardedTensor(
        key=array.key,
        data=torch.zeros_like(expected),
        dtype=array.dtype,
        local_shape=shape,
        global_shape=array.shape,
        global_offset=tuple(w.start for w in where),
        axis_fragmentations=grid,
        replica_id=replica,
        flattened_range=flat,
    )
    return entity, expected


def flat_range(numel: int, rank: int, size: int) -> slice:
    """Return the range of a data-parallel rank: about equal ones, with borders in the middle of rows."""
    borders = [0, *(numel * i // size + 3 for i in range(1, size)), numel]
    return slice(borders[rank], borders[rank + 1])


def write_megackpt(job: Job, arrays: list[Array]) -> None:
    import megackpt

    state: dict[str, Any] = dict(common())
    for array in arrays:
        entity, expected = declare(job, array)
        entity.data.copy_(expected)
        state[array.key] = entity
        if array.key.endswith(".exp_avg") and job.naming == "dcp":  # DCP's AdamW has a step, too
            key = array.key.removesuffix("exp_avg") + "step"
            step = torch.tensor(float(STEP))
            state[key] = megackpt.ShardedTensor.from_rank_offsets(key, step, replica_id=dist.get_rank())
    megackpt.save(state, job.path, (job.backend, job.version))


def read_megackpt(job: Job, arrays: list[Array]) -> None:
    """Load the arrays at a layout, those of a distributed optimizer as flat ranges; compare."""
    import megackpt

    declared = {array.key: declare(job, array) for array in arrays}
    loaded = megackpt.load({key: entity for key, (entity, _) in declared.items()}, job.path)
    for key, (_, expected) in declared.items():
        check_equal(loaded[key], expected, key)


# ---- torch.distributed.checkpoint -------------------------------------------------------------------------


def as_dtensor(job: Job, array: Array, value: torch.Tensor) -> Any:
    """Return a DTensor over (pp, dp, tp); what dp cuts, it cuts along the last dim."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    _, dp, _ = coordinates(job)
    shape = (job.pp, dp[1], job.tp)
    if shape not in _meshes:
        _meshes[shape] = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp", "tp"))
    last = len(array.shape) - 1
    placements = [
        Shard(0) if array.layers else Replicate(),
        Shard(last) if array.flat else Replicate(),
        Replicate() if array.tp_dim is None else Shard(array.tp_dim),
    ]
    return distribute_tensor(value, _meshes[shape], placements, src_data_rank=None)


def write_dcp(job: Job, arrays: list[Array]) -> None:
    """Save a module and its AdamW as get_model_state_dict and get_optimizer_state_dict give them."""
    import torch.distributed.checkpoint as dcp

    _, _, state = dcp_state(job, arrays)
    dcp.save(state, checkpoint_id=job.path)


def read_dcp(job: Job, arrays: list[Array]) -> None:
    """Load with DCP: into a module and its AdamW by DCP's names, else into DTensors by key; compare."""
    import torch.distributed.checkpoint as dcp

    expected = {array.key: as_dtensor(job, array, array.value()).to_local() for array in arrays}
    if job.naming == "megatron":
        tensors = {array.key: as_dtensor(job, array, torch.zeros_like(array.value())) for array in arrays}
        dcp.load(tensors, checkpoint_id=job.path)
    else:
        module, optimizer, state = dcp_state(job, arrays, zero=True)
        wanted = {"model": state["model"]}
        if optimizer is not None:
            wanted["optim"] = {"state": state["optim"]["state"]}
        dcp.load(wanted, checkpoint_id=job.path)
        tensors = {f"model.{name}": p for name, p in module.named_parameters()}
        if optimizer is not None:
            for name, states in state["optim"]["state"].items():
                tensors.update({f"optim.state.{name}.{k}": v for k, v in states.items()})
                check_equal(states["step"], torch.tensor(float(STEP)), f"optim.state.{name}.step")
    for key, value in expected.items():
        check_equal(tensors[key].to_local(), value, key)


def dcp_state(job: Job, arrays: list[Array], *, zero: bool = False) -> tuple[Any, Any, dict[str, Any]]:
    """Return a module whose parameters have the oracle's names and values, its AdamW, and their state."""
    from torch.distributed.checkpoint import state_dict as dcp_state_dict

    by_key = {a.key: a for a in arrays}
    module = torch.nn.Module()
    for array in arrays:
        if array.key.startswith("model."):
            value = torch.zeros_like(array.value()) if zero else array.value()
            add_parameter(module, array.value_key, as_dtensor(job, array, value))
    state: dict[str, Any] = {"model": dcp_state_dict.get_model_state_dict(module)}
    if job.kind == "model":
        return module, None, state
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    for param in module.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    with torch.no_grad():
        for name, param in module.named_parameters():
            own = by_key[f"model.{name}"]
            param.copy_(as_dtensor(job, own, torch.zeros_like(own.value()) if zero else own.value()))
    state["optim"] = dcp_state_dict.get_optimizer_state_dict(module, optimizer)
    for name, states in state["optim"]["state"].items():
        states["step"].fill_(0 if zero else STEP)
        for k in ("exp_avg", "exp_avg_sq"):
            array = by_key[f"optim.state.{name}.{k}"]
            states[k].copy_(
                as_dtensor(job, array, torch.zeros_like(array.value()) if zero else array.value())
            )
    return module, optimizer, state


def add_parameter(module: torch.nn.Module, name: str, value: torch.Tensor) -> None:
    *folders, last = name.split(".")
    for folder in folders:
        if not hasattr(module, folder):
            module.add_module(folder, torch.nn.Module())
        module = getattr(module, folder)
    module.register_parameter(last, torch.nn.Parameter(value))


# ---- zarr -------------------------------------------------------------------------------------------------


def write_zarr(job: Job, arrays: list[Array]) -> None:
    """Write each array with one chunk for each block of the layout, and the files that name the format."""
    tp, dp, pp = coordinates(job)
    if dist.get_rank() == 0:
        Path(job.path).mkdir(parents=True, exist_ok=True)
        for array in arrays:
            create(job, array)
        torch.save(common(), f"{job.path}/common.pt")
        manifest = {"sharded_backend": "zarr", "sharded_backend_version": job.version}
        manifest |= {"common_backend": "torch", "common_backend_version": 1}
        Path(f"{job.path}/metadata.json").write_text(json.dumps(manifest))
    dist.barrier()
    for array in arrays:
        where = array.part(tp, pp)
        if dp[0] == 0 and (array.tp_dim is not None or tp[0] == 0) and (array.layers or pp[0] == 0):
            put(job, array, where)
    dist.barrier()


def read_zarr(job: Job, arrays: list[Array]) -> None:
    tp, _, pp = coordinates(job)
    for array in arrays:
        where = array.part(tp, pp)
        expected = array.value()[where]
        bits = torch.from_numpy(get(job, array, where)).reshape(-1)
        if not torch.equal(bits, expected.contiguous().reshape(-1).view(bits.dtype)):
            raise ValueError(f"{array.key}: elements differ")


def numpy_of(array: Array, where: tuple[slice, ...]) -> Any:
    import ml_dtypes

    block = array.value()[where].contiguous()
    if array.dtype is torch.bfloat16:
        return block.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return block.numpy()


def create(job: Job, array: Array) -> None:
    zeros = (0, job.tp), (0, job.pp)
    chunks = [w.stop - w.start for w in array.part(*zeros)]
    dtype = "bfloat16" if array.dtype is torch.bfloat16 else "<f4"
    if _peer[0] == "tensorstore":
        metadata = {"shape": array.shape, "chunks": chunks, "dtype": dtype, "compressor": None}
        opened(job, array, create=True, metadata=metadata)
    else:
        import ml_dtypes  # noqa: F401 - gives numpy bfloat16
        import numpy as np
        import zarr

        zarr.create(
            array.shape,
            chunks=chunks,
            dtype=np.dtype(dtype),
            compressor=None,
            fill_value=None,
            store=str(folder(job, array)),
        )


def put(job: Job, array: Array, where: tuple[slice, ...]) -> None:
    value = numpy_of(array, where)
    if _peer[0] == "tensorstore":
        opened(job, array)[where].write(value).result()
    else:
        target = opened(job, array)
        target[where] = value.view(target.dtype)  # there are two kinds of bfloat16


def get(job: Job, array: Array, where: tuple[slice, ...]) -> Any:
    """Read a block; bfloat16 as its bits."""
    import numpy as np

    if _peer[0] == "tensorstore":
        value = opened(job, array)[where].read().result()
    else:
        value = opened(job, array)[where]
    value = np.ascontiguousarray(value)
    return value.view(np.int16) if value.dtype.itemsize == 2 else value


def opened(job: Job, array: Array, **more: Any) -> Any:
    if _peer[0] == "tensorstore":
        import tensorstore

        driver = "zarr" if job.version == 1 else "zarr3"
        spec = {"driver": driver, "kvstore": {"driver": "file", "path": str(folder(job, array))}}
        if "metadata" in more:
            spec["metadata"] = more.pop("metadata")
        return tensorstore.open(spec, open=not more.get("create", False), **more).result()
    import ml_dtypes  # noqa: F401 - gives numpy bfloat16
    import zarr

    return zarr.open(str(folder(job, array)), mode="r+")


def folder(job: Job, array: Array) -> Path:
    if job.version == 3 and job.op == "read":  # an attempt has a group of its own
        return next(Path(job.path).glob("zarr-*")) / array.key
    return Path(job.path) / array.key


if __name__ == "__main__":
    main(start, run)
