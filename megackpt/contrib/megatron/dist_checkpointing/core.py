"""What makes a directory a checkpoint. Source: Megatron-Core `dist_checkpointing.core`, for the names."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from megackpt.contrib.megatron.errors import raise_unsupported
from megackpt.engine.checkpoint.manifest import read_manifest
from megackpt.errors import CheckpointingException, FormatError
from megackpt.formats.registry import DEFAULT_BACKEND
from megackpt.formats.strategy import MANIFEST
from megackpt.storage import Store, is_url, opened_store

__all__ = [
    "CONFIG_FNAME",
    "CheckpointingConfig",
    "CheckpointingException",
    "check_is_distributed_checkpoint",
    "maybe_load_config",
    "save_config",
]

CONFIG_FNAME = MANIFEST


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


def check_is_distributed_checkpoint(checkpoint_dir: str | os.PathLike[str] | Store) -> bool:
    """Return whether a directory holds a metadata.json that can be read. Local.

    As in Megatron-Core, a checkpoint of torch.distributed.checkpoint alone is none: Megatron-LM loads that in
    another way (`torch_dcp`, `fsdp_dtensor`). `megackpt.run.check_is_distributed_checkpoint` knows it
    too.

    Raises:
        FormatError: metadata.json is damaged.
    """
    return maybe_load_config(checkpoint_dir) is not None


def maybe_load_config(checkpoint_dir: str | os.PathLike[str] | Store) -> CheckpointingConfig | None:
    """Return the formats that metadata.json names, None for a directory without one. Local.

    Other fields of metadata.json are left out.

    Raises:
        FormatError: metadata.json is damaged.
    """
    if not checkpoint_dir:
        return None
    if isinstance(checkpoint_dir, (str, os.PathLike)):
        directory = os.fspath(checkpoint_dir)
        if not is_url(directory) and not Path(directory).is_dir():
            return None
    with opened_store(checkpoint_dir) as store:
        if not store.exists(CONFIG_FNAME):
            return None
        manifest = read_manifest(store)
        if "sharded_backend" not in manifest:
            raise FormatError(
                f"{store.location}/{CONFIG_FNAME} does not name a sharded_backend. The file is damaged or "
                f"foreign.",
                path=store.location,
            )
    names = ("sharded_backend", "sharded_backend_version", "common_backend", "common_backend_version")
    return CheckpointingConfig(**{name: manifest[name] for name in names if name in manifest})


def save_config(config: CheckpointingConfig, checkpoint_dir: str | os.PathLike[str]) -> None:
    """Write metadata.json, for files that a program wrote itself. Local: one process calls it.

    Raises:
        UnsupportedError: it would be the metadata.json of a checkpoint of megackpt, which names its index.
    """
    with opened_store(checkpoint_dir) as store:
        stored = read_manifest(store) if store.exists(CONFIG_FNAME) else {}
        if DEFAULT_BACKEND in (config.sharded_backend, stored.get("sharded_backend")):
            raise_unsupported(
                f"save_config for backend {DEFAULT_BACKEND!r}",
                because="metadata.json is the commit of such a checkpoint and names the index it commits.",
                instead="save() writes it when everything else is durable.",
            )
        store.replace(CONFIG_FNAME, json.dumps(asdict(config)).encode())
        store.sync()
