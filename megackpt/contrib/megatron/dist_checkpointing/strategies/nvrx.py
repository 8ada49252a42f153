"""Asynchronous saving by nvidia-resiliency-ext, from Megatron-Core 0.17 on.

megackpt's own writer processes save, so nothing of that package is needed; these answer programs that ask.

Source: Megatron-Core 0.19, `dist_checkpointing.strategies.nvrx`, for the names.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import metadata
from typing import Any

NVRX_MIN_VERSION = "0.6.0"


def has_nvrx_async_support() -> bool:
    """Return True: `get_async_strategy("nvrx")` gives classes that save, with or without that package."""
    return True


def make_nvrx_async_request(
    async_request_cls: Callable[..., Any],
    async_fn: Callable[..., Any],
    async_fn_args: Any,
    finalize_fns: list[Callable[..., Any]],
    async_fn_kwargs: dict[str, Any] | None = None,
    preload_fn: Callable[..., Any] | None = None,
) -> Any:
    """Return a request of the given class."""
    return async_request_cls(
        async_fn, async_fn_args, finalize_fns, async_fn_kwargs=async_fn_kwargs or {}, preload_fn=preload_fn
    )


def is_nvrx_min_version(version: str = NVRX_MIN_VERSION) -> bool:
    """Return whether nvidia-resiliency-ext is installed in this version or a later one."""
    try:
        return _numbers(metadata.version("nvidia-resiliency-ext")) >= _numbers(version)
    except metadata.PackageNotFoundError:
        return False


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:3]]
