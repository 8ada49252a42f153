"""Errors of a load that are also those of torch.distributed.checkpoint.

In Megatron-Core its planner finds keys that are not stored, and shapes that do not fit, so programs
catch `torch.distributed.checkpoint.CheckpointException`. It derives from BaseException, not from Exception.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from megackpt.errors import CheckpointError, MismatchError, MissingKeyError


@contextmanager
def also_of_torch() -> Iterator[None]:
    """Raise a MissingKeyError or MismatchError of the block as an error that is also torch's."""
    try:
        yield
    except (MissingKeyError, MismatchError) as error:
        kind: Any = type(error)
        joined: Any = _class_for(kind)(error.message, key=error.key, rank=error.rank, path=error.path)
        joined.failures = {error.rank or 0: (error, None)}
        raise joined.with_traceback(error.__traceback__) from error.__cause__


@cache
def _class_for(kind: Any) -> type[CheckpointError]:
    from torch.distributed.checkpoint.api import CheckpointException

    return type(kind.__name__, (kind, CheckpointException), {"failures": {}, "__doc__": kind.__doc__})
