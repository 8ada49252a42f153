"""`latest_checkpointed_iteration.txt`: the newest committed step, as Megatron-LM notes it.

Owns that file. It is a convenience for scripts and for Megatron-LM: written after a commit, and never read
here, since only commits count.

Source: Megatron-LM `get_checkpoint_tracker_filename` (the name, and a decimal number as content).
"""

from __future__ import annotations

from megackpt.storage import Store

TRACKER = "latest_checkpointed_iteration.txt"


def write_tracker(root: Store, newest: int | None) -> None:
    """Note the newest step, atomically; without one there is no file."""
    if newest is not None:
        root.replace(TRACKER, str(newest).encode())
        return
    root.delete([TRACKER])
    root.sync()
