"""Groups of ranks that do less, or more, than those of the library."""

from __future__ import annotations

from megackpt.comm import Group


class MessagesOnly(Group):
    """A group of a user, with only the two methods that a group must implement."""

    def __init__(self, group: Group) -> None:
        self.rank, self.size, self._group = group.rank, group.size, group

    def all_gather(self, data: bytes) -> list[bytes]:
        return self._group.all_gather(data)

    def gather(self, data: bytes) -> list[bytes]:
        return self._group.gather(data)
