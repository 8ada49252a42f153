"""Reading the format zarr.

Source: Megatron-Core up to 0.15, `dist_checkpointing.strategies.tensorstore`, for the names.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from megackpt.contrib.megatron.errors import unsupported_name
from megackpt.contrib.megatron.our_strategies import DetectingLoadStrategy, LoadArguments
from megackpt.contrib.megatron.settings import OPTIONS

_PLUMBING = {
    "because": "it is a step between zarr arrays and tensors that the format takes by itself here.",
    "instead": "Use load(), or load_tensors_metadata().",
}


class TensorStoreLoadShardedStrategy(DetectingLoadStrategy):
    """Loads a checkpoint of any format that megackpt reads; metadata.json names the format.

    Attributes:
        load_directly_on_device: fill tensors on their device. If False, these tensors do not change, and the
            loaded state dict has tensors in host memory instead.
    """

    SETTINGS: ClassVar[tuple[str, ...]] = ("load_directly_on_device",)

    def __init__(self, load_directly_on_device: bool = False) -> None:
        super().__init__()
        self.load_directly_on_device = load_directly_on_device

    @property
    def load_arguments(self) -> LoadArguments:
        """The arguments of `megackpt.load` that the current settings of this strategy give."""
        return {"options": replace(OPTIONS.load_options, load_on_device=self.load_directly_on_device)}


def register_default_tensorstore_strategies() -> None:
    """Do nothing: our strategies are there without being registered."""


merge_global_slice_with_shape = unsupported_name("merge_global_slice_with_shape", **_PLUMBING)
open_ts_array = unsupported_name("open_ts_array", **_PLUMBING)
