"""Initial weights as a function of the key alone.

The rule: the same seed gives the same model at every parallel layout. The values of a global array
are drawn from a generator of their own, and each rank copies its box. What a rank holds, how far the
vocabulary is padded and in which order parameters are created leave no trace.

Source: Radford et al. 2019, section 2.3 (projections onto the residual path scaled by the number of layers).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from megackpt.entities import ShardedLayout, ShardedObject, ShardedStateDict, ShardedTensor
from megackpt.errors import DeclarationError
from megackpt.training.parallel import ModelChunks
from megackpt.training.parallel.rng import stable_seed
from models.config import GPTConfig
from models.language_model import LanguageModel

STACKED_EXPERTS = ".experts."  # in the keys of arrays whose first axis after the layers' is over experts
RESIDUAL_PROJECTIONS = ("linear_proj", "linear_fc2", "out_proj")
DECAYS = (1.0, 16.0)  # range of `exp(A_log)`
TIME_STEPS = (0.001, 0.1)  # the initial ones of Mamba


@dataclass(frozen=True, slots=True, kw_only=True)
class _Normal:
    """Distribution of initial values; a constant where std is 0."""

    mean: float = 0.0
    std: float


def init_weights(model: LanguageModel | ModelChunks, seed: int) -> None:
    """Set every parameter of `model` to its initial value. Local: call it on every rank with the same seed.

    Weights are normal with std `config.init_std`, those that end on the residual path divided by
    `sqrt(2 * num_layers)`; norms are 1 (0 where the weight is what is added to 1), biases and padding rows 0,
    `dt_bias` is 1, and `A_log` the logarithm of uniform numbers. Drawn on the CPU in float32, then cast.

    Raises:
        DeclarationError: a parameter for whose name there is no rule.
    """
    for chunk in model if isinstance(model, ModelChunks) else [model]:
        _init_chunk(cast(LanguageModel, chunk), seed)


def _init_chunk(model: LanguageModel, seed: int) -> None:
    with torch.no_grad():
        for tensor in _tensors(model.sharded_state_dict()):
            assert tensor.data is not None
            axes = tensor.prepend_axis_num
            leading = tensor.global_offset[:axes]
            if STACKED_EXPERTS not in tensor.key:
                _fill(tensor.data, tensor, leading, seed, model.config)
                continue
            # One expert after the other: together, those of a layer may be larger than this rank's memory.
            for local, expert in enumerate(tensor.data):
                _fill(expert, tensor, (*leading, tensor.global_offset[axes] + local), seed, model.config)


def _fill(
    data: Tensor, tensor: ShardedTensor, leading: tuple[int, ...], seed: int, config: GPTConfig
) -> None:
    """Set `data`, this rank's box of `tensor` at `leading`, the indices along its first axes."""
    whole = initial_values(
        tensor.key,
        tensor.global_shape[len(leading) :],
        leading,
        seed,
        config=config,
        padded=tensor.allow_shape_mismatch,
    )
    data.copy_(whole[tensor.global_slice()[len(leading) :]])


def initial_values(
    key: str,
    shape: tuple[int, ...],
    layer: tuple[int, ...],
    seed: int,
    *,
    config: GPTConfig,
    padded: bool,
) -> Tensor:
    """Return one layer's (and expert's) slice of the global array `key`, float32 of `shape`. Pure.

    Args:
        key: key of the array.
        shape: its global shape without the leading axes over layers and experts.
        layer: index along these axes; empty for what is no part of a stack.
        seed: seed of the model.
        config: the model's sizes.
        padded: dim 0 is the padded vocabulary.

    Raises:
        DeclarationError: there is no rule for this name.
    """
    generator = torch.Generator().manual_seed(stable_seed(seed, key, *layer))
    for part, state_space_values in _STATE_SPACE.items():
        if part in key:
            return state_space_values(shape, generator)
    rule = _rule(key, config)
    if rule.std == 0:
        return torch.full(shape, rule.mean)
    # Drawn for the real rows only: torch's normal numbers depend on how many are drawn at once.
    rows = (config.vocab_size, *shape[1:]) if padded else shape
    values = torch.zeros(shape)
    values[: rows[0]] = torch.randn(rows, generator=generator) * rule.std
    return values


def _decays(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return logarithms of the rates at which states of heads decay."""
    return torch.empty(shape).uniform_(*DECAYS, generator=generator).log()


def _ones(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.ones(shape)


def _time_steps(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return what softplus makes time steps of, whose logarithms are uniform."""
    low, high = map(math.log, TIME_STEPS)
    steps = (low + (high - low) * torch.rand(shape, generator=generator)).exp()
    return steps + (-torch.expm1(-steps)).log()


def _convolution(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return uniform values of the scale that torch's convolutions have."""
    bound: float = shape[-1] ** -0.5
    return bound * (2 * torch.rand(shape, generator=generator) - 1)


_STATE_SPACE: Mapping[str, Callable[[tuple[int, ...], torch.Generator], Tensor]] = {
    ".A_log": _decays,
    ".D": _ones,
    ".mixer.dt_bias": _time_steps,
    ".conv1d.weight": _convolution,
}
"""Parameters of state-space layers, by a part of their keys, and what they start at.

Source: Dao and Gu 2024 (Mamba-2), its reference implementation.
"""


def _rule(key: str, config: GPTConfig) -> _Normal:
    name = key.split(".")
    if "bias" in name or "expert_bias" in name:
        return _Normal(mean=0.0, std=0.0)
    if "dt_bias" in name:  # of a gated delta net
        return _Normal(mean=1.0, std=0.0)
    if "weight" in name and any("norm" in part for part in name):
        # The norms inside of gated delta nets and of Mamba's mixers are never zero-centred.
        is_zero_centred = config.norm.zero_centred and not {"out_norm", "mixer"} & {*name}
        return _Normal(mean=0.0 if is_zero_centred else 1.0, std=0.0)
    if "weight" in name or "gate_weight" in name or "softmax_offset" in name:
        residual = any(part in RESIDUAL_PROJECTIONS for part in name)
        return _Normal(
            std=config.init_std / math.sqrt(2 * config.num_layers) if residual else config.init_std
        )
    raise DeclarationError(
        f"{key!r}: there is no rule for the initial value of this parameter. Name it weight or bias, or add "
        "a rule in models/init.py.",
        key=key,
    )


def _tensors(state: ShardedStateDict) -> list[ShardedTensor]:
    tensors: list[ShardedTensor] = []
    for name, entity in state.items():
        if isinstance(entity, ShardedTensor):
            tensors.append(entity)
        elif isinstance(entity, ShardedLayout):
            tensors += entity.tensors()
        elif not isinstance(entity, ShardedObject):
            raise DeclarationError(
                f"{name!r} is declared as {type(entity).__name__}, which initial values cannot be copied "
                "into. Declare it as a ShardedTensor or ShardedLayout.",
                key=name,
            )
    return tensors
