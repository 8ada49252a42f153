"""Readers of one shard of a data set: their protocol, one over a sequence, and a buffer that shuffles.

Owns the state of one shard, which moves between ranks as a whole. Which rank reads which shards is
`sharded_data`'s affair.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from megackpt.errors import DeclarationError, MismatchError
from megackpt.parallel import stable_seed


class ShardReader(Protocol):
    """Reads the samples of one shard once, in an order of its own. Samples are whatever the program likes."""

    def __next__(self) -> Any:
        """Return the next sample; StopIteration behind the last."""

    def state_dict(self) -> Any:
        """Return all that it takes to go on from here elsewhere: plain values and tensors."""

    def load_state_dict(self, state: Any) -> None:
        """Go on from such a state, saved by a reader of the same shard."""


class SequenceReader:
    """Reads a sequence from its beginning to its end."""

    def __init__(self, samples: Sequence[Any]) -> None:
        self._samples = samples
        self._next = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._next == len(self._samples):
            raise StopIteration
        self._next += 1
        return self._samples[self._next - 1]

    def state_dict(self) -> dict[str, int]:
        """Return length and place."""
        return {"length": len(self._samples), "next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Set the place.

        Raises:
            MismatchError: the shard has another length now.
        """
        if state["length"] != len(self._samples):
            raise MismatchError(
                f"A shard had {state['length']} samples when its position was saved, and has "
                f"{len(self._samples)} now. Resume with the shards that it was saved with."
            )
        self._next = state["next"]


class ShuffleBuffer:
    """Reads another reader's samples in a shuffled order, out of a buffer of them.

    The buffer is part of the state, so its samples have to be plain values or tensors. What is drawn is a
    function of seed and count: there is no random state to save.

    Args:
        reader: what to read from.
        size: how many samples the buffer holds.
        seed: of the shuffling; give each shard and epoch another.
    """

    def __init__(self, reader: ShardReader, *, size: int, seed: int) -> None:
        if size < 1:
            raise DeclarationError(f"A shuffle buffer of {size} samples holds nothing. Give at least 1.")
        self._reader = reader
        self._size = size
        self._seed = seed
        self._drawn = 0
        self._buffer: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        while len(self._buffer) < self._size:
            try:
                self._buffer.append(next(self._reader))
            except StopIteration:
                break
        if not self._buffer:
            raise StopIteration
        chosen = stable_seed(self._seed, self._drawn) % len(self._buffer)
        self._drawn += 1
        self._buffer[chosen], self._buffer[-1] = self._buffer[-1], self._buffer[chosen]
        return self._buffer.pop()

    def state_dict(self) -> dict[str, Any]:
        """Return the buffer, the count and the other reader's state."""
        return {"buffer": list(self._buffer), "drawn": self._drawn, "reader": self._reader.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set them."""
        self._buffer = list(state["buffer"])
        self._drawn = state["drawn"]
        self._reader.load_state_dict(state["reader"])
