"""Arrays moved by a map, pair by pair: the slow and obvious way."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megackpt.maps import RegionMap
from megackpt.maps.requests import in_order_of


def assembled(made: RegionMap, theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the left arrays, as they are stored, copied pair by pair from the right ones."""
    dtype = next(iter(theirs.values())).dtype
    ours = {key: torch.full(array.viewed, float("nan"), dtype=dtype) for key, array in made.left.items()}
    views = {key: theirs[key].view(array.viewed) for key, array in made.right.items()}
    for pair in made.pairs:
        into = in_order_of(ours[pair.left.key][pair.left.box.slices()], pair.axes)
        into.copy_(views[pair.right.key][pair.right.box.slices()] + pair.added)
    return {key: array.view(made.left[key].stored) for key, array in ours.items()}


def random_arrays(made: RegionMap, seed: int) -> dict[str, Tensor]:
    """Return right arrays with random values, multiples of 2^-20: sums with what a map adds are exact."""
    generator = torch.Generator().manual_seed(seed)
    return {
        key: (torch.randn(array.stored, generator=generator) * 2**20).round() / 2**20
        for key, array in made.right.items()
    }
