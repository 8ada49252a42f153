"""The pickles of version 1: objects and common state as torch.save writes them.

Owns which classes they may name.
"""

from __future__ import annotations

import argparse
import collections
import io
import signal
from typing import Any

import torch

from megackpt.errors import FormatError, UnserializableError

_HARMLESS: list[Any] = [
    argparse.Namespace,
    collections.defaultdict,
    collections.deque,
    complex,
    frozenset,
    io.BytesIO,
    signal.Signals,
    slice,
]


def save_value(value: Any, *, path: str) -> bytes:
    """Return what torch.save makes of a value, after proving that `load_value` reads it.

    Raises:
        UnserializableError: it does not, or the value cannot be pickled.
    """
    out = io.BytesIO()
    try:
        torch.save(value, out)
        _load_safely(out.getvalue())
    except Exception as error:
        raise UnserializableError(
            f"{path}: the value cannot be stored as torch.load(weights_only=True) would read it "
            f"({type(error).__name__}: {str(error)[:500]}). Save plain values in its place, or allow the "
            f"class with "
            f"torch.serialization.add_safe_globals() here and where it is loaded.",
            path=path,
        ) from error
    return out.getvalue()


def load_value(data: bytes, *, where: str, allow_unsafe: bool = False) -> Any:
    """Return what torch.save has made these bytes of, tensors in host memory.

    Raises:
        FormatError: they name a class that is not known to be harmless, or are damaged.
    """
    try:
        if allow_unsafe:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
        return _load_safely(data)
    except Exception as error:
        advice = "The file is damaged."
        if type(error).__name__ == "UnpicklingError":
            advice = "If you trust whoever wrote the file, load with allow_unsafe_pickle=True."
        raise FormatError(
            f"{where}: torch.load() refuses it ({type(error).__name__}: {str(error)[:500]}). {advice}",
            path=where,
        ) from error


def _load_safely(data: bytes) -> Any:
    with torch.serialization.safe_globals(_HARMLESS):
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
