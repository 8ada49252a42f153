"""Reading the format zarr.

Source: Megatron-Core up to 0.15, `dist_checkpointing.strategies.tensorstore`, for the names.
"""

from __future__ import annotations

from megackpt.compat.megatron.ours import DetectingLoadStrategy
from megackpt.compat.megatron.refusal import refused

_PLUMBING = {
    "because": "it is a step between zarr arrays and tensors that the format takes by itself here.",
    "instead": "Use load(), or load_tensors_metadata().",
}


class TensorStoreLoadShardedStrategy(DetectingLoadStrategy):
    """Loads a checkpoint of any format that can be read here, as its metadata.json says.

    Tensors are filled where they are, so load_directly_on_device changes nothing.
    """

    def __init__(self, load_directly_on_device: bool = False) -> None:
        super().__init__()
        self.load_directly_on_device = load_directly_on_device


def register_default_tensorstore_strategies() -> None:
    """Do nothing: our strategies are there without being registered."""


merge_global_slice_with_shape = refused("merge_global_slice_with_shape", **_PLUMBING)
open_ts_array = refused("open_ts_array", **_PLUMBING)
