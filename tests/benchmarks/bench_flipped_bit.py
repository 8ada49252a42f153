"""A flipped bit in a data file: what megackpt, DCP, Megatron-Core and torch.save do about it.

    python tests/benchmarks/bench_flipped_bit.py

Each library saves the same tensor. One bit in the middle of its largest file is flipped, and the library
loads. Megatron-Core is left out where it is not installed.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import megackpt

ELEMENTS = 1 << 20


def _state(tensor: torch.Tensor) -> dict[str, Any]:
    return {"w": megackpt.ShardedTensor.from_rank_offsets("w", tensor)}


def _of_megackpt(folder: Path, tensor: torch.Tensor, *, is_save: bool) -> None:
    act = megackpt.save if is_save else megackpt.load
    act(_state(tensor), folder)


def _of_dcp(folder: Path, tensor: torch.Tensor, *, is_save: bool) -> None:
    act = dcp.save if is_save else dcp.load
    act({"w": tensor}, checkpoint_id=folder)


def _of_torch(folder: Path, tensor: torch.Tensor, *, is_save: bool) -> None:
    folder.mkdir(exist_ok=True)
    if is_save:
        torch.save({"w": tensor}, folder / "w.pt")
    else:
        tensor.copy_(torch.load(folder / "w.pt")["w"])


def _of_megatron_core(folder: Path, tensor: torch.Tensor, *, is_save: bool) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor

    from tests.benchmarks.mcore_on_cpu import cuda_is_the_cpu

    folder.mkdir(exist_ok=True)
    state = {"w": ShardedTensor.from_rank_offsets("w", tensor)}
    with cuda_is_the_cpu():
        if is_save:
            dist_checkpointing.save(state, str(folder))
        else:
            tensor.copy_(dist_checkpointing.load(state, str(folder))["w"])


def _flip_a_bit(folder: Path) -> None:
    largest = max((path for path in folder.rglob("*") if path.is_file()), key=os.path.getsize)
    with largest.open("r+b") as file:
        file.seek(os.path.getsize(largest) // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))


def outcome(act: Callable[..., None], folder: Path) -> str:
    """Save, flip a bit, load; return what came of it."""
    expected = torch.arange(float(ELEMENTS))
    act(folder, expected.clone(), is_save=True)
    _flip_a_bit(folder)
    loaded = torch.zeros(ELEMENTS)
    try:
        act(folder, loaded, is_save=False)
    except Exception as error:  # noqa: BLE001 - each library has its own
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    wrong = int((loaded != expected).sum())
    return (
        f"loads {wrong} wrong element{'s' * (wrong != 1)}, without a word"
        if wrong
        else "loads what was saved"
    )


def main() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    libraries = {"megackpt": _of_megackpt, "torch.distributed.checkpoint": _of_dcp, "torch.save": _of_torch}
    if importlib.util.find_spec("megatron") is not None:
        libraries["Megatron-Core"] = _of_megatron_core
    for name, act in libraries.items():
        with tempfile.TemporaryDirectory() as folder:
            print(f"{name}: {outcome(act, Path(folder) / 'checkpoint')}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
