"""The public functions that save, load and inspect a checkpoint.

`megackpt` exports those that most programs need. This package exports the others, and imports each at its
first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megackpt.ground.lazy_names import lazy_names

if TYPE_CHECKING:
    from megackpt.engine.saving.plan_cache import PlanCache
    from megackpt.run.local import check_is_distributed_checkpoint, remove_sharded_tensors
else:  # type checkers would accept any name
    __getattr__ = lazy_names(
        __name__,
        {
            "megackpt.engine.saving.plan_cache": ("PlanCache",),
            "megackpt.run.local": ("check_is_distributed_checkpoint", "remove_sharded_tensors"),
        },
    )

__all__ = ["PlanCache", "check_is_distributed_checkpoint", "remove_sharded_tensors"]
