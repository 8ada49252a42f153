"""Access to object stores through obstore, an optional dependency: the extra `s3`.

This module imports the library, makes a client from a URL, options and the environment, repeats requests
after temporary failures, and translates the library's errors. The texts of these errors quote the server's
answer, which may contain an access key. So the texts are never shown: only the status and the code are
taken from them.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import re
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import ModuleType
from typing import Any, TypeVar

from megackpt.errors import CheckpointError, MissingExtraError, StorageError
from megackpt.storage.error_translation import storage_error
from megackpt.storage.options import OBJECT_SCHEMES, ObjectOptions

T = TypeVar("T")

_URL = re.compile(r"(?P<scheme>[a-z0-9]+)://(?P<bucket>[A-Za-z0-9._-]+)(?P<prefix>/[^?#]*)?")
_HTTP = re.compile(r"https?://[^/\s]")
_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS or GOOGLE_SERVICE_ACCOUNT",
    "az": "AZURE_STORAGE_ACCOUNT_NAME, AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN",
}
"""The environment variables that the library reads, by scheme."""

# What is taken from the texts of the library's errors.
_STATUS = r"status(?: code)?: (\d{3})"
_CODE = r"<Code>(\w{1,80})</Code>"
_RETRIES = r"after (\d+) retries"
_HTTP_FAILURE = r"HttpError \{\s*kind: (\w+)"


def obstore() -> ModuleType:
    """Return the library.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import obstore as module
        import obstore.store
    except ImportError as error:
        raise MissingExtraError(
            f"Object stores need the package obstore, which cannot be imported ({error}). "
            f"Install it with: pip install 'megackpt[s3]'"
        ) from error
    return module


def checked_url(url: str) -> str:
    """Return a URL without slashes at its end.

    Raises:
        StorageError: the URL is not of the form `s3://bucket/prefix`. The error does not quote it, since it
            may contain a password.
    """
    match = _URL.fullmatch(url)
    if match is None or match["scheme"] not in OBJECT_SCHEMES:
        raise StorageError(
            "This is not a URL of an object store: it has to look like s3://bucket/prefix, without user, "
            "password, '?' and '#'. Credentials and options come from the environment or from "
            "ObjectOptions(config=...)."
        )
    parts = (match["prefix"] or "").rstrip("/").removeprefix("/").split("/")
    if any(part in (".", "..") for part in parts) or (len(parts) > 1 and "" in parts):
        raise StorageError(f"{url}: the prefix has an empty part, '.' or '..'. Leave it out.", path=url)
    return url.rstrip("/")


# obstore's stores share no public type: what it returns is Any.
def open_client(url: str, options: ObjectOptions) -> Any:
    """Return a client for the objects under a URL. No request is made.

    Raises:
        MissingExtraError: obstore is not installed.
        StorageError: the library rejects the configuration.
    """
    library = obstore()
    endpoint = _endpoint(options) if url.startswith("s3://") else ""
    if endpoint and not _HTTP.match(endpoint):  # the library would panic at the first request
        raise StorageError(
            f"{url}: the endpoint of the object store must begin with http:// or https://. Correct "
            f"AWS_ENDPOINT_URL or `endpoint` in ObjectOptions(config=...).",
            path=url,
        )
    client: dict[str, Any] = {
        "timeout": timedelta(seconds=options.timeout_s),
        "connect_timeout": timedelta(seconds=options.connect_timeout_s),
        # An endpoint that begins with http:// asks for plain HTTP.
        "allow_http": endpoint.startswith("http://"),
    }
    retry = {
        "max_retries": options.max_retries,
        "retry_timeout": timedelta(seconds=options.retry_s),
        "backoff": {
            "init_backoff": timedelta(seconds=options.backoff_s),
            "max_backoff": timedelta(seconds=15),
            "base": 2,
        },
    }
    try:
        return library.store.from_url(
            url, config=dict(options.config) or None, client_options=client, retry_config=retry
        )
    except Exception as error:
        if not (_is_library_error(error) or isinstance(error, ValueError)):
            raise
        raise StorageError(
            f"{url}: the library rejects the settings of the object store ({type(error).__name__}). Check "
            f"the environment variables ({_CREDENTIALS[url.partition(':')[0]]}) and the names in "
            f"ObjectOptions(config=...): {', '.join(sorted(options.config)) or 'none are given'}."
            f"{_untested(url)}",
            path=url,
        ) from None  # the library's text may quote values


def _endpoint(options: ObjectOptions) -> str:
    config = {key.lower().removeprefix("aws_"): value for key, value in options.config.items()}
    from_environment = next((os.environ[name] for name in _ENDPOINT_VARIABLES if name in os.environ), "")
    return config.get("endpoint_url") or config.get("endpoint") or from_environment


