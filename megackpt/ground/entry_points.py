"""Formats and maps that other packages add, through entry points of their distributions."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import TypeVar

from megackpt.ground.notices import notice

T = TypeVar("T")


def loaded_entry_points(group: str, kind: type[T], *, what: str, log: logging.Logger) -> Iterator[T]:
    """Yield the objects that the entry points of a group name. Local.

    An entry point that cannot be imported, or names another thing, is left out with a warning: the fault of
    another package must not stop our own formats and maps.

    Args:
        group: the group, such as "megackpt.maps".
        kind: the class that the objects have.
        what: what an entry point adds, as the first word of the warning.
        log: the logger of the warnings.
    """
    for point in entry_points(group=group):
        try:
            added = point.load()
        except Exception as error:  # noqa: BLE001 - see above
            notice(log, f"{what} {point.name} ({point.value}) cannot be used: {error}")
            continue
        if not isinstance(added, kind):
            notice(
                log,
                f"{what} {point.name} ({point.value}) cannot be used: it is a {type(added).__name__}, not a "
                f"{kind.__module__}.{kind.__qualname__}.",
            )
            continue
        yield added
