"""The public functions that save, load and inspect a checkpoint."""

from megackpt.api.collective import load, load_with_report, save
from megackpt.api.local import (
    check_is_distributed_checkpoint,
    load_common_state_dict,
    load_content_metadata,
    load_plain_tensors,
    load_sharded_metadata,
    load_tensors_metadata,
    remove_sharded_tensors,
)

__all__ = [
    "check_is_distributed_checkpoint",
    "load",
    "load_common_state_dict",
    "load_content_metadata",
    "load_plain_tensors",
    "load_sharded_metadata",
    "load_tensors_metadata",
    "load_with_report",
    "remove_sharded_tensors",
    "save",
]
