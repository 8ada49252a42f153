"""Options of stores: how local files and objects are written and read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megackpt.errors import DeclarationError
from megackpt.ground.arguments import check_count, check_flag, check_seconds
from megackpt.storage.rawio import ALIGNMENT, BUFFER_BYTES

OBJECT_SCHEMES = ("s3", "gs", "az")
"""Schemes of the URLs of object stores. Only s3 is tested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileOptions:
    """How local files are written and read.

    Attributes:
        direct: use O_DIRECT where the file system allows it: for writes, and for reads of uncached bytes.
        direct_from_bytes: smaller files are written through the page cache, which is faster for them.
        buffer_bytes: size of one staging buffer, a multiple of 4096.
        buffers: staging buffers of one writer, at most 16 MiB in total.
        threads: threads of one writer that write full buffers.
    """

    direct: bool = True
    direct_from_bytes: int = 1 << 20
    buffer_bytes: int = BUFFER_BYTES
    buffers: int = 4
    threads: int = 2

    def __post_init__(self) -> None:
        check_flag("direct", self.direct)
        check_count("direct_from_bytes", self.direct_from_bytes, least=0)
        for name in ("buffer_bytes", "buffers", "threads"):
            check_count(name, getattr(self, name))
        if self.buffer_bytes % ALIGNMENT:
            raise DeclarationError(
                f"buffer_bytes is {self.buffer_bytes}; direct I/O needs a multiple of {ALIGNMENT}."
            )
        if self.buffers * self.buffer_bytes > 16 << 20:
            raise DeclarationError(
                f"{self.buffers} buffers of {self.buffer_bytes} bytes exceed the 16 MiB that a writer may "
                "use. More does not write faster: use fewer or smaller ones."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectOptions:
    """How an object store is reached, written and read.

    Attributes:
        config: settings of the client, by obstore's names (`endpoint`, `region`, `access_key_id`, ...); they
            take precedence over environment variables.
        part_bytes: size of one part of an upload; a smaller file is one request. S3 needs parts of at least
            5 MiB, except for the last. A file that would have more than 10,000 parts gets larger ones.
        parts_in_flight: how many parts of one file are sent at a time.
        range_bytes: a longer read is split into requests of this size.
        ranges_in_flight: how many requests such a read makes at a time.
        timeout_s: the most time that one request may take, in seconds.
        connect_timeout_s: the most time that making a connection may take, in seconds.
        max_retries: how often a request is repeated that failed with 500, 503 or another 5xx, was cut off, or
            timed out.
        retry_s: no request is repeated after this time, in seconds.
        backoff_s: pause before the first repetition, in seconds, with jitter. Each further pause is twice as
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
                f"config is a {type(self.config).__name__}; it must be a mapping whose names and values are "
                f"all text, such as {{'region': 'eu-west-1'}}."
            )
