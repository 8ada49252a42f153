"""Users' own objects: anything with `state_dict()` and `load_state_dict()`.

An object is declared once for all ranks, or once for each rank along chosen axes. Its state is never split or
merged, since only the object knows what it means.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

from megackpt.entities import ShardedObject, ShardedStateDict
from megackpt.errors import DeclarationError, MismatchError
from megackpt.training.state.rank_position import RankPosition, layout_text


class Stateful(Protocol):
    """The methods that torch's modules, schedulers and data loaders have in common. Both methods are local.

    Source: `torch.distributed.checkpoint.stateful.Stateful`.
    """

    def state_dict(self) -> Any:
        """Return plain values and tensors."""

    def load_state_dict(self, state: Any) -> Any:
        """Continue from such a state."""


class CommonObject:
    """An object whose state is equal on all ranks: stored once, compared at save, loaded at any layout."""

    def __init__(self, wrapped: Stateful) -> None:
        self.wrapped = wrapped

    def sharded_state_dict(self, prefix: str = "") -> ShardedStateDict:
        """Return the object's state, as common state. Local."""
        return {"state": self.wrapped.state_dict()}

    def resume(self, loaded: Any, *, step: int) -> str:
        """Load the state into the object. Local."""
        self.wrapped.load_state_dict(loaded["state"])
        return ""


class RankObject:
    """An object with a different state on each rank, or for each index along some axes.

    Ranks with the same indices have the same state, which is stored once.

    Args:
        wrapped: this rank's object.
        position: the position of the rank.
        axes: along which states differ; None for all.
        elsewhere: what to do at another number of ranks along these axes: `error`, or `keep` the present
            state of the object.
        why: why the state cannot be divided among other ranks, for the error's text.
    """

    def __init__(
        self,
        wrapped: Stateful,
        position: RankPosition,
        *,
        axes: tuple[str, ...] | None = None,
        elsewhere: Literal["error", "keep"] = "error",
        why: str = "a state of one rank belongs to no other",
    ) -> None:
        if elsewhere not in ("error", "keep"):
            raise DeclarationError(f"elsewhere={elsewhere!r} is not known. Give 'error' or 'keep'.")
        self.wrapped = wrapped
        self.position = position
        self.axes = position.axes if axes is None else tuple(sorted(axes))
        self.elsewhere = elsewhere
        self.why = why

    @property
    def _sizes(self) -> dict[str, int]:
        return {axis: self.position.size(axis) for axis in self.axes}

    def sharded_state_dict(self, prefix: str = "") -> ShardedStateDict:
        """Declare `prefix + "state"`, an object for each index along the axes. Local."""
        state = ShardedObject(
            f"{prefix}state",
            self.wrapped.state_dict(),
            tuple(self._sizes.values()),
            tuple(self.position.index(axis) for axis in self.axes),
            self.position.replica_index(self.axes),
            elsewhere="keep",
        )
        return {"sizes": self._sizes, "state": state}

    def resume(self, loaded: Any, *, step: int) -> str:
        """Load this rank's state into the object. Local.

        Raises:
            MismatchError: the states are of another number of ranks, and `elsewhere` is "error".
        """
        if loaded["sizes"] == self._sizes:
            self.wrapped.load_state_dict(loaded["state"])
            return ""
        name = type(self.wrapped).__name__
        then, now = layout_text(loaded["sizes"]), layout_text(self._sizes)
        different = f"of a {name} were saved at {then}, and this run is at {now}"
        if self.elsewhere == "keep":
            return f"states {different}: each rank keeps the state of its object"
        raise MismatchError(
            f"States {different}: {self.why}. Resume at the same number of ranks, or declare the object with "
            f'elsewhere="keep" and set it by other means.'
        )


def loader_object(loader: Stateful, position: RankPosition) -> RankObject:
    """Return the declaration of a data loader that knows its own position, such as torchdata's. Local.

    `StatefulDataLoader` keeps the states of its workers and of its rank's sampler in one value, which cannot
    be
    divided: it resumes at the same number of data-parallel ranks, and raises an error at any other.

    Source: `torchdata.stateful_dataloader.StatefulDataLoader`.
    """
    return RankObject(
        loader,
        position,
        axes=("dp",),
        why="a loader's state counts the batches of one rank's own share of the samples, and a share at "
        "another number of ranks has other samples",
    )
