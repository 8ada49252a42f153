"""Data that is cut into shards, each read as a whole by one data-parallel rank.

The states of the readers are stored as an array over shards, not over ranks, so that any number of ranks can
ask for theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from megackpt.entities import ShardedObject, ShardedStateDict
from megackpt.errors import DeclarationError, MismatchError, truncated_list
from megackpt.training.parallel.rng import stable_seed
from megackpt.training.state.rank_position import RankPosition


class ShardReader(Protocol):
    """Reads the samples of one shard once, in any order. A sample may be any object.

    All methods are local.
    """

    def __next__(self) -> Any:
        """Return the next sample; raise StopIteration after the last."""

    def state_dict(self) -> Any:
        """Return plain values and tensors from which another reader can continue."""

    def load_state_dict(self, state: Any) -> None:
        """Continue from the state of a reader of the same shard."""


class SequenceReader:
    """Reads a sequence from its beginning to its end. All methods are local."""

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
        """Return length and position."""
        return {"length": len(self._samples), "next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue at a position.

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
    """Reads another reader's samples in a shuffled order, through a buffer. All methods are local.

    The buffer is part of the state, so its samples have to be plain values or tensors. Which sample is drawn
    is a function of seed and count, so there is no random state to save.

    Args:
        reader: the reader of the samples.
        size: the number of samples in the buffer.
        seed: of the shuffling; give each shard and epoch a different one.
    """

    def __init__(self, reader: ShardReader, *, size: int, seed: int) -> None:
        if size < 1:
            raise DeclarationError(f"A shuffle buffer of {size} samples is too small. Give at least 1.")
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
        index = stable_seed(self._seed, self._drawn) % len(self._buffer)
        self._drawn += 1
        self._buffer[index], self._buffer[-1] = self._buffer[-1], self._buffer[index]
        return self._buffer.pop()

    def state_dict(self) -> dict[str, Any]:
        """Return the buffer, the count and the other reader's state."""
        return {"buffer": list(self._buffer), "drawn": self._drawn, "reader": self._reader.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with them."""
        self._buffer = list(state["buffer"])
        self._drawn = state["drawn"]
        self._reader.load_state_dict(state["reader"])


class ShardedData:
    """An endless iterator over this rank's shards: shard `i` is read by data-parallel rank `i % dp`.

    A rank takes the next sample from its shard that has been read least, by epoch, then by samples, then by
    name. So its order is a function of the shards' states, and a resume at the same dp continues bit for bit.
    At another dp each shard continues with its new reader: every sample of a shard is visited once in each
    epoch of that shard, in the shard's order, but batches are composed differently.

    Ranks that differ only in other axes than dp have the same states. The state of the rank whose other
    indices are all 0 is stored, so that rank has to read.

    Args:
        shards: names of all shards, equal on all ranks, in any order.
        open_shard: returns a reader at the beginning of a shard, given its name and the epoch, from 0.
        position: the position of this rank; the axis of data parallelism is called dp.

    Raises:
        DeclarationError: a name occurs twice, or there are fewer shards than data-parallel ranks.
    """

    def __init__(
        self, shards: Sequence[str], open_shard: Callable[[str, int], ShardReader], position: RankPosition
    ) -> None:
        self.shards = tuple(sorted(shards))
        if len(set(self.shards)) != len(self.shards):
            raise DeclarationError("A shard is named twice. Give each shard of the data a name of its own.")
        dp = position.size("dp")
        if len(self.shards) < dp:
            raise DeclarationError(
                f"{dp} data-parallel ranks share {len(self.shards)} shards. A shard is read by one rank as a "
                f"whole, so some ranks would have none. Use at most {len(self.shards)} data-parallel ranks, "
                f"or cut the data into more shards."
            )
        self.position = position
        self._open = open_shard
        self._progress = {
            number: _ShardProgress(name, open_shard)
            for number, name in enumerate(self.shards)
            if number % dp == position.index("dp")
        }

    @property
    def my_shards(self) -> tuple[str, ...]:
        """The shards that this rank reads."""
        return tuple(progress.name for progress in self._progress.values())

    def __iter__(self) -> ShardedData:
        return self

    def __next__(self) -> Any:
        while True:
            shard = min(self._progress.values(), key=lambda progress: (progress.epoch, progress.drawn))
            try:
                return shard.draw()
            except StopIteration:  # the end of its epoch: another shard may have been read less now
                shard.begin_next_epoch()

    def sharded_state_dict(self, prefix: str = "") -> ShardedStateDict:
        """Declare `prefix + "shards"`, an object for each shard of this rank. Local."""
        states = {
            str(number): ShardedObject(
                f"{prefix}shards",
                progress.state_dict(),
                (len(self.shards),),
                (number,),
                self.position.replica_index(["dp"]),
                elsewhere="keep",
            )
            for number, progress in self._progress.items()
        }
        return {"names": list(self.shards), "states": states}

    def resume(self, loaded: Any, *, step: int) -> str:
        """Continue in each of this rank's shards, whichever rank read it before. Local.

        Raises:
            MismatchError: the data has other shards now; the text names them.
        """
        stored = loaded["names"]
        gone, new = sorted(set(stored) - set(self.shards)), sorted(set(self.shards) - set(stored))
        if gone or new:
            differing = [f"{name!r} is gone" for name in gone] + [f"{name!r} is new" for name in new]
            raise MismatchError(
                f"The position of the data was saved for {len(stored)} shards. "
                f"{len(stored) - len(gone)} of them are there now, and {len(new)} others:\n"
                f"{truncated_list(differing)}\n"
                f"Resume with the same shards: how far the others were read is not known."
            )
        for number, progress in self._progress.items():
            progress.load_state_dict(loaded["states"][str(number)])
        return ""


class _ShardProgress:
    """The progress of one shard: epoch, samples drawn in it, and its reader."""

    def __init__(self, name: str, open_shard: Callable[[str, int], ShardReader]) -> None:
        self.name = name
        self.epoch = 0
        self.drawn = 0
        self._open = open_shard
        self._reader = open_shard(name, 0)

    def draw(self) -> Any:
        """Return the next sample; raise StopIteration after the last of the epoch."""
        sample = next(self._reader)
        self.drawn += 1
        return sample

    def begin_next_epoch(self) -> None:
        """Go back to the first sample."""
        if not self.drawn:
            raise DeclarationError(f"Shard {self.name!r} has no samples. Leave it out of the data.")
        self._begin(self.epoch + 1)

    def _begin(self, epoch: int) -> None:
        self.epoch, self.drawn = epoch, 0
        self._reader = self._open(self.name, epoch)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "drawn": self.drawn, "reader": self._reader.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._begin(state["epoch"])
        self.drawn = state["drawn"]
        self._reader.load_state_dict(state["reader"])
