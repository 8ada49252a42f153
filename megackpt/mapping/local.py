"""LocalNonpersistentObject: a value that is never stored."""

from __future__ import annotations

from typing import Any


class LocalNonpersistentObject:
    """A leaf that `save` drops and `load` answers with its own local value.

    Source: Megatron-Core `dist_checkpointing.mapping.LocalNonpersistentObject`.
    """

    def __init__(self, obj: Any) -> None:  # the user's own object
        self.obj = obj

    def unwrap(self) -> Any:
        """Return the wrapped object."""
        return self.obj
