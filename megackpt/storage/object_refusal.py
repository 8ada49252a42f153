"""Turns failures of obstore into StorageError: what failed, on which URL, why, and what to do about it.

Owns the wording. What the library says quotes the server's answer, which may name an access key: of that only
the status and the code are taken, and it is never shown as it is.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator

from megackpt.errors import CheckpointError, StorageError
from megackpt.storage.error_translation import storage_error

_STATUS = r"status(?: code)?: (\d{3})"
_CODE = r"<Code>(\w{1,80})</Code>"
_RETRIES = r"after (\d+) retries"
_FAILED = r"HttpError \{\s*kind: (\w+)"


@contextlib.contextmanager
def translated_object_errors(action: str, path: str) -> Iterator[None]:
    """Within the block, a failure of the library becomes a StorageError; our own errors pass.

    Raises:
        StorageError: the block raised one.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        if not is_of_library(error):
            raise
        # Not chained: its text quotes the server's answer.
        raise _refused(error, action=action, path=path) from None


def _refused(error: Exception, *, action: str, path: str) -> StorageError:
    """Return the StorageError for a failure of the library."""
    said = str(error)
    status = _first(_STATUS, said)
    code = _first(_CODE, said)
    if isinstance(error, FileNotFoundError) and code not in ("NoSuchBucket", "NoSuchUpload"):
        return storage_error(OSError(errno.ENOENT, os.strerror(errno.ENOENT)), action=action, path=path)
    number, reason, advice = _meaning(type(error).__name__, said, status, code)
    retries = _first(_RETRIES, said)
    answer = f"{reason}{retries and f', also after {retries} retries'}"
    found = StorageError(f"{path}: cannot {action}: {answer}. {advice}", path=path)
    found.errno = number
    return found


def _meaning(kind: str, said: str, status: str, code: str) -> tuple[int | None, str, str]:
    """Return errno, what happened, and what to do."""
    answered = f"the server answered {status}{code and f' ({code})'}"
    if code == "NoSuchBucket":
        return errno.ENOENT, answered, "Create the bucket, or correct its name, region and endpoint."
    if code == "NoSuchUpload":
        return None, answered, "Somebody has aborted the upload (a lifecycle rule?). Save again."
    if kind in ("PermissionDeniedError", "UnauthenticatedError") or status in ("401", "403"):
        return (
            errno.EACCES,
            answered if status else "permission denied",
            "Check the credentials (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN), the clock, "
            "and that they may get, put, list and delete objects there.",
        )
    if status == "503" or code == "SlowDown" or status == "429":
        return (
            errno.EAGAIN,
            answered,
            "The store is overloaded: save less often or with fewer ranks, or raise retry_s.",
        )
    if status:
        return (
            None,
            answered,
            "Look at the state of the service; if it is not a fault of it, at the settings.",
        )
    failed = _first(_FAILED, said)
    if failed == "Timeout":
        return (
            errno.ETIMEDOUT,
            "no answer in time",
            "Check the network and the endpoint (AWS_ENDPOINT_URL); if it is slow, raise timeout_s.",
        )
    if failed == "Connect":
        return None, "no connection", "Check the network and the endpoint (AWS_ENDPOINT_URL)."
    return (
        None,
        f"the transfer failed ({kind})",
        "Check the network, the endpoint (AWS_ENDPOINT_URL), and try again.",
    )


def is_of_library(error: Exception) -> bool:
    """Say whether the library has raised an error."""
    return isinstance(error, OSError) or any(c.__module__.startswith("obstore") for c in type(error).__mro__)


def passes(error: Exception) -> bool:
    """Say whether a failure of the library may pass, and was not repeated by it."""
    said = str(error)
    if not is_of_library(error) or _first(_RETRIES, said):
        return False
    return _first(_FAILED, said) in ("Interrupted", "Timeout", "Decode") or _first(_STATUS, said) == "429"


def _first(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    return found[1] if found else ""
