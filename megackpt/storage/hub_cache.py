"""Snapshots in the cache of huggingface_hub: folders of links to files that revisions of a model share.

    models--ORGANISATION--NAME/
        blobs/DIGEST                    the files
        snapshots/REVISION/NAME         links: ../../blobs/DIGEST

Such a link is the only one that is followed. Its text is parsed, and the file is opened by its name in
`blobs`, so that no text of a link leads anywhere else.

Source: huggingface_hub 2.4, `file_download` and its guide "Manage your cache".
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Callable

from megackpt.storage.sandbox import Sandbox, opened_directory

_SNAPSHOT = re.compile(r"(?P<model>.*/models--[^/]+)/snapshots/[^/]+", re.DOTALL)
_LINK = re.compile(r"(?P<up>(?:\.\./)+)blobs/(?P<blob>[0-9A-Za-z][0-9A-Za-z_-]*)")


def sandbox_of(root: str, *, on_change: Callable[[str], None]) -> Sandbox:
    """Return the sandbox for a directory; its path says whether it is a snapshot. Local; opens no file.

    Args:
        root: the directory, an absolute path.
        on_change: as for `Sandbox`.
    """
    snapshot = _SNAPSHOT.fullmatch(root)
    if snapshot is None:
        return Sandbox(root, on_change=on_change)
    return SnapshotSandbox(root, f"{snapshot['model']}/blobs", on_change=on_change)


class SnapshotSandbox(Sandbox):
    """The files in a snapshot. Links to regular files in `blobs` count as these files, other links do not.

    Args:
        root: the directory of the snapshot, an absolute path.
        blobs: the directory of the files, which is no link itself.
        on_change: as for `Sandbox`.
    """

    def __init__(self, root: str, blobs: str, *, on_change: Callable[[str], None]) -> None:
        super().__init__(root, on_change=on_change)
        self._blobs = blobs

    def open_to_read(self, name: str) -> int:
        """Open a regular file, or the one that a link stands for; return the descriptor."""
        blob = self._blob_of(name)
        if blob is None:
            return super().open_to_read(name)
        with opened_directory(self._blobs) as directory:
            return self._open_regular(directory, blob, name)

    def stat(self, name: str) -> os.stat_result | None:
        """Return the result of lstat, of the file that a link stands for; None if there is no such file."""
        blob = self._blob_of(name)
        if blob is None:
            return super().stat(name)
        with contextlib.suppress(FileNotFoundError), opened_directory(self._blobs) as directory:
            return os.stat(blob, dir_fd=directory, follow_symlinks=False)
        return None

    def _is_file(self, entry: os.DirEntry[str], name: str) -> bool:
        if not entry.is_symlink():
            return super()._is_file(entry, name)
        state = self.stat(name)
        return state is not None and stat.S_ISREG(state.st_mode)

    def _blob_of(self, name: str) -> str | None:
        """Return the name in `blobs` that the link `name` has; None if it is no link of that form."""
        try:
            with self._directory_of(name) as (directory, leaf):
                link = _LINK.fullmatch(os.readlink(leaf, dir_fd=directory))
        except OSError:  # no link, or no such name: what the caller does next says which
            return None
        levels = name.count("/") + 2
        return link["blob"] if link is not None and link["up"] == "../" * levels else None
