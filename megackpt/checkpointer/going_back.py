"""Going back to an older step where the newest one is damaged.

Owns which errors are a reason to. Every rank decides alike without
asking the others: an error of a load is the same on all of them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from megackpt.checkpointer.survey import LastLoad, PassedOver
from megackpt.engine.loading.fallback import DAMAGE
from megackpt.errors import CheckpointError, DeclarationError
from megackpt.options import LoadOptions

log = logging.getLogger(__name__)

T = TypeVar("T")


def load_or_go_back(
    step: int,
    load: Callable[[int], T],
    older: Callable[[int], int | None] | None,
    *,
    where: str,
    rank: int,
) -> tuple[T, LastLoad]:
    """Load a step; where it is damaged, the one that older gives, and so on. Collective, as both functions.

    older returns None where there is no more; it is None itself if nothing but the step may be loaded. where
    is the root, rank this rank. Return what load returned, and which step that was.

    Raises:
        CheckpointError: that of the first step, if none could be loaded, or its error is none of damage.
    """
    passed: list[tuple[int, CheckpointError]] = []
    while True:
        try:
            loaded = load(step)
        except DAMAGE as error:
            passed.append((step, error))
        else:
            over = (PassedOver(step=number, where=where, why=str(error)) for number, error in passed)
            return loaded, LastLoad(step=step, where=where, passed_over=tuple(over))
        before = older(step) if older is not None else None
        if before is None and len(passed) == 1:
            raise passed[0][1]
        if before is None:
            raise _all_failed(passed) from passed[0][1]
        if rank == 0:
            log.warning("Step %d cannot be loaded; going back to step %d. %s", step, before, passed[-1][1])
        step = before


def with_copies_of_step(options: LoadOptions, name: str) -> LoadOptions:
    """Return the options for one step, whose copies lie under its name below the roots that are given.

    Raises:
        DeclarationError: a copy is no root but an open store.
    """
    if any(not isinstance(root, (str, os.PathLike)) for root in options.copies):
        raise DeclarationError(
            f"copies={options.copies!r}: a Checkpointer looks for a copy of each step, so give paths or URLs "
            f"of roots."
        )
    copies: tuple[Any, ...] = tuple(f"{os.fspath(root)}/{name}" for root in options.copies)
    return replace(options, copies=copies) if copies else options


def _all_failed(passed: list[tuple[int, CheckpointError]]) -> CheckpointError:
    first = passed[0][1]
    steps = ", ".join(str(step) for step, _ in passed)
    text = f"None of the steps {steps} can be loaded. Of the newest: {first}"
    return type(first)(text, key=first.key, rank=first.rank, path=first.path)
