"""Source: Megatron-Core `dist_checkpointing.strategies.filesystem_async`, for the names."""

from typing import Any, TypeAlias

from megackpt.compat.megatron.refusal import refused

_results_queue: None = None
"""No queue between processes: a writer process reports to the rank that started it."""
WriteBucket: TypeAlias = tuple[
    Any, str, tuple[list[Any], list[Any]]
]  # Megatron-Core's own, for annotations only
FileSystemWriterAsync = refused(
    "FileSystemWriterAsync",
    because="files are written by a format through a megackpt.storage.Store.",
    instead="Use save(); to write elsewhere pass a Store as checkpoint_dir.",
)


def get_write_results_queue(mp_mode: str = "spawn") -> None:
    """Return None: there is no queue of results to set up before the first save."""
    return _results_queue
