"""Values that every peer can compute by itself: whole global arrays by key, and common state.

Imported by every peer in its own environment, so it knows torch only.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch

STEP = 7
ITERATION = 40


def oracle(key: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the whole global array that a key stands for: the same in every process and at every layout."""
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "little")
    values = (
        torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 0.5 + 0.01
    )  # > 0: exp_avg_sq too
    return values.to(dtype)


def common() -> dict[str, Any]:
    """Return what is neither tensor of the model nor of the optimizer."""
    return {
        "iteration": ITERATION,
        "checkpoint_version": 3.0,
        "note": "näher",
        "schedule": {"lr": 1.25e-4, "steps": [1, 2, 3], "done": False, "none": None},
        "plain_tensor": torch.arange(5, dtype=torch.int64),
    }


def rng_state(rank: int) -> dict[str, Any]:
    return {"rank": rank, "state": torch.arange(4, dtype=torch.uint8) + rank, "name": f"rank {rank}"}


def check_equal(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        raise ValueError(
            f"{what}: {tuple(actual.shape)} {actual.dtype}, expected {tuple(expected.shape)} {expected.dtype}"
        )
    if not torch.equal(as_bytes(actual), as_bytes(expected)):
        wrong = int((actual != expected).sum())
        raise ValueError(f"{what}: {wrong} of {actual.numel()} elements differ")


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


@dataclass(frozen=True)
class Array:
    """A global array of the model of megatron_peer.py, for peers that know arrays only."""

    key: str  # its name in the checkpoint
    value_key: str  # what oracle() knows it as
    shape: tuple[int, ...]  # global shape
    dtype: torch.dtype  # of its elements
    tp_dim: int | None  # the dim cut by tensor parallelism; None if there is none
    layers: bool  # dim 0 counts layers, and is cut by pipeline parallelism
    flat: bool = False  # a data-parallel rank holds a range of the flattened local block

    def value(self) -> torch.Tensor:
        return oracle(self.value_key, self.shape, self.dtype)

    def part(self, tp: tuple[int, int], pp: tuple[int, int]) -> tuple[slice, ...]:
        """Return where the block of a rank lies; tp and pp are (rank, size)."""
        where = [slice(0, n) for n in self.shape]
        for dim, (rank, size) in ((self.tp_dim, tp), (0 if self.layers else None, pp)):
            if dim is not None:
                length = self.shape[dim] // size
                where[dim] = slice(rank * length, (rank + 1) * length)
        return tuple(where)


# (name, global shape, dim cut by tensor parallelism, whether dim 0 counts layers)
PARAMETERS: list[tuple[str, tuple[int, ...], int | None, bool]] = [
    ("embedding.word_embeddings.weight", (96, 32), 0, False),
    ("decoder.layers.self_attention.linear_qkv.layer_norm_weight", (4, 32), None, True),
    ("decoder.layers.self_attention.linear_qkv.weight", (4, 64, 32), 1, True),
    ("decoder.layers.self_attention.linear_proj.weight", (4, 32, 32), 2, True),
    ("decoder.layers.mlp.linear_fc1.layer_norm_weight", (4, 32), None, True),
    ("decoder.layers.mlp.linear_fc1.weight", (4, 96, 32), 1, True),
    ("decoder.layers.mlp.linear_fc2.weight", (4, 32, 48), 2, True),
    ("decoder.final_layernorm.weight", (32,), None, False),
    ("output_layer.weight", (96, 32), 0, False),
]


def arrays_of(kind: str, *, naming: str, optimizer_format: str) -> list[Array]:
    """Return the arrays that a checkpoint of a kind has, by Megatron-Core's or DCP's names."""
    dtype = (
        torch.bfloat16 if kind == "model" or (kind == "distopt" and naming == "megatron") else torch.float32
    )
    states = {
        "model": [],
        "adam": ["exp_avg", "exp_avg_sq"],
        "distopt": ["exp_avg", "exp_avg_sq", "fp32_param"],
    }[kind]
    results = []
    for name, shape, tp_dim, layers in PARAMETERS:
        key = f"model.{name}" if naming == "dcp" else name
        results.append(Array(key, name, shape, dtype, tp_dim, layers))
        for state in states:
            value_key = f"optimizer.state.{state}.{name}"
            if naming == "dcp":
                if state == "fp32_param":
                    continue  # its optimizers have no copies of parameters
                key = f"optim.state.{name}.{state}"
            else:
                stored = (
                    "param" if state == "fp32_param" and optimizer_format == "fully_reshardable" else state
                )
                key = f"optimizer.state.{stored}.{name}"
            results.append(
                Array(key, value_key, shape, torch.float32, tp_dim, layers, flat=kind == "distopt")
            )
    return results
