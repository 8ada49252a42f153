"""ShardedData: data that is cut into shards, each read by one data-parallel rank as a whole.

Owns who reads which shard, in which order a rank takes from its shards, and that their states find their new
readers: the states are an array over shards, not over ranks, so that any number of ranks can ask for theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megackpt.errors import DeclarationError, MismatchError, truncated_list
from megackpt.mapping import ShardedObject, ShardedStateDict
from megackpt.training_state.rank_position import RankPosition
from megackpt.training_state.shard_reader import ShardReader


class ShardedData:
    """An endless iterator over this rank's shards: shard `i` is read by data-parallel rank `i % dp`.

    A rank takes the next sample from the shard that is furthest behind, by epoch, then by samples, then by
    name; so its order is a function of the shards' states, and a resume at the same dp goes on bit for bit.
    At another dp the shards change their readers with all that belongs to them: every sample of a shard is
    visited once per epoch of that shard, in the shard's order; batches are composed otherwise.

    Ranks that differ in other axes than dp, and read the same samples, hold the same states; that of the rank
    whose other indices are all 0 is stored, so that rank has to be one that reads.

    Args:
        shards: names of all shards, equal on all ranks; their order has no meaning.
        open_shard: returns a reader at the beginning of a shard, given its name and the epoch, from 0.
        position: where this rank stands; the axis of data parallelism is called dp.

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
                f"{dp} data-parallel ranks share {len(self.shards)} shards: some would have none, as a shard "
                f"is read by one rank as a whole. Use at most {len(self.shards)} data-parallel ranks, or cut "
                f"the data into more shards."
            )
        self.position = position
        self._open = open_shard
        self._mine = {
            number: _Progress(name, open_shard)
            for number, name in enumerate(self.shards)
            if number % dp == position.index("dp")
        }

    @property
    def my_shards(self) -> tuple[str, ...]:
        """The shards that this rank reads."""
        return tuple(progress.name for progress in self._mine.values())

    def __iter__(self) -> ShardedData:
        return self

    def __next__(self) -> Any:
        while True:
            behind = min(self._mine.values(), key=lambda progress: (progress.epoch, progress.drawn))
            try:
                return behind.draw()
            except StopIteration:  # that one is at its end: another may be behind it now
                behind.begin_next_epoch()

    def sharded_state_dict(self, prefix: str = "") -> ShardedStateDict:
        """Declare `prefix + "shards"`, an object for each shard of this rank. Local."""
        states = {
            str(number): ShardedObject(
                f"{prefix}shards",
                progress.state_dict(),
                (len(self.shards),),
                (number,),
                self.position.copy_but(["dp"]),
                elsewhere="keep",
            )
            for number, progress in self._mine.items()
        }
        return {"names": list(self.shards), "states": states}

    def resume(self, loaded: Any, *, step: int) -> str:
        """Go on in each of this rank's shards where it was left, by whichever rank. Local.

        Raises:
            MismatchError: the data has other shards now; names them.
        """
        stored = loaded["names"]
        gone, new = sorted(set(stored) - set(self.shards)), sorted(set(self.shards) - set(stored))
        if gone or new:
            differing = [f"{name!r} is gone" for name in gone] + [f"{name!r} is new" for name in new]
            raise MismatchError(
                f"The position of the data was saved for {len(stored)} shards, of which there are "
                f"{len(stored) - len(gone)} now, and {len(new)} others:\n{truncated_list(differing)}\n"
                f"Resume with the same shards: how far the others were read is not known."
            )
        for number, progress in self._mine.items():
            progress.load_state_dict(loaded["states"][str(number)])
        return ""


class _Progress:
    """How far one shard was read: epoch, samples drawn in it, and the reader's own state."""

    def __init__(self, name: str, open_shard: Callable[[str, int], ShardReader]) -> None:
        self.name = name
        self.epoch = 0
        self.drawn = 0
        self._open = open_shard
        self._reader = open_shard(name, 0)

    def draw(self) -> Any:
        """Return the next sample; StopIteration behind the last of the epoch."""
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
