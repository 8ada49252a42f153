"""`TrainingState`: the parts of a run that are not tensors, saved and resumed together.

A part that cannot be resumed on one rank raises the same error on all ranks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, Protocol

from megackpt.comm import Group, gather_step, world_group
from megackpt.entities import ShardedObject, ShardedStateDict
from megackpt.errors import DeclarationError, MismatchError
from megackpt.training.state.rank_position import RankPosition, layout_text


class Resumable(Protocol):
    """A part of a run that is neither model nor optimizer, such as a position or a schedule.

    A class of a user may be one.
    """

    def sharded_state_dict(self, prefix: str = "") -> ShardedStateDict:
        """Declare what to save, and what to ask for in a load. Local.

        State that differs from rank to rank is in entities, whose keys begin with the prefix. Everything else
        is common state, equal on all ranks.
        """

    def resume(self, loaded: Any, *, step: int) -> str:
        """Continue from a loaded state. Local; the decision is the same on all ranks.

        Args:
            loaded: what a load returned for `sharded_state_dict`.
            step: the step that was loaded.

        Returns:
            A sentence on what does not go on as it was; "" if everything does.

        Raises:
            MismatchError: the state cannot be continued here; the text has the reason.
        """


class TrainingState:
    """Random streams, data position, schedule and a user's own objects, each under a name.

    Keys in the checkpoint begin with the names, as in `rng.rng`.

    Args:
        parts: the parts by name; names are equal on all ranks.
        group: the ranks that resume together; None for all ranks.
        timeout_s: how long a rank waits for the others in `resume`.

    >>> state = TrainingState({"schedule": ScheduleState({"peak": 1e-3})})    # doctest: +SKIP
    >>> checkpointer.save(100, {"model": ..., **state.sharded_state_dict()})  # doctest: +SKIP
    >>> loaded = checkpointer.load({"model": ..., **state.sharded_state_dict()})  # doctest: +SKIP
    >>> notes = state.resume(loaded, step=100)                                 # doctest: +SKIP
    """

    def __init__(
        self, parts: Mapping[str, Resumable], *, group: Group | None = None, timeout_s: float = 600.0
    ) -> None:
        dotted = [name for name in parts if not name or "." in name]
        if dotted:
            raise DeclarationError(
                f"Parts are named {dotted}: give names without dots, since keys begin with them."
            )
        self.parts = dict(parts)
        self._group = group
        self._timeout_s = timeout_s

    def sharded_state_dict(self) -> ShardedStateDict:
        """Declare all parts, by name, to save them or to ask for them in a load. Local."""
        return {name: part.sharded_state_dict(f"{name}.") for name, part in self.parts.items()}

    def resume(self, loaded: Mapping[str, Any], *, step: int) -> list[str]:
        """Continue every part from a loaded state dict. Collective.

        Parts are resumed in their order; after an error, those before it have been resumed.

        Args:
            loaded: the state dict that a load returned.
            step: the step that was loaded.

        Returns:
            A sentence on each part that does not go on as it was.

        Raises:
            MismatchError: a part cannot be continued, or the checkpoint has no part of that name; the same on
                all ranks, for the first part that failed.
        """
        group = self._group or world_group(timeout_s=self._timeout_s)
        with gather_step(group, "resuming the training state", on_all_ranks=True) as resuming:
            notes = [self._resume_part(name, part, loaded, step) for name, part in self.parts.items()]
            resuming.data = json.dumps([note for note in notes if note]).encode()
        of_rank_0: list[str] = json.loads(resuming.results[0])
        return of_rank_0

    def _resume_part(self, name: str, part: Resumable, loaded: Mapping[str, Any], step: int) -> str:
        if name not in loaded:
            raise MismatchError(
                f"The checkpoint has no {name!r}, which is a part of this run. Resume without that part, or "
                f"from a checkpoint that has it.",
                key=name,
            )
        return part.resume(loaded[name], step=step)


# Users' own objects: anything with `state_dict()` and `load_state_dict()`.
#
# An object is declared once for all ranks, or once for each rank along chosen axes. Its state is never
# split or merged, since only the object knows what it means.


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
