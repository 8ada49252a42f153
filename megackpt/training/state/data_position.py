"""The position of a run in an order of samples that all data-parallel ranks share, and a shuffled order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from megackpt.entities import ShardedStateDict
from megackpt.errors import DeclarationError, MismatchError, truncated_list
from megackpt.plans.geometry import split_range
from megackpt.training.parallel.rng import stable_seed

Ints: TypeAlias = npt.NDArray[np.int64]

# Four rounds make a random-looking permutation of a random function (Luby and Rackoff 1988); two more cost
# little and make up for a round function that is a mere mixer of bits.
_ROUNDS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOrder:
    """An endless order of the samples of a data set: each epoch has each of them once, shuffled anew.

    Which sample is at index `i` is a function of seed, epoch `i // samples` and position `i % samples`. It
    needs no memory, and a rank need not have seen the indices before.

    >>> order = SampleOrder(samples=5, seed=1)
    >>> sorted(order.numbers(range(5)).tolist()), sorted(order.numbers(range(5, 10)).tolist())
    ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4])

    Attributes:
        samples: the number of samples.
        seed: of the shuffling.
        shuffle: False: each epoch visits the samples in order.

    Raises:
        DeclarationError: the number of samples is out of range.

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
        epochs, positions = np.divmod(np.asarray(indices, np.int64), self.samples)
        if not self.shuffle:
            return positions
        numbers = np.empty_like(positions)
        for epoch in np.unique(epochs):
            is_in_epoch = epochs == epoch
            numbers[is_in_epoch] = self._shuffled(positions[is_in_epoch], int(epoch))
        return numbers

    def to_json(self) -> dict[str, Any]:
        """Return plain values that distinguish this order from others. Pure."""
        return {"samples": self.samples, "seed": self.seed, "shuffle": self.shuffle}

    def _shuffled(self, positions: Ints, epoch: int) -> Ints:
        half_bits = max(1, ((self.samples - 1).bit_length() + 1) // 2)
        keys = [stable_seed(self.seed, epoch, "samples", number) for number in range(_ROUNDS)]
        values = _permuted(positions.astype(np.uint64), half_bits, keys)
        # `_permuted` permutes the numbers below the next power of 4. Applied again to each value that is no
        # sample, until all are, it permutes the samples.
        while (outside := values >= self.samples).any():
            values[outside] = _permuted(values[outside], half_bits, keys)
        return values.astype(np.int64)


def _permuted(values: npt.NDArray[np.uint64], half_bits: int, keys: list[int]) -> npt.NDArray[np.uint64]:
    """Permute `[0, 4 ** half_bits)`, by rounds that exchange the upper and lower bits and mix them."""
    bits, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
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


class DataPosition:
    """A position in one global order: all samples before it were consumed, by whichever rank.

    The position is one integer, which is exact at any number of ranks and any batch size.

    Args:
        order: plain values that distinguish this order of samples from others, such as
            `SampleOrder.to_json()` or a fingerprint of the data. Resuming from a checkpoint with another
            order raises an error.

    Attributes:
        consumed: the number of samples that all ranks have consumed, in all epochs.

    >>> data = DataPosition({"files": "v1"})
    >>> data.take(6, dp_rank=1, dp_size=2), data.take(6, dp_rank=0, dp_size=3), data.consumed
    (range(3, 6), range(6, 8), 12)
    """

    def __init__(self, order: Mapping[str, Any]) -> None:
        self.order = dict(order)
        self.consumed = 0

    def take(self, batch: int, *, dp_rank: int = 0, dp_size: int = 1) -> range:
        """Return this rank's indices of the next global batch, and advance by the whole batch.

        Local; every rank calls it, also those that read no data. Ranks with the same index in dp get the same
        samples, whatever their index along tp, cp and pp. Ranks of cp then take a share of every sample.

        Args:
            batch: samples of the global batch.
            dp_rank: this rank's index among the data-parallel ranks.
            dp_size: the number of data-parallel ranks. If it does not divide the batch, the first ranks have
                one sample more.

        Raises:
            DeclarationError: the batch is empty.
        """
        if batch < 1:
            raise DeclarationError(f"A batch of {batch} samples has no indices. Give at least 1.")
        start, stop = split_range(batch, parts=dp_size, index=dp_rank)
        first = self.consumed
        self.consumed += batch
        return range(first + start, first + stop)

    def sharded_state_dict(self, prefix: str = "") -> ShardedStateDict:
        """Return order and position, which are common state. Local."""
        return {"order": dict(self.order), "consumed": self.consumed}

    def resume(self, loaded: Any, *, step: int) -> str:
        """Continue after the samples that were consumed. Local.

        Raises:
            MismatchError: the checkpoint has another order of samples; the text names what differs.
        """
        stored = loaded["order"]
        fields = sorted(stored.keys() | self.order.keys())
        differing = [
            f"{name}: {stored.get(name)!r} stored, {self.order.get(name)!r} here"
            for name in fields
            if stored.get(name) != self.order.get(name)
        ]
        if differing:
            raise MismatchError(
                f"The data position counts samples in another order:\n{truncated_list(differing)}\n"
                f"Give the data, seed and sample length it was trained with; or begin at 0, without resuming "
                f"the position."
            )
        self.consumed = int(loaded["consumed"])
        return ""
