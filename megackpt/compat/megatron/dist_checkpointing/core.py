"""What makes a directory a checkpoint. Source: Megatron-Core `dist_checkpointing.core`, for the names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megackpt.api import check_is_distributed_checkpoint
from megackpt.compat.megatron.refusal import refuse
from megackpt.engine.manifest import read_manifest
from megackpt.errors import CheckpointingException, FormatError, NotACheckpointError
from megackpt.storage import is_object_url, open_store

__all__ = [
    "CONFIG_FNAME",
    "CheckpointingConfig",
    "CheckpointingException",
    "check_is_distributed_checkpoint",
    "maybe_load_config",
    "save_config",
]

CONFIG_FNAME = "metadata.json"


@dataclass
class CheckpointingConfig:
    """Which formats a checkpoint is in, as its metadata.json says.

    Attributes:
        sharded_backend: format of tensors and objects.
        sharded_backend_version: its version.
        common_backend: format of common state.
        common_backend_version: its version.
    """

    sharded_backend: str
    sharded_backend_version: int = 1
    common_backend: str = "torch"
    common_backend_version: int = 1


def maybe_load_config(checkpoint_dir: str) -> CheckpointingConfig | None:
    """Return the formats of a committed checkpoint, None where there is none. Local.

    Other fields of metadata.json are left out.

    Raises:
        FormatError: metadata.json is damaged.
    """
    if not checkpoint_dir:
        return None
    if not is_object_url(str(checkpoint_dir)) and not Path(checkpoint_dir).is_dir():
        return None
    store = open_store(checkpoint_dir)
    try:
        said = read_manifest(store)
    except NotACheckpointError:
        return None
    finally:
        store.close()
    if "sharded_backend" not in said:
        raise FormatError(
            f"{checkpoint_dir}/{CONFIG_FNAME} does not name a sharded_backend. The file is damaged or "
            f"foreign.",
            path=str(checkpoint_dir),
        )
    names = ("sharded_backend", "sharded_backend_version", "common_backend", "common_backend_version")
    return CheckpointingConfig(**{name: said[name] for name in names if name in said})


def save_config(config: CheckpointingConfig, checkpoint_dir: str) -> None:
    """Refuse: metadata.json is the commit of a checkpoint.

    Raises:
        UnsupportedError: always.
    """
    refuse(
        "save_config",
        because="metadata.json is the commit of a checkpoint and names the index it commits.",
        instead="save() writes it when everything else is durable.",
    )
