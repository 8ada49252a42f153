"""Small real checkpoints in every format, damage to their files, and one small job, simulated and real."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

import megackpt
from megackpt import SaveOptions, ShardedObject
from megackpt.cli.simulation import ModelSizes
from megackpt.comm import Group
from megackpt.entities import ShardedStateDict
from megackpt.formats.registry import save_strategies
from megackpt.storage import MemoryStore, Store
from megackpt.testing.world import SimulatedWorld
from megackpt.training.optim import DistributedOptimizer
from megackpt.training.parallel import ParallelGroups, ParallelLayout, RoutingOptions
from models import GPTConfig, MoEConfig, build_gpt
from tests.support.states import flat_range, save_on_ranks, sharded
from tests.support.zarr_v1 import copy_as_zarr_v1

SAVED_FORMATS = sorted((strategy.backend, strategy.version) for strategy in save_strategies())
NATIVE, ZARR_1 = ("megackpt", 1), ("zarr", 1)
FORMATS = [*SAVED_FORMATS, ZARR_1]  # all that `saved` makes: the last one is only read
RANKS = 2
COMMON = {"step": 7, "args": {"lr": 3e-4, "betas": [0.9, 0.95]}, "rng": torch.arange(4)}
CONTENT = {"sharding": "flat"}
LONG = torch.arange(400_000, dtype=torch.float32)  # several digest blocks on each rank


def state_of(rank: int) -> ShardedStateDict:
    """A matrix cut by columns, a flat range, a long vector, a replica in bfloat16; an object a rank."""
    numbers = torch.arange(48.0).reshape(6, 8)
    cut = (0, 21, 48)[rank : rank + 2]
    return {
        "block": sharded("block", numbers[:, 4 * rank : 4 * rank + 4], (1, rank, 2)),
        "flat": flat_range("flat", numbers, *cut),
        "long": sharded("long", LONG[rank * 200_000 : (rank + 1) * 200_000].clone(), (0, rank, 2)),
        "half": sharded("half", torch.ones(3).bfloat16(), replica_id=rank),
        "object": ShardedObject("object", {"rank": rank, "seen": [1, 2.0]}, (RANKS,), (rank,)),
        **COMMON,
    }


def saved(directory: Path, format: tuple[str, int] = NATIVE, *, parity: int | None = None) -> Path:
    """Save the state of both ranks, with a file of tensors of common state where the format has one."""
    options = SaveOptions(plain_tensors="common", parity=parity)
    target: Path | Store = MemoryStore() if format == ZARR_1 else directory
    strategy = NATIVE if format == ZARR_1 else format
    save_on_ranks(RANKS, state_of, target, strategy, content_metadata=CONTENT, options=options)
    if format == ZARR_1:
        copy_as_zarr_v1(target, directory)
    return directory


@cache
def _files_of_saved(format: tuple[str, int]) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as name:
        return contents(saved(Path(name), format))


def copy_of_saved(directory: Path, format: tuple[str, int] = NATIVE) -> Path:
    """Write what `saved` writes, which is saved once: all copies are of one save."""
    for name, data in _files_of_saved(format).items():
        file = directory / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    return directory


def flip(file: Path, at: int) -> None:
    """Flip a bit of a byte; at counts from the end where it is negative."""
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "lose": Path.unlink,
    "cut": lambda file: file.write_bytes(file.read_bytes()[:5000]),
    "lose the end": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "grow": lambda file: file.write_bytes(file.read_bytes() + b"more"),
    "spoil the last byte": lambda file: flip(file, -1),
    "spoil the header": lambda file: flip(file, 20),
}
"""What may become of a file."""


def contents(directory: Path | Store) -> dict[str, bytes]:
    """Return all files by their names."""
    if isinstance(directory, Store):
        return {name: directory.read(name, max_bytes=1 << 30) for name in directory.names()}
    return {str(file.relative_to(directory)): file.read_bytes() for file in files_below(directory, "*")}


def files_below(directory: Path, pattern: str) -> list[Path]:
    """Return files, sorted by name."""
    return sorted(path for path in directory.rglob(pattern) if path.is_file())


def data_files(directory: Path) -> list[Path]:
    """Return the data files of a native checkpoint, in the order of ranks."""
    return sorted((directory / "data").iterdir())


BUCKET = 20_000  # elements: several parameters in some buckets, one in others

SIZES = ModelSizes(vocab_size=300, hidden_size=64, num_layers=3, num_heads=4, ffn_size=192, query_groups=2)
TIED = replace(SIZES, tied_embeddings=True, linear_bias=True)


def real_state(
    sizes: ModelSizes, layout: ParallelLayout, rank: int, *, bucket_size: int = BUCKET
) -> ShardedStateDict:
    """What a rank that trains the model would save."""
    groups = ParallelGroups.offline(layout, rank)
    config = GPTConfig(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        num_layers=sizes.num_layers,
        num_heads=sizes.num_heads,
        ffn_hidden_size=sizes.ffn_size,
        num_query_groups=sizes.query_groups,
        tied_embeddings=sizes.tied_embeddings,
        linear_bias=sizes.linear_bias,
        params_dtype=getattr(torch, sizes.dtype),
        moe=_experts(sizes),
    )
    model = build_gpt(config, groups)
    optimizer = DistributedOptimizer(
        model.parameters(), lambda g: torch.optim.AdamW(g), groups, bucket_size=bucket_size
    )
    declared = model.sharded_state_dict()
    state: dict[str, Any] = {"model": declared, "optimizer": optimizer.sharded_state_dict(declared)}
    return state


def _experts(sizes: ModelSizes) -> MoEConfig | None:
    experts = sizes.experts
    if experts is None:
        return None
    is_routed = [int(layer >= experts.dense_layers) for layer in range(sizes.num_layers)]
    return MoEConfig(
        num_experts=experts.count,
        ffn_hidden_size=experts.ffn_size,
        routing=RoutingOptions(bias_rate=1e-3 if experts.router_bias else None),
        shared_ffn_hidden_size=experts.shared_ffn_size,
        layer_freq=tuple(is_routed) if experts.dense_layers else 1,
    )


def save_for_real(sizes: ModelSizes, layout: ParallelLayout, directory: Path) -> None:
    """Save what all ranks would, with ranks as threads."""

    def save(group: Group) -> None:
        # Models that are built for themselves have replicas with values of their own.
        options = megackpt.SaveOptions(sample_replicas=megackpt.Policy.IGNORE)
        megackpt.save(real_state(sizes, layout, group.rank), directory, options=options, group=group)

    SimulatedWorld(layout.world_size).run(save)