def with_retries(
    request: Callable[[], T], options: ObjectOptions, *, unless: Callable[[], bool] = lambda: False
) -> T:
    """Return the result of an idempotent request; repeat it after failures that may be temporary.

    The library repeats most failed requests itself. It does not repeat a request whose answer was cut off
    after its head, a deletion that timed out, or a request answered by 429, which some stores send where S3
    sends 503.

    Args:
        request: makes the request.
        options: how often and how long to repeat it.
        unless: called after a failure; True means that the request must not be repeated.
    """
    deadline = time.monotonic() + options.retry_s
    for attempt in itertools.count():
        try:
            return request()
        except Exception as error:
            is_over = attempt >= options.max_retries or time.monotonic() > deadline or unless()
            if is_over or not _is_temporary(error):
                raise
        # With jitter: the ranks of a job must not all repeat their requests at the same moment.
        time.sleep(random.uniform(0.5, 1.5) * min(15.0, options.backoff_s * 2**attempt))
    raise AssertionError("unreachable")


@contextlib.contextmanager
def translated_object_errors(action: str, path: str) -> Iterator[None]:
    """A context manager: an error of the library becomes a StorageError. Errors of megackpt pass unchanged.

    Raises:
        StorageError: the block raised an error of the library.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        if not _is_library_error(error):
            raise
        # Not chained: its text quotes the server's answer.
        raise _translated(error, action=action, path=path) from None


def _translated(error: Exception, *, action: str, path: str) -> StorageError:
    text = str(error)
    status = _first(_STATUS, text)
    code = _first(_CODE, text)
    if isinstance(error, FileNotFoundError) and code not in ("NoSuchBucket", "NoSuchUpload"):
        return storage_error(OSError(errno.ENOENT, os.strerror(errno.ENOENT)), action=action, path=path)
    scheme = path.partition(":")[0]
    number, reason, advice = _explanation(type(error).__name__, text, status, code, scheme=scheme)
    retries = _first(_RETRIES, text)
    reason += f", also after {retries} retries" if retries else ""
    translated = StorageError(f"{path}: cannot {action}: {reason}. {advice}{_untested(path)}", path=path)
    translated.errno = number
    return translated


def _untested(url: str) -> str:
    """Return a sentence for URLs that the library serves, and no test of megackpt uses."""
    scheme = url.partition(":")[0]
    return "" if scheme == "s3" else f" {scheme}:// URLs are untested: obstore serves them."


def _explanation(kind: str, text: str, status: str, code: str, *, scheme: str) -> tuple[int | None, str, str]:
    """Return errno, what happened, and what to do.

    Args:
        kind: name of the library's error class.
        text: the library's text.
        status: the HTTP status in it, "" if there is none.
        code: the code of the object store in it, "" if there is none.
        scheme: that of the URL.
    """
    endpoint = "the endpoint (AWS_ENDPOINT_URL)" if scheme == "s3" else "the endpoint"
    answer = f"the server answered {status}{code and f' ({code})'}"
    if code == "NoSuchBucket":
        return errno.ENOENT, answer, "Create the bucket, or correct its name, region and endpoint."
    if code == "NoSuchUpload":
        return None, answer, "Somebody has aborted the upload (a lifecycle rule?). Save again."
    if kind in ("PermissionDeniedError", "UnauthenticatedError") or status in ("401", "403"):
        return (
            errno.EACCES,
            answer if status else "permission denied",
            f"Check the credentials ({_CREDENTIALS.get(scheme, 'of the store')}), the clock, and that they "
            f"may get, put, list and delete objects there.",
        )
    if status == "503" or code == "SlowDown" or status == "429":
        return (
            errno.EAGAIN,
            answer,
            "The store is overloaded: save less often or with fewer ranks, or raise retry_s.",
        )
    if status:
        return (
            None,
            answer,
            "Look at the status of the service. If it works, check bucket, region and endpoint.",
        )
    failure = _first(_HTTP_FAILURE, text)
    if failure == "Timeout":
        return (
            errno.ETIMEDOUT,
            "no answer in time",
            f"Check the network and {endpoint}; if it is slow, raise timeout_s.",
        )
    if failure == "Connect":
        return None, "no connection", f"Check the network and {endpoint}."
    return (
        None,
        f"the transfer failed ({kind})",
        f"Check the network, {endpoint}, and try again.",
    )


def _is_library_error(error: Exception) -> bool:
    return isinstance(error, OSError) or any(c.__module__.startswith("obstore") for c in type(error).__mro__)


def _is_temporary(error: Exception) -> bool:
    """Return whether a failure may go away, and the library has not repeated the request."""
    text = str(error)
    if not _is_library_error(error) or _first(_RETRIES, text):
        return False
    return (
        _first(_HTTP_FAILURE, text) in ("Interrupted", "Timeout", "Decode") or _first(_STATUS, text) == "429"
    )


def _first(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match[1] if match else ""
