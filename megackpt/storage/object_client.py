"""The door to obstore, an optional dependency: the extra `s3`.

Owns its import, how a client is set up from an URL, options and the environment, and which requests are made
again. Which requests are made is up to `objects` and `object_upload`, how failures are worded to
`object_refusal`.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from types import ModuleType
from typing import Any, TypeVar

from megackpt.arguments import check_count, check_seconds
from megackpt.errors import DeclarationError, MissingExtraError, StorageError
from megackpt.storage.buffers import BUFFER_BYTES
from megackpt.storage.object_refusal import is_of_library, passes
from megackpt.storage.paths import SCHEMES

T = TypeVar("T")

_URL = re.compile(r"(?P<scheme>[a-z0-9]+)://(?P<bucket>[A-Za-z0-9._-]+)(?P<prefix>/[^?#]*)?")
_HTTP = re.compile(r"https?://[^/\s]")
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectOptions:
    """How an object store is reached, written and read.

    Attributes:
        config: settings of the client, by obstore's names (`endpoint`, `region`, `access_key_id`, ...); they
            take precedence over environment variables.
        part_bytes: size of one part of an upload; smaller files are one request. S3 takes no parts below
            5 MiB but the last. Larger where a file would need more than 10,000 parts.
        parts_in_flight: parts of one file that are sent at a time.
        range_bytes: longer reads are made of several requests of this size.
        ranges_in_flight: requests that one such read makes at a time.
        timeout_s: how long one request may take, in seconds.
        connect_timeout_s: how long a connection may take to be made, in seconds.
        max_retries: how often a request is repeated that failed with 500, 503 or another 5xx, was cut off, or
            timed out.
        retry_s: no request is repeated after so many seconds.
        backoff_s: pause before the first repetition, in seconds, with jitter; each further one is twice as
            long, at most 15 s.
    """

    config: Mapping[str, str] = field(default_factory=dict, repr=False)  # may hold secrets
    part_bytes: int = 2 * BUFFER_BYTES
    parts_in_flight: int = 4
    range_bytes: int = 8 << 20
    ranges_in_flight: int = 4
    timeout_s: float = 60.0
    connect_timeout_s: float = 5.0
    max_retries: int = 10
    retry_s: float = 180.0
    backoff_s: float = 0.1

    def __post_init__(self) -> None:
        for name in ("part_bytes", "parts_in_flight", "range_bytes", "ranges_in_flight"):
            check_count(name, getattr(self, name))
        for name in ("timeout_s", "connect_timeout_s", "retry_s", "backoff_s"):
            check_seconds(name, getattr(self, name))
        check_count("max_retries", self.max_retries, least=0, otherwise=", 0 for none")
        is_config = isinstance(self.config, Mapping) and all(
            isinstance(text, str) for pair in self.config.items() for text in pair
        )
        if not is_config:  # not quoted: it may hold secrets
            raise DeclarationError(
                f"config is a {type(self.config).__name__} with other things than text; give names and "
                f"values as text, as {{'region': 'eu-west-1'}}."
            )


def obstore() -> ModuleType:
    """Return the module.

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
    """Return an URL without slashes at its end.

    Raises:
        StorageError: it is not of the form `s3://bucket/prefix`. It is not quoted: it may hold a password.
    """
    found = _URL.fullmatch(url)
    if found is None or found["scheme"] not in SCHEMES:
        raise StorageError(
            "This is no URL of an object store: it has to look like s3://bucket/prefix, without user, "
            "password, '?' and '#'. Credentials and options come from the environment or from "
            "ObjectOptions(config=...)."
        )
    parts = (found["prefix"] or "").rstrip("/").removeprefix("/").split("/")
    if any(part in (".", "..") for part in parts) or (len(parts) > 1 and "" in parts):
        raise StorageError(f"{url}: the prefix has an empty part, '.' or '..'. Leave it out.", path=url)
    return url.rstrip("/")


# obstore's stores share no public type: what it returns is Any.
def open_client(url: str, options: ObjectOptions) -> Any:
    """Return a client for what lies below an URL. No request is made.

    Raises:
        MissingExtraError: obstore is not installed.
        StorageError: the configuration is refused.
    """
    library = obstore()
    endpoint = _endpoint(options)
    if endpoint and not _HTTP.match(endpoint):  # the library would panic at the first request
        raise StorageError(
            f"{url}: the endpoint of the object store does not begin with http:// or https://. Check "
            f"AWS_ENDPOINT_URL and `endpoint` in ObjectOptions(config=...).",
            path=url,
        )
    client: dict[str, Any] = {
        "timeout": timedelta(seconds=options.timeout_s),
        "connect_timeout": timedelta(seconds=options.connect_timeout_s),
        # Plain HTTP is what an endpoint that begins with it asks for.
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
        if not (is_of_library(error) or isinstance(error, ValueError)):
            raise
        raise StorageError(
            f"{url}: the settings of the object store are refused ({type(error).__name__}). Check the "
            f"environment variables (AWS_..., for s3) and the names in ObjectOptions(config=...): "
            f"{', '.join(sorted(options.config)) or 'none are given'}.",
            path=url,
        ) from None  # the library's text may quote values


def _endpoint(options: ObjectOptions) -> str:
    given = {key.lower().removeprefix("aws_"): value for key, value in options.config.items()}
    from_environment = next((os.environ[name] for name in _ENDPOINTS if name in os.environ), "")
    return given.get("endpoint_url") or given.get("endpoint") or from_environment


def repeating(
    request: Callable[[], T], options: ObjectOptions, *, unless: Callable[[], bool] = lambda: False
) -> T:
    """Return what an idempotent request returns, repeated where it fails in a way that passes.

    The library repeats most by itself; not answers that are cut off after their head, deletions that time
    out, nor 429, with which some stores say what S3 says with 503.
    """
    deadline = time.monotonic() + options.retry_s
    for attempt in itertools.count():
        try:
            return request()
        except Exception as error:
            is_over = attempt >= options.max_retries or time.monotonic() > deadline or unless()
            if is_over or not passes(error):
                raise
        time.sleep(random.uniform(0.5, 1.5) * min(15.0, options.backoff_s * 2**attempt))
    raise AssertionError("unreachable")
