"""The format zarr. Source: Megatron-Core up to 0.15, `dist_checkpointing.strategies.zarr`, for the names."""

from __future__ import annotations

from megackpt.contrib.megatron.errors import unsupported_name
from megackpt.contrib.megatron.our_strategies import DetectingLoadStrategy, FormatSaveStrategy

_PLUMBING = {
    "because": "it is a step between zarr arrays and tensors that tensorstore takes here.",
    "instead": "Use save() and load(), or load_tensors_metadata().",
}


class ZarrSaveShardedStrategy(FormatSaveStrategy):
    """Saves one zarr array for each key, in shards: version 3. Megatron-Core's version 1 is only read.

    Raises:
        DeclarationError: there is no such version, or it is only read.
    """


class ZarrLoadShardedStrategy(DetectingLoadStrategy):
    """Loads a checkpoint of any format that megackpt reads; metadata.json names the format."""


def register_default_zarr_strategies() -> None:
    """Do nothing: our strategies are there without being registered."""


flatten_range = unsupported_name("flatten_range", **_PLUMBING)
load_zarr_based_sharded_metadata = unsupported_name("load_zarr_based_sharded_metadata", **_PLUMBING)
pad_to_expected_shape = unsupported_name("pad_to_expected_shape", **_PLUMBING)
postprocess_numpy_array = unsupported_name("postprocess_numpy_array", **_PLUMBING)
