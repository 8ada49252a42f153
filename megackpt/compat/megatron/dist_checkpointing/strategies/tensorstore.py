"""Reading the format zarr.

Source: Megatron-Core up to 0.15, `dist_checkpointing.strategies.tensorstore`, for the names.
"""

from __future__ import annotations

from typing import ClassVar

from megackpt.compat.megatron.our_strategies import DetectingLoadStrategy, LoadArguments
from megackpt.compat.megatron.unsupported import unsupported_name
from megackpt.options import LoadOptions

_PLUMBING = {
    "because": "it is a step between zarr arrays and tensors that the format takes by itself here.",
    "instead": "Use load(), or load_tensors_metadata().",
}


class TensorStoreLoadShardedStrategy(DetectingLoadStrategy):
    """Loads a checkpoint of any format that can be read here, as its metadata.json says.

    Attributes:
        load_directly_on_device: fill tensors that are on a device there. Otherwise those stay as they are,
            and the loaded state dict holds tensors in host memory in their place.
    """

    SETTINGS: ClassVar[tuple[str, ...]] = ("load_directly_on_device",)

    def __init__(self, load_directly_on_device: bool = False) -> None:
        super().__init__()
        self.load_directly_on_device = load_directly_on_device

    @property
    def load_arguments(self) -> LoadArguments:
        """What of `megackpt.load`'s arguments this strategy stands for, as it is set now."""
        return {"options": LoadOptions(load_on_device=self.load_directly_on_device)}


def register_default_tensorstore_strategies() -> None:
    """Do nothing: our strategies are there without being registered."""


merge_global_slice_with_shape = unsupported_name("merge_global_slice_with_shape", **_PLUMBING)
open_ts_array = unsupported_name("open_ts_array", **_PLUMBING)
