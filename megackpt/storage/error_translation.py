"""Errors of stores: what failed, where, why, and what to do about it.

This module translates errors of the operating system, and makes the errors that all stores share.
`object_client` translates the errors of its library.
"""

from __future__ import annotations

import errno
import os
from types import TracebackType

from megackpt.errors import CheckpointError, FormatError, StorageError

_ADVICE = {
    errno.EPERM: "The process runs as uid {uid}: check the owner, mode and attributes of the path.",
    errno.EACCES: "The process runs as uid {uid}: check the owner and mode of the path and of its parents.",
    errno.EROFS: "The file system is mounted read-only: choose another directory, or remount it (the kernel "
    "also does this after a disk error: see its log).",
    errno.ENOENT: "It does not exist: check the path, that nobody moved or deleted it, and that the store "
    "was created before it was written to.",
    errno.EEXIST: "It exists already: another process may be writing to the same path.",
    errno.ENOTDIR: "{file} is a file where a directory is needed: give another path, or move the file away.",
    errno.EISDIR: "It is a directory where a file is needed.",
    errno.ENAMETOOLONG: "A part of the path is longer than the file system allows.",
    errno.EIO: "The device reports a fault: see the kernel log and the health of the disk or mount, and "
    "verify what it stored (megackpt verify --deep).",
    errno.EFBIG: "The file would be larger than the file system or the process limit (ulimit -f) allows.",
    errno.EMFILE: "The process has too many open files: raise the limit (ulimit -n).",
    errno.ENFILE: "The machine has too many open files: raise fs.file-max.",
    errno.ESTALE: "The network file system has lost the file: another client removed it, or the server "
    "exported the directory again. Try again.",
    errno.ETIMEDOUT: "The network file system did not answer in time: check its server and the connection.",
}
_ADVICE_ON_LOST_FILES = (
    "It does not exist: check the path, and that nobody moved or deleted it. `megackpt verify` lists all "
    "files that a checkpoint lacks."
)
_READS = ("look up", "open", "read")
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def storage_error(error: OSError, *, action: str, path: str, nbytes: int | None = None) -> StorageError:
    """Return the StorageError for an OSError; the caller chains the two.

    Args:
        error: the error that the operating system raised.
        action: the attempted action, as a verb: "write", "open", ...
        path: the file or directory concerned.
        nbytes: how many bytes of space the action needed, if any.
    """
    meaning = os.strerror(error.errno) if error.errno is not None else str(error)
    code = errno.errorcode.get(error.errno, "") if error.errno is not None else ""
    if error.errno in _DISK_FULL:
        advice = _advice_on_space(path, nbytes)
    elif error.errno == errno.ENOENT and action in _READS:
        advice = _ADVICE_ON_LOST_FILES
    else:
        advice = _ADVICE.get(error.errno or 0, "Check the file system and try again.")
        file = _non_directory_in(path) if error.errno == errno.ENOTDIR else path
        advice = advice.format(uid=os.getuid(), file=file)
    translated = StorageError(
        f"{path}: cannot {action}: {meaning}{code and f' ({code})'}. {advice}", path=path
    )
    translated.errno = error.errno
    return translated


# Lower case like `contextlib.suppress`. A class, as a generator would cost as much as a short write.
class translated_errors:
    """A context manager: an OSError of the block becomes a StorageError. Errors of megackpt pass unchanged.

    One object can be entered several times.

    Raises:
        StorageError: the block raised an OSError.
    """

    def __init__(self, action: str, path: str, *, nbytes: int | None = None) -> None:
        self._action, self._path, self._nbytes = action, path, nbytes

    def __enter__(self) -> None:
        """Enter."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        if isinstance(error, OSError) and not isinstance(error, CheckpointError):
            raise storage_error(error, action=self._action, path=self._path, nbytes=self._nbytes) from error


def short_file_error(path: str, end: int, offset: int, nbytes: int) -> FormatError:
    """Return the error for a file that ends at byte `end`, before the end of the range that is needed."""
    return FormatError(
        f"{path}: the file ends at byte {end:,}, but bytes [{offset:,}:{offset + nbytes:,}) are needed. It "
        "was cut short, perhaps by an incomplete copy: restore it, or use another checkpoint.",
        path=path,
    )


def large_file_error(path: str, nbytes: int, max_bytes: int) -> FormatError:
    """Return the error for a small file that is larger than it may be."""
    return FormatError(
        f"{path}: the file has {nbytes:,} bytes, more than the {max_bytes:,} that are allowed. It is "
        "damaged, or not part of a checkpoint: restore it, or use another checkpoint.",
        path=path,
    )


def closed_writer_error(path: str) -> StorageError:
    """Return the error for a write after the writer was closed or has failed."""
    return StorageError(f"{path}: this writer is closed. Open a new one to write the file again.", path=path)


def excess_bytes_error(path: str, nbytes: int, *, written: int, expected: int) -> StorageError:
    """Return the error for a write of nbytes that exceeds the size that the file was opened with."""
    return StorageError(
        f"{path}: {nbytes:,} more bytes after {written:,} exceed the {expected:,} that the file was opened "
        "for. Open the writer with the size of everything that will be written.",
        path=path,
    )


def incomplete_file_error(path: str, *, written: int, expected: int) -> StorageError:
    """Return the error for a writer that was closed before all bytes were written."""
    return StorageError(
        f"{path}: closed after {written:,} of {expected:,} bytes, so the file was removed. Write all of it "
        "before closing.",
        path=path,
    )


def _advice_on_space(path: str, nbytes: int | None) -> str:
    facts = []
    if nbytes is not None:
        facts.append(f"{nbytes:,} bytes were needed")
    free = _free_bytes(path)
    if free is not None:
        facts.append(f"{free:,} bytes are free")
    known = f"{', '.join(facts)}. " if facts else ""
    if nbytes is not None and free is not None and free >= nbytes:
        # Other limits have the same error as a full disk.
        return (
            f"{known}So another limit is reached: inodes (df -i), your quota (quota -s), or one full target "
            f"of a parallel file system (lfs df, lfs quota). Free what is full, raise the quota, or choose "
            f"another directory."
        )
    return f"{known}Free space (older checkpoints?), raise the quota, or choose another directory."


def _free_bytes(path: str) -> int | None:
    """Return the bytes that an unprivileged process may use on the file system of `path`; None if unknown.

    For a path that does not exist, the nearest existing parent counts.
    """
    while True:
        try:
            state = os.statvfs(path)
        except OSError:
            parent = os.path.dirname(path)
            if parent == path:
                return None
            path = parent
        else:
            return state.f_bavail * state.f_frsize


def _non_directory_in(path: str) -> str:
    """Return the part of a path that is a file although it should be a directory."""
    while not os.path.lexists(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    return "A part of the path" if os.path.isdir(path) else path
