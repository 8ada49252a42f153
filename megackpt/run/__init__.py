"""The public functions that save, load and inspect a checkpoint.

`megackpt` exports those that most programs need. This package exports the others, and imports each at its
first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megackpt.engine.saving.plan_cache import PlanCache
    from megackpt.run.local import check_is_distributed_checkpoint, remove_sharded_tensors

__all__ = ["PlanCache", "check_is_distributed_checkpoint", "remove_sharded_tensors"]

_LAZY_IMPORTS = {
    "PlanCache": "megackpt.engine.saving.plan_cache",
    "check_is_distributed_checkpoint": "megackpt.run.local",
    "remove_sharded_tensors": "megackpt.run.local",
}


def __getattr__(name: str) -> Any:
    """Import a name at its first use."""
    if name not in _LAZY_IMPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY_IMPORTS[name]), name)
