"""A save strategy for Megatron-Core's own `dist_checkpointing.save`, where `install()` would come too late.

    from megatron.core import dist_checkpointing

    dist_checkpointing.save(state, path, MegackptSaveStrategy())

Megatron-Core's newer versions replace strategies of other classes by their own, and always load with their
own. So this one is derived from Megatron-Core's, and writes format `torch_dist`.

Source: Megatron-Core 0.16.1 `dist_checkpointing/serialization.py`, and its main branch of November 2026.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from megackpt.codec.stand_ins import keep_unknown_values
from megackpt.entities import ShardedStateDict
from megackpt.errors import UnsupportedError
from megackpt.formats.safe_pickle import load_value
from megackpt.options import SaveOptions
from megackpt.run.collective import save

_COMMON_FILE = "common.pt"
_COMMON_KEY = "common_state"


class MegackptSaveStrategy(TorchDistSaveShardedStrategy):
    """Saves with megackpt: declarations are proved, replicas spread over ranks, and errors raised on all.

    It may be within Megatron-Core's `FullyParallelSaveStrategyWrapper`. Megatron-Core writes `metadata.json`
    once more after it.

    Args:
        options: of the save.
    """

    def __init__(self, options: SaveOptions | None = None) -> None:
        super().__init__("torch_dist", 1)
        self._options = options

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | os.PathLike[str]) -> None:
        """Save what Megatron-Core passes, and its common state. Collective.

        Raises:
            CheckpointError: as `megackpt.save`.
        """
        state = dict(sharded_state_dict)
        with keep_unknown_values():
            state |= _common_state(state.pop(_COMMON_KEY, None), Path(checkpoint_dir, _COMMON_FILE))
            save(
                state,
                os.fspath(checkpoint_dir),
                ("torch_dist", 1),
                # Megatron-Core has compared common state, and passes all of it to rank 0 only.
                preprocess_common_before_consistancy_check=lambda _: {},
                options=self._options,
            )

    def async_save(self, *args: Any, **kwargs: Any) -> Any:
        """Raise an error.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "MegackptSaveStrategy saves synchronously. For asynchronous saves, call "
            "megackpt.contrib.megatron.install() before Megatron-Core is imported."
        )


def _common_state(declared: Any, file: Path) -> dict[str, Any]:
    """Return common state on rank 0: newer versions pass it as an object, older ones have written a file."""
    if dist.is_initialized() and dist.get_rank() > 0:
        return {}
    if declared is not None:
        return dict(declared.data)
    return dict(load_value(file.read_bytes(), where=str(file))) if file.is_file() else {}
