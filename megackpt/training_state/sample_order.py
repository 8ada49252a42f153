"""SampleOrder: in which order the samples of a data set are visited, as a function without state.

Owns the permutation. How far a run has come in it is `data_position`'s affair.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from megackpt.errors import DeclarationError
from megackpt.parallel import stable_seed

Ints: TypeAlias = npt.NDArray[np.int64]

# Four rounds make a random-looking permutation of a random function (Luby and Rackoff 1988); two more cost
# little and make up for a round function that is a mere mixer of bits.
_ROUNDS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOrder:
    """An endless order of the samples of a data set: each epoch has each of them once, shuffled anew.

    Which sample comes at index `i` is a function of seed, epoch `i // samples` and place `i % samples`: it
    needs no memory, and no rank has to have seen the indices before it.

    >>> order = SampleOrder(samples=5, seed=1)
    >>> sorted(order.numbers(range(5)).tolist()), sorted(order.numbers(range(5, 10)).tolist())
    ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4])

    Attributes:
        samples: how many there are.
        seed: of the shuffling.
        shuffle: False visits them in order, in each epoch.

    Raises:
        DeclarationError: there are none.

    Source: a Feistel network over indices with cycle walking (Black and Rogaway 2002, section 4).
    """

    samples: int
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.samples < 2**62:
            raise DeclarationError(
                f"A data set of {self.samples} samples has no order. Give at least 1 sample."
            )

    def numbers(self, indices: npt.ArrayLike | range) -> Ints:
        """Return the numbers of the samples at some indices of the order, int64 in `[0, samples)`. Pure."""
        asked = np.asarray(indices, np.int64)
        epochs, places = np.divmod(asked, self.samples)
        if not self.shuffle:
            return places
        numbers = np.empty_like(places)
        for epoch in np.unique(epochs):
            of_epoch = epochs == epoch
            numbers[of_epoch] = self._shuffled(places[of_epoch], int(epoch))
        return numbers

    def to_json(self) -> dict[str, Any]:
        """Return what tells this order from others."""
        return {"samples": self.samples, "seed": self.seed, "shuffle": self.shuffle}

    def _shuffled(self, places: Ints, epoch: int) -> Ints:
        half = max(1, ((self.samples - 1).bit_length() + 1) // 2)
        keys = [stable_seed(self.seed, epoch, "samples", number) for number in range(_ROUNDS)]
        values = _permuted(places.astype(np.uint64), half, keys)
        # A permutation of the next power of 4, walked along until it comes back among the samples, is one of
        # the samples.
        while (outside := values >= self.samples).any():
            values[outside] = _permuted(values[outside], half, keys)
        return values.astype(np.int64)


def _permuted(values: npt.NDArray[np.uint64], half: int, keys: list[int]) -> npt.NDArray[np.uint64]:
    """Permute `[0, 4 ** half)`, by rounds that exchange and mix the two halves of the bits."""
    bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> bits, values & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right, key) & mask)
    joined: npt.NDArray[np.uint64] = (left << bits) | right
    return joined


def _mixed(values: npt.NDArray[np.uint64], key: int) -> npt.NDArray[np.uint64]:
    """Return 64 mixed bits of each value. Source: the finalizer of SplitMix64 (Steele et al. 2014)."""
    mixed: npt.NDArray[np.uint64] = values * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed = mixed ^ (mixed >> np.uint64(31))
    return mixed
