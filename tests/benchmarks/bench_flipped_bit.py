"""A flipped bit in a data file: what megackpt, DCP, Megatron-Core and torch.save do about it.

    python tests/benchmarks/bench_flipped_bit.py

Each library saves the same tensor. One bit in the middle of its largest file is flipped, and the library
loads. Megatron-Core is left out where it is not installed.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from megackpt.cli.benchmark.contenders import Contender, native
from megackpt.cli.benchmark.state import GridLayout, RankState, Shard
from tests.benchmarks.mcore_on_cpu import MegatronCoreOnCpu
from tests.benchmarks.peers.contenders import PlainTorch
from tests.benchmarks.peers.dcp import TorchDistributed

ELEMENTS = 1 << 20


def _flip_a_bit(folder: Path) -> None:
    largest = max((path for path in folder.rglob("*") if path.is_file()), key=os.path.getsize)
    with largest.open("r+b") as file:
        file.seek(os.path.getsize(largest) // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))


def outcome(library: Contender, folder: Path) -> str:
    """Save, flip a bit, load; return what came of it."""
    expected = torch.arange(float(ELEMENTS))
    shard = Shard(key="w", data=expected.clone(), box_shape=(ELEMENTS,), tp_axis=None, replica=(0, 0))
    state = RankState(GridLayout(), 0, [shard])
    library.save(library.declare(state), folder)
    _flip_a_bit(folder)
    shard.data.zero_()
    try:
        library.load(library.declare(state), folder)
    except Exception as error:  # noqa: BLE001 - each library has its own
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    wrong = int((shard.data != expected).sum())
    return (
        f"loads {wrong} wrong element{'s' * (wrong != 1)}, without a word"
        if wrong
        else "loads what was saved"
    )


def main() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    libraries = {
        "megackpt": native,
        "torch.distributed.checkpoint": TorchDistributed,
        "torch.save": PlainTorch,
        "Megatron-Core": MegatronCoreOnCpu,
    }
    if importlib.util.find_spec("megatron") is None:
        del libraries["Megatron-Core"]
    for name, library in libraries.items():
        with tempfile.TemporaryDirectory() as folder:
            print(f"{name}: {outcome(library(), Path(folder))}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
