"""A format that waits before it commits, for tests of what happens meanwhile."""

from __future__ import annotations

import threading
from typing import Any

from megackpt.formats.native import NativeSaveStrategy


class SlowStrategy(NativeSaveStrategy):
    """Has written all chunks when `is_written` is set, and goes on to the commit when `goes_on` is."""

    def __init__(self) -> None:
        self.is_written, self.goes_on = threading.Event(), threading.Event()

    def write_index(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Wait, then write the index."""
        self.is_written.set()
        assert self.goes_on.wait(60)
        return super().write_index(*args, **kwargs)
