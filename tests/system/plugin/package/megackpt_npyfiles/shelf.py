"""A store for URLs of its own: `shelf://run/iter_1` lies below the directory that SHELF names."""

from __future__ import annotations

import os

from megackpt.storage import LocalStore


class ShelfStore(LocalStore):
    """Files of a shelf."""

    def __init__(self, url: str) -> None:
        super().__init__(f"{os.environ['SHELF']}/{url.removeprefix('shelf://')}")
        self._url = url

    def __reduce__(self) -> tuple[type[ShelfStore], tuple[str]]:
        return ShelfStore, (self._url,)
