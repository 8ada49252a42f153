"""Rotary positions: the frequencies of each kind of scaling, and the rotation of queries and keys.

Frequencies are float32 and computed in the order of operations of transformers: at position 100,000 the last
bit of a frequency turns by a hundredth of a radian.

Source: Su et al. 2021, section 3.4.2 (halves rotated as in GPT-NeoX); the scalings name theirs.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from models.block_config import DynamicScaling, LinearScaling, Llama3Scaling, RotaryConfig, YarnScaling


class Rotation(NamedTuple):
    """Cosines and sines, float32 `[s, rotated_dims / 2]`, of the angles at some positions.

    If it is interleaved, neighbouring dims are a pair; the rotated pairs are put as if it were not.
    """

    cos: Tensor
    sin: Tensor
    is_interleaved: bool = False


def rotation(config: RotaryConfig, head_dim: int, positions: Tensor, length: int) -> Rotation:
    """Return the rotation at `positions` `[s]` of sequences of `length` tokens. Pure."""
    dims = config.rotated_dims(head_dim)
    frequency = rotary_frequencies(config, dims, length, device=positions.device)
    angle = torch.outer(positions.float(), frequency)
    magnitude = rotary_magnitude(config)
    return Rotation(angle.cos() * magnitude, angle.sin() * magnitude, config.interleaved)


def rotate(x: Tensor, by: Rotation) -> Tensor:
    """Return queries or keys `[b, n, s, head_dim]` with their first dims rotated. Pure."""
    half = by.cos.shape[-1]
    pairs, rest = torch.split_with_sizes(x.float(), [2 * half, x.shape[-1] - 2 * half], dim=-1)
    # The order of the result does not matter: it is the same for queries and keys.
    first, second = (pairs[..., ::2], pairs[..., 1::2]) if by.is_interleaved else pairs.chunk(2, dim=-1)
    cos, sin = by.cos, by.sin
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1).to(x.dtype)


def rotary_frequencies(
    config: RotaryConfig, dims: int, length: int, *, device: torch.device | None = None
) -> Tensor:
    """Return the angles per position, float32 `[dims / 2]`, for sequences of `length` tokens. Pure."""
    scaling = config.scaling
    base = config.base
    if isinstance(scaling, DynamicScaling):
        base *= _dynamic_growth(scaling, dims, length)
    power = base ** (torch.arange(0, dims, 2, dtype=torch.float32, device=device) / dims)
    frequency = 1.0 / power
    if isinstance(scaling, LinearScaling):
        return frequency / scaling.factor
    if isinstance(scaling, Llama3Scaling):
        return _llama3(frequency, scaling)
    if isinstance(scaling, YarnScaling):
        return _yarn(power, scaling, base)
    return frequency


def rotary_magnitude(config: RotaryConfig) -> float:
    """Return what sines and cosines are multiplied by. Pure."""
    if not isinstance(config.scaling, YarnScaling):
        return 1.0
    if config.scaling.magnitude is not None:
        return config.scaling.magnitude
    return 0.1 * math.log(max(config.scaling.factor, 1.0)) + 1.0


def _dynamic_growth(scaling: DynamicScaling, dims: int, length: int) -> float:
    """Return how many times larger the base is; 1 for sequences of at most the original length."""
    longer = max(length, scaling.original_length) / scaling.original_length
    growth: float = (scaling.factor * longer - (scaling.factor - 1)) ** (dims / (dims - 2))
    return growth


def _llama3(frequency: Tensor, scaling: Llama3Scaling) -> Tensor:
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    wavelength = 2 * math.pi / frequency
    weight = (scaling.original_length / wavelength - low) / (high - low)
    between = (1 - weight) * frequency / scaling.factor + weight * frequency
    is_low, is_high = wavelength > scaling.original_length / low, wavelength < scaling.original_length / high
    return torch.where(is_low, frequency / scaling.factor, torch.where(is_high, frequency, between))


def _yarn(power: Tensor, scaling: YarnScaling, base: float) -> Tensor:
    dims = 2 * len(power)
    start, stop = (_dim_of(turns, scaling, dims, base) for turns in (scaling.fast_turns, scaling.slow_turns))
    if scaling.whole_dims:
        start, stop = math.floor(start), math.ceil(stop)
    start, stop = max(start, 0), min(stop, dims - 1)
    if start == stop:
        stop += 0.001  # a step instead of a ramp
    numbers = torch.arange(dims // 2, dtype=torch.float32, device=power.device)
    kept = 1 - ((numbers - start) / (stop - start)).clamp(0, 1)
    return 1.0 / (scaling.factor * power) * (1 - kept) + 1.0 / power * kept


def _dim_of(turns: float, scaling: YarnScaling, dims: int, base: float) -> float:
    """Return which frequency, as a number of its dim, makes so many turns within the original length."""
    return dims * math.log(scaling.original_length / (turns * 2 * math.pi)) / (2 * math.log(base))
