"""`TrainingState`: the parts of a run that are not tensors, saved and resumed together.

A part that cannot be resumed on one rank raises the same error on all ranks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

from megackpt.comm import Group, gather_step, world_group
from megackpt.entities import ShardedStateDict
from megackpt.errors import DeclarationError, MismatchError


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
