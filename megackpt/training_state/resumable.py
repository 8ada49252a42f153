"""What a part of a run's state has to offer to be saved and resumed with the others.

Owns the protocol only; the parts are beside it, and a user's own class may be one.
"""

from __future__ import annotations

from typing import Any, Protocol

from megackpt.mapping import ShardedStateDict


class Resumable(Protocol):
    """State that is neither model nor optimizer: random streams, a position, a schedule, a user's object."""

    def sharded_state_dict(self, prefix: str = "") -> ShardedStateDict:
        """Declare what there is to save, and to ask for in a load. Local.

        prefix begins the keys of its entities. What differs from rank to rank is in entities; everything else
        is common state, equal on all ranks.
        """

    def resume(self, loaded: Any, *, step: int) -> str:  # loaded: a state dict of this part's own making
        """Continue from what a load made of `sharded_state_dict`. Local; decides alike on all ranks.

        step is the one that was loaded. Returns a sentence on what does not go on as it was, "" if all does.

        Raises:
            MismatchError: it cannot be continued here; the text has the reason.
        """
