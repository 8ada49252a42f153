"""Source: Megatron-Core `dist_checkpointing.strategies.cached_metadata_filesystem_reader`, for the name."""

from __future__ import annotations

import os
from typing import Any, ClassVar

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import StorageMeta

from megackpt.formats.torch_dist.metadata_unpickler import load_metadata


class CachedMetadataFileSystemReader(FileSystemReader):
    """torch's reader of its own format; the `.metadata` of a path is read once in this process.

    It is unpickled without running anything that the file names. `load` does not need this class.
    """

    _metadata_cache: ClassVar[dict[str, Any]] = {}

    def __init__(self, path: str | os.PathLike[str], cache_metadata: bool = True) -> None:
        super().__init__(path)
        self.cache_metadata = cache_metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """Return the metadata, as `read_metadata` of torch's reader does.

        Raises:
            FormatError: `.metadata` names a class that has no place in one, or is no pickle.
        """
        rank = kwargs.get("rank")
        path = os.path.abspath(
            self.fs.concat_path(self.path, ".metadata" if rank is None else f"__{rank}.metadata")
        )
        metadata = self._metadata_cache.get(path) if self.cache_metadata else None
        if metadata is None:
            with self.fs.create_stream(path, "rb") as stream:
                metadata = load_metadata(stream.read(), where=path)
            if getattr(metadata, "storage_meta", None) is None:
                metadata.storage_meta = StorageMeta()
            if self.cache_metadata:
                self._metadata_cache[path] = metadata
        metadata.storage_meta.load_id = self.load_id
        return metadata

    @classmethod
    def clear_metadata_cache(cls) -> None:
        """Forget what was read."""
        cls._metadata_cache.clear()
