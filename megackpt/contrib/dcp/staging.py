"""The copy that a save in the background takes of a state dict, for torch releases that take none.

A workaround: before DCP had stagers, its async_save copied tensors of devices only, and shared tensors in
host memory with the training.
"""

from __future__ import annotations

import copy
from typing import Any

from torch.distributed.checkpoint import staging

if hasattr(staging, "DefaultStager"):  # DCP copies everything itself

    class Stager:
        """Nothing: DCP takes the copy."""

else:
    from torch.distributed._state_dict_utils import _offload_state_dict_to_cpu

    class Stager(staging.BlockingAsyncStager):  # type: ignore[no-redef]
        """Takes the copy when async_save asks the storage writer for it."""

        def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
            """Return the state dict in host memory of its own. Local."""
            return copy.deepcopy(_offload_state_dict_to_cpu(state_dict, type_check=False))
