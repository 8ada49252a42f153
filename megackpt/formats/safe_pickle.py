"""What torch.save writes, read without letting it run anything.

Owns which classes such a pickle may name: those of torch.load(weights_only=True), those that the user has
allowed there, and a few harmless ones more that common checkpoints hold. Formats that hold no pickles do not
need it.
"""

from __future__ import annotations

import argparse
import io
import logging
import pathlib
import pickle
import re
import signal
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from megackpt.errors import CheckpointError, FormatError, UnknownClassError, UnserializableError
from megackpt.formats.pickle_limits import check_archive
from megackpt.formats.safe_numpy import STAND_INS, RefusedValueError, no_bytes, plain_values, stand_ins
from megackpt.notices import notice

log = logging.getLogger(__name__)

ADVICE = (
    "Nothing was run. If you trust whoever wrote the file, load with allow_unsafe_pickle=True, which lets "
    "it run any code."
)
"""What the text of a refusal ends in."""

# Source: Megatron-Core, megatron/core/safe_globals.py; enumerations and dataclasses.
_IN_COMMON_STATE = {
    "megatron.core.enums": ("ModelType",),
    "megatron.core.optimizer.optimizer_config": ("OptimizerConfig",),
    "megatron.core.rerun_state_machine": ("RerunDiagnostic", "RerunMode", "RerunState"),
    "megatron.core.transformer.enums": ("AttnBackend", "CudaGraphScope"),
}


# What makes dtypes and arrays; numpy.dtypes has a class for each dtype.
_DISPLACED = (*STAND_INS, "numpy.dtypes.")


class Inert:
    """Stands for an instance of a class that is not loaded: holds its attributes and does nothing."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)


@cache
def inert(module: str, name: str) -> type[Inert]:
    """Return a class of this name whose instances do nothing."""
    return type(name, (Inert,), {"__module__": module})


def load_value(data: bytes | memoryview, *, where: str, allow_unsafe: bool = False) -> Any:
    """Return what `torch.save` has made these bytes of, tensors in host memory.

    Raises:
        UnknownClassError: they name a class that is not known to be harmless.
        FormatError: they are damaged.
    """
    try:
        if allow_unsafe:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
        check_archive(data)
        return _load_safely(data)
    except CheckpointError:
        raise
    except RefusedValueError as error:
        raise FormatError(f"{where}: it holds {error}, so it is refused. {ADVICE}", path=where) from error
    except Exception as error:
        refused = _refused_by_torch(data, error)
        if refused and not allow_unsafe:
            raise UnknownClassError(
                f"{where}: it names {refused}, which is not known to be harmless, so it is refused. "
                f"{ADVICE} torch.serialization.add_safe_globals() allows single classes.",
                path=where,
            ) from error
        raise FormatError(
            f"{where}: torch.load() fails ({type(error).__name__}: {str(error)[:300]}). The file is damaged.",
            path=where,
        ) from error


def save_value(value: Any, *, path: str) -> bytes:
    """Return what `torch.save` makes of a value, after proving that `load_value` reads it.

    Raises:
        UnserializableError: it does not, or the value cannot be pickled.
    """
    out = io.BytesIO()
    try:
        torch.save(value, out)
    except Exception as error:
        raise UnserializableError(
            f"{path}: a {type(value).__name__} cannot be pickled ({type(error).__name__}: {error}). This "
            f"format stores values as torch.save does; save something plainer.",
            path=path,
        ) from error
    data = out.getvalue()
    try:
        _load_safely(data)
    except RefusedValueError as error:
        raise UnserializableError(
            f"{path}: the value holds {error}. Save plain arrays, or lists, in its place.", path=path
        ) from error
    except Exception as error:
        refused = _refused_by_torch(data, error) or str(error)[:300]
        raise UnserializableError(
            f"{path}: the value holds {refused}, which torch.load(weights_only=True) would refuse. Save "
            f"plain values (numbers, strings, lists, dicts, tensors, numpy arrays) in its place, or allow "
            f"the class with torch.serialization.add_safe_globals() here and where it is loaded.",
            path=path,
        ) from error
    return data


def warn_of_unsafe_pickle(where: str) -> None:
    """Log that a checkpoint may run code."""
    notice(
        log,
        f"{where} is opened with allow_unsafe_pickle: its pickles may run any code. Do this only with files "
        f"that you trust.",
    )


def _load_safely(data: bytes | memoryview) -> Any:
    with _harmless_classes(), stand_ins():
        return plain_values(torch.load(io.BytesIO(data), map_location="cpu", weights_only=True))


@cache
def _harmless() -> tuple[Any, ...]:
    """Classes, and functions by the names that pickles give them, that hold data and do nothing else."""
    path = type(pathlib.Path())
    paths = [(path, f"{module}.{path.__name__}") for module in ("pathlib", "pathlib._local")]
    plain = [argparse.Namespace, types.SimpleNamespace, io.BytesIO, signal.Signals]
    # Not defaultdict or deque: torch's unpickler cannot fill them.
    builtin = [frozenset, slice, complex]
    return (*paths, *plain, *builtin, (no_bytes, "builtins.bytes"))


def _of_megatron() -> list[Any]:
    """Classes that common state of Megatron-LM holds: its own where it has been imported, else inert ones."""
    return [
        (getattr(sys.modules.get(module), name, inert(module, name)), f"{module}.{name}")
        for module, names in _IN_COMMON_STATE.items()
        for name in names
    ]


_lock = threading.Lock()
_users = 0
_added: list[Any] = []
_displaced: list[Any] = []


@contextmanager
def _harmless_classes() -> Iterator[None]:
    """Let torch know the harmless classes for a while, in all threads: its list is global.

    What was on the list before stays on it; torch.serialization.safe_globals would take it off. Only classes
    and functions of numpy that the user has allowed give way to stand-ins meanwhile, under names that no
    pickle can hold: other threads must still be able to fill their instances.
    """
    global _users
    with _lock:
        if _users == 0:
            known = set(torch.serialization.get_safe_globals())
            _displaced[:] = [c for c in known if _name_of(c).startswith(_DISPLACED)]
            hidden = [(c[0] if isinstance(c, tuple) else c, f"\n{_name_of(c)}") for c in _displaced]
            named = [(stand_in, name) for name, stand_in in STAND_INS.items()]
            harmless = (*_harmless(), *_of_megatron(), *named, *hidden)
            _added[:] = [c for c in harmless if c not in known]
            torch._weights_only_unpickler._remove_safe_globals(_displaced)
            torch.serialization.add_safe_globals(_added)
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                torch._weights_only_unpickler._remove_safe_globals(_added)
                torch.serialization.add_safe_globals(_displaced)


def _name_of(allowed: Any) -> str:
    """Return the name by which a pickle gets a class or function of torch's list."""
    return allowed[1] if isinstance(allowed, tuple) else f"{allowed.__module__}.{allowed.__qualname__}"


def _refused_by_torch(data: bytes | memoryview, error: Exception) -> str:
    """Name the classes that kept torch from loading; "" if it was something else."""
    if not isinstance(error, pickle.UnpicklingError):
        return ""
    try:
        with _harmless_classes():
            unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data))
    except Exception:  # noqa: BLE001 - the message of the first error has the name, too
        unsafe = []
    named = re.findall(r"(?:GLOBAL|class|function|type) [`'\"]?([A-Za-z_][\w.]*\.[\w.]+)", str(error))
    return ", ".join(sorted(unsafe)) or ", ".join(dict.fromkeys(name.rstrip(".") for name in named))
