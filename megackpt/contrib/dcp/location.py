"""Where a DCP save or load happens: which rank this is, and which store.

DCP leaves these two questions to planners and storages.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from megackpt.errors import DeclarationError
from megackpt.storage import Location, Store, opened_store


def rank_and_size(process_group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Return this process's rank in a group and the group's size; (0, 1) without torch.distributed. Local."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(process_group), dist.get_world_size(process_group)


@contextmanager
def opened(location: Location | None) -> Iterator[Store]:
    """Open the store of a location, and close it at the end unless it was handed in open.

    Raises:
        DeclarationError: there is no location.
    """
    if location is None:
        raise DeclarationError(
            "No directory to save to or load from. Give it to the storage writer or reader, or to DCP as "
            "checkpoint_id."
        )
    with opened_store(location) as store:
        yield store
