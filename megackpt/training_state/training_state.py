"""TrainingState: the parts of a run that are no tensors, declared and resumed together.

Owns that a part that cannot be resumed on one rank is refused on all. What the parts are is their own affair.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from megackpt.comm import Group, run_on_all_ranks, world_group
from megackpt.errors import DeclarationError, MismatchError
from megackpt.mapping import ShardedStateDict
from megackpt.training_state.resumable import Resumable


class TrainingState:
    """Random streams, data position, schedule and a user's own objects, each under a name.

    Keys in the checkpoint begin with the names, as in `rng.rng`.

    Args:
        parts: names and parts; equal names on all ranks.
        group: who resumes together; None for all ranks.
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
            raise DeclarationError(f"Parts are named {dotted}: give names without dots, as they begin keys.")
        self.parts = dict(parts)
        self._group = group
        self._timeout_s = timeout_s

    def sharded_state_dict(self) -> ShardedStateDict:
        """Declare all parts, by name: to be saved, and to be asked for in a load. Local."""
        return {name: part.sharded_state_dict(f"{name}.") for name, part in self.parts.items()}

    def resume(self, loaded: Mapping[str, Any], *, step: int) -> list[str]:
        """Continue every part from a loaded state dict; return what does not go on as it was. Collective.

        Parts are resumed in their order; after an error, those before it have been. step is the one loaded.

        Raises:
            MismatchError: a part cannot be continued, or the checkpoint has none of that name; on all ranks,
                naming the first that failed.
        """

        def resume_here() -> bytes:
            notes = [self._resume_part(name, part, loaded, step) for name, part in self.parts.items()]
            return json.dumps([note for note in notes if note]).encode()

        group = self._group or world_group(timeout_s=self._timeout_s)
        notes: list[str] = json.loads(
            run_on_all_ranks(group, resume_here, doing="resuming the training state")[0]
        )
        return notes

    def _resume_part(self, name: str, part: Resumable, loaded: Mapping[str, Any], step: int) -> str:
        if name not in loaded:
            raise MismatchError(
                f"The checkpoint has no {name!r}, of which this run is made. Resume without that part, or "
                f"from a checkpoint that has it.",
                key=name,
            )
        return part.resume(loaded[name], step=step)
